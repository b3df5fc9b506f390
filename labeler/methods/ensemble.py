"""AE-DPFL (Zhu et al. 2021, Algorithm 2): an agent trains a model on its records, which casts one vote per query.

The proof needs only that there is one vote per query, for any learner. `one_hot_ballots` and `workers.learning.linear`
cast the votes.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray

from labeler.descent import MOST_RECORDS
from labeler.errors import PrivacyRefusal
from labeler.methods.knn import knn_ballots
from labeler.methods.sensitivity import CountedVotes, Method, share_of_a_row
from labeler.records import ModelStore
from labeler.setting import StatedLevel

if TYPE_CHECKING:
    from labeler.records import Learner, Records, RunnerContext
    from labeler.tally import QueryBatch
    from labeler.task import Task


def squared(task: Task, level: StatedLevel, queries: int) -> int:  # noqa: ARG001  # as every method's
    """Squared L2 sensitivity of the sums of Q queries: 2 Q for a record or a person, Q for an agent.

    **Instance.** The record may change the model and so every prediction. Each costs one
    vote here and one there: 2 Q, whether it comes, goes or replaces another.

    **Person.** Whatever the model learns without them, it casts one vote per query: 2 Q, as for one record.

    **Agent.** The one vote of each row disappears: Q.
    """
    return queries if level == "agent" else 2 * queries


def largest(task: Task, level: StatedLevel) -> int:  # noqa: ARG001  # as every method's
    """Return one vote. *Proof.* An agent casts no more than one per query, whichever unit comes or goes."""
    return 1


def per_cell(task: Task) -> int:  # noqa: ARG001  # as every method's
    """Return one vote per query."""
    return 1


def one_hot_ballots(predictions: NDArray[np.integer], *, num_classes: int) -> NDArray[np.int64]:
    """Cast one vote per query, for the class a locally trained model predicts (AE-DPFL; Zhu et al. 2021, Algorithm 2).

    One record may change the model and with it any prediction, so per query one vote may move: two
    coordinates by one (squared L2 at most 2).

    Args:
        predictions: shape (num_queries,), the predicted class; -1 casts no vote.
        num_classes: C, the number of classes of the task.

    Returns:
        Votes, int64, shape (num_queries, num_classes); each row sums to at most 1.

    Raises:
        InvalidSetting: a prediction is not a class of the task.
    """
    return knn_ballots(predictions[:, None], num_classes=num_classes)


MOST_NUMBERS = 2**24
"""Most numbers in double precision of features and of training: 128 MiB, and a minute or two on one core."""

MOST_HEAD = 2**21
"""Most weights of a head: 1,000 classes of a backbone with 2,048 numbers."""

MOST_SQUARE = 2**25
"""Most numbers of X^T X: features of 5,791 numbers. Training holds a few copies."""

_COPIES_OF_SCORES = 4
"""Copies that training makes per record: scores, their exponentials, the labels and the gradient by each of them."""


def ballots(task: Task, batch: QueryBatch, records: Records, context: RunnerContext) -> NDArray[np.int64]:
    """Return one vote per query, for the class that the agent's own head predicts; the lowest among equals."""
    head = head_of(task, records, models=context.models, learner=context.learner)
    return one_hot_ballots(context.learner.predictions(head, batch.features), num_classes=task.num_classes)


def head_of(task: Task, records: Records, *, models: ModelStore, learner: Learner) -> NDArray[np.int64]:
    """Return the agent's head for a task, cached or trained now."""

    def train() -> NDArray[np.int64]:
        most = most_records(dimension=records.all_features.shape[1], num_classes=task.num_classes)
        return learner.head(records.trainable(most), num_classes=task.num_classes)

    return models.once(records.version, f"ensemble {task.digest}", train, task=task)


def most_records(*, dimension: int, num_classes: int) -> int:
    """Return the most records a head is trained on: public, so that memory use does not tell their number."""
    return max(1, min(MOST_RECORDS, MOST_NUMBERS // (dimension + _COPIES_OF_SCORES * num_classes)))


def check_head(task: Task, dimension: int) -> None:
    """Refuse a task whose head would have more weights than a site has room for; before the charge, by public facts.

    Raises:
        PrivacyRefusal: it would have more.
    """
    weights = (dimension + 1) * task.num_classes
    if weights > MOST_HEAD:
        raise PrivacyRefusal(
            f"a head of {task.num_classes} classes over features of {dimension} numbers has {weights} weights, and a "
            f"site trains at most {MOST_HEAD}; ask about fewer classes, use a backbone of fewer numbers, or method knn"
        )
    if (dimension + 1) ** 2 > MOST_SQUARE:
        raise PrivacyRefusal(
            f"a site trains heads over features of at most {math.isqrt(MOST_SQUARE) - 1} numbers, found {dimension}; "
            "use a backbone of fewer numbers, or method knn"
        )


METHOD: Final = Method(
    "AE-DPFL",
    "one vote per question, of a model trained on its records",
    ballots=ballots,
    stated=CountedVotes(squared, largest, per_cell),
    row_total=lambda task: task.k,
    share_kind=share_of_a_row,
    check_room=check_head,
    is_attacked=True,
)
