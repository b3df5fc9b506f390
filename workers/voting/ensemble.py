"""AE-DPFL on frozen features: an agent trains a head on its records and casts one vote per query.

Zhu et al. 2021, Algorithm 2. The price does not depend on the head: whatever it says, one record moves at most one vote
per query (`labeler.ballots.one_hot_ballots`). So it is trained to be right: multinomial logistic regression, until it
converges or for MOST_ITERATIONS, on all records or on as many as are quick to train on, those of the smallest ids. Any
function of the records would do for the price; that there is always an answer, and nothing else to be seen, would not
follow from an arbitrary one: no number of records or iterations is refused after the charge.

Memory is bounded by public facts, the classes of the task and the numbers of a feature: of a head (`check_head`, before
the charge), of what it is trained on (`most_records`) and of the questions that are scored at once.
"""

from __future__ import annotations

import warnings

import numpy as np
from numpy.typing import NDArray

from labeler.ballots import one_hot_ballots
from labeler.batch import QueryBatch
from labeler.descent import MOST_RECORDS
from labeler.errors import PrivacyRefusal
from labeler.task import Task
from workers.voting.model_store import ModelStore
from workers.voting.records import Records

INVERSE_REGULARISATION = 10.0
"""scikit-learn's C on features of norm 1. On the amazon and caltech10 photographs 1, 10 and 100 lie within a point of
each other (sums without noise: 93.8, 94.5, 94.8 and 89.2, 89.5, 89.4 % right)."""

MOST_ITERATIONS = 2000
"""Of L-BFGS; then the head is what it is."""

MOST_NUMBERS = 2**24
"""In double precision, of features and of what training makes of them: 128 MiB, and a minute or two on one core."""

MOST_HEAD = 2**21
"""Weights of a head, at most: 1,000 classes of a backbone with 2,048 numbers. Training holds some 25 copies."""

_COPIES_OF_SCORES = 4
"""That training makes for each record: scores, their exponentials, the truth and the gradient by each of them."""

_SCORED_NUMBERS = 2**22
"""Features and scores of the questions that are looked at together: 32 MiB."""

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


def check_head(task: Task, dimension: int) -> None:
    """Refuse a task whose head would have more weights than a site has room for; before the charge, of public facts.

    Raises:
        PrivacyRefusal: it would.
    """
    weights = (dimension + 1) * task.num_classes
    if weights > MOST_HEAD:
        raise PrivacyRefusal(
            f"a head of {task.num_classes} classes over features of {dimension} numbers has {weights} weights, and a "
            f"site trains at most {MOST_HEAD}; ask about fewer classes, use a backbone of fewer numbers, or method knn"
        )


def most_records(*, dimension: int, num_classes: int) -> int:
    """How many records a head is trained on at most: public, so that memory tells nothing of how many there are."""
    return max(1, min(MOST_RECORDS, MOST_NUMBERS // (dimension + _COPIES_OF_SCORES * num_classes)))


def train_head(records: Records, *, num_classes: int) -> NDArray[np.int64]:
    """A linear classifier as integers, shape (dimension + 1, num_classes); the last row is the intercept.

    Classes of which the agent has no record are never predicted.
    """
    dimension = records.all_features.shape[1]
    records = records.first(most_records(dimension=dimension, num_classes=num_classes))
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
    at_once = max(1, _SCORED_NUMBERS // (queries.shape[1] + weights[..., -1, :].size))
    found = [np.zeros((*head.shape[:-2], 0), dtype=np.int64)]
    for start in range(0, len(queries), at_once):
        part = queries[start : start + at_once].astype(np.float64)
        scores = part @ weights[..., :-1, :] + _FEATURE_ONE * weights[..., -1:, :]
        found.append(scores.argmax(axis=-1))
    return np.concatenate(found, axis=-1)
