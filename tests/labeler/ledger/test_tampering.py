"""A journal that was edited, cut, replaced by an older copy or lost its anchor is refused, with what to do."""

from __future__ import annotations

import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import psycopg
import pytest

from labeler.errors import InvalidSetting, JournalBehind, JournalBroken, Unavailable
from labeler.ledger.backup import accept_restored
from labeler.ledger.chain import EMPTY, Anchor, Head
from labeler.ledger.ledger import Charge, Ledger
from tests.labeler.ledger.conftest import Clock, Place, undone

CHARGES = [Charge("federation", "instance", 10)]


def tamper(place: Place, *statements: str) -> None:
    """Change tables behind the journal's back, with its triggers switched off."""
    place.close()
    if place.dialect == "sqlite":
        with closing(sqlite3.connect(place.target)) as connection, connection:
            for name in ("stay", "remain", "follow"):
                connection.execute(f"DROP TRIGGER ledger_entries_{name}")
            for statement in statements:
                connection.execute(statement)
        return
    with psycopg.connect(place.target) as connection:
        connection.execute("ALTER TABLE ledger_entries DISABLE TRIGGER USER")
        for statement in statements:
            connection.execute(statement)  # type: ignore[call-overload]  # a statement of this test


@pytest.fixture
def filled(place: Place, clock: Clock) -> Place:
    """A closed journal: an account and five reservations, two of them posted; six entries and two."""
    ledger = Ledger(place.open(), clock=clock)
    ledger.open_account("federation", "instance", 100)
    for number in range(5):
        ledger.reserve(f"job-{number}", CHARGES)
    ledger.post("job-0")
    ledger.post("job-1")
    place.close()
    return place


@pytest.mark.parametrize(
    ("change", "seq"),
    [
        ("UPDATE ledger_entries SET amount = 9 WHERE seq = 3", 3),
        ("UPDATE ledger_entries SET detail = '{\"cap\":1000}', amount = 1000 WHERE seq = 1", 1),
        ("DELETE FROM ledger_entries WHERE seq = 4", 4),
        ("DELETE FROM ledger_entries WHERE seq = 1", 1),
        ("UPDATE ledger_entries SET previous_hash = hash WHERE seq = 6", 6),
    ],
)
def test_the_first_entry_that_does_not_hold_is_named(filled: Place, clock: Clock, change: str, seq: int) -> None:
    tamper(filled, change)
    with pytest.raises(JournalBroken, match=rf"^entry {seq} .*restore the newest backup"):
        Ledger(filled.open(), clock=clock).verify()


def test_a_chain_that_was_computed_anew_is_caught_by_the_anchor_and_by_witnesses(filled: Place, clock: Clock) -> None:
    """An attacker who edits an entry can also compute all later hashes, but not change the head that others know."""
    seen = Ledger(filled.open(), clock=clock).head()
    filled.close()
    tamper(filled, f"UPDATE ledger_entries SET hash = '{'a' * 64}' WHERE seq = 8")
    database = filled.open()
    with pytest.raises(JournalBehind, match=r"has another entry 8 than journal.head has seen"):
        Ledger(database, clock=clock)
    with pytest.raises(JournalBehind, match="than hospital-2 has seen"):
        Ledger(database, clock=clock, anchored=False).check_not_behind(seen, witness="hospital-2")


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ("UPDATE ledger_accounts SET spent = 20", "balance of account 'federation'/'instance'"),
        ("UPDATE ledger_accounts SET cap = 1000", "balance of account 'federation'/'instance'"),
        ("DELETE FROM ledger_reservations WHERE reservation_id = 'job-3'", "state of reservation 'job-3'"),
        (
            "UPDATE ledger_reservations SET state = 'reserved', settled_seq = NULL WHERE reservation_id = 'job-0'",
            "state of reservation 'job-0'",
        ),
    ],
)
def test_a_balance_that_is_not_the_sum_of_its_entries_is_named(
    filled: Place, clock: Clock, change: str, what: str
) -> None:
    tamper(filled, change)
    with pytest.raises(JournalBroken, match=what):
        Ledger(filled.open(), clock=clock).verify()


def test_a_step_that_the_stored_balance_makes_impossible_is_refused_whole(filled: Place, clock: Clock) -> None:
    tamper(filled, "UPDATE ledger_accounts SET spent = 20, posted = 20")
    ledger = Ledger(filled.open(), clock=clock)
    head = ledger.head()
    with pytest.raises(JournalBroken, match="Verify the journal"):
        ledger.post("job-2")
    assert (ledger.head(), ledger.state("job-2")) == (head, "reserved")


def test_a_journal_without_its_last_entries_is_refused(filled: Place, clock: Clock) -> None:
    tamper(
        filled,
        "DELETE FROM ledger_entries WHERE seq > 6",
        "UPDATE ledger_reservations SET state = 'reserved', settled_seq = NULL",
        "UPDATE ledger_accounts SET posted = 0",
    )
    database = filled.open()
    with pytest.raises(JournalBehind, match=r"ends at entry 6, and journal.head has seen entry 8.*newest backup"):
        Ledger(database, clock=clock)
    assert Ledger(database, clock=clock, anchored=False).verify().seq == 6, "by itself it looks whole"


def test_an_emptied_journal_is_refused(filled: Place, clock: Clock, tmp_path: Path) -> None:
    if filled.dialect == "sqlite":
        filled.target = str(tmp_path / "new.db")
    else:
        tamper(filled, "DROP SCHEMA public CASCADE", "CREATE SCHEMA public")
    with pytest.raises(JournalBehind, match="ends at entry 0"):
        Ledger(filled.open(), clock=clock)


def test_an_older_copy_is_refused_also_after_it_went_on_by_itself(sqlite_place: Place, clock: Clock) -> None:
    path = Path(sqlite_place.target)
    ledger = Ledger(sqlite_place.open(), clock=clock)
    ledger.open_account("federation", "instance", 100)
    ledger.reserve("monday", CHARGES)
    sqlite_place.close()
    shutil.copy(path, path.with_suffix(".monday"))
    ledger = Ledger(sqlite_place.open(), clock=clock)
    ledger.reserve("tuesday", CHARGES)
    seen = ledger.head()
    sqlite_place.close()
    shutil.copy(path.with_suffix(".monday"), path)
    with pytest.raises(JournalBehind, match="older copy, and what was charged since is missing"):
        Ledger(sqlite_place.open(), clock=clock)
    sqlite_place.close()
    gone_on = Ledger(sqlite_place.open(with_anchor=False), clock=clock)
    gone_on.reserve("wednesday", CHARGES)
    gone_on.reserve("thursday", CHARGES)
    with pytest.raises(JournalBehind, match="another entry 3 than hospital-1 has seen"):
        gone_on.check_not_behind(seen, witness="hospital-1")
    sqlite_place.close()
    with pytest.raises(JournalBehind, match="another entry 3"):
        Ledger(sqlite_place.open(), clock=clock)


def test_a_journal_whose_anchor_is_missing_or_damaged_is_refused(filled: Place, clock: Clock) -> None:
    filled.anchor.unlink()
    database = filled.open()
    with pytest.raises(JournalBehind, match=r"journal.head is missing beside .*which has 8 entries.*accept-restored"):
        Ledger(database, clock=clock)
    for damaged in (b"", b"{}", b'{"seq": 8, "hash": "00", "check": ""}', b"[" * 5000):
        filled.anchor.write_bytes(damaged)
        with pytest.raises(JournalBehind, match=r"journal.head is damaged"):
            Ledger(database, clock=clock)


def test_a_journal_ahead_of_its_anchor_is_in_order(filled: Place, clock: Clock) -> None:
    """Such a journal is left by a crash between the commit and the anchor."""
    older = filled.anchor.read_bytes()
    ledger = Ledger(filled.open(), clock=clock)
    ledger.post("job-2")
    assert filled.anchor.read_bytes() != older
    filled.close()
    filled.anchor.write_bytes(older)
    assert Ledger(filled.open(), clock=clock).verify().seq == 9


def test_the_anchor_remembers_every_commit_and_nothing_that_was_undone(place: Place, clock: Clock) -> None:
    database = place.open()
    ledger = Ledger(database, clock=clock)
    anchor = Anchor(place.anchor)
    assert anchor.read() == EMPTY
    assert place.anchor.stat().st_mode & 0o777 == 0o600
    ledger.open_account("federation", "instance", 100)
    for number in range(3):
        ledger.reserve(f"job-{number}", CHARGES)
        assert anchor.read() == ledger.head()
    before = anchor.read()
    with undone(database) as connection:
        ledger.reserve("undone", CHARGES, connection=connection)
    assert anchor.read() == before
    with database.write():
        assert anchor.read() == before, "an undone entry must not be remembered by the next transaction"
    assert anchor.read() == before


def test_a_witness_of_an_earlier_or_the_same_head_is_content(filled: Place, clock: Clock) -> None:
    ledger = Ledger(filled.open(), clock=clock)
    for entry in ledger.entries():
        ledger.check_not_behind(Head(entry.seq, entry.hash))
    ledger.check_not_behind(EMPTY)
    with pytest.raises(JournalBehind, match="seen entry 9"):
        ledger.check_not_behind(Head(9, "b" * 64))


def test_an_accepted_older_copy_has_nothing_left_to_spend(filled: Place, clock: Clock) -> None:
    database = filled.open()
    with_more = Ledger(database, clock=clock)
    with_more.open_account("recorded", "agent", None)
    for _ in range(2):  # a crash after the write-off: the same command again
        filled.anchor.unlink(missing_ok=True)
        head = accept_restored(database, clock=clock, reason="the disk died, Monday's copy is the newest")
        ledger = Ledger(database, clock=clock)
        assert ledger.verify() == head
    assert ledger.balance("federation", "instance").left == 0
    assert ledger.entries()[-1].detail == {"written_off": "the disk died, Monday's copy is the newest"}


def test_a_copy_that_does_not_hold_by_itself_cannot_be_accepted(filled: Place, clock: Clock) -> None:
    tamper(filled, "UPDATE ledger_entries SET amount = 9 WHERE seq = 3")
    with pytest.raises(JournalBroken, match="entry 3"):
        accept_restored(filled.open(), clock=clock, reason="why not")
    filled.close()
    without = filled.open(with_anchor=False)
    with pytest.raises(InvalidSetting, match="without an anchor"):
        accept_restored(without, clock=clock, reason="why not")


def test_an_anchor_that_cannot_be_written_is_told_and_the_step_is_kept(ledger: Ledger, place: Place) -> None:
    place.anchor.unlink()
    place.anchor.mkdir()
    with pytest.raises(Unavailable, match=r"journal.head cannot be written .*twice equals once"):
        ledger.reserve("job", CHARGES)
    place.anchor.rmdir()
    assert ledger.reserve("job", CHARGES) == 2
    ledger.post("job")
    assert Anchor(place.anchor).read() == ledger.head()


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
