"""Class sums along public axes: the arithmetic that `labeler.class_means` proves its bound for.

Whatever is done here to one record is done number by number, so that no row hangs on the rows beside it, and what is
added up are whole numbers.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from labeler.class_means import FINE, MeanTerms
from labeler.linear_model import PublicAxes
from workers.learning.blocks import Rows, block_rows


def whole_rows(axes: PublicAxes, features: NDArray[np.floating]) -> NDArray[np.int64]:
    """phi of each row in whole FINE-ths, cut towards zero, shape (n, axes); each a function of its row, bit for bit.

    Args:
        axes: the public map.
        features: as stored, divided by 2048: shape (n, dimension).
    """
    along = axes.along(features)
    # Not einsum or norm, whose order of additions may hang on how many rows there are.
    squares = np.zeros(len(along))
    for axis in range(axes.count):
        squares += along[:, axis] * along[:, axis]
    # An integer row that is not zero is at least one long.
    rows = along / np.maximum(np.sqrt(squares), 1.0)[:, None]
    return np.trunc(rows * FINE).astype(np.int64)


def whole_sums(records: Rows, *, terms: MeanTerms, axes: PublicAxes) -> NDArray[np.int64]:
    """The exact sum of phi tensor e_y over all records, whole FINE-ths, shape (num_classes, axes). Private."""
    sums = np.zeros((terms.num_classes, axes.count), dtype=np.int64)
    for features, labels in records.read(block_rows(records.dimension + axes.count), 0):
        np.add.at(sums, labels.astype(np.int64), whole_rows(axes, features))
    return sums


def class_sums(records: Rows, *, terms: MeanTerms, axes: PublicAxes) -> NDArray[np.float64]:
    """An agent's vector: its class sums on the ball of `terms.reach`.

    Private: it leaves the agent only inside a `labeler.noise.VectorSum` with these terms' bounds.

    Args:
        records: finite features and labels that are classes, as a shard holds.
        axes: the public map.

    Returns:
        float64, shape (axes + 1, num_classes); the last row is zero: a mean has no intercept.
    """
    vector = np.zeros((axes.count + 1, terms.num_classes))
    vector[:-1] = whole_sums(records, terms=terms, axes=axes).T / FINE
    # One sum over all numbers: zero rows of the centre add nothing.
    length = float(np.sqrt(np.sum(vector * vector)))
    # Inside of the ball the factor is 1, and changes no bit.
    return vector * (terms.reach / max(length, terms.reach))
