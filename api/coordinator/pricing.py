"""Prices of jobs: what a job costs, and its charges by round and account; `labeler.driver.settlement` makes them.

A price request charges nothing and touches no private data.

A job is charged per round at two levels: for one record (instance) and for one agent's whole data (agent). Every
participant and the federation have an account at each level. A level without a finite price may only be used if its
account has no cap. It is recorded there as `UNBOUNDED_NANO`, so that nobody can claim a bound later.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import lru_cache

from api.coordinator.budgets import refusal
from api.schema import AccountAfter, EstimateView, ExpectedAccuracy, LifeView, PriceView
from labeler.batching import question_charges, round_charges, round_sizes, total_charges
from labeler.budget import UNBOUNDED_NANO
from labeler.errors import BudgetExceeded, NotReady
from labeler.expectation import Expectation, expect
from labeler.ledger.ledger import Balance, Charge
from labeler.ledger.rounds import FEDERATION, agent_account
from labeler.ledger.tasks import TaskRecord
from labeler.planning import OfKind, Price, price
from labeler.setting import LEVELS
from labeler.solving import hint, queries_that_fit
from labeler.task import Level, Task


def certified_price(task: Task, queries: int) -> Price:
    """Return `labeler.planning.price`, cached by kind of task and number of queries.

    Raises:
        InvalidSetting: the task has fewer queries.
    """
    return _price(OfKind(task), queries)


def price_view(task: Task, queries: int) -> PriceView:
    """Return the cost of a number of a task's queries, asked and charged round by round.

    Raises:
        InvalidSetting: the task has fewer queries.
    """
    return _price_view(OfKind(task), queries)


def round_amounts(task: Task, size: int, *, finite: Collection[Level], answered: int = 0) -> dict[Level, int]:
    """Return the recorded charge of one round at each level; UNBOUNDED_NANO at a level without a finite price.

    Args:
        answered: queries of earlier rounds.
    """
    charges = round_charges(task, size, answered=answered)
    return {level: charges[level] if level in finite else UNBOUNDED_NANO for level in LEVELS}


def finite_levels(task: Task, queries: int) -> tuple[Level, ...]:
    """Return the levels that have a guarantee."""
    view = price_view(task, queries)
    return tuple(level for level in LEVELS if charge_at(view, level) is not None)


def accounts_of(participants: Iterable[str]) -> list[str]:
    """Return the federation's account and the participants', in charging order."""
    return [FEDERATION, *(agent_account(agent) for agent in participants)]


def charges_of(participants: Iterable[str], amounts: Mapping[Level, int]) -> list[Charge]:
    """Return one charge per account and level."""
    return [Charge(account, level, amounts[level]) for account in accounts_of(participants) for level in LEVELS]


def estimate(
    task: Task,
    participants: Sequence[str],
    queries: int,
    balances: Mapping[tuple[str, Level], Balance],
    *,
    delta: float,
    records: int | None = None,
) -> EstimateView:
    """Return the price of a job, and every account as it would stand afterwards.

    Args:
        task: stored or only described.
        participants: agents that would be charged.
        queries: 1 to the task's max_queries.
        balances: the ledger's present ones, by account and level.
        delta: the coordinator's, for the stated epsilons.
        records: the reader's guess of the number of private images.

    Raises:
        InvalidSetting: the task has fewer queries.
        NotReady: an account was never opened.
    """
    view = price_view(task, queries)
    expected = _expected(OfKind(task), queries, records)
    accounts = tuple(
        _account_after(account, level, charge_at(view, level), balances)
        for account in accounts_of(participants)
        for level in LEVELS
    )
    short = next((after for after in accounts if not after.enough), None)
    refused = None
    if short is not None:
        refused = BudgetExceeded(
            "",
            account=short.account,
            level=short.level,
            asked=short.asked_nano or 0,
            left=short.left_nano or 0,
            cap=balances[short.account, short.level].cap or 0,
        )
    limited = [
        0 if after.asked_nano is None else max(after.left_nano, 0) // after.asked_nano
        for after in accounts
        if after.left_nano is not None
    ]
    return EstimateView(
        price=view,
        sigma_votes=task.sigma_votes,
        total_sigma_votes=task.total_sigma_votes,
        quorum=task.quorum,
        affordable=refused is None,
        accounts=accounts,
        refusal="" if refused is None else str(refusal(refused, task, queries=queries, delta=delta)),
        queries_that_fit=_fit(task, queries, accounts) or None,
        jobs_left=min(limited, default=None),
        expected_accuracy=ExpectedAccuracy.model_validate(expected.to_json()),
        warning=expected.warning,
        noise_hint=hint(task),
    )


def _fit(task: Task, queries: int, accounts: Sequence[AccountAfter]) -> int:
    """Return how many queries every account covers, where some do not cover all; 0 if fewer would not help."""
    least = {
        level: min(after.left_nano or 0 for after in accounts if after.level == level and not after.enough)
        for level in {after.level for after in accounts if not after.enough}
    }
    return min(
        (queries_that_fit(task, queries, level=level, left_nano=left) for level, left in least.items()), default=0
    )


def _account_after(
    account: str, level: Level, asked: int | None, balances: Mapping[tuple[str, Level], Balance]
) -> AccountAfter:
    balance = balances.get((account, level))
    if balance is None:
        raise NotReady(f"account {account!r} has not been opened yet; try again when the agent is enrolled")
    left = balance.left
    enough = left is None or (asked is not None and asked <= left)
    return AccountAfter(account=account, level=level, asked_nano=asked, left_nano=left, enough=enough)


def charge_at(view: PriceView, level: str) -> int | None:
    """Return the charge at a level; None where it has no finite price."""
    return view.instance_charge_nano if level == "instance" else view.agent_charge_nano


@lru_cache(maxsize=4096)
def _expected(one: OfKind, queries: int, records: int | None) -> Expectation:
    return expect(one.task, queries=queries, records=records)


@lru_cache(maxsize=4096)
def _price(one: OfKind, queries: int) -> Price:
    return price(one.task, queries=queries)


@lru_cache(maxsize=4096)
def _price_view(one: OfKind, queries: int) -> PriceView:
    task, cost = one.task, _price(one, queries)
    # In its smallest possible rounds: each is rounded up, so a job costs this much or less.
    charges = total_charges(task, round_sizes(task, queries))
    # Without a provable epsilon there is no charge either: a number would look like a guarantee.
    finite = {level for level in LEVELS if math.isfinite(cost.statement(level).epsilon) and level in charges}
    each = question_charges(task, queries)
    reasons = [f"{level} level: {cost.statement(level).reason}" for level in LEVELS if level not in finite]
    return PriceView(
        queries=queries,
        delta=task.delta,
        instance_epsilon=cost.instance.epsilon if "instance" in finite else None,
        agent_epsilon=cost.agent.epsilon if "agent" in finite else None,
        instance_charge_nano=charges["instance"] if "instance" in finite else None,
        agent_charge_nano=charges["agent"] if "agent" in finite else None,
        instance_question_nano=each.get("instance") if "instance" in finite else None,
        agent_question_nano=each.get("agent") if "agent" in finite else None,
        person_epsilon=None if cost.person is None else cost.person.to_json()["epsilon"],
        records_per_person=cost.records_per_person,
        group_epsilon=None if cost.group is None else cost.group.to_json()["epsilon"],
        group_size=cost.group_size,
        one_record=cost.one_record,
        reason="; ".join(reasons),
        colluding_agents=cost.colluding_agents,
        holds_against=cost.holds_against,
        participant_epsilon=cost.instance.participant_epsilon if "instance" in finite else None,
        life=None if cost.life is None else LifeView.model_validate(cost.life.to_json()),
        dishonest_talliers=cost.dishonest_talliers,
    )


def worst_case(task: TaskRecord, sizes: Sequence[int], num_queries: int) -> list[Charge]:
    """Return the reservations of a proposed job: all its rounds, in the accounts of every possible participant.

    Args:
        task: with its agents.
        sizes: queries of each round.
        num_queries: of the job.
    """
    total: dict[Level, int] = {}
    for amounts in round_prices(task, sizes, num_queries):
        for level, amount in amounts.items():
            total[level] = total.get(level, 0) + amount
    return charges_of(task.participants, total)


def round_prices(task: TaskRecord, sizes: Sequence[int], num_queries: int) -> list[dict[Level, int]]:
    """Return the recorded charge of each round of a job, by level."""
    finite = finite_levels(task.task, num_queries)
    by_size = {
        (size, is_first): round_amounts(task.task, size, finite=finite, answered=0 if is_first else 1)
        for size in set(sizes)
        for is_first in (True, False)
    }
    return [by_size[size, number == 0] for number, size in enumerate(sizes)]
