"""Who says whether an agent may answer: its ledger, in memory for one `run`, or durable for a site's own process.

Charging an answer is one step that either happens whole or not at all: the round was never answered under another
version of the records, every level the owner limits is priced and covered, and only then is the price taken.
The ledger here and its durable twin (workers.durable_ledger) keep the same rules and pass the same tests.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from labeler.budget import Account
from labeler.errors import InvalidSetting, PrivacyRefusal
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
    ) -> None:
        """Take the price of one answer, once: the same round of the same records again changes nothing.

        Args:
            round_digest: the round to be answered.
            shard_version: which records would answer.
            reservation_id: names the charge for ever.
            charges: nano-units of mu^2 at every level at which the task has a finite price.
            task: of the round.
            num_queries: queries in the round.

        Raises:
            PrivacyRefusal: the round was answered by other records, or a level that is limited has no finite price.
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
        self._answered: dict[str, str] = {}

    def charge(
        self,
        *,
        round_digest: str,
        shard_version: str,
        reservation_id: str,
        charges: Mapping[Level, int],
        task: Task,  # noqa: ARG002  # a run has one task, and no site that limits queries by the day
        num_queries: int,  # noqa: ARG002  # as above
    ) -> None:
        """See AgentLedger."""
        if self._answered.get(round_digest, shard_version) != shard_version:
            raise PrivacyRefusal(ANSWERED_BEFORE)
        charged = dict(self.accounts)
        for level, account in self.accounts.items():
            charged[level] = account.reserve(reservation_id, priced(charges, level)).post(reservation_id)
        self.accounts = charged
        self._answered[round_digest] = shard_version

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
            "max_agent_records"
        )
    return charges[level]


ANSWERED_BEFORE = (
    "records were deleted since this batch was first answered; the noise of the other agents would be the same again. "
    "Ask in a new task (a new nonce), which is charged anew"
)
"""Why a round is refused once the records behind it have changed."""
