"""Who says whether an agent may answer: its ledger, in memory for one `run`, or durable for a site's own process.

Charging an answer is one step that either happens whole or not at all: the round was never charged for other
recipients, every level the owner limits is priced and covered, and only then is the price taken. A round is charged
once whatever becomes of the records; what is sent of it then says `labeler.rounds.agent`.
The ledger here and its durable twin (workers.agent.durable_ledger) keep the same rules and pass the same tests.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Protocol

from labeler.batching import due
from labeler.budget import Account
from labeler.errors import InvalidSetting, PrivacyRefusal
from labeler.rounds.agent import ANSWERED_TO_OTHERS, Recipients
from labeler.task import Level, Task


class AgentLedger(Protocol):
    """What an agent asks before it computes anything."""

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
        """Take the price of one answer, once: the same round again changes nothing.

        Args:
            shard_version: which records would answer, were it answered now.
            charges: nano-units of mu^2 at every level at which the task has a finite price.
            recipients: who gets the shares of the answer.
            expires_at: unix time in seconds after which nobody waits for the answer; None where nobody said.

        Raises:
            PrivacyRefusal: the round was charged for other recipients, more queries of the task
                than it has are asked, or a level that is limited has no finite price.
            PolicyRefusal: the site's policy does not allow it now.
            BudgetExceeded: an account has too little left. Nothing was charged.
        """
        ...


class InMemoryLedger:
    """The ledger of an agent that lives for one `run`.

    Args:
        accounts: what may be spent at each level; instance level always, agent level where it is limited.

    Raises:
        InvalidSetting: no instance-level account.
    """

    def __init__(self, accounts: Mapping[Level, Account]) -> None:
        if "instance" not in accounts:
            raise InvalidSetting("an agent's ledger has no instance-level account, so it could not refuse anything")
        self.accounts: dict[Level, Account] = dict(accounts)
        self._answered: dict[str, Recipients] = {}
        self._queries: Counter[str] = Counter()

    def charge(
        self,
        *,
        round_digest: str,
        shard_version: str,  # noqa: ARG002  # see AgentLedger
        reservation_id: str,
        charges: Mapping[Level, int],
        task: Task,
        num_queries: int,
        recipients: Recipients,
        expires_at: float | None = None,  # noqa: ARG002  # as above
    ) -> None:
        """See AgentLedger."""
        if self._answered.get(round_digest, recipients) != recipients:
            raise PrivacyRefusal(ANSWERED_TO_OTHERS)
        if round_digest in self._answered:
            return
        asked = self._queries[task.digest] + num_queries
        if asked > task.max_queries:
            raise PrivacyRefusal(beyond_task(asked, task))
        charged = dict(self.accounts)
        charges = due(task, charges, answered=self._queries[task.digest])
        for level, account in self.accounts.items():
            charged[level] = account.reserve(reservation_id, priced(charges, level)).post(reservation_id)
        self.accounts = charged
        self._answered[round_digest] = recipients
        self._queries[task.digest] = asked

    def __repr__(self) -> str:
        return f"InMemoryLedger(levels={sorted(self.accounts)})"


def priced(charges: Mapping[Level, int], level: Level) -> int:
    """The charge at a level that is limited.

    Raises:
        PrivacyRefusal: there is none, so no budget could pay it.
    """
    if level not in charges:
        raise PrivacyRefusal(
            f"this task has no finite {level}-level price, so no {level}-level budget can pay it; give the task "
            "ballot_radius or max_agent_records, or raise sigma_votes"
        )
    return charges[level]


def beyond_task(answered: int, task: Task) -> str:
    """Why a round is refused that asks more of a task than a person approved, and than its price covers."""
    return (
        f"the task has {task.max_queries} queries, and with this round {answered} of it would be answered; ask in a "
        "new task"
    )
