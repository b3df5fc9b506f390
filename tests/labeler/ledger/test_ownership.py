"""A journal has one owner on either database; one whose owner was cut off is written by no other process."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager

import psycopg
import pytest

from labeler.errors import JournalInUse
from labeler.ledger.database import POSTGRESQL_OWNER, Database, open_database
from labeler.ledger.ledger import Charge, Ledger
from tests.labeler.ledger.conftest import Clock, Place, program
from tests.postgres_server import PostgresServer

pytestmark = pytest.mark.process

RIVAL = """
import sys
from datetime import UTC, datetime
from labeler.ledger import database
from labeler.ledger.database import open_database
from labeler.ledger.ledger import Charge, Ledger
from labeler.errors import JournalInUse
database.PATIENCE_S = float(sys.argv[3])
try:
    with open_database(sys.argv[1]) as database:
        ledger = Ledger(database, clock=lambda: datetime.now(UTC), anchored=False)
        ledger.reserve(sys.argv[2], [Charge("federation", "instance", 1)])
        print("owns it", flush=True)
        sys.stdin.readline()
except JournalInUse as error:
    print(error)
"""


@pytest.fixture
def url(postgres_server: PostgresServer) -> Iterator[str]:
    url = postgres_server.new_database()
    yield url
    postgres_server.give_back(url)


@pytest.fixture
def stranger(url: str) -> Iterator[psycopg.Connection]:
    with psycopg.connect(url, autocommit=True) as connection:
        yield connection


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("labeler.ledger.database.PATIENCE_S", 0.0)


def rival(target: str, name: str = "rival", *, patience_s: float = 0.0) -> subprocess.Popen[str]:
    return program(RIVAL, target, name, patience_s)


def told(process: subprocess.Popen[str]) -> str:
    return process.stdout.readline().strip()


def cut(stranger: psycopg.Connection) -> None:
    """End the session that holds the owner's lock, as a network or an administrator may."""
    found = stranger.execute(
        "SELECT pg_terminate_backend(pid, 240000) FROM pg_locks WHERE locktype = 'advisory' AND objid = %s",
        (POSTGRESQL_OWNER & 0xFFFFFFFF,),
    ).fetchall()
    assert found == [(True,)]


CHARGES = [Charge("federation", "instance", 1)]


def filled(database: Database, clock: Clock) -> Ledger:
    ledger = Ledger(database, clock=clock, anchored=False)
    ledger.open_account("federation", "instance", 100)
    return ledger


@pytest.fixture
def database(url: str) -> Iterator[Database]:
    """The journal on PostgreSQL, held by this process."""
    with open_database(url) as database:
        yield database


@pytest.fixture
def ledger(database: Database, clock: Clock) -> Ledger:
    return filled(database, clock)


@contextmanager
def taken_over(target: str, name: str = "rival") -> Iterator[subprocess.Popen[str]]:
    """Another process owns the journal meanwhile, and has charged for something.

    PostgreSQL frees the lock of a process that was killed when it notices, a moment later.
    """
    other = rival(target, name, patience_s=240.0)
    assert told(other) == "owns it"
    yield other
    other.communicate()


def test_a_second_process_is_refused_with_a_sentence_and_takes_over_when_the_first_has_ended(
    place: Place, clock: Clock
) -> None:
    with closing(place.open(with_anchor=False)) as database:
        ledger = filled(database, clock)
        second = rival(place.target)
        assert "another process holds the journal" in told(second)
        second.communicate()
        with closing(open_database(place.target, read_only=True)) as looking:
            assert Ledger(looking, clock=clock, anchored=False).verify() == ledger.head()
        ledger.reserve("ours", CHARGES)
    with taken_over(place.target) as third:
        holds = r"another process holds the journal .*one process at a time may write it"
        with pytest.raises(JournalInUse, match=holds):
            place.open(with_anchor=False)
        third.kill()
    assert Ledger(place.open(with_anchor=False), clock=clock).state("rival") == "reserved"


def test_a_process_that_is_killed_leaves_the_journal_to_the_next_at_once_with_all_that_it_acknowledged(
    place: Place, clock: Clock
) -> None:
    filled(place.open(with_anchor=False), clock)
    place.close()
    for number in range(3):
        with taken_over(place.target, f"rival-{number}") as process:
            process.kill()
            assert process.wait() == -9
    ledger = Ledger(place.open(with_anchor=False), clock=clock)
    assert (ledger.verify().seq, ledger.balance("federation", "instance").spent) == (4, 3)


def test_an_owner_whose_connection_was_cut_takes_the_lock_again_before_it_writes(
    url: str, ledger: Ledger, stranger: psycopg.Connection, impatient: None
) -> None:
    for number in range(2):
        cut(stranger)
        ledger.reserve(f"job-{number}", CHARGES)
        with pytest.raises(JournalInUse):
            open_database(url)
    assert ledger.verify().seq == 3


def test_an_owner_that_was_cut_off_writes_nothing_while_another_holds_the_journal(
    url: str, ledger: Ledger, stranger: psycopg.Connection
) -> None:
    cut(stranger)
    with taken_over(url):
        with pytest.raises(JournalInUse, match="another process holds"):
            ledger.reserve("late", CHARGES)
        assert ledger.state("late") is None
    # It has ended, and the lock is free; what it did is not what this process remembers.
    with pytest.raises(JournalInUse, match=r"took .* over"):
        ledger.reserve("late", CHARGES)
    assert [entry.reservation_id for entry in ledger.entries()] == ["", "rival"]


def test_an_owner_that_was_cut_off_in_the_middle_of_a_transaction_keeps_nothing_of_the_next(
    url: str, database: Database, ledger: Ledger, stranger: psycopg.Connection, clock: Clock
) -> None:
    """The lock goes while a transaction is open: that one was first in the line of writers, and no other can follow."""
    with database.write() as connection:
        ledger.reserve("first", CHARGES, connection=connection)
        cut(stranger)
    with taken_over(url), pytest.raises(JournalInUse):
        ledger.reserve("second", CHARGES)
    with closing(open_database(url, read_only=True)) as looking:
        entries = Ledger(looking, clock=clock, anchored=False).entries()
    assert [entry.reservation_id for entry in entries] == ["", "first", "rival"]


def test_an_owner_that_is_cut_off_before_it_ever_wrote_does_not_write_over_another(
    url: str, stranger: psycopg.Connection, clock: Clock
) -> None:
    with open_database(url) as database:
        filled(database, clock)
    with open_database(url) as database:
        ledger = Ledger(database, clock=clock, anchored=False)
        cut(stranger)
        with taken_over(url):
            pass
        with pytest.raises(JournalInUse, match=r"took .* over"):
            ledger.reserve("late", CHARGES)


def test_of_many_processes_that_open_one_new_journal_one_gets_it(url: str, clock: Clock) -> None:
    with open_database(url) as database:
        filled(database, clock)
    rivals = [rival(url, f"rival-{number}") for number in range(3)]
    answers = [told(process) for process in rivals]
    assert sorted(answer == "owns it" for answer in answers) == [False, False, True]
    for process in rivals:
        process.communicate()
    with open_database(url) as database:
        assert Ledger(database, clock=clock, anchored=False).verify().seq == 2


def test_a_server_that_ends_idle_sessions_does_not_end_the_owners(
    url: str, stranger: psycopg.Connection, clock: Clock, impatient: None
) -> None:
    name = url.rsplit("/", 1)[1]
    stranger.execute(f'ALTER DATABASE "{name}" SET idle_session_timeout = 1000')
    with open_database(url) as database:
        ledger = filled(database, clock)
        before = stranger.execute("SELECT pid FROM pg_locks WHERE locktype = 'advisory'").fetchall()
        time.sleep(2.5)
        assert stranger.execute("SELECT pid FROM pg_locks WHERE locktype = 'advisory'").fetchall() == before != []
        ledger.reserve("job", CHARGES)
