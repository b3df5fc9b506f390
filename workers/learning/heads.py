"""AE-DPFL's heads on frozen features: how an agent trains the head that casts its votes.

Zhu et al. 2021, Algorithm 2. The price does not depend on the head: whatever it says, one record moves at most one vote
per query (`labeler.methods.ensemble.one_hot_ballots`). So it is trained to be right: multinomial logistic regression

    J(W, b) = sum over records of -log softmax(W x + b)_y  +  |W|^2 / (2 C)

on all records or on as many as are quick to train on, those of the smallest ids.

**Time is an answer, too.** Every agent takes the same STEPS over all classes of the task, whatever it holds: one class
or none, converged or not. A class of which it has no record is closed by adding minus infinity to its score, and is
never predicted. A step minimises a bound on J that touches it where it stands: the softmax never curves more than a
half (Boehning 1992), so with X the records, each with a one for the intercept,

    W <- W - M (X^T (P - Y) + W / C),      M = (X^T X / 2 + 1/C)^-1,

where the intercept is in the bound's 1/C and not in J's. Momentum is Nesterov's and begins anew, by a factor of zero,
where it points uphill (O'Donoghue and Candes 2015).

Memory is bounded by public facts, the classes of the task and the numbers of a feature: of a head and of its bound
(`labeler.methods.ensemble.check_head`, before the charge), of what it is trained on and of the questions scored at
once.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from labeler.records import FEATURE_ONE, Block, Rows, block_rows, kept
from workers.learning.descent import softmax_slopes

INVERSE_REGULARISATION = 10.0
"""C on features of norm 1. On the amazon and caltech10 photographs 1, 10 and 100 lie within a point of each other (sums
without noise: 93.8, 94.5, 94.8 and 89.2, 89.5, 89.4 % right)."""

STEPS = 100
"""Of every training. On digits and on features of photographs the loss is then below that at which scikit-learn's
L-BFGS stops."""

_SCORED_NUMBERS = 2**22
"""Features and scores of the questions that are looked at together: 32 MiB."""

LARGEST_WEIGHT = 2**20
"""Weights become integers up to this, so that scores of integer features are exact in double precision, below
2^11 * 2^20 * (number of features + 1) < 2^53 for up to two million features."""


def train_head(records: Rows, *, num_classes: int) -> NDArray[np.int64]:
    """A linear classifier as integers, shape (dimension + 1, num_classes); the last row is the intercept.

    Classes of which the agent has no record are never predicted.
    """
    return integer_head(*_fit(records, num_classes=num_classes))


def integer_head(weights: NDArray[np.float64], is_present: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Weights as integers, scaled to what scores can hold; classes that are not present are never predicted.

    Args:
        weights: shape (dimension + 1, num_classes), the last row the intercept.
        is_present: of which classes the agent has records, shape (num_classes,).
    """
    largest = max(float(np.abs(weights).max()), 1e-300)
    head = np.rint(weights * ((LARGEST_WEIGHT - 1) / largest)).astype(np.int64)
    # Beyond what any weights can add up to, so that the intercept alone keeps them from winning.
    head[-1] = np.where(is_present, head[-1], -4 * LARGEST_WEIGHT * len(weights))
    return head


def _fit(records: Rows, *, num_classes: int) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """The weights after all steps, and which classes there are."""
    size = records.dimension + 1
    at_once, classes = block_rows(size + 2 * num_classes), np.arange(num_classes)

    def prepared(skip: int) -> Iterator[Block]:
        for features, labels in records.read(at_once, skip):
            rows = np.ones((len(features), size))
            rows[:, :-1] = features
            yield rows, labels[:, None] == classes

    blocks = kept(prepared)
    products, is_present = np.zeros((size, size)), np.zeros(num_classes, dtype=np.bool_)
    for rows, truth in blocks():
        products += rows.T @ rows
        is_present |= truth.any(axis=0)
    inverse = np.linalg.inv(products / 2 + np.eye(size) / INVERSE_REGULARISATION)
    ridge = np.full(size, 1 / INVERSE_REGULARISATION)
    ridge[-1] = 0
    closed = np.where(is_present, 0.0, -np.inf)
    # One row per class, which libraries multiply in half the time.
    here = ahead = np.zeros((num_classes, size))
    age = 1.0
    for _ in range(STEPS):
        slope = ridge * ahead
        for rows, truth in blocks():
            slope += softmax_slopes((ahead @ rows.T).T + closed, truth).T @ rows
        there = ahead - slope @ inverse
        move = there - here
        goes_on, older = float(np.vdot(slope, move) <= 0), (1 + np.sqrt(1 + 4 * age * age)) / 2
        here, ahead = there, there + goes_on * (age - 1) / older * move
        age = goes_on * older + (1 - goes_on)
    return here.T, is_present


def predict(head: NDArray[np.int64], queries: NDArray[np.int16]) -> NDArray[np.int64]:
    """The class with the largest score, shape (..., num_queries); sums of integers, exact whatever their order.

    Args:
        head: of one agent, or of several along leading axes.
        queries: shape (num_queries, dimension).
    """
    weights = head.astype(np.float64)
    at_once = max(1, _SCORED_NUMBERS // (queries.shape[1] + weights[..., -1, :].size))
    found = [np.zeros((*head.shape[:-2], 0), dtype=np.int64)]
    for start in range(0, len(queries), at_once):
        part = queries[start : start + at_once].astype(np.float64)
        scores = part @ weights[..., :-1, :] + FEATURE_ONE * weights[..., -1:, :]
        found.append(scores.argmax(axis=-1))
    return np.concatenate(found, axis=-1)
