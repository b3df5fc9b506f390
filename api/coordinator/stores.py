"""Everything in the coordinator's journal, opened together, and the way of every write into it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from api.coordinator.budgets import check_delta, open_accounts
from api.coordinator.config import CoordinatorConfig
from api.coordinator.settlement import JournalSettlement
from labeler.driver.intake import Errand, Result, run_errand
from labeler.ledger.database import Connection, Database, open_database
from labeler.ledger.jobs import ForgottenJobs, JobStore
from labeler.ledger.ledger import Ledger
from labeler.ledger.parties import PartyStore
from labeler.ledger.rounds import AggregateStore
from labeler.ledger.sequences import Sequences
from labeler.ledger.tasks import TaskShares, TaskStore
from labeler.ledger.tokens import TokenStore
from labeler.system.clock import Clock
from labeler.system.clock import now_utc as utc_now


@dataclass(frozen=True)
class Stores:
    """Everything in the coordinator's journal, over one database.

    Attributes:
        hand_in: takes what is to be written, to be kept with others in one commit; without it, each is a commit.
    """

    database: Database
    ledger: Ledger
    tasks: TaskStore
    shares: TaskShares
    jobs: JobStore
    forgotten: ForgottenJobs
    aggregates: AggregateStore
    parties: PartyStore
    sequences: Sequences
    tokens: TokenStore
    clock: Clock
    hand_in: Callable[[Errand], None] | None = None

    @classmethod
    def over(cls, database: Database, *, clock: Clock) -> Stores:
        """Those of a journal that is open."""
        return cls(
            database=database,
            ledger=Ledger(database, clock=clock),
            tasks=TaskStore(database),
            shares=TaskShares(database, clock=clock),
            jobs=JobStore(database, clock=clock),
            forgotten=ForgottenJobs(database, clock=clock),
            aggregates=AggregateStore(database),
            parties=PartyStore(database, clock=clock),
            sequences=Sequences(database, clock=clock),
            tokens=TokenStore(database, clock=clock),
            clock=clock,
        )

    @classmethod
    def open(cls, config: CoordinatorConfig, *, clock: Clock = utc_now) -> Stores:
        """Open the journal and check it from its first entry to its last.

        Raises:
            JournalBroken, JournalBehind, UnsafeStorage, JournalInUse: see labeler.ledger.
            InvalidSetting: see `check_delta`.
        """
        database = open_database(config.journal_target, anchor=config.home / "journal.head")
        try:
            stores = cls.over(database, clock=clock)
            stores.ledger.verify()
            check_delta(stores.tasks, config.delta)
            open_accounts(stores.ledger, config, [one.party_id for one in stores.parties.list(role="agent")])
        except BaseException:
            database.close()
            raise
        return stores

    @property
    def settlement(self) -> JournalSettlement:
        """How jobs are charged and end here."""
        return JournalSettlement(self.database, self.ledger, self.jobs, self.tasks)

    def write(self, step: Callable[[Connection], Result]) -> Result:
        """Run a step in a write transaction; it is durable when this returns, and undone whole where it raises."""
        if self.hand_in is not None:
            return run_errand(self.hand_in, step)
        with self.database.write() as connection:
            return step(connection)
