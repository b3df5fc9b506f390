"""AE-DPFL on frozen features: an agent trains a head on its records and casts one vote per query.

Zhu et al. 2021, Algorithm 2. The price does not depend on the head: whatever it says, one record moves at most one vote
per query (`labeler.ballots.one_hot_ballots`). So it is trained to be right: multinomial logistic regression, until it
converges or for MOST_ITERATIONS, on all records or on as many as are quick to train on, those of the smallest ids. Any
function of the records would do for the price; that there is always an answer, and nothing else to be seen, would not
follow from an arbitrary one: no number of records, classes or iterations is refused.
"""

from __future__ import annotations

import warnings

import numpy as np
from numpy.typing import NDArray

from labeler.ballots import one_hot_ballots
from labeler.batch import QueryBatch
from labeler.descent import MOST_RECORDS
from labeler.task import Task
from workers.voting.model_store import ModelStore
from workers.voting.records import Records

INVERSE_REGULARISATION = 10.0
"""scikit-learn's C on features of norm 1. On the amazon and caltech10 photographs 1, 10 and 100 lie within a point of
each other (sums without noise: 93.8, 94.5, 94.8 and 89.2, 89.5, 89.4 % right)."""

MOST_ITERATIONS = 2000
"""Of L-BFGS; then the head is what it is."""

MOST_NUMBERS = 2**24
"""Of features in double precision: 128 MiB, and a minute or two of training on one core."""

LARGEST_WEIGHT = 2**20
"""Weights become integers up to this, so that scores of integer features are exact in double precision, below
2^11 * 2^20 * (number of features + 1) < 2^53 for up to two million features."""

_FEATURE_ONE = 2048


def ensemble_ballots(task: Task, batch: QueryBatch, records: Records, models: ModelStore) -> NDArray[np.int64]:
    """One vote per query, for the class that the agent's own head predicts; the lowest among equals.

    Args:
        models: where its head is kept: trained once per task and version of the records.

    Returns:
        Votes, int64, shape (num_queries, num_classes).
    """
    head = models.once(
        records.version, f"ensemble {task.digest}", lambda: train_head(records, num_classes=task.num_classes)
    )
    return one_hot_ballots(predict(head, batch.features), num_classes=task.num_classes)


def train_head(records: Records, *, num_classes: int) -> NDArray[np.int64]:
    """A linear classifier as integers, shape (dimension + 1, num_classes); the last row is the intercept.

    Classes of which the agent has no record are never predicted.
    """
    dimension = records.all_features.shape[1]
    records = records.first(min(MOST_RECORDS, max(1, MOST_NUMBERS // dimension)))
    present = np.unique(records.labels)
    weights = np.zeros((dimension + 1, num_classes))
    if len(present) > 1:
        coefficients, intercepts = _fit(records)
        two = len(present) == 2
        # With two classes scikit-learn fits one column of weights: of the second against the first.
        weights[:-1, present] = np.stack([-coefficients[0], coefficients[0]], axis=1) / 2 if two else coefficients.T
        weights[-1, present] = np.array([-1, 1]) * intercepts[0] / 2 if two else intercepts
    return integer_head(weights, present)


def integer_head(weights: NDArray[np.float64], present: NDArray[np.integer]) -> NDArray[np.int64]:
    """Weights as integers, scaled to what scores can hold; classes that are not present are never predicted.

    Args:
        weights: shape (dimension + 1, num_classes), the last row the intercept.
        present: classes of which the agent has records.
    """
    largest = np.abs(weights).max() or 1.0
    head = np.rint(weights * ((LARGEST_WEIGHT - 1) / largest)).astype(np.int64)
    absent = np.setdiff1d(np.arange(weights.shape[1]), present)
    # Beyond what any weights can add up to, so that the intercept alone keeps them from winning.
    head[-1, absent] = -4 * LARGEST_WEIGHT * len(weights)
    return head


def _fit(records: Records) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    # Loaded where it is wanted: most agents never train.
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.linear_model import LogisticRegression

    features = np.concatenate([block for block, _ in records.blocks(2**16)]).astype(np.float64) / _FEATURE_ONE
    with warnings.catch_warnings():
        # Where it stops after the last iteration it votes with what it has, like everybody; only records decide that.
        warnings.simplefilter("ignore", ConvergenceWarning)
        fitted = LogisticRegression(C=INVERSE_REGULARISATION, max_iter=MOST_ITERATIONS).fit(features, records.labels)
    return fitted.coef_, fitted.intercept_


def predict(head: NDArray[np.int64], queries: NDArray[np.int16]) -> NDArray[np.int64]:
    """The class with the largest score, shape (..., num_queries); sums of integers, exact whatever their order.

    Args:
        head: of one agent, or of several along leading axes.
        queries: shape (num_queries, dimension).
    """
    weights = head.astype(np.float64)
    scores = queries.astype(np.float64) @ weights[..., :-1, :] + _FEATURE_ONE * weights[..., -1:, :]
    return np.asarray(scores.argmax(axis=-1), dtype=np.int64)
