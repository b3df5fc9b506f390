"""Prices of jobs, and their settlement: what a job costs, what is charged when and to whom, and how a job ends.

Looking at a price charges nothing and touches no private data.

A job is charged per round at two levels: for one record (instance) and for one agent's whole data (agent). Every
participant and the federation have an account at each. A level without a finite price may only be used where its
account is not limited at all; it is recorded there as `UNBOUNDED_NANO`, so that nobody can claim a bound later.

    submitted        JOB/proposed reserves the worst case: every round, the federation and every agent of the task
    settled          in one transaction it is given back, and JOB/0, JOB/1, ... reserve one round each, for the
                     federation and the agents that are asked; who declined is charged nothing
    round asked      from here on nobody can say that nothing left
    agreed on        JOB/N is posted
    job ends         rounds of which nothing left are given back, every other one is posted; queries of rounds that
                     nobody was asked about go back to their task, in the same transaction. Those of a round that
                     was asked stay used up, even where everybody refused and its charge went back: the questions
                     were told, and who refuses now may have paid and answered before
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from api.coordinator.budgets import FEDERATION, agent_account, refusal
from api.problems import problem_of
from api.schema import AccountAfter, EstimateView, ExpectedAccuracy, LifeView, PriceView
from labeler.batching import question_charges, round_charges, round_sizes, total_charges
from labeler.budget import UNBOUNDED_NANO, NothingLeft
from labeler.errors import BudgetExceeded, LabelerError, NotReady
from labeler.expectation import Expectation, expect
from labeler.ledger.database import Connection, Database
from labeler.ledger.jobs import JobRecord, JobState, JobStore, RoundRecord
from labeler.ledger.ledger import Balance, Charge, Ledger
from labeler.ledger.tasks import TaskRecord, TaskStore
from labeler.planning import OfKind, Price, price
from labeler.rounds.effects import UNFINISHED
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
        one_record=cost.one_record,
        reason="; ".join(reasons),
        colluding_agents=cost.colluding_agents,
        holds_against=cost.holds_against,
        participant_epsilon=cost.instance.participant_epsilon if "instance" in finite else None,
        life=None if cost.life is None else LifeView.model_validate(cost.life.to_json()),
        dishonest_talliers=cost.dishonest_talliers,
    )


Amounts = Mapping[Level, int]
"""Nano-units by level."""


def reservation_id(job_id: str, number: int) -> str:
    """The ledger's name for the charge of one round."""
    return f"{job_id}/{number}"


def proposed_id(job_id: str) -> str:
    """The ledger's name for the worst case of a whole job, until it is known whom it asks."""
    return f"{job_id}/proposed"


def worst_case(task: TaskRecord, sizes: Sequence[int], num_queries: int) -> list[Charge]:
    """What a job reserves while it is proposed: all its rounds, in the accounts of everybody who may take part.

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
    """What each round of a job is recorded as, by level: of rounds of such sizes."""
    finite = finite_levels(task.task, num_queries)
    by_size = {
        (size, is_first): round_amounts(task.task, size, finite=finite, answered=0 if is_first else 1)
        for size in set(sizes)
        for is_first in (True, False)
    }
    return [by_size[size, number == 0] for number, size in enumerate(sizes)]


@dataclass(frozen=True)
class JournalSettlement:
    """How jobs are settled in this journal (labeler.driver.storing.Settlement)."""

    database: Database
    ledger: Ledger
    jobs: JobStore
    tasks: TaskStore

    def prices(self, job: JobRecord, rounds: Sequence[RoundRecord], task: TaskRecord) -> list[dict[Level, int]]:
        """See `round_prices`."""
        return round_prices(task, [one.num_queries for one in rounds], job.num_queries)

    def divide(
        self,
        job: JobRecord,
        rounds: Sequence[RoundRecord],
        task: TaskRecord,
        asked: Collection[str],
        *,
        amounts: Sequence[Amounts],
        connection: Connection,
    ) -> None:
        """Put one reservation per round, for those who are asked, in the place of the job's.

        Nothing was asked under the job's reservation, and what takes its place is part of it, so it always fits.

        Args:
            amounts: what each round costs (`prices`), worked out before the transaction: a price may take seconds.

        Raises:
            NotReady: the job has ended meanwhile.
        """
        whole = proposed_id(job.job_id)
        state = self.ledger.state(whole, connection=connection)
        if state != "reserved":
            raise NotReady(f"job {job.job_id!r} has ended meanwhile, and its charge was given back")
        self.ledger.void(whole, NothingLeft(whole, "divided"), connection=connection)
        for one, nano in zip(rounds, amounts, strict=True):
            self.ledger.reserve(
                reservation_id(job.job_id, one.number),
                charges_of([agent for agent in task.participants if agent in asked], nano),
                detail={"job": job.job_id, "task": task.digest, "queries": one.num_queries, "by": job.created_by},
                connection=connection,
            )

    def end(
        self, job: JobRecord, state: JobState, error: LabelerError | None, *, connection: Connection | None = None
    ) -> JobRecord:
        """End a job in one transaction: void the charge of rounds of which nothing left, post all others.

        Nothing left of a round where nobody was asked, or where everybody who was asked refused and no share was ever
        passed on to a tallier. A refusal alone proves nothing: an agent may have answered, and refuse when it is asked
        again under another policy. In every other case shares may be on their way, so the charge stands.

        Args:
            job: unfinished.
            state: cancelled, failed, refused or expired.
            error: why, shown to the requester.
            connection: write transaction to join.

        Returns:
            The job as it is now.
        """
        with self.database.writing(connection) as connection:
            now = self.jobs.get(job.job_id, connection=connection)
            if now.is_finished:
                # Somebody else ended it, and gave back what there was.
                return now
            asked = self.jobs.willingness.asked(job.job_id, connection=connection)
            participants = set(asked or self.tasks.get(job.task_digest, connection=connection).participants)
            rounds = self.jobs.rounds(job.job_id, connection=connection)
            whole = proposed_id(job.job_id)
            if self.ledger.state(whole, connection=connection) == "reserved":
                if all(one.state == "waiting" for one in rounds):
                    self.ledger.void(whole, NothingLeft(whole, "never-asked"), connection=connection)
                else:
                    # No program of ours asks before it has divided; whichever did, what it asked is paid for.
                    self.ledger.post(
                        whole, detail={"job": job.job_id, "because": "asked before divided"}, connection=connection
                    )
            for one in rounds:
                name = reservation_id(job.job_id, one.number)
                if self.ledger.state(name, connection=connection) is None:
                    continue  # it was reserved with the whole job, and nobody was asked
                if one.state == "waiting":
                    self.ledger.void(name, NothingLeft(name, "never-asked"), connection=connection)
                elif one.state == "asked" and participants <= one.final_refusals and not one.has_shares:
                    self.ledger.void(name, NothingLeft(name, "refused"), connection=connection)
                elif one.state in ("asked", "agreed"):
                    detail = {
                        "job": job.job_id,
                        "queries": one.num_queries,
                        "because": f"{state} after agents were asked",
                    }
                    self.ledger.post(name, detail=detail, connection=connection)
            problem = None if error is None else problem_of(error)
            ended = self.jobs.change(job.job_id, state, expected=UNFINISHED, problem=problem, connection=connection)
            # After the end: until then a round that waits could still be asked.
            for first_query, num_queries in self.jobs.unasked(job.job_id, connection=connection):
                self.tasks.give_back(job.task_digest, first_query, num_queries, connection=connection)
            return ended
