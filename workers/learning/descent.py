"""The arithmetic of `labeler.descent`: projected gradient descent, a fixed number of steps, records in blocks.

Nothing in it depends on how many records there are but how long it takes: a block is read, adds to the gradient, and
is forgotten, or kept where all of them fit into KEPT_NUMBERS. There is no randomness: no seed, no order of records, no
early stop, no refusal.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.special import expit

from labeler.descent import BLOCK_ROWS, LEAST_BLOCK_ROWS, Descent

Array = NDArray[np.float64]

BLOCK_NUMBERS = 2**22
"""Of one block, at most, but for LEAST_BLOCK_ROWS rows: 32 MiB."""

KEPT_NUMBERS = 2**25
"""Prepared rows that are kept between steps, 256 MiB; more are prepared anew at every step."""

Block = tuple[Array, Any]
"""Rows as the learner sees them, shape (..., r, d), and the truth about them, as its slopes want it."""

Blocks = Callable[[], Iterable[Block]]
"""Reads all rows once, block by block; the same at every call."""

Slopes = Callable[[Array, Any], Array]
"""(scores, truth) -> the loss's derivative by each score, shape (..., r, columns)."""


@dataclass(frozen=True, eq=False)
class Rows:
    """Records' features and labels, read as often as wanted. Private where the records are; does not print.

    Attributes:
        count: how many.
        dimension: numbers of a feature.
        read: all of them in one order, at most so many at once: features (r, dimension), any scale, and labels (r,).
    """

    count: int
    dimension: int
    read: Callable[[int], Iterator[tuple[NDArray[np.floating], NDArray[np.integer]]]]

    @classmethod
    def of(cls, features: NDArray[np.floating], labels: NDArray[np.integer]) -> Rows:
        """Rows of arrays in memory."""

        def read(most: int) -> Iterator[tuple[NDArray[np.floating], NDArray[np.integer]]]:
            for start in range(0, len(labels), most):
                yield features[start : start + most], labels[start : start + most]

        return cls(len(labels), features.shape[1], read)

    def __repr__(self) -> str:
        return "Rows(<private>)"


def block_rows(numbers: int) -> int:
    """How many rows of so many numbers are read at once."""
    return max(LEAST_BLOCK_ROWS, min(BLOCK_ROWS, BLOCK_NUMBERS // max(1, numbers)))


def kept(blocks: Blocks, *, numbers: int) -> Blocks:
    """The same blocks, prepared once where together they have few enough numbers."""
    if numbers > KEPT_NUMBERS:
        return blocks
    prepared = list(blocks())
    return lambda: prepared


def descend(
    terms: Descent,
    blocks: Blocks,
    slopes: Slopes,
    *,
    counts: float | Array,
    shape: tuple[int, ...],
    ball_axes: int | tuple[int, ...],
) -> Array:
    """The weights after all steps.

    Args:
        terms: the mechanism.
        blocks: all rows.
        slopes: of the loss.
        counts: what the sum of losses is divided by: records and public rows, at least `terms.least`; per model where
            there are several.
        shape: of the weights, (..., d, columns).
        ball_axes: of the weights over which a norm is cut to `terms.reach`.
    """
    weights = np.zeros(shape)
    step, keep, reach = terms.learning_rate, 1 - terms.learning_rate * terms.regularisation, terms.reach
    for _ in range(terms.iterations):
        gradient = np.zeros(shape)
        for rows, truth in blocks():
            gradient += rows.swapaxes(-1, -2) @ slopes(rows @ weights, truth)
        weights = keep * weights - (step / counts) * gradient
        norms = np.sqrt(np.square(weights).sum(axis=ball_axes, keepdims=True))
        weights *= reach / np.maximum(norms, reach)
    return weights


def softmax_slopes(scores: Array, is_class: NDArray[np.bool_]) -> Array:
    """Of -log softmax(scores)_y, columns along the last axis."""
    powers = np.exp(scores - scores.max(axis=-1, keepdims=True))
    slopes: Array = powers / powers.sum(axis=-1, keepdims=True) - is_class
    return slopes


def logistic_slopes(scores: Array, is_positive: NDArray[np.bool_]) -> Array:
    """Of log(1 + exp(-+ score)), one column."""
    slopes: Array = expit(scores) - is_positive
    return slopes
