"""The check that every label is charged once finds a charge that is missing, doubled, wrong or void."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest

from benchmarks.service.requesters import PaidJob
from benchmarks.service.service import Book, check_agent, check_coordinator, read_book
from labeler.budget import NothingLeft
from labeler.ledger.database import Database, open_database
from labeler.ledger.ledger import Charge, Ledger

ACCOUNTS = ("federation", "agent:a")
CHARGES = {"instance": 7, "agent": 11}
JOBS = [PaidJob(f"job-{number}", "task", 1, CHARGES, 8) for number in range(3)]


@pytest.fixture
def database(tmp_path: Path) -> Iterator[Database]:
    with open_database(tmp_path / "journal.db", anchor=tmp_path / "journal.head", allow_unsynced=True) as database:
        yield database


def ledger_of(database: Database) -> Ledger:
    ledger = Ledger(database, clock=lambda: datetime.now(UTC))
    for account in ACCOUNTS:
        ledger.open_account(account, "instance", 1000)
        ledger.open_account(account, "agent", None)
    return ledger


def pay(ledger: Ledger, job_id: str, *, instance: int = 7, post: bool = True) -> None:
    charges = [Charge(account, "instance", instance) for account in ACCOUNTS]
    charges += [Charge(account, "agent", 11) for account in ACCOUNTS]
    ledger.reserve(f"{job_id}/proposed", charges)
    ledger.void(f"{job_id}/proposed", NothingLeft(f"{job_id}/proposed", "divided"))
    ledger.reserve(f"{job_id}/0", charges)
    if post:
        ledger.post(f"{job_id}/0")


def book_of(ledger: Ledger) -> Book:
    return Book("coordinator", tuple(ledger.entries(limit=1000)), tuple(ledger.balances()))


def test_jobs_that_were_paid_once_add_up(tmp_path: Path, database: Database) -> None:
    ledger = ledger_of(database)
    for job in JOBS:
        pay(ledger, job.job_id)
    database.close()
    assert check_coordinator(read_book("coordinator", tmp_path), JOBS, ["agent:a"]) == []


def test_a_missing_or_unposted_charge_is_found(database: Database) -> None:
    ledger = ledger_of(database)
    pay(ledger, "job-0")
    pay(ledger, "job-1", post=False)
    found = check_coordinator(book_of(ledger), JOBS, ["agent:a"])
    assert any("'post', 'job-1/0'" in sentence and "missing" in sentence for sentence in found)
    assert any("'reserve', 'job-2/0'" in sentence and "missing" in sentence for sentence in found)


def test_a_wrong_a_void_and_a_foreign_charge_are_found(database: Database) -> None:
    ledger = ledger_of(database)
    pay(ledger, "job-0", instance=8)
    pay(ledger, "job-1")
    pay(ledger, "job-2")
    pay(ledger, "stranger", post=False)
    ledger.void("stranger/0", NothingLeft("stranger/0", "never-asked"))
    found = " ".join(check_coordinator(book_of(ledger), JOBS, ["agent:a"]))
    assert "('reserve', 'job-0/0', 'federation', 'instance', 8) belongs to no completed job" in found
    assert "'void', 'stranger/0'" in found
    assert "federation (instance) has 22 posted and 0 reserved, and the jobs cost 21" in found


def test_an_agent_that_charged_itself_twice_is_found(database: Database) -> None:
    ledger = Ledger(database, clock=lambda: datetime.now(UTC))
    for level, cap in (("instance", 1000), ("agent", None)):
        ledger.open_account("agent:a", level, cap)  # type: ignore[arg-type]  # both are levels
    for number in range(4):
        ledger.reserve(f"round-{number}", [Charge("agent:a", "instance", 7), Charge("agent:a", "agent", 11)])
        ledger.post(f"round-{number}")
        found = check_agent(book_of(ledger), JOBS)
        assert (found == []) == (number == 2)
