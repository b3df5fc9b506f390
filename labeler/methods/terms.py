"""What a method says of itself: its traits, and what is proved of it. A method is a module that fills these in.

Every system of the papers is one sum of bounded contributions. They differ in what a row of the sum is about, in who
adds the noise, and in whether a job can be cut into rounds; outside the modules that vote nobody has to know more.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Literal, Protocol

from labeler.setting import Setting, StatedLevel

if TYPE_CHECKING:
    # Names of methods are known to the command line, which loads no numpy for them.
    import numpy as np
    from numpy.typing import NDArray

    from labeler.accounting.events import IntegerSum
    from labeler.noise import VectorSum

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


@dataclass(frozen=True)
class MethodTraits:
    """What is publicly known of a way to answer.

    Attributes:
        system: its name in the papers.
        answer: what an agent contributes, in words for people.
        sums: what is added up, in words for people.
        asked_at_once: whether all queries of a task are one composition, so that a job is asked in one round.
        rows_have_a_total: whether talliers can check what the rows of a ballot sum to (labeler.tally).
        counts: whether contributions are whole votes, counted; else they are real numbers on a fixed-point grid.
        asks_for_a_model: whether the sum is a model's weights; then its rows are no queries, and the public images are
            labelled with it afterwards.
        is_sampled: whether it trains a public model in steps, each a round that is asked about what the rounds before
            it have opened, over secret samples (`Training.sampled`): all steps are one composition, paid for with the
            first.
        has_local_noise: whether each agent's noise is in what it answers already, enough of it for its own price; then
            no share of noise is added to the sum, and nobody's collusion weakens the guarantee.
        has_k: whether k neighbours vote; else k is 1.
        records_choose: whether each record looks for its k nearest queries, rather than each query for its k nearest
            records. Then k is at most the number of queries, any number of votes of one agent may meet in a cell, a
            task may cap the records of an agent, and what the counts add up to tells about how many records there are.
        may_have_attributes: whether a record may vote for several classes at once (`Task.attributes_per_record`).
        learns_from_queries: whether every NEGATIVES_EVERY-th query is a public negative example that agents learn from.
        stated: what is proved of it. None: nobody has stated what a record changes, so that it has no price.
    """

    system: str
    answer: str
    sums: str = "votes"
    asked_at_once: bool = False
    rows_have_a_total: bool = False
    counts: bool = True
    asks_for_a_model: bool = False
    is_sampled: bool = False
    has_local_noise: bool = False
    has_k: bool = False
    records_choose: bool = False
    may_have_attributes: bool = False
    learns_from_queries: bool = False
    stated: CountedVotes | BoundedNumbers | None = None

    @property
    def releases(self) -> tuple[ReleaseKind, ...]:
        """What may be opened: a winner only where a row of the sum counts votes."""
        return ("histogram", "winner") if self.counts else ("histogram",)

    @property
    def is_priced_by_training(self) -> bool:
        """Whether the price depends on how agents train, so that the task has to say it: a vote is worth one whatever
        cast it, a number as much as a record can move it."""
        return not self.counts


class Asked(Setting, Protocol):
    """A task, with what its method says of itself."""

    @property
    def traits(self) -> MethodTraits: ...
