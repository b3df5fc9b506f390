"""The ledger of a site's own agent process: its journal, under the policy its owner keeps beside it.

The twin of workers.agent_ledger.InMemoryLedger for what has to survive crashes: what was charged, and the key and the
deadline of the round, are durable before anything is computed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta

from feature_store.journal.agent_memory import AgentMemory
from feature_store.journal.agent_rounds import JournalRounds
from feature_store.journal.charges import Charge
from feature_store.journal.database import Database
from feature_store.journal.ledger import Ledger
from labeler.answered import Recipients
from labeler.batching import LEVELS
from labeler.budget import UNBOUNDED_NANO
from labeler.errors import PolicyRefusal
from labeler.task import Level, Task
from workers.agent_ledger import priced
from workers.policy import Policy

_DAY = timedelta(days=1)

GRACE = timedelta(hours=1)
"""How long after the deadline of an ask its round is kept: talliers hold shares for as long."""

KEPT_LONGEST = timedelta(days=31)
"""A round is kept no longer than this after its charge, whatever deadline a coordinator states; a job has 30 days."""


class DurableLedger:
    """Charges a site's journal within the caps and the daily limit of its policy; see workers.agent_ledger.

    The policy is read again at every charge, so tightening it works at once, and a cap lowered below what is
    spent stops the agent from answering anything new.

    Args:
        database: the site's journal.
        memory: what the agent was charged for.
        rounds: where a round that is charged begins.
        ledger: of the same journal.
        account: the agent's account.
        read_policy: reads the site's policy; whatever it raises refuses the charge.
        clock: gives times with a time zone.
    """

    def __init__(
        self,
        database: Database,
        memory: AgentMemory,
        rounds: JournalRounds,
        ledger: Ledger,
        *,
        account: str,
        read_policy: Callable[[], Policy],
        clock: Callable[[], datetime],
    ) -> None:
        self._database = database
        self._memory = memory
        self._rounds = rounds
        self._ledger = ledger
        self._account = account
        self._read_policy = read_policy
        self._clock = clock

    def open_accounts(self) -> Policy:
        """Open the accounts with the caps of the policy as it is now, and return it.

        Raises:
            PolicyRefusal: the policy cannot be read.
            BudgetExceeded: more than a cap was spent before the cap was lowered.
        """
        policy = self._read_policy()
        for level in LEVELS:
            self._ledger.open_account(self._account, level, policy.budget.cap(level))
        return policy

    def charge(
        self,
        *,
        round_digest: str,
        shard_version: str,
        reservation_id: str,
        charges: Mapping[Level, int],
        task: Task,
        num_queries: int,
        recipients: Recipients,
        expires_at: float | None = None,
    ) -> None:
        """See AgentLedger. The round begins in the same transaction (feature_store.journal.agent_rounds)."""
        policy = self.open_accounts()
        # One record is always promised something; a whole site where its owner says how much.
        for level in LEVELS:
            if level == "instance" or policy.budget.cap(level) is not None:
                priced(charges, level)
        if self._ledger.state(reservation_id) != "posted":
            self._check_day(policy, num_queries)
        with self._database.write() as connection:
            is_new = self._memory.charge(
                round_digest=round_digest,
                shard_version=shard_version,
                reservation_id=reservation_id,
                charges=[Charge(self._account, level, charges.get(level, UNBOUNDED_NANO)) for level in LEVELS],
                num_queries=num_queries,
                task_digest=task.digest,
                max_queries=task.max_queries,
                recipients=recipients,
                connection=connection,
            )
            if is_new:
                self._rounds.open(round_digest, self._kept_until(expires_at), connection=connection)

    def _kept_until(self, expires_at: float | None) -> datetime:
        latest = self._clock() + KEPT_LONGEST
        if expires_at is None or expires_at >= latest.timestamp():
            return latest
        return min(latest, datetime.fromtimestamp(expires_at, UTC) + GRACE)

    def _check_day(self, policy: Policy, num_queries: int) -> None:
        most = policy.allow.max_queries_per_day
        answered = self._memory.queries_since(self._clock() - _DAY)
        if answered + num_queries > most:
            raise PolicyRefusal(
                f"allow.max_queries_per_day: the site answers {most} queries in 24 hours, {answered} were answered and "
                f"{num_queries} more asked; submit again later, with fewer queries, or ask the site to raise it"
            )
