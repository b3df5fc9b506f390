"""Multinomial logistic regressions of many agents in the same steps: each reaches the minimum of its own problem.

    J(W, b) = sum over an agent's records of -log softmax(W x + b)_y  +  |W|^2 / (2 C)

is what `workers.voting.ensemble` minimises for one agent: b is not regularised, and a class of which the agent has no
record takes no part. The minimum is unique but for a shift of b.

**Arithmetic.** At the minimum W is a combination X^T A of the records, one row of A per record, with columns that add
up to zero because b is free. So an agent's unknowns are A and b, its scores K A + b with K = X X^T, and what a step
costs follows from its number of records and not from the dimension: two products with n x n matrices, which pays for
agents of a few dozen. The softmax never curves more than a half (Boehning 1992), so with D = P - Y + A / C the step

    A <- A - Q D,   b <- b - q D,      M = (K / 2 + 1/C)^-1,  m = M 1,  Q = M - m m^T / 1^T m,  q = 2 m^T / 1^T m

minimises a bound on J that touches it where it stands; momentum is Nesterov's and begins anew where it points uphill
(O'Donoghue and Candes 2015). An agent is done when |W - W*| <= C |grad J| is at most `tolerance`.

No agent's arithmetic reads another's numbers.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from benchmarks.learning.linear_users import NO_RECORD
from labeler.errors import BadData

Array = NDArray[np.float64]
Place = tuple[Array, Array, Array]
"""Parts, their scores K A, and intercepts, of several agents."""

TOLERANCE = 1e-6
_MOST_STEPS, _LOOK_EVERY = 20_000, 8


def fit_heads(
    features: Array,
    labels: NDArray[np.integer],
    *,
    num_classes: int,
    inverse_regularisation: float,
    tolerance: float = TOLERANCE,
) -> Array:
    """Every agent's head.

    Args:
        features: shape (agents, records, dimension), finite.
        labels: shape (agents, records); NO_RECORD where an agent has fewer records than the largest.
        inverse_regularisation: C, the same for all.
        tolerance: distance from the minimum, in the norm of the weights.

    Returns:
        float64, shape (agents, dimension + 1, num_classes); the last row is the intercept. Zero for a class of which
        an agent has no record, and altogether where it has records of fewer than two.

    Raises:
        BadData: shapes that do not fit, features that are not finite, or a label that is no class.
    """
    if features.ndim != 3 or labels.shape != features.shape[:2] or not np.isfinite(features).all():
        raise BadData(f"agents' records are finite rows with one label each, found {features.shape}, {labels.shape}")
    if labels.size and not NO_RECORD <= int(labels.min()) <= int(labels.max()) < num_classes:
        raise BadData(f"a label is no class of the task, which has {num_classes}")
    is_record = (labels != NO_RECORD)[..., None].astype(np.float64)
    rows = features * is_record
    truth = (labels[..., None] == np.arange(num_classes)).astype(np.float64)
    present = truth.any(axis=1, keepdims=True)
    classes = present.sum(axis=2, keepdims=True)
    parts, intercepts = np.zeros_like(truth), np.zeros((len(labels), 1, num_classes))
    learns = np.flatnonzero(classes[:, 0, 0] > 1)
    if len(learns):
        ridge = np.full((len(learns), 1, 1), 1 / inverse_regularisation)
        own = rows[learns]
        products = own @ own.swapaxes(1, 2)
        problem = _Problem.of_records(products, truth[learns], is_record[learns], present[learns], ridge)
        parts[learns], intercepts[learns] = _descend(problem, tolerance)
    weights: Array = np.concatenate([rows.swapaxes(1, 2) @ parts, intercepts], axis=1)
    return weights


@dataclass(frozen=True, eq=False, repr=False)
class _Problem:
    """Of several agents; the first axis of every array counts them. Private; does not print.

    Attributes:
        products: K, shape (agents, records, records); zero where there is no record.
        truth: one-hot labels, shape (agents, records, classes).
        is_record: one or zero, shape (agents, records, 1).
        closed: minus infinity for a class that takes no part, else zero, shape (agents, 1, classes).
        ridge: 1/C, shape (agents, 1, 1).
        step, step_of_intercepts: Q and q, shapes (agents, records, records) and (agents, 1, records).
    """

    products: Array
    truth: Array
    is_record: Array
    closed: Array
    ridge: Array
    step: Array
    step_of_intercepts: Array

    @classmethod
    def of_records(
        cls, products: Array, truth: Array, is_record: Array, present: NDArray[np.bool_], ridge: Array
    ) -> _Problem:
        inverse = np.linalg.inv(products / 2 + ridge * np.eye(products.shape[1]))
        summed = inverse @ is_record
        total = (summed * is_record).sum(axis=1, keepdims=True)
        step = inverse - summed @ summed.swapaxes(1, 2) / total
        closed = np.where(present, 0.0, -np.inf)
        return cls(products, truth, is_record, closed, ridge, step, 2 * summed.swapaxes(1, 2) / total)

    def of(self, agents: NDArray[np.integer]) -> _Problem:
        return _Problem(**{field.name: getattr(self, field.name)[agents] for field in fields(self)})


def _descend(problem: _Problem, tolerance: float) -> tuple[Array, Array]:
    """The parts A and the intercepts b of each agent at its minimum."""
    shape = problem.truth.shape
    found, found_intercepts = np.zeros(shape), np.zeros((shape[0], 1, shape[2]))
    agents, age = np.arange(shape[0]), np.ones((shape[0], 1, 1))
    # Where an agent stands, and where momentum carries it.
    here: Place = (np.zeros(shape), np.zeros(shape), np.zeros((shape[0], 1, shape[2])))
    ahead = here
    for count in range(1, _MOST_STEPS + 1):
        parts, scores, intercepts = ahead
        excess = _softmax(scores + intercepts + problem.closed) * problem.is_record - problem.truth
        slope = excess + problem.ridge * parts
        if count % _LOOK_EVERY == 0:
            length = (slope * (problem.products @ slope)).sum(axis=(1, 2))
            length += np.square(excess.sum(axis=1)).sum(axis=1)
            # Whoever gets no further answers with what it has: that costs accuracy, if anything.
            going = (length > np.square(tolerance * problem.ridge[:, 0, 0])) & (count < _MOST_STEPS - _LOOK_EVERY)
            found[agents[~going]], found_intercepts[agents[~going]] = parts[~going], intercepts[~going]
            if not going.any():
                break
            if not going.all():
                agents, age, problem = agents[going], age[going], problem.of(np.flatnonzero(going))
                slope, excess = slope[going], excess[going]
                here, ahead = _some(here, going), _some(ahead, going)
                parts, scores, intercepts = ahead
        moved = parts - problem.step @ slope
        there: Place = (moved, problem.products @ moved, intercepts - problem.step_of_intercepts @ slope)
        moves = (there[0] - here[0], there[1] - here[1], there[2] - here[2])
        rise = (slope * moves[1]).sum(axis=(1, 2)) + (excess.sum(axis=1) * moves[2][:, 0]).sum(axis=1)
        begins = (rise > 0)[:, None, None]
        older = (1 + np.sqrt(1 + 4 * np.square(age))) / 2
        carried = np.where(begins, 0.0, (age - 1) / older)
        here, age = there, np.where(begins, 1.0, older)
        ahead = (there[0] + carried * moves[0], there[1] + carried * moves[1], there[2] + carried * moves[2])
    return found, found_intercepts


def _some(place: Place, agents: NDArray[np.bool_]) -> Place:
    return place[0][agents], place[1][agents], place[2][agents]


def _softmax(scores: Array) -> Array:
    powers: Array = np.exp(scores - scores.max(axis=2, keepdims=True))
    powers /= powers.sum(axis=2, keepdims=True)
    return powers
