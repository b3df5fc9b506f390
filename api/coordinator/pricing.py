"""What a job costs, and whether the budgets cover it now. Looking charges nothing and touches no private data.

A job is charged per round at two levels: for one record (instance) and for one agent's whole data (agent). Every
participant and the federation have an account at each. A level without a finite price may only be used where its
account is not limited at all; it is recorded there as `UNBOUNDED_NANO`, so that nobody can claim a bound later.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import lru_cache

from api.coordinator.budgets import FEDERATION, agent_account, refusal
from api.schema import AccountAfter, EstimateView, ExpectedAccuracy, LifeView, PriceView
from labeler.batching import round_charges, round_sizes, total_charges
from labeler.budget import UNBOUNDED_NANO
from labeler.errors import BudgetExceeded, NotReady
from labeler.expectation import Expectation, expect
from labeler.ledger.ledger import Balance, Charge
from labeler.planning import OfKind, Price, price
from labeler.setting import LEVELS
from labeler.solving import hint
from labeler.task import Level, Task


def certified_price(task: Task, queries: int) -> Price:
    """`labeler.planning.price`, remembered per kind of task and number of queries.

    Raises:
        InvalidSetting: the task has fewer queries.
    """
    return _price(OfKind(task), queries)


def price_view(task: Task, queries: int) -> PriceView:
    """What so many queries of a task cost, as they would be asked and charged: round by round.

    Raises:
        InvalidSetting: the task has fewer queries.
    """
    return _price_view(OfKind(task), queries)


def round_amounts(task: Task, size: int, *, finite: Collection[Level], answered: int = 0) -> dict[Level, int]:
    """What one round is recorded as at each level; UNBOUNDED_NANO at a level that has no finite price.

    Args:
        answered: queries of the rounds before.
    """
    charges = round_charges(task, size, answered=answered)
    return {level: charges[level] if level in finite else UNBOUNDED_NANO for level in LEVELS}


def finite_levels(task: Task, queries: int) -> tuple[Level, ...]:
    """The levels at which something is guaranteed."""
    view = price_view(task, queries)
    return tuple(level for level in LEVELS if _charge(view, level) is not None)


def accounts_of(participants: Iterable[str]) -> list[str]:
    """The federation's account and the participants', in the order in which they are charged."""
    return [FEDERATION, *(agent_account(agent) for agent in participants)]


def charges_of(participants: Iterable[str], amounts: Mapping[Level, int]) -> list[Charge]:
    """One charge per account and level."""
    return [Charge(account, level, amounts[level]) for account in accounts_of(participants) for level in LEVELS]


def first_shortage(
    task: Task, queries: int, participants: Iterable[str], balances: Mapping[tuple[str, Level], Balance]
) -> BudgetExceeded | None:
    """The refusal of the first account that does not cover a job; None where all do. Last spenders are not filled in.

    Raises:
        NotReady: an account was never opened.
    """
    view = price_view(task, queries)
    for account in accounts_of(participants):
        for level in LEVELS:
            after = _account_after(account, level, _charge(view, level), balances)
            if not after.enough:
                cap = balances[account, level].cap or 0
                return BudgetExceeded(
                    f"account {account!r}, {level} level: not enough is left",
                    account=account,
                    level=level,
                    asked=after.asked_nano or 0,
                    left=after.left_nano or 0,
                    cap=cap,
                )
    return None


def estimate(
    task: Task,
    participants: Sequence[str],
    queries: int,
    balances: Mapping[tuple[str, Level], Balance],
    *,
    delta: float,
    records: int | None = None,
) -> EstimateView:
    """The price of a job of so many queries, and every account as it would stand.

    Args:
        task: stored or only described.
        participants: agents that would be charged.
        queries: 1 to the task's max_queries.
        balances: of the ledger, now, by account and level.
        delta: the coordinator's, for words.
        records: private images that the asker assumes there are.

    Raises:
        InvalidSetting: the task has fewer queries.
        NotReady: an account was never opened.
    """
    view = price_view(task, queries)
    expected = _expected(OfKind(task), queries, records)
    accounts = tuple(
        _account_after(account, level, _charge(view, level), balances)
        for account in accounts_of(participants)
        for level in LEVELS
    )
    shortage = first_shortage(task, queries, participants, balances)
    what = f"a job of {queries} {'query' if queries == 1 else 'queries'}"
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
        affordable=shortage is None,
        accounts=accounts,
        refusal="" if shortage is None else str(refusal(shortage, what=what, delta=delta)),
        jobs_left=min(limited, default=None),
        expected_accuracy=ExpectedAccuracy.model_validate(expected.to_json()),
        warning=expected.warning,
        noise_hint=hint(task),
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


def _charge(view: PriceView, level: Level) -> int | None:
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
    # In the smallest rounds that it may be asked in: each is rounded up, so a job costs what is said here or less.
    charges = total_charges(task, round_sizes(task, queries))
    # Where no epsilon can be proved there is no charge either: a number would look like a guarantee.
    finite = {level for level in LEVELS if math.isfinite(cost.statement(level).epsilon) and level in charges}
    reasons = [f"{level} level: {cost.statement(level).reason}" for level in LEVELS if level not in finite]
    return PriceView(
        queries=queries,
        delta=task.delta,
        instance_epsilon=cost.instance.epsilon if "instance" in finite else None,
        agent_epsilon=cost.agent.epsilon if "agent" in finite else None,
        instance_charge_nano=charges["instance"] if "instance" in finite else None,
        agent_charge_nano=charges["agent"] if "agent" in finite else None,
        person_epsilon=None if cost.person is None else cost.person.to_json()["epsilon"],
        records_per_person=cost.records_per_person,
        one_record=cost.one_record,
        reason="; ".join(reasons),
        colluding_agents=cost.colluding_agents,
        holds_against=cost.holds_against,
        participant_epsilon=cost.instance.participant_epsilon if "instance" in finite else None,
        life=None if cost.life is None else LifeView.model_validate(cost.life.to_json()),
        dishonest_talliers=cost.dishonest_talliers,
    )
