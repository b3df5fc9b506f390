"""Linear models, class sums and sampled steps: the arithmetic of three methods, with nothing to choose.

The linear learners that `labeler.methods.blind_average.LinearTerms` defines: for one agent, and for thousands of
users at once.

    weights = train_linear(features, labels, terms=terms)         one agent: what `labeler run` and the service call
    weights = train_users(features, labels, terms=terms)          the same for every user of a simulation

The terms' docstring is the mechanism, with the proof; this module is the arithmetic, and changes neither. There is no
randomness in it: no seed, no order of records, no early stop.

Class sums along public axes: the arithmetic that `labeler.methods.blind_average` proves its bound for.

Whatever is done here to one record is done number by number, so that no row hangs on the rows beside it, and what is
added up are whole numbers.

The arithmetic of `labeler.methods.federated`: gradients of records in whole numbers, and an agent's own update.

Whatever is done to one record here is done to single numbers, or to sums of whole numbers that are exact in any order:
so no gradient hangs on the records beside it. Every record is looked at in every step, drawn or not: how long a step
takes does not tell how many were drawn.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from labeler.descent import MOST_WEIGHTS
from labeler.errors import BadData, InvalidSetting
from labeler.methods.blind_average import FINE, HUBER_WIDTH, LinearTerms, MeanTerms
from labeler.methods.federated import MARGIN, THETA_UNIT, UNIT, StepTerms
from labeler.randomness import ByteSource
from labeler.records import FEATURE_ONE, Block, PublicAxes, Rows, block_rows, kept
from workers.learning.descent import descend, softmax_slopes
from workers.progress import ProgressCallback, silent

NO_RECORD = -1
"""The label of a row that only fills an array up: it is no record and changes nothing."""

_NUMBERS_AT_ONCE = 1 << 18
# Users of a simulation are trained in groups whose rows stay in a core's cache over all steps; measured, larger groups
# are slower.


def train_linear(
    features: NDArray[np.floating], labels: NDArray[np.integer], *, terms: LinearTerms
) -> NDArray[np.float64]:
    """One agent's model: the mechanism of `terms` on its records.

    Private: it leaves the agent only inside a `labeler.noise.VectorSum` with these terms' `largest_norm` and
    `sensitivity`. Another machine may round differently, within `terms.rounding_margin`: an agent that is asked twice
    sends again what it stored, and does not train again.

    Args:
        features: shape (num_records, dimension), any scale: rows are cut to `terms.feature_norm`.
        labels: shape (num_records,), 0 to num_classes - 1.

    Returns:
        float64, shape (dimension + 1, num_classes); the last row is the weight of the constant `terms.bias_feature`.

    Raises:
        BadData: a feature is not finite, a label is no class, or shapes do not fit.
        InvalidSetting: more weights than the proof's margin for rounding covers. Never for a number of records.
        PrivacyRefusal: more records than the terms' public bound, which whoever answers with them keeps.
    """
    if features.ndim != 2 or labels.shape != features.shape[:1]:
        raise BadData(f"records are rows with one label each, found shapes {features.shape} and {labels.shape}")
    if labels.size and int(labels.min()) < 0:
        raise BadData("a label is no class of the task")
    _check(features[None], labels[None], terms)
    return train_rows(Rows.of(features, labels), terms=terms)


def train_rows(
    records: Rows, *, terms: LinearTerms, axes: PublicAxes | None = None, engine: str = "numpy"
) -> NDArray[np.float64]:
    """`train_linear` of records that are read in blocks, of any number: what an agent calls.

    Args:
        records: finite features and labels that are classes, as a shard holds.
        axes: the public map in front of it; None for features as they are.
        engine: which devices may be used; see descent.descend.
    """
    dimension = records.dimension if axes is None else axes.count
    at_once = block_rows(records.dimension + dimension + 1 + terms.num_classes)

    def blocks(skip: int) -> Iterator[Block]:
        for features, labels in records.read(at_once, skip):
            seen = features if axes is None else axes(features)
            yield _augmented(seen[None], terms), _truth(labels[None], terms)

    (weights,) = descend(
        terms.descent,
        kept(blocks),
        _SLOPES[terms.learner],
        counts=float(terms.descent.denominator(records.count)),
        shape=(1, dimension + 1, terms.num_classes),
        ball_axes=_ball_axes(terms),
        numbers=records.public_count * (dimension + 1),
        engine=engine,
    )
    return np.asarray(weights)


def train_users(
    features: NDArray[np.floating],
    labels: NDArray[np.integer],
    *,
    terms: LinearTerms,
    progress: ProgressCallback = silent,
) -> NDArray[np.float64]:
    """Every user's own model, as `train_linear` would give it up to rounding.

    Args:
        features: shape (users, rows, dimension).
        labels: shape (users, rows); NO_RECORD where a user has fewer records than rows.
        progress: told how many users are done.

    Returns:
        float64, shape (users, dimension + 1, num_classes).

    Raises:
        As for train_linear.
    """
    users, records, dimension = _check(features, labels, terms)
    weights, descent = np.empty((users, dimension + 1, terms.num_classes)), terms.descent
    group = max(1, _NUMBERS_AT_ONCE // max(1, records * (dimension + 1)))
    at_once = block_rows(min(group, users) * (dimension + 1 + terms.num_classes))
    for start in range(0, users, group):
        part = slice(start, start + group)
        counts = np.array([descent.denominator(int(own)) for own in (labels[part] != NO_RECORD).sum(axis=1)])
        blocks = [
            (_augmented(features[part, some], terms), _truth(labels[part, some], terms))
            for some in (slice(row, row + at_once) for row in range(0, records, at_once))
        ]
        weights[part] = descend(
            descent,
            lambda blocks=blocks: blocks,  # type: ignore[misc]  # a default binds what a loop changes
            _SLOPES[terms.learner],
            counts=counts[:, None, None].astype(np.float64),
            shape=(len(counts), dimension + 1, terms.num_classes),
            ball_axes=_ball_axes(terms),
        )
        progress("Training users", min(start + group, users), users)
    return weights


def linear_scores(
    features: NDArray[np.floating], weights: NDArray[np.float64], *, terms: LinearTerms
) -> NDArray[np.float64]:
    """Scores of a model on rows, prepared as in training; the class is the largest.

    Args:
        features: shape (n, dimension).
        weights: shape (dimension + 1, num_classes), of one user or an average of many.

    Returns:
        float64, shape (n, num_classes).
    """
    scores: NDArray[np.float64] = _augmented(features, terms) @ weights
    return scores


Truth = tuple[NDArray[np.bool_], NDArray[np.bool_]]
"""Whether a row is of a class, shape (users, rows, classes), and whether it is a record, shape (users, rows, 1)."""


def _softmax(scores: Any, truth: Any, xp: Any = np, /) -> Any:
    is_class, is_record = truth
    return softmax_slopes(scores, is_class, xp) * is_record


def _hinge(scores: Any, truth: Any, xp: Any = np, /) -> Any:
    is_class, is_record = truth
    signs = 2.0 * is_class - 1.0
    return -signs * xp.clip((1 + HUBER_WIDTH - signs * scores) / (2 * HUBER_WIDTH), 0, 1) * is_record


_SLOPES = {"softmax": _softmax, "svm": _hinge}


def _truth(labels: NDArray[np.integer], terms: LinearTerms) -> Truth:
    return labels[..., None] == np.arange(terms.num_classes), (labels != NO_RECORD)[..., None]


def _ball_axes(terms: LinearTerms) -> int | tuple[int, ...]:
    return (1, 2) if terms.learner == "softmax" else 1


def _augmented(features: NDArray[np.floating], terms: LinearTerms) -> NDArray[np.float64]:
    rows = features.astype(np.float64)
    norms = np.linalg.norm(rows, axis=-1, keepdims=True)
    rows *= terms.feature_norm / np.maximum(norms, terms.feature_norm)
    return np.concatenate([rows, np.full((*rows.shape[:-1], 1), terms.bias_feature)], axis=-1)


def _check(features: NDArray[np.floating], labels: NDArray[np.integer], terms: LinearTerms) -> tuple[int, int, int]:
    if features.ndim != 3 or labels.shape != features.shape[:2] or features.shape[2] < 1:
        raise BadData(f"users' records are rows with one label each, found shapes {features.shape} and {labels.shape}")
    if not np.issubdtype(labels.dtype, np.integer) or not np.isfinite(features).all():
        raise BadData("features must be finite numbers and labels integers")
    if labels.size and not NO_RECORD <= int(labels.min()) <= int(labels.max()) < terms.num_classes:
        raise BadData(f"a label is no class of the task, which has {terms.num_classes}")
    users, records, dimension = features.shape
    if (dimension + 1) * terms.num_classes > MOST_WEIGHTS:
        raise InvalidSetting(
            f"{(dimension + 1) * terms.num_classes} weights are more than {MOST_WEIGHTS}, for which rounding is "
            "bounded; use fewer features, for example a public projection"
        )
    return users, records, dimension


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


Array = NDArray[np.float64]

StepBlock = tuple[Array, NDArray[np.integer]]
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
    blocks: Iterable[StepBlock], count: int, theta: Array, *, terms: StepTerms, source: ByteSource
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

    It is made in any case. Whatever records do to it, it lies in a ball (labeler.methods.federated, fact 3).

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


def rows_on_grid(records: Rows, axes: PublicAxes | None, *, num_classes: int) -> Iterator[StepBlock]:
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
