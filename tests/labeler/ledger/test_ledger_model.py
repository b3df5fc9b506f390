"""The ledger against a model of it: random steps, repeats, crashes and restarts, many accounts.

The oracle is what each job was charged and its state, in two dictionaries; a crash before a commit forgets the step in
both, a restart changes neither.
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

from labeler.budget import NothingLeft
from labeler.errors import BudgetExceeded, LabelerError, PrivacyRefusal, ProtocolViolation
from labeler.ledger.database import open_database
from labeler.ledger.ledger import Charge, Ledger

ACCOUNTS = ("federation", "agent-1", "agent-2")
IDS = st.sampled_from([f"job-{number}" for number in range(6)])
CHARGES = st.dictionaries(st.sampled_from(ACCOUNTS), st.integers(1, 30), min_size=1)


class Oracle:
    """Thirty lines that say what a ledger of several accounts does."""

    def __init__(self, caps: dict[str, int]) -> None:
        self.caps = caps
        self.charges: dict[str, dict[str, int]] = {}
        self.states: dict[str, str] = {}

    def spent(self, name: str, *states: str) -> int:
        return sum(charges.get(name, 0) for job, charges in self.charges.items() if self.states[job] in states)

    def reserve(self, job: str, charges: dict[str, int]) -> None:
        if job in self.charges:
            if self.charges[job] != charges:
                raise ProtocolViolation
            if self.states[job] == "void":
                raise PrivacyRefusal
        elif any(self.spent(name, "reserved", "posted") + nano > self.caps[name] for name, nano in charges.items()):
            raise BudgetExceeded("it is not covered")
        else:
            self.charges[job], self.states[job] = charges, "reserved"

    def end(self, job: str, state: str, *, instead_of: str) -> None:
        if job not in self.states:
            raise ProtocolViolation
        if self.states[job] == instead_of:
            raise PrivacyRefusal
        self.states[job] = state

    def post(self, job: str) -> None:
        self.end(job, "posted", instead_of="void")

    def void(self, job: str) -> None:
        self.end(job, "void", instead_of="posted")


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
        for name, cap in self.oracle.caps.items():
            balance = self.ledger.balance(name, "instance")
            posted = self.oracle.spent(name, "posted")
            assert (balance.cap, balance.posted) == (cap, posted)
            assert posted <= balance.spent == self.oracle.spent(name, "reserved", "posted") <= cap
        assert {job: self.ledger.state(job) for job in self.oracle.states} == self.oracle.states

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
