"""From stored features to what a private head sees: a map that depends on public images alone, into a public norm.

    x -> z = (x - mean) basis -> (r z / max(|z|, l), a),      r^2 + a^2 = c^2

The mean and the principal axes are those of the public negatives, which every client has; a private image decides
nothing about how another is mapped. (Dividing by the largest private norm, as the paper's equation 4 does, would let
one record scale all others, and the proof is gone.) No row is longer than c, which is the bound in the
sensitivity, and the constant a carries the intercept.

**Rounding.** A matrix product may round a row differently when another record is gone. Where |z| is tiny, dividing by
it would blow that up to another direction altogether; l, a tenth of the public rows' length, forbids it. A map is
refused where rounding could move a row by more than `FEATURE_ROUNDING` of c, for stored rows of norm at most 2; the
margin of `labeler.methods.aux_distill` contains that much.

Centring matters more than anything else here: features of a network are positive and share a large mean, along which
noise of a head moves all queries together.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from labeler.errors import InvalidSetting
from labeler.records import Array

CONSTANT_SHARE = 0.1
"""The constant coordinate, as a share of the norm."""

LEAST_LENGTH = 0.1
"""l, as a share of the root mean square length of the public rows."""

_INSIDE = 1 - 1e-12
_STORED_NORM = 2.0
_LEAST_VARIANCE = 1e-9


@dataclass(frozen=True, eq=False)
class PublicMap:
    """The map; see the module.

    Attributes:
        mean: float64, shape (stored,).
        basis: float64, shape (stored, reduced); None keeps all coordinates as they are.
        least_length: l.
        clip_norm: c.

    Raises:
        InvalidSetting: a number is out of bounds.
    """

    mean: Array
    basis: Array | None
    least_length: float
    clip_norm: float = 1.0

    def __post_init__(self) -> None:
        if not 0 < self.least_length < math.inf or not 0 < self.clip_norm < math.inf:
            raise InvalidSetting("a map's least length and norm must be positive and finite")

    @property
    def dimension(self) -> int:
        """Numbers per row that come out, with the constant."""
        return (len(self.mean) if self.basis is None else self.basis.shape[1]) + 1

    @property
    def rounding(self) -> float:
        """Bound on how far, as a share of c, a row may move when other rows are computed with it.

        A product of d terms is off by at most (d + 2) 2^-52 times the norms, and two of them differ by twice that.
        """
        spread = 1.0 if self.basis is None else float(np.linalg.norm(self.basis))
        reach = (_STORED_NORM + float(np.linalg.norm(self.mean))) * spread
        return 2 * (len(self.mean) + 2) * 2.0**-52 * reach / self.least_length

    def __call__(self, features: NDArray[np.floating]) -> Array:
        """Rows of norm c at most, float64, shape (n, dimension)."""
        if features.ndim != 2 or features.shape[1] != len(self.mean):
            raise InvalidSetting(f"this map takes rows of {len(self.mean)} numbers, found shape {features.shape}")
        rows = features.astype(np.float64)
        rows = rows - self.mean if self.basis is None else rows @ self.basis - self.mean @ self.basis
        norms = np.sqrt(np.einsum("ij,ij->i", rows, rows))[:, None]
        constant = CONSTANT_SHARE * self.clip_norm * _INSIDE
        length = math.sqrt(1 - CONSTANT_SHARE**2) * self.clip_norm * _INSIDE
        # Not only cut but brought to one length: a row near the mean says as much as any other.
        rows *= length / np.maximum(norms, self.least_length)
        return np.hstack([rows, np.full((len(rows), 1), constant)])


def plain_map(dimension: int, *, clip_norm: float = 1.0) -> PublicMap:
    """No mean taken off and no axes chosen: rows only brought to one length, as in the paper."""
    return PublicMap(np.zeros(dimension), None, LEAST_LENGTH, clip_norm)


def fit_public_map(
    public: NDArray[np.floating], *, dimensions: int, whitening: float = 0.5, clip_norm: float = 1.0
) -> PublicMap:
    """Centre on public images and keep their first principal axes.

    Args:
        public: features of public images, shape (m, stored).
        dimensions: axes kept, at most min(m, stored).
        whitening: each axis is divided by its standard deviation to this power: 0 leaves them, 1 makes all equal. Axes
            that tell classes apart are rarely the longest.
        clip_norm: c.

    Raises:
        InvalidSetting: a number is out of bounds, or there are fewer images than axes.
    """
    if not 1 <= dimensions <= min(public.shape):
        raise InvalidSetting(
            f"{dimensions} axes cannot be fitted to public features of shape {public.shape}; take fewer, or more images"
        )
    if not 0 <= whitening <= 1:
        raise InvalidSetting(f"whitening lies between 0 and 1, found {whitening!r}")
    rows = public.astype(np.float64)
    mean = rows.mean(axis=0)
    rows -= mean
    variances, axes = np.linalg.eigh(rows.T @ rows / len(rows))
    kept = slice(None, -dimensions - 1, -1)
    floor = _LEAST_VARIANCE * max(float(variances[-1]), np.finfo(float).tiny)
    basis = axes[:, kept] * np.maximum(variances[kept], floor) ** (-whitening / 2)
    length = math.sqrt(float(np.einsum("ij,ij->", rows @ basis, rows @ basis)) / len(rows))
    if length == 0:
        raise InvalidSetting("the public features are all the same, so they have no axes")
    return PublicMap(mean, basis, LEAST_LENGTH * length, clip_norm)
