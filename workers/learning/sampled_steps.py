"""The arithmetic of `labeler.federated`: gradients of records in whole numbers, and an agent's own update.

Whatever is done to one record here is done to single numbers, or to sums of whole numbers that are exact in any order:
so no gradient hangs on the records beside it. Every record is looked at in every step, drawn or not: how long a step
takes does not tell how many were drawn.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

import numpy as np
from numpy.typing import NDArray

from labeler.federated import MARGIN, THETA_UNIT, UNIT, StepTerms
from labeler.linear_model import FEATURE_ONE, PublicAxes
from labeler.randomness import ByteSource
from workers.learning.blocks import Rows, block_rows

Array = NDArray[np.float64]

Block = tuple[Array, NDArray[np.integer]]
"""Rows in whole UNIT-ths, at most BLOCK of them, and their classes."""

BLOCK = 4096
"""Records at once, at most: sums of so many products of whole numbers below 2^40 are exact in double precision."""

_LN2_HIGH, _LN2_LOW = 0.6931471803691238, 1.9082149292705877e-10
_TERMS = tuple(1 / math.factorial(order) for order in range(12, -1, -1))


def coins(source: ByteSource, count: int, terms: StepTerms) -> NDArray[np.bool_]:
    """Who takes part in a step; secret. Each with a chance of `terms.threshold` / 2^64, whoever the others are."""
    if terms.threshold == 2**64:
        return np.ones(count, dtype=np.bool_)
    return source.uint64(count) < np.uint64(terms.threshold)


def sampled_gradients(
    blocks: Iterable[Block], count: int, theta: Array, *, terms: StepTerms, source: ByteSource
) -> Array:
    """The sum of the clipped gradients of the records that are drawn, on the ball, in clips; shape (rows, num_classes).

    Private: it leaves the agent only inside a `labeler.noise.VectorSum` with these terms' bounds.

    Args:
        blocks: the agent's records (`rows_on_grid`).
        count: how many they are.
        theta: the public model, on its grid.
        terms: of the step.
        source: the agent's secret source of this step's coins.
    """
    # Whole numbers of any size: no number of records wraps around.
    total = np.zeros((terms.rows, terms.num_classes), dtype=object)
    drawn, at = coins(source, count, terms), 0
    for rows, labels in blocks:
        slopes = clipped_slopes(rows, labels, theta, terms)
        slopes *= drawn[at : at + len(rows), None]
        at += len(rows)
        total = total + np.rint(rows.T @ slopes).astype(np.int64).astype(object)
    return on_ball(total.astype(np.float64) / (UNIT * UNIT) / terms.clip, terms.reach)


def clipped_slopes(rows: Array, labels: NDArray[np.integer], theta: Array, terms: StepTerms) -> Array:
    """d of each row in whole UNIT-ths, so short that |z| |d| <= c; shape (n, num_classes).

    Args:
        rows: whole UNIT-ths, shape (n, terms.rows), at most BLOCK of them.
        labels: classes.
        terms: of the step.
    """
    scores = (rows @ (theta * THETA_UNIT)) / float(UNIT * THETA_UNIT)
    slopes = probabilities(scores)
    slopes[np.arange(len(labels)), labels.astype(np.int64)] -= 1.0
    squares = np.zeros(len(rows))
    for column in slopes.T:
        squares += column * column
    # Whole numbers: their squares add up exactly.
    lengths = np.sqrt(np.einsum("ij,ij->i", rows, rows)) / UNIT * np.sqrt(squares)
    clip = terms.clip * (1 - MARGIN)
    short: Array = np.trunc(slopes * (clip / np.maximum(lengths, clip))[:, None] * UNIT)
    return short


def probabilities(scores: Array) -> Array:
    """Softmax by operations that are correctly rounded number by number, and the same whatever stands beside them."""
    best = scores.max(axis=1, keepdims=True)
    x = np.maximum(scores - best, -700.0)
    whole = np.rint(x * (1 / math.log(2)))
    rest = x - whole * _LN2_HIGH - whole * _LN2_LOW
    powers = np.zeros_like(x)
    for factor in _TERMS:
        powers = powers * rest + factor
    powers = np.ldexp(powers, whole.astype(np.int32))
    total = np.zeros(len(x))
    for column in powers.T:
        total += column
    found: Array = powers / total[:, None]
    return found


def clipped_update(
    records: Rows,
    theta: Array,
    *,
    terms: StepTerms,
    axes: PublicAxes | None,
    rate: float,
    shrink: float,
    local_steps: int,
    source: ByteSource,
) -> Array:
    """The agent's own change of the model, in clips and at most one long, or zero where its coin says no.

    It is made in any case. Whatever records do to it, it lies in a ball (labeler.federated, fact 3).

    Args:
        records, axes: see `rows_on_grid`.
        rate: length of a gradient step.
        shrink: lambda of lambda/2 |theta|^2.
        local_steps: how many, each over all records.
    """
    takes_part = bool(coins(source, 1, terms)[0])
    local = theta.copy()
    for _ in range(local_steps):
        gradient = np.zeros_like(local)
        for rows, labels in rows_on_grid(records, axes, num_classes=terms.num_classes):
            z = rows / UNIT
            slopes = probabilities(np.clip(z @ local, -1e6, 1e6))
            slopes[np.arange(len(labels)), labels.astype(np.int64)] -= 1.0
            gradient += z.T @ slopes
        local = np.clip(local - rate * (gradient / max(1, records.count) + shrink * local), -1e6, 1e6)
    return on_ball((local - theta) / terms.clip, 1.0) * takes_part


def on_ball(vector: Array, radius: float) -> Array:
    """The nearest point of a ball around zero."""
    length = float(np.sqrt(np.sum(vector * vector)))
    # Inside of the ball the factor is 1, and changes no bit.
    return vector * (radius / max(length, radius))


def rows_on_grid(records: Rows, axes: PublicAxes | None, *, num_classes: int) -> Iterator[Block]:
    """Rows (phi(x), 1) in whole UNIT-ths, |phi(x)| <= 1, each a function of its record, bit for bit.

    Args:
        records: features as stored divided by 2048, and labels that are classes.
        axes: the public map; None where features are read as they are.
        num_classes: numbers that are made of each row: fewer rows at once where there are many.
    """
    columns = (records.dimension if axes is None else axes.count) + 1
    for features, labels in records.read(min(BLOCK, block_rows(records.dimension + columns + num_classes)), 0):
        along = np.rint(features.astype(np.float64) * FEATURE_ONE) if axes is None else axes.along(features)
        squares = np.zeros(len(along))
        for column in along.T:
            squares += column * column
        # An integer row that is not zero is at least one long; a feature as it is stays as short as it is.
        longest = np.maximum(np.sqrt(squares) * (1 + MARGIN), FEATURE_ONE if axes is None else 1.0)
        rows = np.empty((len(along), along.shape[1] + 1))
        rows[:, :-1] = np.trunc(along / longest[:, None] * UNIT)
        rows[:, -1] = UNIT
        yield rows, labels
