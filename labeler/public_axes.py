"""A public map in front of a linear model: features less a public centre, along public axes, brought to one length.

    x -> z = A (x - m) -> z / |z|            rows of A and m travel as the questions of a blind-average task

Features of a network are positive and share a large mean, along which noise on a model's weights moves all images
together; and most of their directions say nothing about classes, but carry noise like all others. Axes are chosen by
whoever asks, from public images (`feature_store.query_selection.axis_rows`). They travel as the rows that are asked
about, so that everybody's digest of the round is of them, and the model's weights are one row per axis and one for the
constant.

**Privacy.** The map is public and fixed before any record is looked at, and it maps each record by itself; whatever it
is, a mapped record has length one, or zero. So the bounds of `labeler.convex` are those of rows of such a norm.

**No rounding depends on other records.** A, m and stored features are whole numbers, and every sum of products in
A (x - m) is below (2^11 + 2^15 sqrt(d)) 2^15 sqrt(d) < 2^53 for d <= 2^20 numbers: exact in double precision in any
order. What is left is a square root of a sum of squares and a division, off by (rows + 3) 2^-53 at most, which is
below the 2^-34 that `labeler.descent` has room for, for every number of weights that it allows.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from labeler.errors import BadData

FEATURE_ONE = 2048.0


@dataclass(frozen=True, eq=False)
class PublicAxes:
    """The map.

    Attributes:
        rows: int16, shape (axes + 1, dimension): the axes, then the centre; in the unit of stored features.

    Raises:
        BadData: there is no axis.
    """

    rows: NDArray[np.int16]

    def __post_init__(self) -> None:
        if self.rows.dtype != np.int16 or self.rows.ndim != 2 or len(self.rows) < 2:
            raise BadData(f"a public map is an int16 array of axes and a centre, found shape {self.rows.shape}")

    @property
    def count(self) -> int:
        """How many axes."""
        return len(self.rows) - 1

    @property
    def dimension(self) -> int:
        """Numbers of a feature that it maps."""
        return int(self.rows.shape[1])

    def along(self, features: NDArray[np.floating]) -> NDArray[np.float64]:
        """A (x - m), whole numbers and exact, shape (n, axes); features as for a call."""
        whole = np.rint(features.astype(np.float64) * FEATURE_ONE)
        along: NDArray[np.float64] = (whole - self.rows[-1].astype(np.float64)) @ self.rows[:-1].T.astype(np.float64)
        return along

    def __call__(self, features: NDArray[np.floating]) -> NDArray[np.float64]:
        """Rows of length one, or zero for a feature that is the centre; float64, shape (n, axes).

        Args:
            features: as stored, divided by 2048: shape (n, dimension).
        """
        along = self.along(features)
        lengths = np.sqrt(np.einsum("ij,ij->i", along, along))[:, None]
        # An integer row that is not zero is at least one long.
        mapped: NDArray[np.float64] = along / np.maximum(lengths, 1.0)
        return mapped
