"""What the winners of a task reveal by themselves, where a method's rows allow a proof (`labeler.accounting.winner`).

Ledgers are charged what the noisy sums would cost, of which winners are a function: that holds whatever else is asked,
and adds up as one number. What is stated here is less, and true of the whole task's winners beside it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from labeler.accounting.winner import ONE_BIT, SWAP, WinnerEvent, winner_epsilon
from labeler.methods.sensitivity import integer_event
from labeler.noise import DiscreteGaussian
from labeler.task import StatedLevel, Task


@dataclass(frozen=True)
class WinnerGuarantee:
    """What so many winners reveal at one level.

    Attributes:
        level: whose presence is protected.
        epsilon: certified at the task's delta for the integer mechanism, rounded up; never above the histogram's.
        mu_squared, delta_0: for every epsilon the winners are (epsilon, delta_mu(epsilon) + delta_0)-DP.
    """

    level: StatedLevel
    epsilon: float
    mu_squared: float
    delta_0: float

    def to_json(self) -> dict[str, Any]:
        """JSON has no infinity: an infinite epsilon is null."""
        return {
            "epsilon": self.epsilon if math.isfinite(self.epsilon) else None,
            "mu_squared": self.mu_squared,
            "delta_0": self.delta_0,
        }


def winner_event(task: Task, level: StatedLevel, queries: int) -> WinnerEvent | None:
    """The winners of so many queries as an event; None where nothing is proved beyond the sums' price.

    Where rows have a total (top-k votes, one vote of a model), each query is bounded by itself. Squared by votes, a
    change of 1 is one vote that arrives or leaves. One of 2 in which no count moves by more than one vote is one vote
    here and one there: a vote that moves, since no record adds two votes to a row. More votes, or reverse-knn, whose
    bound is of all queries together, have no such proof.
    """
    if task.release != "winner" or not task.traits.rows_have_a_total:
        return None
    one, every = integer_event(task, level, 1), integer_event(task, level, queries)
    if one is None or every is None or one.largest_change != 1 or one.squared_sensitivity not in (1, 2):
        return None
    change = ONE_BIT if one.squared_sensitivity == 1 else SWAP
    return WinnerEvent(every, change, queries, is_duel=task.num_classes == 2 and task.abstain_below is None)


def winner_guarantee(task: Task, level: StatedLevel, queries: int) -> WinnerGuarantee | None:
    """What the winners of so many queries of a task reveal; None where only the sums' price is known."""
    event = winner_event(task, level, queries)
    if event is None:
        return None
    certified = DiscreteGaussian(event.sums.share_sigma_grid).total_variation
    epsilon = winner_epsilon(event, task.delta, total_variation=certified)
    return WinnerGuarantee(level, epsilon, float(event.pair.mu_squared), event.pair.delta_0)


def winner_guarantees(task: Task, queries: int) -> dict[StatedLevel, WinnerGuarantee]:
    """The guarantees at every level that the task states and that are proved."""
    levels: tuple[StatedLevel, ...] = ("instance", "agent")
    if task.records_per_person is not None:
        levels = ("instance", "person", "agent")
    found = {level: winner_guarantee(task, level, queries) for level in levels}
    return {level: one for level, one in found.items() if one is not None}
