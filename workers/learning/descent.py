"""The arithmetic of `labeler.descent`: projected gradient descent, a fixed number of steps, records in blocks.

Nothing in it depends on how many records there are but how long it takes: a block is read, adds to the gradient, and
is forgotten, or kept where all of them fit into KEPT_NUMBERS. There is no randomness: no seed, no order of records, no
early stop, no refusal. Where there is much to do and a GPU, the steps are taken there (`on_device`), within the same
margin for rounding.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from scipy.special import expit

from feature_store.index.build import training_device
from feature_store.index.engine import DeviceFault
from labeler.descent import BLOCK_ROWS, LEAST_BLOCK_ROWS, Descent

Array = NDArray[np.float64]

log = logging.getLogger(__name__)

BLOCK_NUMBERS = 2**22
"""Of one block, at most, but for LEAST_BLOCK_ROWS rows: 32 MiB."""

KEPT_NUMBERS = 2**25
"""Prepared rows that are kept between steps, 256 MiB; more are prepared anew at every step."""

Block = tuple[Array, Any]
"""Rows as the learner sees them, shape (..., r, d), and the truth about them, as its slopes want it."""

Blocks = Callable[[], Iterable[Block]]
"""Reads all rows once, block by block; the same at every call."""


class Slopes(Protocol):
    """A loss, as the steps see it."""

    def __call__(self, scores: Any, truth: Any, xp: Any = np, /) -> Any:
        """The loss's derivative by each score, shape (..., r, columns); `xp` is numpy, or torch for its tensors."""


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
    numbers: int = 0,
    engine: str = "numpy",
) -> Array:
    """The weights after all steps.

    Args:
        terms: the mechanism.
        blocks: all rows.
        slopes: of the loss.
        counts: what the sum of losses is divided by, `terms.denominator` of all rows; per model of several.
        shape: of the weights, (..., d, columns).
        ball_axes: of the weights over which a norm is cut to `terms.reach`.
        numbers: of all rows together, by which it is seen whether a device is worth it.
        engine: which devices may be used, as for an index (feature_store.index.build.training_device).
    """
    device = training_device(engine, products=2 * numbers * shape[-1] * terms.iterations)
    if device is not None:
        from workers.learning.on_device import descend_on

        try:
            return descend_on(device, terms, blocks, slopes, counts=counts, shape=shape, ball_axes=ball_axes)
        except DeviceFault as fault:
            log.error("a device failed; the processor trains instead", extra={"cause": str(fault)})
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


def softmax_slopes(scores: Any, is_class: Any, xp: Any = np, /) -> Any:
    """Of -log softmax(scores)_y, columns along the last axis; see Slopes."""
    powers = xp.exp(scores - xp.amax(scores, axis=-1, keepdims=True))
    return powers / powers.sum(axis=-1, keepdims=True) - is_class


def logistic_slopes(scores: Any, is_positive: Any, xp: Any = np, /) -> Any:
    """Of log(1 + exp(-+ score)), one column; see Slopes."""
    return (expit(scores) if xp is np else xp.sigmoid(scores)) - is_positive
