"""A site's journal of rounds, round by round: the steps of an agent's turn (workers.agent.driver), each by itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from labeler.errors import PrivacyRefusal
from labeler.ledger.agent_memory import AgentMemory, JournalRounds
from labeler.ledger.database import Database
from labeler.ledger.ledger import Ledger
from labeler.ledger.promises import PromiseStore
from labeler.rounds.agent import ANSWERED_TO_OTHERS, NOT_KEPT, Recipients
from labeler.system.erasable import ErasableKeys, KeysInMemory
from workers.agent.ledger import DurableLedger
from workers.agent.policy import Policy


@dataclass(repr=False)
class JournalStore:
    """A `tests.answering.RoundStore` over the journal; what is kept is judged as a machine does."""

    database: Database
    rounds: JournalRounds

    def stored(self, round_digest: str, recipients: Recipients) -> tuple[bytes, ...] | None:
        """See RoundStore."""
        kept = self.rounds.kept(round_digest)
        if kept is None:
            return None
        if kept.stage == "erased":
            raise PrivacyRefusal(NOT_KEPT)
        if kept.recipients != recipients:
            raise PrivacyRefusal(ANSWERED_TO_OTHERS)
        return kept.bodies

    def key(self, round_digest: str) -> bytes:
        """See RoundStore."""
        kept = self.rounds.kept(round_digest)
        if kept is None or kept.stage == "erased":
            raise PrivacyRefusal(NOT_KEPT)
        return self.rounds.key_of_charged(round_digest)

    def store(self, round_digest: str, recipients: Recipients, bodies: Sequence[bytes]) -> tuple[bytes, ...]:
        """See RoundStore."""
        with self.database.write() as connection:
            self.rounds.store_new(round_digest, bodies, connection=connection)
        stored = self.stored(round_digest, recipients)
        assert stored is not None
        return stored

    def erase(self, round_digest: str) -> None:
        """See RoundStore."""
        with self.database.write() as connection:
            self.rounds.erase_in([round_digest], connection=connection)

    def expire(self, now: datetime) -> list[str]:
        """Erase every round that nobody may ask for any more; their digests."""
        over = self.rounds.over(now)
        with self.database.write() as connection:
            self.rounds.erase_in(over, connection=connection)
        return over

    def __repr__(self) -> str:
        return repr(self.rounds)


@dataclass(repr=False)
class ChargingLedger:
    """A `tests.answering.Charges` over a site's ledger: a charge, and the beginning of its round, by themselves."""

    database: Database
    rounds: JournalRounds
    ledger: DurableLedger
    expires_at: float | None = None

    def charge(self, *, round_digest: str, **given: Any) -> None:
        """See Charges."""
        policy = self.ledger.open_accounts()
        with self.database.write() as connection:
            if self.ledger.charge_in(connection, policy, round_digest=round_digest, **given):
                self.rounds.open({round_digest: self.ledger.kept_until(self.expires_at)}, connection=connection)


class Clock:
    """The time, as a test sets it."""

    def __init__(self) -> None:
        self.now = datetime(2026, 11, 20, 12, tzinfo=UTC)

    def __call__(self) -> datetime:
        return self.now


class DurableSite:
    """A site's ledger over its journal, as its process begins it, with policy and clock in reach."""

    def __init__(
        self,
        database: Database,
        policy: Policy,
        *,
        clock: Clock | None = None,
        keys: ErasableKeys | None = None,
        expires_at: float | None = None,
    ) -> None:
        self.database, self.policy = database, policy
        self.clock = clock or Clock()
        self.journal = Ledger(database, clock=self.clock)
        self.promises = PromiseStore(database, self.journal)
        self.durable = DurableLedger(
            database, AgentMemory(database, self.journal), self.journal, self.promises,
            account="agent:a", read_policy=lambda: self.policy, clock=self.clock,
        )  # fmt: skip
        self.durable.open_accounts()
        self.rounds = JournalRounds(database, keys or KeysInMemory())
        self.ledger = ChargingLedger(database, self.rounds, self.durable, expires_at)

    def spent(self) -> int:
        return self.journal.balance("agent:a", "instance").spent
