"""The ledger against `labeler.budget.Account`: random steps, repeats, crashes and restarts, many accounts.

The oracle is one frozen `Account` per account, changed together or not at all; a crash before a commit forgets the
step in both, a restart changes neither.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import hypothesis.stateful as stateful
import pytest
from hypothesis import settings
from hypothesis import strategies as st

from labeler.budget import Account, NothingLeft
from labeler.errors import LabelerError, ProtocolViolation
from labeler.ledger.database import open_database
from labeler.ledger.ledger import Charge, Ledger

ACCOUNTS = ("federation", "agent-1", "agent-2")
IDS = st.sampled_from([f"job-{number}" for number in range(6)])
CHARGES = st.dictionaries(st.sampled_from(ACCOUNTS), st.integers(1, 30), min_size=1)


class Oracle:
    """Thirty lines that say what a ledger of several accounts does."""

    def __init__(self, caps: dict[str, int]) -> None:
        self.accounts = {name: Account(name, "instance", cap) for name, cap in caps.items()}
        self.charges: dict[str, dict[str, int]] = {}

    def reserve(self, job: str, charges: dict[str, int]) -> None:
        if self.charges.setdefault(job, charges) != charges:
            raise ProtocolViolation
        try:
            self._step(job, lambda account: account.reserve(job, charges[account.name]))
        except LabelerError:
            if all(job not in account.reservations for account in self.accounts.values()):
                del self.charges[job]
            raise

    def post(self, job: str) -> None:
        self._step(job, lambda account: account.post(job))

    def void(self, job: str) -> None:
        self._step(job, lambda account: account.void(job, NothingLeft(job, "below-quorum")))

    def _step(self, job: str, change: Callable[[Account], Account]) -> None:
        if job not in self.charges:
            raise ProtocolViolation
        self.accounts |= {name: change(self.accounts[name]) for name in self.charges[job]}


class Crash(Exception):
    """The process dies before the commit."""


class LedgerModel(stateful.RuleBasedStateMachine):
    @stateful.initialize(caps=st.lists(st.integers(0, 60), min_size=3, max_size=3))
    def begin(self, caps: list[int]) -> None:
        self.folder = tempfile.TemporaryDirectory()
        self.now = datetime(2026, 3, 1, tzinfo=UTC)
        self._open()
        self.oracle = Oracle(dict(zip(ACCOUNTS, caps, strict=True)))
        for name, cap in zip(ACCOUNTS, caps, strict=True):
            self.ledger.open_account(name, "instance", cap)

    def _open(self) -> None:
        folder = Path(self.folder.name)
        self.database = open_database(folder / "journal.db", anchor=folder / "journal.head", allow_unsynced=True)
        self.ledger = Ledger(self.database, clock=lambda: self.now)

    def _same(self, ours: Callable[[], object], theirs: Callable[[], object]) -> None:
        try:
            theirs()
        except LabelerError as expected:
            with pytest.raises(type(expected)):
                ours()
            return
        ours()

    @stateful.rule(job=IDS, charges=CHARGES)
    def reserve(self, job: str, charges: dict[str, int]) -> None:
        asked = [Charge(name, "instance", amount) for name, amount in charges.items()]
        self._same(lambda: self.ledger.reserve(job, asked), lambda: self.oracle.reserve(job, charges))

    @stateful.rule(job=IDS)
    def reserve_again(self, job: str) -> None:
        if job in self.oracle.charges:
            self.reserve(job, self.oracle.charges[job])

    @stateful.rule(job=IDS)
    def post(self, job: str) -> None:
        self._same(lambda: self.ledger.post(job), lambda: self.oracle.post(job))

    @stateful.rule(job=IDS)
    def void(self, job: str) -> None:
        self._same(lambda: self.ledger.void(job, NothingLeft(job, "below-quorum")), lambda: self.oracle.void(job))

    @stateful.rule(job=IDS, charges=CHARGES, step=st.sampled_from(["reserve", "post", "void"]))
    def crash_before_the_commit(self, job: str, charges: dict[str, int], step: str) -> None:
        asked = [Charge(name, "instance", amount) for name, amount in charges.items()]

        def crash() -> None:
            with self.database.write() as connection:
                if step == "reserve":
                    self.ledger.reserve(job, asked, connection=connection)
                elif step == "post":
                    self.ledger.post(job, connection=connection)
                else:
                    self.ledger.void(job, NothingLeft(job, "refused"), connection=connection)
                raise Crash

        with pytest.raises((Crash, LabelerError)):
            crash()

    @stateful.rule()
    def restart(self) -> None:
        head = self.ledger.head()
        self.database.close()
        self._open()
        assert self.ledger.head() == head

    @stateful.rule(seconds=st.integers(-100_000, 100_000))
    def turn_the_clock(self, seconds: int) -> None:
        self.now += timedelta(seconds=seconds)

    @stateful.invariant()
    def agrees_with_the_oracle(self) -> None:
        for name, account in self.oracle.accounts.items():
            balance = self.ledger.balance(name, "instance")
            assert (balance.cap, balance.spent, balance.posted) == (account.cap, account.spent, account.posted)
            assert 0 <= balance.spent <= account.cap
        for job, charges in self.oracle.charges.items():
            states = {self.oracle.accounts[name].reservations[job].state for name in charges}
            assert states == {self.ledger.state(job)}

    @stateful.invariant()
    def holds_by_itself(self) -> None:
        head = self.ledger.verify()
        times = [entry.at for entry in self.ledger.entries(limit=1000)]
        assert (times, len(times)) == (sorted(times), head.seq)

    def teardown(self) -> None:
        if hasattr(self, "database"):
            self.database.close()
            self.folder.cleanup()


TestLedgerModel = LedgerModel.TestCase
TestLedgerModel.settings = settings(max_examples=15, stateful_step_count=25)
