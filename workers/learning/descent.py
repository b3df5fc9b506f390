"""The arithmetic of `labeler.descent`: projected gradient descent, a fixed number of steps, records in blocks.

Only its run time depends on the number of records. There is no randomness: no seed, no order of records, no early stop,
no refusal. It runs on the processor, in double precision.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from scipy.special import expit

from labeler.descent import Descent
from labeler.records import Array, Blocks, Slopes
from labeler.steady import LOWEST, powers
from workers.learning.steps import steps


def descend(
    terms: Descent,
    blocks: Blocks,
    slopes: Slopes,
    *,
    counts: float | Array,
    shape: tuple[int, ...],
    ball_axes: int | tuple[int, ...],
) -> Array:
    """Return the weights after all steps.

    Args:
        terms: the mechanism.
        blocks: all rows.
        slopes: of the loss.
        counts: what the sum of losses is divided by, `terms.denominator` of all rows; per model of several.
        shape: of the weights, (..., d, columns).
        ball_axes: of the weights over which a norm is cut to `terms.reach`.
    """
    weights = np.zeros(shape)
    step, keep, reach = terms.learning_rate, 1 - terms.learning_rate * terms.regularisation, terms.reach
    for _ in steps(terms.iterations):
        gradient = np.zeros(shape)
        for rows, truth in blocks():
            gradient += rows.swapaxes(-1, -2) @ slopes(rows @ weights, truth)
        weights = keep * weights - (step / counts) * gradient
        norms = np.sqrt(np.square(weights).sum(axis=ball_axes, keepdims=True))
        weights *= reach / np.maximum(norms, reach)
    return weights


def softmax_slopes(scores: Array, is_class: Any, /) -> Array:
    """Return the slopes of -log softmax(scores)_y, columns along the last axis; see Slopes."""
    found = powers(scores)
    return np.asarray(found / found.sum(axis=-1, keepdims=True) - is_class)


def logistic_slopes(scores: Array, is_positive: Any, /) -> Array:
    """Return the slopes of log(1 + exp(-+ score)), each column by itself; see Slopes."""
    return np.asarray(expit(np.maximum(scores, LOWEST)) - is_positive)
