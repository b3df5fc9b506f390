"""Linear models, class sums and sampled steps: the arithmetic of three methods, with nothing to choose.

**Linear models.** `labeler.methods.blind_average.LinearTerms` defines the learners: its docstring is the mechanism,
with the proof. This module is the arithmetic, and changes neither. There is no randomness in it: no seed, no order of
records, no early stop.

**Class sums** along public axes: the arithmetic for which `labeler.methods.blind_average` proves its bound. Each record
is processed number by number, so no row depends on other rows. Only whole numbers are added.

**Sampled steps**: the arithmetic of `labeler.methods.federated`, gradients of records in whole numbers, and an agent's
own update. Each record is processed by single numbers, or by sums of whole numbers that are exact in any order. So no
gradient depends on other records. Every step reads every record, drawn or not, so its time does not tell how many were
drawn.

**AE-DPFL's heads** on frozen features (Zhu et al. 2021, Algorithm 2): an agent trains the head that casts its votes.
The price does not depend on the head: whatever it says, one record moves at most one vote per query
(`labeler.methods.ensemble.one_hot_ballots`). So it is trained to be right, by multinomial logistic regression

    J(W, b) = sum over records of -log softmax(W x + b)_y  +  |W|^2 / (2 C)

on all records, or on those with the smallest ids if all would take too long. Of attributes each has its own model of
yes and no, by logistic regression with the same terms.

**Time tells nothing.** Every agent takes the same STEPS over all classes of the task, whatever it holds: one class or
none, converged or not. A class without records is closed by adding minus infinity to its score, and is never predicted.
A step minimizes a bound on J that touches J at the current point. The softmax never curves more than a half (Boehning
1992), and the logistic loss no more than a quarter. With X the records, each with a one for the intercept, the step is

    W <- W - M (X^T (P - Y) + W / C),      M = (X^T X / 2 + 1/C)^-1,

where the intercept is in the bound's 1/C and not in J's. Momentum is Nesterov's and restarts, by a factor of zero,
where it points uphill (O'Donoghue and Candes 2015).

Public facts bound the memory: the classes of the task and the numbers of a feature. They bound the head and its bound
(`labeler.methods.ensemble.check_head`, before the charge), the training rows, and the questions scored at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from labeler.methods.blind_average import ALONG, COUNTED, FINE, HUBER_WIDTH, LinearTerms, MeanTerms
from labeler.methods.federated import MARGIN, THETA_UNIT, UNIT, StepTerms
from labeler.randomness import ByteSource
from labeler.records import FEATURE_ONE, Block, Blocks, PublicAxes, Rows, Slopes, block_rows, kept
from labeler.steady import LOWEST, steady
from workers.learning.descent import descend, logistic_slopes, softmax_slopes
from workers.learning.steps import steps


def train_rows(records: Rows, *, terms: LinearTerms, axes: PublicAxes | None = None) -> NDArray[np.float64]:
    """Train one agent's model: the mechanism of `terms` on its records, read in blocks, of any number.

    Private: it leaves the agent only inside a `labeler.noise.VectorSum` with these terms' `largest_norm` and
    `sensitivity`. Another machine may round differently, within `terms.rounding_margin`. So an agent that is asked
    twice sends what it stored, and does not train again.

    Args:
        records: finite features and labels that are classes, as a shard holds.
        axes: the public map in front of it; None for features as they are.

    Returns:
        float64, shape (dimension + 1, num_classes); the last row is the weight of the constant `terms.bias_feature`.

    Raises:
        PrivacyRefusal: more records than the terms' public bound, which the caller enforces.
    """
    dimension = records.dimension if axes is None else axes.count
    at_once = block_rows(records.dimension + dimension + 1 + terms.num_classes)

    def blocks(skip: int) -> Iterator[Block]:
        for features, labels in records.read(at_once, skip):
            seen = features if axes is None else axes(features)
            yield augmented(seen[None], terms), labels[None, :, None] == np.arange(terms.num_classes)

    (weights,) = descend(
        terms.descent,
        kept(blocks),
        SLOPES[terms.learner],
        counts=float(terms.descent.denominator(records.count)),
        shape=(1, dimension + 1, terms.num_classes),
        ball_axes=ball_axes(terms),
    )
    return np.asarray(weights)


def _hinge(scores: Array, is_class: Any, /) -> Array:
    signs = 2.0 * is_class - 1.0
    return np.asarray(-signs * np.clip((1 + HUBER_WIDTH - signs * scores) / (2 * HUBER_WIDTH), 0, 1))


SLOPES = {"softmax": softmax_slopes, "svm": _hinge, "logistic": logistic_slopes}
"""The slopes of each learner's loss, columns along the last axis; see labeler.records.Slopes."""


def ball_axes(terms: LinearTerms) -> int | tuple[int, ...]:
    return (1, 2) if terms.learner == "softmax" else 1


def augmented(features: NDArray[np.floating], terms: LinearTerms) -> NDArray[np.float64]:
    rows = features.astype(np.float64)
    norms = np.linalg.norm(rows, axis=-1, keepdims=True)
    rows *= terms.feature_norm / np.maximum(norms, terms.feature_norm)
    return np.concatenate([rows, np.full((*rows.shape[:-1], 1), terms.bias_feature)], axis=-1)


def whole_rows(axes: PublicAxes, features: NDArray[np.floating]) -> NDArray[np.int64]:
    """Return each row, and the constant that counts it, in whole FINE-ths, cut towards zero, shape (n, axes + 1).

    Each is a function of its feature, bit for bit.

    Args:
        axes: the public map.
        features: as stored, divided by 2048: shape (n, dimension).
    """
    along = axes.along(features)
    # An integer row that is not zero is at least one long.
    rows = along / np.maximum(np.sqrt(summed(along * along)), 1.0)[:, None]
    counted = np.full((len(rows), 1), COUNTED)
    return np.asarray(np.trunc(np.concatenate([rows * ALONG, counted], axis=1) * FINE), dtype=np.int64)


def summed(rows: Array) -> Array:
    """Return the sum of each row, shape (n,), column after column.

    Not by einsum, norm or sum, whose order of additions may depend on the number of rows.
    """
    total = np.zeros(len(rows))
    for column in rows.T:
        total += column
    return total


def whole_sums(records: Rows, *, terms: MeanTerms, axes: PublicAxes) -> NDArray[np.int64]:
    """Return the exact sum of phi tensor e_y over all records, whole FINE-ths, shape (num_classes, axes + 1)."""
    sums = np.zeros((terms.num_classes, axes.count + 1), dtype=np.int64)
    for features, labels in records.read(block_rows(records.dimension + axes.count), 0):
        np.add.at(sums, labels.astype(np.int64), whole_rows(axes, features))
    return sums


def class_sums(records: Rows, *, terms: MeanTerms, axes: PublicAxes) -> NDArray[np.float64]:
    """Return an agent's vector: its class sums on the ball of `terms.reach`.

    Private: it leaves the agent only inside a `labeler.noise.VectorSum` with these terms' bounds.

    Args:
        records: finite features and labels that are classes, as a shard holds.
        axes: the public map.

    Returns:
        float64, shape (axes + 1, num_classes); the last row counts records, COUNTED for each.
    """
    return on_ball(whole_sums(records, terms=terms, axes=axes).T / FINE, terms.reach)


Array = NDArray[np.float64]

StepBlock = tuple[Array, NDArray[np.integer]]
"""Rows in whole UNIT-ths, at most BLOCK of them, and their classes."""

BLOCK = 4096
"""Records at once, at most: sums of this many products of whole numbers below 2^40 are exact in double precision."""

_LN2_HIGH, _LN2_LOW = 0.6931471803691238, 1.9082149292705877e-10
_TERMS = tuple(1 / math.factorial(order) for order in range(12, -1, -1))


def coins(source: ByteSource, count: int, terms: StepTerms) -> NDArray[np.bool_]:
    """Draw the secret sample of records for a step, each independently with chance `terms.threshold` / 2^64."""
    if terms.threshold == 2**64:
        return np.ones(count, dtype=np.bool_)
    return source.uint64(count) < np.uint64(terms.threshold)


def sampled_gradients(
    blocks: Iterable[StepBlock], count: int, theta: Array, *, terms: StepTerms, source: ByteSource
) -> Array:
    """Return the sum of the clipped gradients of the drawn records, on the ball, in clips; shape (rows, num_classes).

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
    """Return d of each row in whole UNIT-ths, so short that |z| |d| <= c; shape (n, num_classes).

    Args:
        rows: whole UNIT-ths, shape (n, terms.rows), at most BLOCK of them.
        labels: classes.
        terms: of the step.
    """
    scores = (rows @ (theta * THETA_UNIT)) / float(UNIT * THETA_UNIT)
    slopes = probabilities(scores)
    slopes[np.arange(len(labels)), labels.astype(np.int64)] -= 1.0
    # Rows are whole numbers: their squares add up exactly.
    lengths = np.sqrt(np.einsum("ij,ij->i", rows, rows)) / UNIT * np.sqrt(summed(slopes * slopes))
    clip = terms.clip * (1 - MARGIN)
    short: Array = np.trunc(slopes * (clip / np.maximum(lengths, clip))[:, None] * UNIT)
    return short


def probabilities(scores: Array) -> Array:
    """Return the softmax by operations that are correctly rounded number by number, the same whatever other rows there
    are, and in a time that does not depend on them (labeler.steady).
    """
    best = scores.max(axis=1, keepdims=True)
    x = np.maximum(scores - best, LOWEST)
    whole = np.rint(x * (1 / math.log(2)))
    rest = x - whole * _LN2_HIGH - whole * _LN2_LOW
    powers = np.zeros_like(x)
    for factor in _TERMS:
        powers = powers * rest + factor
    powers = np.ldexp(powers, whole.astype(np.int32))
    return np.asarray(powers / summed(powers)[:, None])


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
    """Return the agent's own change of the model, in clips and at most one long, or zero where its coin says no.

    It is computed in any case. Whatever records do to it, it lies in a ball (labeler.methods.federated, fact 3).

    Args:
        records, axes: see `rows_on_grid`.
        rate: length of a gradient step.
        shrink: lambda of lambda/2 |theta|^2.
        local_steps: how many, each over all records.
    """
    takes_part = bool(coins(source, 1, terms)[0])
    local = theta.copy()
    for _ in steps(local_steps):
        gradient = np.zeros_like(local)
        for rows, labels in rows_on_grid(records, axes, num_classes=terms.num_classes):
            z = rows / UNIT
            slopes = probabilities(np.clip(z @ local, -1e6, 1e6))
            slopes[np.arange(len(labels)), labels.astype(np.int64)] -= 1.0
            gradient += z.T @ slopes
        moved = steady(gradient) / max(1, records.count) + shrink * local
        local = steady(np.clip(local - rate * moved, -1e6, 1e6))
    return on_ball((local - theta) / terms.clip, 1.0) * takes_part


def on_ball(vector: Array, radius: float) -> Array:
    """Return the nearest point of a ball around zero."""
    length = float(np.sqrt(np.sum(vector * vector)))
    # Inside the ball the factor is 1, and changes no bit.
    return vector * (radius / max(length, radius))


def rows_on_grid(records: Rows, axes: PublicAxes | None, *, num_classes: int, skip: int = 0) -> Iterator[StepBlock]:
    """Yield rows (phi(x), 1) in whole UNIT-ths, |phi(x)| <= 1, each a function of its record, bit for bit.

    Args:
        records: features as stored divided by 2048, and labels that are classes.
        axes: the public map; None where features are read as they are.
        num_classes: numbers that are made of each row: fewer rows at once where there are many.
        skip: blocks to leave out at the beginning.
    """
    columns = (records.dimension if axes is None else axes.count) + 1
    for features, labels in records.read(min(BLOCK, block_rows(records.dimension + columns + num_classes)), skip):
        along = np.rint(features.astype(np.float64) * FEATURE_ONE) if axes is None else axes.along(features)
        lengths = np.sqrt(summed(along * along)) * (1 + MARGIN)
        # An integer row that is not zero is at least one long; a feature as it is stays as short as it is.
        longest = np.maximum(lengths, FEATURE_ONE if axes is None else 1.0)
        rows = np.full((len(along), along.shape[1] + 1), float(UNIT))
        rows[:, :-1] = np.trunc(along / longest[:, None] * UNIT)
        yield rows, labels


INVERSE_REGULARISATION = 10.0
"""C on features of norm 1. On the amazon and caltech10 photographs 1, 10 and 100 lie within a point of each other (sums
without noise: 93.8, 94.5, 94.8 and 89.2, 89.5, 89.4 % right)."""

STEPS = 100
"""Steps of every training. On digits and on features of photographs the loss is then below that at which scikit-learn's
L-BFGS stops.
"""

_SCORED_NUMBERS = 2**22
"""Features and scores of the questions that are scored together: 32 MiB."""

LARGEST_WEIGHT = 2**20
"""Weights become integers up to this. Scores of integer features are then exact in double precision: below 2^11 * 2^20
* (number of features + 1) < 2^53 for up to two million features.
"""


def train_head(records: Rows, *, num_classes: int, is_several: bool = False) -> NDArray[np.int64]:
    """Train a linear classifier as integers, shape (dimension + 1, num_classes); the last row is the intercept.

    Classes of which the agent has no record are never predicted.

    Args:
        is_several: classes are attributes, each with a yes or a no; labels have shape (n, num_classes).
    """
    return integer_head(*_fit(records, num_classes=num_classes, is_several=is_several))


def integer_head(weights: NDArray[np.float64], is_present: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Return weights as integers, scaled to what scores can hold; classes that are not present are never predicted.

    Args:
        weights: shape (dimension + 1, num_classes), the last row the intercept.
        is_present: of which classes the agent has records, shape (num_classes,).
    """
    largest = max(float(np.abs(weights).max()), 1e-300)
    head = np.rint(weights * ((LARGEST_WEIGHT - 1) / largest)).astype(np.int64)
    # Beyond any sum of weights, so that the intercept alone keeps these classes from winning.
    head[-1] = np.where(is_present, head[-1], -4 * LARGEST_WEIGHT * len(weights))
    return head


def _fit(records: Rows, *, num_classes: int, is_several: bool = False) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """Return the weights after all steps, and which classes there are."""
    size = records.dimension + 1
    at_once = block_rows(size + 2 * num_classes)

    def prepared(skip: int) -> Iterator[Block]:
        for features, labels in records.read(at_once, skip):
            rows = np.ones((len(features), size))
            rows[:, :-1] = features
            yield rows, truth_of(labels, num_classes)

    blocks = kept(prepared)
    products, is_present = np.zeros((size, size)), np.zeros(num_classes, dtype=np.bool_)
    for rows, truth in blocks():
        products += rows.T @ rows
        is_present |= truth.any(axis=0)
    inverse = np.linalg.inv(products / 2 + np.eye(size) / INVERSE_REGULARISATION)
    ridge = np.full(size, 1 / INVERSE_REGULARISATION)
    ridge[-1] = 0
    closed = np.where(is_present, 0.0, -np.inf)
    start, slopes = np.zeros((num_classes, size)), logistic_slopes if is_several else softmax_slopes
    here = minimize(blocks, inverse, ridge, start=start, closed=closed, slopes=slopes)
    return here.T, is_present


def minimize(
    blocks: Blocks,
    inverse: NDArray[np.floating],
    ridge: Array | float,
    *,
    start: Array,
    closed: Array | float = 0.0,
    anchor: Array | float = 0.0,
    slopes: Slopes = softmax_slopes,
) -> Array:
    """Return the weights after all STEPS towards the least sum of losses + ridge/2 |W - anchor|^2.

    Args:
        blocks: rows, and which class each is of.
        inverse: M of the module.
        ridge: of each number of a row.
        start: shape (num_classes, size), like `anchor`: one row per class, which libraries multiply in half the time.
        closed: added to the scores.
        slopes: of the loss.
    """
    here = ahead = start
    age = 1.0
    for _ in steps(STEPS):
        slope = ridge * (ahead - anchor)
        for rows, truth in blocks():
            slope += slopes((ahead @ rows.T).T + closed, truth).T @ rows
        there = ahead - slope @ inverse
        move = there - here
        goes_on, older = float(np.vdot(slope, move) <= 0), (1 + np.sqrt(1 + 4 * age * age)) / 2
        here, ahead = there, there + goes_on * (age - 1) / older * move
        age = goes_on * older + (1 - goes_on)
    return here


def truth_of(labels: NDArray[np.integer], num_classes: int) -> NDArray[np.bool_]:
    """Return which classes each record has, shape (n, num_classes): that of its label, or its attributes."""
    return np.asarray(labels != 0 if labels.ndim == 2 else labels[:, None] == np.arange(num_classes))


def predict(head: NDArray[np.int64], queries: NDArray[np.int16]) -> NDArray[np.int64]:
    """Return the class with the largest score, shape (..., num_queries); sums of integers, exact in any order.

    Args:
        head: of one agent, or of several along leading axes.
        queries: shape (num_queries, dimension).
    """
    return said(head, queries, score=head_scores, numbers=head[..., -1, :].size, is_several=False)


def head_scores(head: NDArray[np.int64], queries: Array) -> Array:
    """Return the scores of each class, shape (..., num_queries, num_classes), in grid units."""
    weights = head.astype(np.float64)
    return np.asarray(queries @ weights[..., :-1, :] + FEATURE_ONE * weights[..., -1:, :])


def said(
    model: NDArray[np.int64],
    queries: NDArray[np.int16],
    *,
    score: Callable[[NDArray[np.int64], Array], Array],
    numbers: int,
    is_several: bool,
) -> NDArray[np.int64]:
    """Return what a model says of queries, a part of them at a time.

    Args:
        score: (model, queries): the scores of each class.
        numbers: how many scores a query has.
        is_several: say 1 or 0 of each class, 1 where its score is above 0; else the class with the largest.
    """
    found, at_once = [], max(1, _SCORED_NUMBERS // (queries.shape[1] + numbers))
    for start in range(0, max(1, len(queries)), at_once):
        scores = score(model, queries[start : start + at_once].astype(np.float64))
        found.append((scores > 0).astype(np.int64) if is_several else scores.argmax(axis=-1))
    return np.concatenate(found, axis=-2 if is_several else -1)
