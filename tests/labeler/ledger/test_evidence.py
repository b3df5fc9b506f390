"""Evidence is read from either database alike, and a charge without its round is found on both."""

from __future__ import annotations

import pytest

from labeler.budget import NothingLeft
from labeler.errors import JournalBroken
from labeler.evidence.derive import derive, differences, software
from labeler.ledger.evidence import EvidenceScope, coordinator_facts, read_chain
from labeler.ledger.jobs import JobStore
from labeler.ledger.ledger import Charge, Ledger
from labeler.ledger.tasks import TaskRecord, TaskStore
from labeler.setting import LEVELS
from tests.labeler.evidence.conftest import AGENTS, task_with
from tests.labeler.ledger.conftest import Clock, Place


@pytest.mark.process
def test_a_task_and_its_accounts_are_read_and_a_charge_without_its_round_is_refused(place: Place, clock: Clock) -> None:
    database = place.open()
    ledger, tasks = Ledger(database, clock=clock), TaskStore(database)
    JobStore(database, clock=clock)
    task = task_with()
    for account in ("federation", *(f"agent:{name}" for name in AGENTS)):
        for level in LEVELS:
            ledger.open_account(account, level, 10**9)
    tasks.add(TaskRecord(task, AGENTS, clock(), "tok-1"))
    with database.read() as connection:
        facts = coordinator_facts(connection, EvidenceScope(task.digest), delta=1e-5, read_at=clock())
    document = derive(facts, software("0"))
    head = ledger.head()
    assert (facts.journal.entries, facts.journal.head) == (head.seq, head.hash) == (8, head.hash)
    assert [one.participants for one in facts.tasks] == [AGENTS]
    assert {one.cap_nano for one in facts.accounts} == {10**9}
    assert not differences(document, derive(facts, software("0")))
    name = "job_1/0"
    ledger.reserve(name, [Charge("federation", "instance", 5)], detail={"job": "job_1", "task": task.digest})
    with pytest.raises(JournalBroken, match="a row was removed"), database.read() as connection:
        coordinator_facts(connection, EvidenceScope(task.digest), delta=1e-5, read_at=clock())


@pytest.mark.process
def test_an_account_that_paid_for_something_of_no_finite_price_has_no_bound(sqlite_place: Place, clock: Clock) -> None:
    """So is a restored journal whose unlimited accounts were not written off."""
    database = sqlite_place.open()
    ledger = Ledger(database, clock=clock)
    accounts = ("whole", "unpriced", "given back", "restored")
    for account in accounts:
        for level in LEVELS:
            ledger.open_account(account, level, 10**9)
    ledger.reserve("job/0", [Charge("whole", level, 5) for level in LEVELS])
    for name, account in (("old", "unpriced"), ("void", "given back")):
        ledger.reserve(name, [Charge(account, "instance", 5)])
    ledger.post("old")
    ledger.void("void", NothingLeft("void", "never-asked"))
    ledger.write_off("whole", "instance", "lost")
    ledger.write_off("whole", "agent", "lost")
    ledger.write_off("restored", "instance", "lost")
    with database.read() as connection:
        found = read_chain(connection, read_at=clock()).accounts
    assert {(one.account, one.level) for one in found if one.is_unpriced} == {
        ("unpriced", "agent"),
        ("restored", "agent"),
    }
    assert ledger.charged_without() == {"instance": set(), "agent": {"unpriced", "restored"}}
