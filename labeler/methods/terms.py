"""What a method says of itself, what is proved of it, and how an agent answers by it.

Every system of the papers is one sum of bounded contributions. They differ in what a row of the sum is about, in who
adds the noise, and in whether a job can be cut into rounds; outside their modules nobody has to know more.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from fractions import Fraction
from typing import TYPE_CHECKING, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from labeler.errors import InvalidSetting
from labeler.records import Indexes, ModelStore, PublicAxes, Records, Rows
from labeler.setting import Setting, StatedLevel, Training

if TYPE_CHECKING:
    from labeler.accounting.events import IntegerSum
    from labeler.methods.aux_distill import LocalHeadTerms
    from labeler.methods.blind_average import LinearTerms, MeanTerms
    from labeler.methods.federated import StepTerms
    from labeler.noise import VectorSum
    from labeler.randomness import ByteSource
    from labeler.tally import QueryBatch
    from labeler.task import Task

ReleaseKind = Literal["histogram", "winner"]
"""What is opened of a sum: all of it, or the largest of each row."""


@dataclass(frozen=True)
class CountedVotes:
    """What is proved of a method whose agents count votes. At every level.

    Attributes:
        squared: (setting, level, queries): the squared L2 norm of the largest change of the sums of one batch of so
            many queries; None where there is no bound. The proof is the function's docstring.
        largest: (setting, level): the most whole votes by which one coordinate changes; None where there is no bound.
        per_cell: (setting): the most votes that one agent may cast for one class at one query, before it is clipped.
    """

    squared: Callable[[Setting, StatedLevel, int], Fraction | int | None]
    largest: Callable[[Setting, StatedLevel], int | None]
    per_cell: Callable[[Setting], int]


@dataclass(frozen=True)
class BoundedNumbers:
    """What is proved of a method whose agents answer with real numbers on a grid.

    Attributes:
        answer_sum: (setting): the noisy vector whose price the task has, in units of what one record changes: the sum
            of all agents, or each agent's own. The proof is the function's docstring and that of `VectorSum`.
        longest: (setting): the largest magnitude of one number of one agent on the grid, grid units.
        check: (numbers, setting): refuse numbers of one agent beyond what the price covers; int64, grid units.
        event: (setting, level): everything that a task opens, where that is more than `answer_sum` once; None: once.
    """

    answer_sum: Callable[[Setting], VectorSum]
    longest: Callable[[Setting], int]
    check: Callable[[NDArray[np.int64], Setting], None]
    event: Callable[[Setting, StatedLevel], IntegerSum] | None = None


class Learner(Protocol):
    """Fits models to an agent's records; the arithmetic of what `labeler.methods` prove (`workers.learning`)."""

    def head(self, records: Rows, *, num_classes: int) -> NDArray[np.int64]:
        """Fit a classifier as integers, shape (dimension + 1, num_classes)."""

    def predictions(self, head: NDArray[np.int64], questions: NDArray[np.int16]) -> NDArray[np.int64]:
        """Return the class that a head gives to each question, shape (num_queries,)."""

    def weights(self, records: Rows, *, terms: LinearTerms, axes: PublicAxes | None) -> NDArray[np.float64]:
        """Fit the linear model of these terms, shape (rows of the model, num_classes)."""

    def class_sums(self, records: Rows, *, terms: MeanTerms, axes: PublicAxes) -> NDArray[np.float64]:
        """Sum records by class, shape (axes + 1, num_classes)."""

    def soft_votes(
        self, records: Rows, questions: NDArray[np.int16], *, terms: LocalHeadTerms, source: ByteSource
    ) -> NDArray[np.float64]:
        """Fit two heads, add their noise, and return soft votes, shape (num_queries, num_classes)."""

    def check_negatives(self, questions: NDArray[np.int16], terms: LocalHeadTerms) -> None:
        """Refuse questions from which no public map can be made, by public numbers alone."""

    def step(
        self,
        records: Rows,
        model: NDArray[np.float64],
        *,
        terms: StepTerms,
        axes: PublicAxes | None,
        training: Training,
        source: ByteSource,
    ) -> NDArray[np.float64]:
        """Return what an agent adds to one step of training, shape (rows, num_classes)."""


@dataclass(frozen=True)
class RunnerContext:
    """An agent's index, learner and source of chance, with which a method finds its ballots.

    Attributes:
        indexes: finds neighbours among records and questions.
        models: where models are kept while a round is open.
        local_noise: gives the agent's secret source of chance of its own for this batch, at its beginning: of noise, or
            of who takes part in a step.
        learner: fits models.
    """

    indexes: Indexes = field(repr=False)
    models: ModelStore = field(repr=False)
    local_noise: Callable[[], ByteSource] = field(repr=False)
    learner: Learner = field(repr=False)


def _unanswered(*_: object) -> NDArray[np.int64]:
    raise InvalidSetting("this method says nothing of how agents answer; give it ballots")


def _accepts(*_: object) -> None:
    return None


@dataclass(frozen=True)
class Method:
    """A way to answer: what it is, what is proved of it, and how an agent answers by it.

    Attributes:
        system: its name in the papers.
        answer: what an agent contributes, in words for people.
        sums: what is added up, in words for people.
        ballots: (task, batch, records, context): an agent's answers, int64, shape (num_queries, num_classes); private.
        stated: what is proved of it. None: nobody has stated what a record changes, so that it has no price.
        takes: optional fields of a task that mean something for it; others are refused.
        single_round: all queries of a task, or of a step, are one composition, asked in one round.
        row_total: (setting): what the rows of a ballot sum to with the votes not cast, which talliers check
            (`labeler.tally`); None where rows have no total.
        asks_for_a_model: the sum is a model's weights; its rows are no queries, and the public images are labeled with
            it afterwards.
        has_local_noise: each agent's noise is in what it answers already, enough of it for its own price; then no share
            of noise is added to the sum, and nobody's collusion weakens the guarantee.
        is_reverse: each record looks for its k nearest queries, rather than each query for its k nearest records. Then
            k is at most the number of queries, any number of votes of one agent may meet in a cell, and what the counts
            add up to tells about how many records there are.
        is_attacked: `labeler audit` has adversaries that were thought of for it. Another method would be attacked with
            those of a method that it is not, prove nothing, and look safe: so its audit is refused.
        check_room: (task, dimension of features): refuse what an agent has no room to answer, before the charge and by
            public facts alone.
        check_questions: (task, batch, learner): refuse questions that it cannot be asked, likewise.
        most_rows: (task, dimension of features): how many records take part in an agent's answer at most, by public
            facts; None for all of them.
    """

    system: str
    answer: str
    sums: str = "votes"
    ballots: Callable[[Task, QueryBatch, Records, RunnerContext], NDArray[np.int64]] = _unanswered
    stated: CountedVotes | BoundedNumbers | None = None
    takes: frozenset[str] = frozenset()
    single_round: bool = False
    row_total: Callable[[Setting], int] | None = None
    asks_for_a_model: bool = False
    has_local_noise: bool = False
    is_reverse: bool = False
    is_attacked: bool = False
    check_room: Callable[[Task, int], None] = _accepts
    check_questions: Callable[[Task, QueryBatch, Learner], None] = _accepts
    most_rows: Callable[[Task, int], int | None] = _accepts

    @property
    def counts(self) -> bool:
        """Contributions are whole votes, counted; else they are real numbers on a fixed-point grid."""
        return not isinstance(self.stated, BoundedNumbers)

    @property
    def has_k(self) -> bool:
        """k neighbours vote; else k is 1."""
        return "k" in self.takes

    @property
    def is_sampled(self) -> bool:
        """A public model is trained in steps over secret samples, each a round: all steps are one composition."""
        return "training.sampled" in self.takes

    @property
    def learns_from_queries(self) -> bool:
        """Every NEGATIVES_EVERY-th query is a public negative example that agents learn from."""
        return "training.dimension" in self.takes

    @property
    def releases(self) -> tuple[ReleaseKind, ...]:
        """What may be opened: a winner only where a row of the sum counts votes."""
        return ("histogram", "winner") if self.counts else ("histogram",)


class Asked(Setting, Protocol):
    """A task, with what its method says of itself."""

    @property
    def traits(self) -> Method: ...


def check_labels(labels: NDArray[np.integer], num_classes: int, *, least: int) -> None:
    """Refuse labels that are no classes of the task."""
    if labels.size and (labels.min() < least or labels.max() >= num_classes):
        raise InvalidSetting(
            f"a record carries a label outside the {num_classes} classes of the task; "
            "shards and task must list the same classes in the same order"
        )
