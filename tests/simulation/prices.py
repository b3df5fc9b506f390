"""The right charges of an account, worked out from the price of a task alone and from no ledger's own arithmetic.

A model is trained in steps of which an account pays for all with the first that it is charged for, and the least there
is for every further one (`labeler.methods.federated`). Which step is the first, each ledger says for itself: the
coordinator charges step 0 first, to everybody who is asked, also for who never got it; a site that never got it has
charged itself nothing, and pays for all with the first step that it answers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from labeler.ledger.chain import Entry
from labeler.methods.sensitivity import integer_event
from labeler.planning import has_finite_price
from labeler.setting import LEVELS
from labeler.task import Level, Task

LEAST = 1
"""Nano-units: what a further step costs."""


@dataclass(frozen=True)
class Paid:
    """One charge for a round.

    Attributes:
        name: of the round, for people.
        queries: of the round.
        amount: nano-units of mu^2.
    """

    name: str
    queries: int
    amount: int


@lru_cache(maxsize=1024)
def price(task: Task, level: Level, queries: int) -> int | None:
    """Return what a round costs by itself, and the first of a model's steps; None where nothing finite is promised."""
    event = integer_event(task, level, queries) if has_finite_price(task, level) else None
    return None if event is None else event.round_nano


def wrongly_paid(task: Task, level: Level, paid: Sequence[Paid]) -> str:
    """What is wrong with all that one account paid for rounds of one task, in the order of its ledger; empty if none.

    Where no price is finite, whatever stands there says so.
    """
    for number, one in enumerate(paid):
        whole = price(task, level, one.queries)
        wanted = LEAST if task.sampled is not None and number else whole
        if whole is not None and one.amount != wanted:
            return f"paid {one.amount} for {one.name}, which costs {wanted}"
    return ""


def is_covered(task: Task, queries: int, charges: Mapping[str, Mapping[str, int]], name: str) -> bool:
    """Whether enough is charged for an answer to leave: its round's price, of steps the whole price for all so far.

    Args:
        task, queries: of the round.
        charges: level -> round -> nano-units, of all rounds of the task that one account is charged for.
        name: of the round, which is charged by itself in any case.
    """
    for level in LEVELS:
        whole, of_rounds = price(task, level, queries), charges.get(level, {})
        if not of_rounds.get(name):
            return False
        total = sum(of_rounds.values()) if task.sampled is not None else of_rounds[name]
        if whole is not None and total < whole:
            return False
    return True


@dataclass
class Standing:
    """Charges that stand in a ledger, reserved or posted, as its entries say: what was given back is none."""

    amounts: dict[tuple[str, str, str], int] = field(default_factory=dict)

    def add(self, entry: Entry) -> None:
        """The next entry."""
        if entry.reservation_id:
            name = (entry.account, entry.level, entry.reservation_id)
            self.amounts[name] = 0 if entry.kind == "void" else entry.amount

    def of(self, account: str, reservations: Sequence[str]) -> dict[str, dict[str, int]]:
        """Level -> reservation -> nano-units, of these reservations."""
        return {level: {name: self.amounts.get((account, level, name), 0) for name in reservations} for level in LEVELS}
