"""Every refusal of the ledger word for word, every bound at its edge, every step in the caller's transaction."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from sqlalchemy import text

from labeler.budget import NothingLeft
from labeler.errors import (
    BudgetExceeded,
    InvalidSetting,
    JournalBehind,
    JournalBroken,
    LabelerError,
    NotFound,
    PrivacyRefusal,
    ProtocolViolation,
)
from labeler.ledger.chain import EMPTY, Anchor, Head
from labeler.ledger.database import Database
from labeler.ledger.ledger import MAX_AMOUNT, Charge, Ledger
from tests.labeler.ledger.conftest import Clock, Place

CHARGES = [Charge("federation", "instance", 10)]


@pytest.fixture
def database(sqlite_place: Place) -> Database:
    return sqlite_place.open()


@pytest.fixture
def ledger(database: Database, clock: Clock) -> Ledger:
    """A ledger with the account 'federation', instance level, cap 100, and three reservations."""
    ledger = Ledger(database, clock=clock)
    ledger.open_account("federation", "instance", 100)
    for name in ("reserved", "posted", "void"):
        ledger.reserve(name, CHARGES)
    ledger.post("posted")
    ledger.void("void", NothingLeft("void", "refused"))
    return ledger


NO_ID = "a reservation id is a text of at least one character"
PAGE = "a page has 1 to 1000 entries, found "
AFTER = "a page begins after a sequence number of at least 0, found "
SEARCH = "a search is a printable text of at most 256 characters"


@pytest.mark.parametrize(
    ("step", "kind", "said"),
    [
        (lambda of: of.state(""), InvalidSetting, NO_ID),
        (lambda of: of.reserve("", CHARGES), InvalidSetting, NO_ID),
        (lambda of: of.post(""), InvalidSetting, NO_ID),
        (lambda of: of.void("", NothingLeft("x", "refused")), InvalidSetting, NO_ID),
        (lambda of: of.write_off("federation", "instance", ""), InvalidSetting,
         "a reason is a text of at least one character"),
        (lambda of: of.entries(limit=0), InvalidSetting, PAGE + "0"),
        (lambda of: of.entries(limit=1001), InvalidSetting, PAGE + "1001"),
        (lambda of: of.entries(limit=1.0), InvalidSetting, PAGE + "1.0"),
        (lambda of: of.entries(after=-1), InvalidSetting, AFTER + "-1"),
        (lambda of: of.entries(after=MAX_AMOUNT + 1), InvalidSetting, AFTER + str(MAX_AMOUNT + 1)),
        (lambda of: of.entries(search="x" * 257), InvalidSetting, SEARCH),
        (lambda of: of.entries(search="\n"), InvalidSetting, SEARCH),
        (lambda of: of.entries(search=7), InvalidSetting, SEARCH),
        (lambda of: of.balance("nobody", "agent"), NotFound,
         "there is no account 'nobody' at the agent level; open it first"),
        (lambda of: of.balance("", "agent"), InvalidSetting,
         "the name of an account is a text of at least one character"),
        (lambda of: of.balance("a", "person"), InvalidSetting, "a level is 'instance' or 'agent', found 'person'"),
        (lambda of: of.post("unknown"), ProtocolViolation, "there is no reservation 'unknown'; reserve it first"),
        (lambda of: of.post("void"), PrivacyRefusal,
         "reservation 'void' was voided with a proof that nothing left, and is now reported as released; do not "
         "release, and find out which of the two is true"),
        (lambda of: of.void("posted", NothingLeft("posted", "refused")), PrivacyRefusal,
         "reservation 'posted' was released and stays charged for ever"),
        (lambda of: of.void("reserved", None), PrivacyRefusal,
         "voiding reservation 'reserved' needs a NothingLeft about it"),
        (lambda of: of.reserve("void", CHARGES), PrivacyRefusal,
         "reservation 'void' was voided and pays for nothing; use a new id"),
        (lambda of: of.check_not_behind(Head(9, "b" * 64)), JournalBehind, "another party has seen entry 9"),
    ],
)  # fmt: skip
def test_every_refusal_of_the_ledger_word_for_word(
    ledger: Ledger, step: Callable[[Any], object], kind: type[LabelerError], said: str
) -> None:
    head = ledger.head()
    with pytest.raises(kind) as refusal:
        step(ledger)
    if kind is JournalBehind:
        assert said in str(refusal.value)
        assert str(refusal.value).startswith("the journal journal.db ends at entry 6, and ")
    else:
        assert str(refusal.value) == said
    assert ledger.head() == head


def test_a_page_holds_a_hundred_unless_another_number_is_said_and_its_bounds_are_allowed(
    ledger: Ledger, database: Database
) -> None:
    ledger.open_account("many", "instance", None)
    with database.write() as connection:
        for number in range(110):
            ledger.reserve(f"small-{number}", [Charge("many", "instance", 1)], connection=connection)
    assert len(ledger.entries()) == 100
    assert len(ledger.entries(limit=1)) == 1
    assert len(ledger.entries(limit=1000)) == ledger.head().seq == 117
    assert ledger.entries(after=MAX_AMOUNT) == []
    assert ledger.entries(search="x" * 256) == []


def test_an_entry_that_cannot_be_read_is_told_without_its_content(ledger: Ledger, database: Database) -> None:
    with database.write() as connection:
        connection.execute(text("DROP TRIGGER ledger_entries_stay"))
        connection.execute(text("UPDATE ledger_entries SET detail = 'secret' WHERE seq = 2"))
    with pytest.raises(JournalBroken) as broken:
        ledger.entries()
    assert str(broken.value) == "an entry cannot be read; verify the journal to learn which"


@pytest.mark.parametrize(
    "step",
    [
        lambda of, held: of.open_account("new", "instance", 5, connection=held),
        lambda of, held: of.open_account("federation", "instance", 500, connection=held),
        lambda of, held: of.reserve("new", CHARGES, connection=held),
        lambda of, held: of.post("reserved", connection=held),
        lambda of, held: of.void("reserved", NothingLeft("reserved", "refused"), connection=held),
    ],
)
def test_every_step_is_undone_with_the_transaction_that_it_is_a_part_of(
    ledger: Ledger, database: Database, step: Callable[[Ledger, object], object]
) -> None:
    before = (ledger.head(), ledger.balances(), ledger.entries())

    def undone() -> None:
        with database.write() as connection:
            step(ledger, connection)
            assert ledger.head(connection=connection).seq == before[0].seq + 1
            raise KeyError

    with pytest.raises(KeyError):
        undone()
    assert (ledger.head(), ledger.balances(), ledger.entries()) == before


def test_the_entry_of_a_cap_is_about_no_reservation(ledger: Ledger) -> None:
    assert [(entry.kind, entry.reservation_id) for entry in ledger.entries(limit=2)] == [
        ("open", ""),
        ("reserve", "reserved"),
    ]


def test_a_write_off_is_named_after_its_place_in_the_ledger(ledger: Ledger) -> None:
    assert ledger.head().seq == 6
    assert ledger.write_off("federation", "instance", "the disk died") == 80
    assert [(entry.seq, entry.reservation_id) for entry in ledger.entries(after=6)] == [
        (7, "written-off-7"),
        (8, "written-off-7"),
    ]
    ledger.verify()


def test_a_journal_that_must_not_look_at_its_anchor_neither_reads_nor_writes_it(
    sqlite_place: Place, clock: Clock
) -> None:
    database = sqlite_place.open()
    Ledger(database, clock=clock, anchored=False).open_account("a", "instance", 5)
    assert not sqlite_place.anchor.exists()
    with pytest.raises(JournalBehind) as behind:
        Ledger(database, clock=clock)
    assert str(behind.value).startswith(
        "journal.head is missing beside the journal journal.db, which has 1 entries, so nobody can tell whether it is "
        "the newest copy. Put the file back from where the journal came from. "
    )


def test_a_journal_without_an_anchor_works_and_one_with_an_anchor_writes_it_unless_it_only_reads(
    sqlite_place: Place, clock: Clock
) -> None:
    without = Ledger(sqlite_place.open(with_anchor=False), clock=clock)
    assert without.head() == EMPTY
    assert not sqlite_place.anchor.exists()
    sqlite_place.close()
    assert Ledger(sqlite_place.open(read_only=True), clock=clock).head() == EMPTY
    assert not sqlite_place.anchor.exists()
    ledger = Ledger(sqlite_place.open(), clock=clock)
    assert Anchor(sqlite_place.anchor).read() == EMPTY
    ledger.open_account("a", "instance", 5)
    assert Anchor(sqlite_place.anchor).read() == ledger.head() != EMPTY


def test_a_refusal_for_budget_names_the_three_last_spenders_of_this_account_at_this_level(ledger: Ledger) -> None:
    ledger.open_account("federation", "agent", 100)
    ledger.open_account("other", "instance", 100)
    for name in ("monday", "tuesday", "wednesday"):
        ledger.reserve(name, CHARGES)
    ledger.post("monday")
    ledger.reserve("thursday", [Charge("federation", "agent", 3), Charge("other", "instance", 4)])
    with pytest.raises(BudgetExceeded) as refusal:
        ledger.reserve("friday", [Charge("federation", "instance", 51)])
    assert str(refusal.value) == (
        "account 'federation', instance level: 51 nano-units of mu^2 were asked for and 50 of 100 are left. Last "
        "spenders: monday (10), tuesday (10), wednesday (10). Ask fewer queries, raise sigma_votes, or raise the "
        "budget."
    )


def test_entries_are_found_by_their_level(ledger: Ledger) -> None:
    ledger.open_account("federation", "agent", 100)
    assert [entry.seq for entry in ledger.entries(level="instance")] == [1, 2, 3, 4, 5, 6]
    assert [entry.seq for entry in ledger.entries(level="agent")] == [7]


def test_every_statement_that_reads_several_entries_asks_for_their_order(ledger: Ledger, database: Database) -> None:
    """A database may return rows in any order that was not asked for; SQLite happens to return these in order."""
    asked: list[str] = []
    with database.write() as held:
        connection: Any = held.connection.driver_connection
        connection.set_trace_callback(asked.append)
        ledger.post("reserved", connection=held)
        connection.set_trace_callback(None)
    of_rows = [" ".join(sql.replace("ledger_entries.", "").split()) for sql in asked if sql.startswith("SELECT")]
    of_rows = [sql for sql in of_rows if "account" in sql and "FROM ledger_entries" in sql]
    assert of_rows
    assert all("ORDER BY seq" in sql for sql in of_rows)


def test_the_writer_of_a_journal_knows_its_head_without_a_look_once_it_was_durable(
    ledger: Ledger, database: Database, clock: Clock
) -> None:
    """Two ledgers over one journal, as two roles of a process have them: each knows what it has written itself."""
    other = Ledger(database, clock=clock)
    assert other.known_head() == other.head() == ledger.known_head() == ledger.head()
    before = ledger.head()
    with database.write() as held:
        ledger.reserve("first", CHARGES, connection=held)
        ledger.reserve("second", CHARGES, connection=held)
        at_ledger = ledger.head(connection=held)
        assert ledger.known_head() == before
        other.post("first", connection=held)
    assert (ledger.known_head(), other.known_head()) == (at_ledger, other.head())
    with database.read() as held:
        database_says = ledger.head(connection=held)
    assert database_says == other.known_head()

    def undone() -> None:
        with database.write() as held:
            other.post("second", connection=held)
            raise KeyError

    with pytest.raises(KeyError):
        undone()
    assert other.known_head() == database_says
    with database.write() as held:
        connection: Any = held.connection.driver_connection
        asked: list[str] = []
        connection.set_trace_callback(asked.append)
        assert other.known_head() == database_says
        connection.set_trace_callback(None)
    assert asked == []


def test_the_anchor_is_written_once_for_all_steps_of_a_transaction(
    ledger: Ledger, database: Database, sqlite_place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[Head] = []
    remember = Anchor.remember

    def noted(anchor: Anchor, head: Head) -> None:
        written.append(head)
        remember(anchor, head)

    monkeypatch.setattr(Anchor, "remember", noted)
    with database.write() as held:
        for name in ("first", "second", "third"):
            ledger.reserve(name, CHARGES, connection=held)
    assert written == [ledger.head()] == [Anchor(sqlite_place.anchor).read()]
