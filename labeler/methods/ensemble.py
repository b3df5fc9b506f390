"""AE-DPFL (Zhu et al. 2021, Algorithm 2): an agent trains a model on its records, which casts one vote per query.

The proof needs only that there is one vote per query, for any learner, also for one that reads the public queries. So
the learners "linear" (`workers.learning.linear`), "network" and "adapted" (`workers.learning.network`) have one price,
one proof and one event. `one_hot_ballots` casts their votes.

Classes may be attributes, so that a model says yes or no to each. Then it votes for at most t of those that it says yes
to: for the first of them in the order of the classes, a public rule that is the same for every agent
(`labeler.methods.knn.attribute_ballots`, for a model in place of a neighbor). One class per query is the case t = 1.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray

from labeler.descent import MOST_RECORDS
from labeler.errors import PrivacyRefusal
from labeler.methods.knn import NEIGHBORS_AT_ONCE, attribute_ballots, blocks_of, knn_ballots
from labeler.methods.sensitivity import CountedVotes, Method, share_of_a_row
from labeler.records import ModelStore
from labeler.setting import PLAIN, StatedLevel

if TYPE_CHECKING:
    from labeler.records import Learner, Records, RunnerContext
    from labeler.tally import QueryBatch
    from labeler.task import Task


def squared(task: Task, level: StatedLevel, queries: int) -> int:
    """Squared L2 sensitivity of the sums of Q queries: w Q for a record or a person, t Q for an agent.

    Here a model casts at most t votes per query, no two for one class: t = 1 and w = 2 for classes. For attributes
    t = min(tau, C) and w = min(2 t, C), tau is `attributes_per_record`.

    **Instance.** The record may change the model, whatever learner there is, and so every prediction. Two rows of zeros
    and ones with at most t ones each differ, by one, in no more than t + t places, and in no more than C. So w per
    query, whether the record comes, goes or replaces another. Different queries have different coordinates: w Q. Two
    rows without a common class attain it if 2 t <= C, one full and one empty row if t = C.

    **Person.** Whatever the model learns without them, it casts at most t votes per query: w Q, as for one record.

    **Agent.** The votes of each row disappear: t Q.
    """
    votes = task.votes_of_a_record
    return queries * (votes if level == "agent" else min(2 * votes, task.num_classes))


def largest(task: Task, level: StatedLevel) -> int:  # noqa: ARG001  # as every method's
    """Return one vote. *Proof.* An agent casts no more than one per query and class, whichever unit comes or goes."""
    return 1


def per_cell(task: Task) -> int:  # noqa: ARG001  # as every method's
    """Return one vote per query and class."""
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


@dataclass(frozen=True)
class VoterTerms:
    """The public terms of an agent's model.

    Attributes:
        learner: "linear", a head on the features; "network", with one hidden layer; "adapted", the same fitted to the
            features of the queries, too.
        num_classes: C, of the task.
        is_several: classes are attributes, each with a yes or a no.
    """

    learner: str
    num_classes: int
    is_several: bool

    @classmethod
    def of(cls, task: Task) -> VoterTerms:
        """Return those of a task."""
        learner = PLAIN if task.training is None else task.training.learner
        return cls(learner, task.num_classes, task.attributes_per_record is not None)

    @property
    def reads_queries(self) -> bool:
        """Return whether a model depends on the queries, so that every batch has its own."""
        return self.learner == "adapted"


def ballots(task: Task, batch: QueryBatch, records: Records, context: RunnerContext) -> NDArray[np.int64]:
    """Return the votes of the agent's own model: for the class that it predicts at each query, the lowest among equals;
    or for the first t attributes that it says yes to.
    """
    terms = VoterTerms.of(task)
    model = model_of(task, records, batch, models=context.models, learner=context.learner)
    if not terms.is_several:
        predicted = context.learner.predictions(model, batch.features, terms=terms)
        return one_hot_ballots(predicted, num_classes=task.num_classes)
    votes = np.zeros((len(batch), task.num_classes), dtype=np.int64)
    for block in blocks_of(len(batch), NEIGHBORS_AT_ONCE // task.num_classes):
        said = context.learner.predictions(model, batch.features[block], terms=terms)
        votes[block] = attribute_ballots(said[:, None], most=task.votes_of_a_record)
    return votes


def model_of(
    task: Task, records: Records, batch: QueryBatch | None = None, *, models: ModelStore, learner: Learner
) -> NDArray[np.int64]:
    """Return the agent's model for a task, cached or trained now.

    A model that reads the queries is that of its batch, and no further round needs it again.

    Args:
        batch: the queries; None where the model is made for later ones and reads none.
    """
    terms, queries = VoterTerms.of(task), None
    name = f"ensemble {task.digest}"
    if terms.reads_queries and batch is not None:
        name, queries = f"{name} {batch.digest}", batch.features

    def train() -> NDArray[np.int64]:
        most = most_records(dimension=records.all_features.shape[1], num_classes=task.num_classes)
        return learner.voter(records.trainable(most), queries, terms=terms)

    return models.once(records.version, name, train, task=None if terms.reads_queries else task)


def most_records(*, dimension: int, num_classes: int) -> int:
    """Return the most records a head is trained on: public, so that memory use does not tell their number."""
    return max(1, min(MOST_RECORDS, MOST_NUMBERS // (dimension + _COPIES_OF_SCORES * num_classes)))


def check_head(task: Task, dimension: int) -> None:
    """Refuse a task whose head would have more weights than a site has room for; before the charge, by public facts.

    With a hidden layer there are no more: with at most 32,000 classes, 64 (dimension + 1) + 65 C is below the same
    bound wherever a head keeps to it.

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
    attributes="the attributes that a model trained on its records sees in each question",
    learners=(PLAIN, "network", "adapted"),
    row_total=lambda task: task.k,
    share_kind=share_of_a_row,
    check_room=check_head,
    is_attacked=True,
)
