"""Features as integers, so that similarity is exact and one record moves at most one vote."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from labeler.errors import BadData

FEATURE_SCALE = 2048
"""A normalised feature times this, rounded, is stored. Inner products then stay below 2^24 and are exact in float32."""


def quantize(features: NDArray[np.floating]) -> NDArray[np.int16]:
    """Normalise each row to Euclidean length 1 in float64, and round 2048 times it to int16.

    Rows are treated one by one: no statistic of the data enters, so a record's feature depends on its image alone.

    Args:
        features: floats, shape (n, d), any length but zero.

    Returns:
        int16, shape (n, d), `rint(2048 * x / ||x||)`; halves round to even.

    Raises:
        BadData: not two-dimensional floats, or a row that is zero or not finite.
    """
    if features.ndim != 2 or not np.issubdtype(features.dtype, np.floating):
        raise BadData(
            f"features must be floats of shape (n, dimension), found {features.dtype} of shape {features.shape}"
        )
    usable = usable_rows(features)
    if not usable.all():
        raise BadData(
            f"{int((~usable).sum())} of {len(usable)} features are zero or not finite, so they have no direction; "
            "the images may be blank, or the backbone's weights damaged"
        )
    exact = features.astype(np.float64)
    # Dividing by the largest entry first keeps the squares of very large and very small rows in range.
    exact /= np.abs(exact).max(axis=1, keepdims=True, initial=0.0)
    exact /= np.linalg.norm(exact, axis=1, keepdims=True)
    exact *= FEATURE_SCALE
    return np.rint(exact, out=exact).astype(np.int16)


def on_grid(features: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Which rows may have been made by `quantize`: whole numbers whose length rounding explains.

    Args:
        features: float64, shape (n, d).
    """
    slack = features.shape[1] ** 0.5 / 2
    # Comparisons with NaN are False; without an upper bound here the squares could overflow.
    whole = (np.abs(features) <= FEATURE_SCALE + slack).all(axis=1)
    whole &= (np.rint(np.where(whole[:, None], features, 0.5)) == features).all(axis=1)
    lengths = np.linalg.norm(np.where(whole[:, None], features, 0.0), axis=1)
    ready: NDArray[np.bool_] = whole & (np.abs(lengths - FEATURE_SCALE) <= slack)
    return ready


def usable_rows(features: NDArray[np.floating]) -> NDArray[np.bool_]:
    """Which rows have a direction: finite, and not all zero."""
    usable: NDArray[np.bool_] = np.isfinite(features).all(axis=1) & features.any(axis=1)
    return usable


def largest_square_length(dimension: int) -> int:
    """Bound on the squared length of a quantised row: rounding moves each of d entries by at most 1/2."""
    return int((FEATURE_SCALE + dimension**0.5 / 2) ** 2) + 1
