"""The ledger of a site's own agent process: its journal, under the policy that its owner keeps in the same home.

A charge happens whole or not at all. The round must never have been charged for other recipients, and every level that
the owner limits must be priced and covered; only then is the price taken. A round is charged once, even if the records
change; `labeler.rounds.agent` then says what is sent of it. The charges of a turn are one transaction, and with the key
and the deadline of each round they are durable before anything is computed (workers.agent.driver).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from fractions import Fraction
from math import floor

from labeler.batching import check_queries, due, round_charges
from labeler.budget import UNBOUNDED_NANO
from labeler.errors import PolicyRefusal, PrivacyRefusal, ProtocolViolation
from labeler.ledger.agent_memory import AgentMemory, check_delta
from labeler.ledger.chain import Head
from labeler.ledger.database import Connection, Database
from labeler.ledger.ledger import Charge, Ledger
from labeler.ledger.lifetimes import set_aside
from labeler.ledger.promises import Compared, PromiseStore, Proposed, RequesterShares, promise_name
from labeler.messages.bodies import Proposal
from labeler.rounds.agent import Recipients
from labeler.setting import LEVELS
from labeler.system.clock import Clock
from labeler.task import Level, Task
from workers.agent.policy import Policy

LONGEST_PROMISE = timedelta(days=31)
"""A yes sets a site's budget aside, so no coordinator can ask for one that holds longer; a job has at most 30 days."""

_DAY = timedelta(days=1)

GRACE = timedelta(hours=1)
"""Time after the deadline of an ask for which its round is kept: talliers hold shares for as long."""

KEPT_LONGEST = timedelta(days=31)
"""A round is kept no longer than this after its charge, whatever deadline a coordinator states; a job has 30 days."""


class ShareUsedUp(PolicyRefusal):
    """A requester's share of the budget does not cover its job."""


@dataclass(frozen=True)
class Payment:
    """An answer of `DurableLedger.may_pay`.

    Attributes:
        prices: what each round is charged, nano-units of mu^2 per level.
        compared: everything that has to cover them, in the order of the checks.
        refusal: why the site does not pay; None where it does.
    """

    prices: list[dict[Level, int]]
    compared: list[Compared]
    refusal: PrivacyRefusal | None


class DurableLedger:
    """A ledger that charges a site's journal within the caps and the daily limit of its policy; see the module.

    The policy is checked again at every charge, so tightening it works at once. A cap lowered below what is spent stops
    the agent from answering anything new. Accounts are reopened where it is another policy.

    Args:
        memory: what the agent was charged for.
        read_policy: reads the site's policy; whatever it raises refuses the charge.
    """

    def __init__(
        self,
        database: Database,
        memory: AgentMemory,
        ledger: Ledger,
        promises: PromiseStore,
        *,
        account: str,
        read_policy: Callable[[], Policy],
        clock: Clock,
    ) -> None:
        self._database = database
        self._memory = memory
        self._promises = promises
        self._ledger = ledger
        self._account = account
        self._read_policy = read_policy
        self._clock = clock
        self._shares = RequesterShares()
        self._opened: Policy | None = None

    def check_witnesses(self) -> None:
        """Refuse to answer anything whose charge could not be told to a witness of the journal.

        Raises:
            Unavailable: one cannot be told now.
        """
        self._ledger.remember()

    def open_accounts(self) -> Policy:
        """Open the accounts with the caps of the policy as it is now, and return it.

        What it promises for votes for life is set aside in them, once.

        Raises:
            PolicyRefusal: the policy cannot be read, or names a delta at which nothing can be said of what was spent.
            BudgetExceeded: more than a cap was spent before the cap was lowered.
        """
        policy = self._read_policy()
        if policy != self._opened:
            with self._database.read() as connection:
                check_delta(connection, policy.budget.delta)
            for level in LEVELS:
                self._ledger.open_account(self._account, level, policy.budget.cap(level))
            if policy.budget.life_nano is not None:
                set_aside(self._ledger, self._account, policy.budget.life_nano)
            self._opened = policy
        return policy

    def charge_in(
        self,
        connection: Connection,
        policy: Policy,
        *,
        round_digest: str,
        shard_version: str,
        charges: Mapping[Level, int],
        task: Task,
        num_queries: int,
        recipients: Recipients,
    ) -> bool:
        """Take the price of one answer in a transaction of many; the caller starts the round in the same one.

        Args:
            connection: the transaction; the caller must undo it if this raises (`Database.attempt`).
            policy: as `open_accounts` returned it.

        Returns:
            True if it was charged now, and not before.
        """
        paid_by = self._memory.paid_by(round_digest, connection=connection)
        answered = self._memory.queries_of(task.digest, connection=connection)
        amounts = _amounts(policy, due(task, charges, answered=answered))
        policy.check_delta(task)  # it may be another one than the task was admitted under
        promised = None
        if paid_by is None:
            promised = self._promises.take(task.digest, num_queries, amounts, connection=connection)
            if promised is None:
                # The yes counted what was promised. For the rest, no requester is named.
                payment = self.may_pay(connection, policy, task, [(num_queries, charges)])
                if payment.refusal is not None:
                    raise payment.refusal
        is_new = self._memory.charge(
            round_digest=round_digest,
            shard_version=shard_version,
            reservation_id=paid_by or promised or round_digest,
            charges=[Charge(self._account, level, amount) for level, amount in amounts.items()],
            num_queries=num_queries,
            task_digest=task.digest,
            max_queries=task.max_queries,
            recipients=recipients,
            is_promised=promised is not None,
            connection=connection,
        )
        if is_new and promised is None:
            self._shares.note("", [(round_digest, amounts)], life_nano=_life_nano(task), connection=connection)
        if is_new:
            self._memory.note_task(task, self._clock(), connection=connection)
        return is_new

    def may_pay(
        self,
        connection: Connection,
        policy: Policy,
        task: Task,
        rounds: Sequence[tuple[int, Mapping[Level, int]]],
        *,
        requester: str = "",
    ) -> Payment:
        """Say whether the site pays for rounds of a task: its policy, its budget, and what others were promised of it.

        The checks, in this order: the policy's delta. A finite price at every level that is limited. The queries of the
        task, and of the day, including those promised and not yet asked. What a day's answers may still tell of the
        budget without a price. The requester's share of the budget and of the votes for life. The account of each
        level, of which votes for life have had their part set aside.

        Args:
            rounds: queries of each round, and its price for who was never charged for the task, in nano-units of mu^2.
            requester: for whom, as the coordinator says.
        """
        prices: list[dict[Level, int]] = []
        compared: list[Compared] = []
        asked = before = self._memory.queries_of(task.digest, connection=connection)
        try:
            policy.check_delta(task)
            for size, charges in rounds:
                prices.append(_amounts(policy, due(task, charges, answered=asked)))
                asked += size
            check_queries(asked, task.max_queries)
            self._check_day(policy, asked - before, connection)
            compared = self._compared(policy, task, requester, prices, connection)
            self._check_covered(compared, requester, connection)
        except PrivacyRefusal as refusal:
            return Payment(prices, compared, refusal)
        return Payment(prices, compared, None)

    @property
    def head(self) -> Head:
        """Return the end of the journal, which an answer carries: it covers what the answer has spent."""
        return self._ledger.head()

    def answered_in(self, connection: Connection, round_digest: str, commitment: Mapping[str, str]) -> None:
        """Note in the chain that the answer to a round was stored, with what it says of its spends."""
        paid_by = self._memory.paid_by(round_digest, connection=connection)
        if paid_by is None:
            raise PrivacyRefusal("an answer that was never charged is not stored")
        self._ledger.answer(paid_by, commitment, connection=connection)

    def kept_until(self, expires_at: float | None) -> datetime:
        """Return until when a round is kept whose ask states this deadline, in unix seconds."""
        latest = self._clock() + KEPT_LONGEST
        if expires_at is None or expires_at >= latest.timestamp():
            return latest
        return min(latest, datetime.fromtimestamp(expires_at, UTC) + GRACE)

    def promise_in(self, connection: Connection, policy: Policy, proposal: Proposal) -> datetime:
        """Say yes to a proposal that was not answered: set the price of all its rounds aside until its deadline.

        Args:
            connection: a transaction of many; the caller must undo it if this raises (`Database.attempt`).
            policy: as `open_accounts` returned it.

        Returns:
            Until when the yes holds.

        Raises:
            PrivacyRefusal: a level that is limited has no finite price, or the task has too few queries left.
            ProtocolViolation: the deadline is more than LONGEST_PROMISE away.
            PolicyRefusal: the day's queries are used up, or what a day's answers may tell of the budget without a
                price.
            ShareUsedUp: its requester's share of the budget does not cover it; to be told to `decline`.
            BudgetExceeded: an account does not cover it; likewise.
        """
        now = self._clock()
        if proposal.expires_at > (now + LONGEST_PROMISE).timestamp():
            days = math.ceil((proposal.expires_at - now.timestamp()) / 86_400)
            raise ProtocolViolation(
                f"the proposal's deadline is {days} days away, and a site "
                f"sets budget aside for at most {LONGEST_PROMISE.days}; give the job a nearer deadline"
            )
        payment = self._may_pay_for(connection, policy, proposal)
        if payment.refusal is not None:
            raise payment.refusal
        about = self._about(proposal)
        self._promises.told.note(about.digest, payment.compared, proposal.requester, now, connection)
        rounds = list(zip(proposal.sizes, payment.prices, strict=True))
        self._promises.keep(about, rounds, account=self._account, connection=connection)
        kept = [(promise_name(about.digest, number), amounts) for number, amounts in enumerate(payment.prices)]
        life_nano = _life_nano(proposal.task)
        self._shares.note(proposal.requester, kept, life_nano=life_nano, connection=connection)
        self._memory.note_requester(proposal.task.digest, proposal.requester, now, connection=connection)
        return about.until

    def decline(self, connection: Connection, policy: Policy, proposal: Proposal, error: PrivacyRefusal) -> None:
        """Store that the budget, or a requester's share, did not cover a proposal, and what that no reveals.

        Args:
            error: as `promise_in` raised it; what it had written is undone.
        """
        about = self._about(proposal)
        compared = self._may_pay_for(connection, policy, proposal).compared
        self._promises.told.note(about.digest, compared, proposal.requester, about.at, connection)
        if not isinstance(error, ShareUsedUp):  # others' jobs give a share back; then it is considered again
            self._promises.decline(about, connection=connection)

    def decline_ask(
        self,
        connection: Connection,
        policy: Policy,
        round_digest: str,
        task: Task,
        num_queries: int,
        charges: Mapping[Level, int],
    ) -> None:
        """Store what the refusal of an uncovered round reveals that had not been proposed."""
        compared = self.may_pay(connection, policy, task, [(num_queries, charges)]).compared
        self._promises.told.note(round_digest, compared, "", self._clock(), connection)

    def _about(self, proposal: Proposal) -> Proposed:
        until = datetime.fromtimestamp(proposal.expires_at, UTC)
        return Proposed(proposal.digest, proposal.job_id, proposal.task.digest, until, self._clock())

    def _may_pay_for(self, connection: Connection, policy: Policy, proposal: Proposal) -> Payment:
        rounds = [(size, round_charges(proposal.task, size)) for size in proposal.sizes]
        return self.may_pay(connection, policy, proposal.task, rounds, requester=proposal.requester)

    def _compared(
        self,
        policy: Policy,
        task: Task,
        requester: str,
        prices: Sequence[Mapping[Level, int]],
        connection: Connection,
    ) -> list[Compared]:
        """Return everything that has to cover a price, in the order of the checks: the share, then the accounts."""
        found: list[Compared] = []
        share, budget = policy.budget.per_requester, policy.budget
        limited = [(level, cap) for level in LEVELS if (cap := budget.cap(level)) is not None]
        if share is not None:
            taken, of_life = self._shares.taken(requester, connection=connection)
            for level, cap in limited:
                before = taken[level]
                amount = before + sum(one[level] for one in prices)
                found.append(Compared(f"share, {level}", floor(Fraction(share) * cap), before, amount))
            if task.lifetime_budget is not None and budget.life_nano is not None:
                amount = of_life + len(prices) * _life_nano(task)
                found.append(Compared("share, life", floor(Fraction(share) * budget.life_nano), of_life, amount))
        for level, cap in limited:
            before = self._ledger.balance(self._account, level, connection=connection).spent
            found.append(Compared(level, cap, before, before + sum(one[level] for one in prices)))
        return found

    def _check_covered(self, compared: Sequence[Compared], requester: str, connection: Connection) -> None:
        """Refuse what is not covered; before that, refuse what may no longer be told without a price.

        Raises:
            PolicyRefusal: the latter; it says nothing of a budget.
            ShareUsedUp, BudgetExceeded: the former.
        """
        self._promises.told.check(compared, requester, self._clock(), connection)
        for one in compared:
            if one.is_covered:
                continue
            if one.scale.startswith("share"):
                who = f"the jobs of {requester!r}" if requester else "all jobs without a named requester"
                raise ShareUsedUp(
                    "budget.per_requester: the site gives one requester a share of its budget, and with this job "
                    f"{who} would take more; ask for less, or ask the site to raise it"
                )
            level: Level = "agent" if one.scale == "agent" else "instance"
            charge = Charge(self._account, level, one.amount - one.taken)
            raise self._ledger.overdrawn(charge, connection=connection)

    def _check_day(self, policy: Policy, num_queries: int, connection: Connection) -> None:
        most = policy.allow.max_queries_per_day
        answered = self._memory.queries_since(self._clock() - _DAY, connection=connection)
        answered += self._promises.open_queries(connection=connection)
        if answered + num_queries > most:
            raise PolicyRefusal(
                f"allow.max_queries_per_day: the site answers {most} queries in 24 hours, {answered} were answered or "
                f"promised and {num_queries} more asked; submit again later, with fewer queries, or ask the site to "
                "raise it"
            )


def _life_nano(task: Task) -> int:
    """Return the most that a round takes of any record's votes for life."""
    if task.lifetime_budget is None:
        return 0
    # Imported on use: few sites cast votes for life.
    from labeler.accounting.lifetime import job_nano

    return job_nano(task)


def _amounts(policy: Policy, charges: Mapping[Level, int]) -> dict[Level, int]:
    """Return what a round is charged at each level: its price, or a substitute where it has none.

    Raises:
        PrivacyRefusal: a level that is limited has no finite price.
    """
    # A limit always holds for one record; for a whole site only where its owner sets one.
    for level in LEVELS:
        if level == "instance" or policy.budget.cap(level) is not None:
            priced(charges, level)
    return {level: charges.get(level, UNBOUNDED_NANO) for level in LEVELS}


def priced(charges: Mapping[Level, int], level: Level) -> int:
    """Return the charge at a level that is limited.

    Raises:
        PrivacyRefusal: there is none, so no budget could pay it.
    """
    if level not in charges:
        raise PrivacyRefusal(
            f"this task has no finite {level}-level price, so no {level}-level budget can pay it; give the task "
            "ballot_radius or max_agent_records, or raise sigma_votes"
        )
    return charges[level]
