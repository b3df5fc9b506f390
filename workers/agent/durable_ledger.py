"""The ledger of a site's own agent process: its journal, under the policy its owner keeps beside it.

The twin of workers.agent.ledger.InMemoryLedger for what has to survive crashes, of many rounds in one transaction: what
was charged, and the key and the deadline of the round, are durable before anything is computed (workers.agent.desk).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from fractions import Fraction
from math import floor

from feature_store.clock import Clock
from feature_store.journal.agent_memory import AgentMemory
from feature_store.journal.answer_history import AnsweredTasks, check_delta
from feature_store.journal.asked_by import AskedBy
from feature_store.journal.chain import Head
from feature_store.journal.charges import Charge
from feature_store.journal.database import Connection, Database
from feature_store.journal.ledger import Ledger
from feature_store.journal.lifetimes import set_aside
from feature_store.journal.promises import PromiseStore, Proposed, promise_name
from feature_store.journal.requester_shares import RequesterShares
from feature_store.journal.told import Compared
from labeler.batching import due, round_charges
from labeler.budget import UNBOUNDED_NANO
from labeler.errors import PolicyRefusal, PrivacyRefusal, ProtocolViolation
from labeler.messages.rounds import Proposal
from labeler.rounds.agent import Recipients
from labeler.setting import LEVELS
from labeler.task import Level, Task
from workers.agent.ledger import beyond_task, priced
from workers.agent.policy import Policy

LONGEST_PROMISE = timedelta(days=31)
"""A yes sets a site's budget aside, so no coordinator can ask for one that holds longer; a job has at most 30 days."""

_DAY = timedelta(days=1)

GRACE = timedelta(hours=1)
"""How long after the deadline of an ask its round is kept: talliers hold shares for as long."""

KEPT_LONGEST = timedelta(days=31)
"""A round is kept no longer than this after its charge, whatever deadline a coordinator states; a job has 30 days."""


class ShareUsedUp(PolicyRefusal):
    """A requester's share of the budget does not cover its job."""


class DurableLedger:
    """Charges a site's journal within the caps and the daily limit of its policy; see workers.agent.ledger.

    The policy is looked at again at every charge, so tightening it works at once, and a cap lowered below what is
    spent stops the agent from answering anything new. Accounts are opened anew where it is another policy.

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
        self._tasks = AnsweredTasks(database)
        self._asked_by = AskedBy(database)
        self._shares = RequesterShares(database)
        self._opened: Policy | None = None

    def check_witnesses(self) -> None:
        """Nothing is answered whose charge a witness of the journal was not told of.

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
        if policy is not self._opened:
            with self._database.read() as connection:
                check_delta(connection, policy.budget.delta)
            for level in LEVELS:
                self._ledger.open_account(self._account, level, policy.budget.cap(level))
            if policy.budget.life_nano is not None:
                set_aside(self._ledger, self._account, policy.budget.life_nano)
            self._opened = policy
        return policy

    def check_price(self, task: Task, sizes: Sequence[int]) -> None:
        """Find out whether rounds of these sizes can be priced at all, before anything is written down.

        Raises:
            Exception: whatever a task brings about that nobody had thought of.
        """
        for size in set(sizes):
            round_charges(task, size)

    def charge_in(
        self,
        connection: Connection,
        policy: Policy,
        *,
        round_digest: str,
        shard_version: str,
        reservation_id: str,
        charges: Mapping[Level, int],
        task: Task,
        num_queries: int,
        recipients: Recipients,
    ) -> bool:
        """Take the price of one answer in a transaction of many; the caller begins the round in the same one.

        Args:
            connection: the transaction; what this leaves when it raises has to be undone (`Database.attempt`).
            policy: as `open_accounts` returned it.

        Returns:
            Whether it was charged now, and not before.
        """
        policy.check_delta(task)  # it may be another one than the task was admitted under
        answered = self._memory.queries_of(task.digest, connection=connection)
        amounts = _amounts(policy, due(task, charges, answered=answered))
        paid_by = self._memory.paid_by(round_digest, connection=connection)
        promised = None
        if paid_by is None:
            promised = self._promises.take(task.digest, num_queries, amounts, connection=connection)
            if promised is None:
                # What was promised was counted at the yes. For whom the rest is nobody has said.
                self._check_day(policy, num_queries, connection)
                self._check_covered(self._compared(policy, task, "", [amounts], connection), "", connection)
        is_new = self._memory.charge(
            round_digest=round_digest,
            shard_version=shard_version,
            reservation_id=paid_by or promised or reservation_id,
            charges=[Charge(self._account, level, amount) for level, amount in amounts.items()],
            num_queries=num_queries,
            task_digest=task.digest,
            max_queries=task.max_queries,
            recipients=recipients,
            is_promised=promised is not None,
            connection=connection,
        )
        if is_new and promised is None:
            self._shares.note("", [(reservation_id, amounts)], life_nano=_life_nano(task), connection=connection)
        if is_new:
            self._tasks.note(task, self._clock(), connection=connection)
        return is_new

    @property
    def head(self) -> Head:
        """The end of the journal, which an answer carries: it covers what the answer has spent."""
        return self._ledger.known_head()

    def unanswered_for_life(self) -> list[str]:
        """See AnsweredTasks."""
        with self._database.read() as connection:
            return self._tasks.unanswered_for_life(connection=connection)

    def answered_in(self, connection: Connection, round_digest: str, commitment: Mapping[str, str]) -> None:
        """Note in the chain that the answer to a round was stored, with what it says of its spends."""
        paid_by = self._memory.paid_by(round_digest, connection=connection)
        if paid_by is None:
            raise PrivacyRefusal("an answer that was never charged is not stored")
        self._ledger.answer(paid_by, commitment, connection=connection)

    def kept_until(self, expires_at: float | None) -> datetime:
        """Until when a round is kept whose ask states this deadline, in unix seconds."""
        latest = self._clock() + KEPT_LONGEST
        if expires_at is None or expires_at >= latest.timestamp():
            return latest
        return min(latest, datetime.fromtimestamp(expires_at, UTC) + GRACE)

    def promise_in(self, connection: Connection, policy: Policy, proposal: Proposal) -> datetime:
        """Say yes to a proposal that was not answered: set the price of all its rounds aside until its deadline.

        Args:
            connection: a transaction of many; what this leaves when it raises has to be undone (`Database.attempt`).
            policy: as `open_accounts` returned it.

        Returns:
            Until when the yes holds.

        Raises:
            PrivacyRefusal: a level that is limited has no finite price, or the task has too few queries left.
            ProtocolViolation: the deadline is more than LONGEST_PROMISE away.
            PolicyRefusal: the day's queries are used up, or what a day's answers may tell of the budget for nothing.
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
        prices = self._prices(policy, proposal, connection)
        answered = self._memory.queries_of(proposal.task.digest, connection=connection) + proposal.num_queries
        if answered > proposal.task.max_queries:
            raise PrivacyRefusal(beyond_task(answered, proposal.task))
        self._check_day(policy, proposal.num_queries, connection)
        compared = self._compared(policy, proposal.task, proposal.requester, prices, connection)
        self._check_covered(compared, proposal.requester, connection)
        about = self._about(proposal)
        self._promises.told.note(about.digest, compared, proposal.requester, now, connection)
        rounds = list(zip(proposal.sizes, prices, strict=True))
        self._promises.keep(about, rounds, account=self._account, connection=connection)
        kept = [(promise_name(about.digest, number), amounts) for number, amounts in enumerate(prices)]
        life_nano = _life_nano(proposal.task)
        self._shares.note(proposal.requester, kept, life_nano=life_nano, connection=connection)
        self._asked_by.note(proposal.task.digest, proposal.requester, now, connection=connection)
        return about.until

    def decline(self, connection: Connection, policy: Policy, proposal: Proposal, error: PrivacyRefusal) -> None:
        """Remember that the budget, or a requester's share, did not cover a proposal, and what that no tells.

        Args:
            error: as `promise_in` raised it; what it had written is undone.
        """
        prices = self._prices(policy, proposal, connection)
        compared = self._compared(policy, proposal.task, proposal.requester, prices, connection)
        about = self._about(proposal)
        self._promises.told.note(about.digest, compared, proposal.requester, about.at, connection)
        if not isinstance(error, ShareUsedUp):  # a share is given back with others' jobs; then it is considered anew
            self._promises.decline(about, connection=connection)

    def decline_ask(
        self, connection: Connection, policy: Policy, round_digest: str, task: Task, charges: Mapping[Level, int]
    ) -> None:
        """Remember what it tells that a round was not covered which had not been proposed."""
        answered = self._memory.queries_of(task.digest, connection=connection)
        amounts = _amounts(policy, due(task, charges, answered=answered))
        compared = self._compared(policy, task, "", [amounts], connection)
        self._promises.told.note(round_digest, compared, "", self._clock(), connection)

    def _about(self, proposal: Proposal) -> Proposed:
        until = datetime.fromtimestamp(proposal.expires_at, UTC)
        return Proposed(proposal.digest, proposal.job_id, proposal.task.digest, until, self._clock())

    def _prices(self, policy: Policy, proposal: Proposal, connection: Connection) -> list[dict[Level, int]]:
        """What each round of a proposal is charged."""
        prices, asked = [], self._memory.queries_of(proposal.task.digest, connection=connection)
        for size in proposal.sizes:
            prices.append(_amounts(policy, round_charges(proposal.task, size, answered=asked)))
            asked += size
        return prices

    def _compared(
        self,
        policy: Policy,
        task: Task,
        requester: str,
        prices: Sequence[Mapping[Level, int]],
        connection: Connection,
    ) -> list[Compared]:
        """Everything that has to cover a price, in the order in which it is looked at: the share, then the accounts."""
        found: list[Compared] = []
        share, budget = policy.budget.per_requester, policy.budget
        limited = [(level, cap) for level in LEVELS if (cap := budget.cap(level)) is not None]
        if share is not None:
            taken, of_life = self._shares.taken(requester, connection=connection)
            for level, cap in limited:
                before = taken[level]
                amount = before + sum(one[level] for one in prices)
                found.append(Compared(f"share, {level}", floor(Fraction(share) * cap), before, amount))
            if task.life is not None and budget.life_nano is not None:
                amount = of_life + len(prices) * _life_nano(task)
                found.append(Compared("share, life", floor(Fraction(share) * budget.life_nano), of_life, amount))
        for level, cap in limited:
            before = self._ledger.balance(self._account, level, connection=connection).spent
            found.append(Compared(level, cap, before, before + sum(one[level] for one in prices)))
        return found

    def _check_covered(self, compared: Sequence[Compared], requester: str, connection: Connection) -> None:
        """Refuse what is not covered, and before that what nobody may be told for nothing any more.

        Raises:
            PolicyRefusal: the latter; it says nothing of a budget.
            ShareUsedUp, BudgetExceeded: the former.
        """
        self._promises.told.check(compared, requester, self._clock(), connection)
        for one in compared:
            if one.is_covered:
                continue
            if one.scale.startswith("share"):
                who = f"the jobs of {requester!r}" if requester else "all jobs of which it is not told who asks"
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
    """The most that a round takes of any record's votes for life."""
    if task.life is None:
        return 0
    # Loaded where it is wanted: few sites cast votes for life.
    from labeler.accounting.lifetime import job_nano

    return job_nano(task)


def _amounts(policy: Policy, charges: Mapping[Level, int]) -> dict[Level, int]:
    """What a round is charged at each level: its price, or what stands for none.

    Raises:
        PrivacyRefusal: a level that is limited has no finite price.
    """
    # One record is always promised something; a whole site where its owner says how much.
    for level in LEVELS:
        if level == "instance" or policy.budget.cap(level) is not None:
            priced(charges, level)
    return {level: charges.get(level, UNBOUNDED_NANO) for level in LEVELS}
