"""The budget of every query: its share of what its job was charged, and the account's total after it.

Each method says which kind of share its questions have (`Method.share_kind`):

    each      the price is the same for each question: the round's charge over its questions.
    running   the price grows with the number asked: C(i) - C(i - 1), i counting within its round, C the running
              maximum of the round's price for i questions, in nano-units (`running_prices`).
    shared    the price is of the whole job: its charge over its questions, or over its images where rows are no
              questions. An attribution: the first question alone would cost the whole.
    life      each image pays for its own votes: the most that one record could pay here, of its B.

Shares are whole nano-units. Except for `life` those of a job add up to its charge in the ledger exactly, by the largest
remainder. A round that was given back took 0. Everything follows from the task, the number of questions and the
ledger. Nothing depends on a vote, so a share tells no more than the charge does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from labeler.accounting.lifetime import vote_nano
from labeler.batching import round_charges
from labeler.budget import UNBOUNDED_NANO, epsilon_spent
from labeler.methods.sensitivity import ShareKind
from labeler.setting import LEVELS, Level
from labeler.task import Task

Nano = NDArray[np.int64]

COLUMNS: Final = (
    "account", "level", "share_kind", "share_nano", "total_nano", "total_epsilon", "charge_nano",
    "agent_share_nano", "agent_total_nano", "agent_total_epsilon",
)  # fmt: skip
"""What a row says of its question's budget, in label files and over REST."""

JOB_ACCOUNT: Final = "job"
"""The account of a job that `labeler run` makes: the job alone."""

_MOST_EPSILONS = 256


@dataclass(frozen=True)
class ChargedRounds:
    """Rounds that one entry of a ledger charged together.

    Attributes:
        sizes: questions of each round.
        nano: the charge by level; 0 if it was given back.
        after: the account's total right after the entry, by level.
    """

    sizes: tuple[int, ...]
    nano: Mapping[Level, int]
    after: Mapping[Level, int]


@dataclass(frozen=True)
class QueryBudgets:
    """The budget of every row of a job, in order.

    Attributes:
        kind: what its shares are.
        charge_nano: what the ledger charged for the question's round, or for the whole job where shares are `shared`,
            at instance level.
        shares: by level, nano-units of mu^2; a level at which the job has no finite charge is left out.
        totals: by level, the account's total after each row.
    """

    kind: ShareKind
    charge_nano: Nano
    shares: Mapping[Level, Nano]
    totals: Mapping[Level, Nano]

    def columns(self, account: str, delta: float) -> dict[str, list[Any]]:
        """Return the columns of `COLUMNS`.

        Args:
            account: whose totals these are.
            delta: of the account; totals are stated in epsilon at it, rounded up.
        """
        count = len(self.charge_nano)
        found: dict[str, list[Any]] = {
            "account": [account] * count,
            "level": ["instance"] * count,
            "share_kind": [self.kind] * count,
            "charge_nano": self.charge_nano.tolist(),
        }
        for level in LEVELS:
            prefix = "" if level == "instance" else "agent_"
            totals = self.totals.get(level)
            found[f"{prefix}share_nano"] = [None] * count if totals is None else self.shares[level].tolist()
            found[f"{prefix}total_nano"] = [None] * count if totals is None else totals.tolist()
            found[f"{prefix}total_epsilon"] = [None] * count if totals is None else _epsilons(totals, delta)
        return {name: found[name] for name in COLUMNS}


def query_budgets(
    task: Task, charged: Sequence[ChargedRounds], *, rows: int, prices: Mapping[Level, Sequence[int]]
) -> QueryBudgets:
    """Return the budget of every row of a job.

    Args:
        charged: every round of the job, in order.
        rows: number of rows: of questions, or of images where a model was asked for.
        prices: `running_prices` of as many questions as the largest round has; empty for other kinds of shares.
    """
    kind = task.traits.share_kind(task)
    # A level without a finite price is recorded as UNBOUNDED_NANO for each round; a finite charge may be larger.
    finite = [
        level
        for level in LEVELS
        if not any(one.nano[level] and one.nano[level] % UNBOUNDED_NANO == 0 for one in charged)
    ]
    if kind == "shared":
        charged = [_joined(charged, rows)]
    charge = {level: [one.nano[level] for one in charged] for level in LEVELS}
    shares: dict[Level, Nano] = {}
    totals: dict[Level, Nano] = {}
    for level in finite:
        parts = [
            apportion(one.nano[level], _weights(one.sizes, prices.get(level, ()) if kind == "running" else ()))
            for one in charged
        ]
        before = [one.after[level] - one.nano[level] for one in charged]
        totals[level] = _whole(
            np.array(list(accumulate(part)), dtype=np.int64) + start for part, start in zip(parts, before, strict=True)
        )
        shares[level] = _whole(np.array(part, dtype=np.int64) for part in parts)
    sizes = [sum(one.sizes) for one in charged]
    if kind == "life" and "instance" in shares:
        # The ledger's nano-unit is a round's, whatever its votes cost the records that cast them.
        paid = [vote_nano(task) if nano else 0 for nano in charge["instance"]]
        shares["instance"] = np.repeat(np.array(paid, dtype=np.int64), sizes)
    return QueryBudgets(kind, np.repeat(np.array(charge["instance"], dtype=np.int64), sizes), shares, totals)


def running_prices(
    task: Task, queries: int, *, progress: Callable[[int, int], None] = lambda *_: None
) -> dict[Level, list[int]]:
    """Return C(1) to C(queries) by level, each the most that a round with that number of questions, or fewer, costs.

    Each takes up to 30 ms: compute them once, and away from requests. Empty for tasks whose shares are of another kind.
    """
    found: dict[Level, list[int]] = {}
    if task.traits.share_kind(task) != "running":
        return found
    for count in range(1, queries + 1):
        for level, nano in round_charges(task, count).items():
            found.setdefault(level, []).append(nano)
        progress(count, queries)
    return {level: list(accumulate(prices, max)) for level, prices in found.items()}


def apportion(total: int, weights: Sequence[int]) -> list[int]:
    """Divide a whole number in proportion to weights, by the largest remainder; among equals the first gets more.

    The parts add up to `total`, and are the weights themselves where these do.
    """
    whole = sum(weights)
    if not whole:
        return apportion(total, [1] * len(weights)) if weights else []
    parts, remainders = zip(*(divmod(total * weight, whole) for weight in weights), strict=True)
    found = list(parts)
    order = sorted(range(len(weights)), key=lambda place: -remainders[place])
    for place in order[: total - sum(parts)]:
        found[place] += 1
    return found


def share_words(kind: ShareKind) -> str:
    """Return what a kind of share means, for people."""
    return _WORDS[kind]


_WORDS: Final[Mapping[ShareKind, str]] = {
    "each": "every question costs the same",
    "running": "what this question added to the price of its round",
    "shared": "an attribution: the job is priced once, and its first question alone would cost the whole",
    "life": "the most that one image could pay here, of its own budget for life; the ledger is charged a nano-unit a "
    "round",
}


def _joined(charged: Sequence[ChargedRounds], rows: int) -> ChargedRounds:
    """Return all charges of a job as one, which its rows share."""
    nano: dict[Level, int] = {level: sum(one.nano[level] for one in charged) for level in LEVELS}
    after: dict[Level, int] = {level: max((one.after[level] for one in charged), default=0) for level in LEVELS}
    return ChargedRounds((rows,), nano, after)


def _weights(sizes: Sequence[int], prices: Sequence[int]) -> list[int]:
    """Return the weight of each question: the increase of its round's price, or 1 without prices."""
    if not prices:
        return [1] * sum(sizes)
    increases = [price - before for price, before in zip(prices, (0, *prices), strict=False)]
    return [increase for size in sizes for increase in increases[:size]]


def _whole(parts: Any) -> Nano:
    return np.concatenate([np.zeros(0, dtype=np.int64), *parts])


def _epsilons(totals: Nano, delta: float) -> list[float | None]:
    """Return the epsilon of each total, rounded up.

    One takes a third of a millisecond. So of more than 256 rows neighbors get the epsilon of their largest total.
    """
    if not len(totals):
        return []
    step = -(-len(totals) // _MOST_EPSILONS)
    largest = np.maximum.reduceat(totals, np.arange(0, len(totals), step)).tolist()
    return [epsilon_spent(largest[place // step], delta) for place in range(len(totals))]
