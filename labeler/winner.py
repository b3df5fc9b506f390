"""What talliers must know to find the winners of a round, and what each of them answers.

Talliers never see a task, only the round. In a winner round these terms are part of the round and of its
digest, so an agent that split its ballots for other terms, and a tallier that was told others, are found
out before anything is added.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from labeler.errors import InvalidSetting, ProtocolViolation
from labeler.sharing import PrimeField, field_for

ABSTAINED = -1
"""The answer to a query whose best noisy sum is below the threshold."""


@dataclass(frozen=True)
class WinnerTerms:
    """How the winner of a query follows from the shares of a round.

    Attributes:
        scale: grid units per vote.
        lowest: the smallest a noisy sum can be, grid units; at most 0.
        highest: the largest a noisy sum can be, grid units. The two fix the field in which shares add up.
        row_total: what every row of an agent's ballots sums to, "not voted" included, in votes; None where rows
            have no fixed sum, so that ballots come with their noise added and no row can be checked.
        threshold: a query whose best noisy sum is below it gets the answer -1, grid units; None never abstains.

    Raises:
        InvalidSetting: a number is outside its bounds, or the sums are too wide for a field.
    """

    scale: int
    lowest: int
    highest: int
    row_total: int | None
    threshold: int | None

    def __post_init__(self) -> None:
        if self.scale < 1 or (self.row_total is not None and self.row_total < 1):
            raise InvalidSetting("scale and row_total of a winner round must be at least 1")
        if self.threshold is not None and self.threshold < 0:
            raise InvalidSetting(f"the threshold of a winner round must be at least 0, found {self.threshold}")
        if max(self.scale, self.row_total or 1) > self.highest:
            raise InvalidSetting("scale and row_total of a winner round cannot be above the highest sum")
        _ = self.field

    @cached_property
    def field(self) -> PrimeField:
        """Where the shares of this round add up."""
        return field_for(self.lowest, self.highest)


@dataclass(frozen=True, eq=False, repr=False)
class Winner:
    """One tallier's answer to a round: what the three talliers opened together. The answers of all three are equal.

    Attributes:
        tallier: index of the tallier.
        contributors: the agents summed.
        sharings_digest: of the shares summed (labeler.tally.AggregateShare).
        labels: int16, shape (num_queries,), the winning class, or -1 where the talliers abstained; read-only.
        is_seeded: True where any contributor's noise or masks came from a known seed.

    Raises:
        ProtocolViolation: the labels are not int16 numbers of at least -1, one per query.
    """

    tallier: int
    round_digest: str
    contributors: frozenset[str]
    sharings_digest: str
    labels: NDArray[np.int16]
    is_seeded: bool

    def __post_init__(self) -> None:
        if self.labels.dtype != np.int16 or self.labels.ndim != 1 or not self.labels.size:
            raise ProtocolViolation("the winners of a round are int16 numbers, one per query")
        if self.labels.min() < ABSTAINED:
            raise ProtocolViolation("a winner is the number of a class, or -1")
        labels = self.labels.copy()
        labels.setflags(write=False)
        object.__setattr__(self, "labels", labels)

    def __repr__(self) -> str:
        return f"Winner(tallier={self.tallier}, round={self.round_digest[:12]!r}, queries={len(self.labels)})"


def words_per_query(terms: WinnerTerms | None, *, num_classes: int, agents: int) -> int:
    """Most 64-bit words for one query in a message of a round, or in what a tallier keeps of its sum.

    Args:
        terms: of the round; None for a histogram, whose sum or last share has one word per class.
        num_classes: classes of the task.
        agents: most agents that contribute.

    Returns:
        Where rows are checked, an agent's last share holds ballots, votes not cast and noise, and a tallier's sum
        has one more word per agent: what its row sums to.
    """
    if terms is None or terms.row_total is None:
        return num_classes
    return max(2 * num_classes + 1, num_classes + agents)


def winner_time_limit_s(num_queries: int, num_classes: int) -> float:
    """How long talliers may take for the winners of a round, and the coordinator waits for them before it asks again.

    A tallier that dies is noticed at once, by its connections; the limit ends what hangs without that.
    """
    return 60.0 + num_queries * num_classes / 500
