"""Everything in the coordinator's journal, opened together."""

from __future__ import annotations

from dataclasses import dataclass

from api.coordinator.budgets import check_delta, open_accounts
from api.coordinator.config import CoordinatorConfig
from feature_store.clock import Clock
from feature_store.clock import now_utc as utc_now
from feature_store.journal.database import Database, open_database
from feature_store.journal.jobs import JobStore
from feature_store.journal.ledger import Ledger
from feature_store.journal.parties import PartyStore
from feature_store.journal.rounds import AggregateStore
from feature_store.journal.sequences import Sequences
from feature_store.journal.tasks import TaskShares, TaskStore
from feature_store.journal.tokens import TokenStore


@dataclass(frozen=True)
class Stores:
    """Everything in the coordinator's journal, over one database."""

    database: Database
    ledger: Ledger
    tasks: TaskStore
    shares: TaskShares
    jobs: JobStore
    aggregates: AggregateStore
    parties: PartyStore
    sequences: Sequences
    tokens: TokenStore

    @classmethod
    def _over(cls, database: Database, ledger: Ledger, clock: Clock) -> Stores:
        return cls(
            database=database,
            ledger=ledger,
            tasks=TaskStore(database),
            shares=TaskShares(database, clock=clock),
            jobs=JobStore(database, clock=clock),
            aggregates=AggregateStore(database),
            parties=PartyStore(database),
            sequences=Sequences(database),
            tokens=TokenStore(database),
        )

    @classmethod
    def open(cls, config: CoordinatorConfig, *, clock: Clock = utc_now) -> Stores:
        """Open the journal and check it from its first entry to its last.

        Raises:
            JournalBroken, JournalBehind, UnsafeStorage, JournalInUse: see feature_store.journal.
            InvalidSetting: see `check_delta`.
        """
        database = open_database(config.journal_target, anchor=config.home / "journal.head")
        try:
            ledger = Ledger(database, clock=clock)
            ledger.verify()
            stores = cls._over(database, ledger, clock)
            check_delta(stores.tasks, config.delta)
            open_accounts(ledger, config, [one.party_id for one in stores.parties.list(role="agent")])
        except BaseException:
            database.close()
            raise
        return stores
