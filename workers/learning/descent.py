"""The arithmetic of `labeler.descent`: projected gradient descent, a fixed number of steps, records in blocks.

Nothing in it depends on how many records there are but how long it takes. There is no randomness: no seed, no order of
records, no early stop, no refusal. Where there is much to do and a GPU, the steps are taken there (`on_device`), within
the same margin for rounding.
"""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
from scipy.special import expit

from feature_store.index.build import training_device
from feature_store.index.exact_index import DeviceFault
from labeler.descent import Descent
from labeler.records import Array, Blocks, Slopes

log = logging.getLogger(__name__)


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
        numbers: of so many rows as a public number says, by which it is seen whether a device is worth it.
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
