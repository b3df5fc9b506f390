"""An agent keeps of a round: one key, the first answer, and in the end nothing."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import text
from sqlalchemy.exc import IntegrityError

from labeler.errors import BadData, PrivacyRefusal, StorageFull
from labeler.ledger.agent_memory import AgentMemory, JournalRounds
from labeler.ledger.database import Database, open_database
from labeler.ledger.ledger import Charge, Ledger
from labeler.rounds.agent import NOT_KEPT, Recipients
from labeler.system.erasable import KEYS_FILE, KeyFolder, is_locked_away, lock_away, take_out
from labeler.system.faults import listening
from tests.full_disk import no_room
from tests.workers.journal_store import JournalStore

NOW = datetime(2026, 11, 20, 12, tzinfo=UTC)
ROUND, OTHER = "a" * 64, "b" * 64
TALLIERS: Recipients = (("tallier-0", "c" * 64), ("tallier-1", "d" * 64))
BODIES = (b"body for tallier 0", b"", b"body for tallier 2" * 1000)


def charged(store: JournalStore, round_digest: str, *, kept_until: datetime = NOW) -> None:
    """Take the price of a round and begin it, as workers.agent.ledger does."""
    ledger = Ledger(store.database, clock=lambda: NOW)
    ledger.open_account("agent:a", "instance", 1000)
    fields = {"round_digest": round_digest, "shard_version": "v", "reservation_id": round_digest, "num_queries": 1}
    task = {"task_digest": "f" * 64, "max_queries": 100, "charges": [Charge("agent:a", "instance", 1)]}
    with store.database.write() as connection:
        if AgentMemory(store.database, ledger).charge(**fields, **task, recipients=TALLIERS, connection=connection):
            store.rounds.open({round_digest: kept_until}, connection=connection)


@pytest.fixture
def database(tmp_path: Path) -> Iterator[Database]:
    with open_database(tmp_path / "journal.db", anchor=tmp_path / "journal.head", allow_unsynced=True) as database:
        yield database


@pytest.fixture
def keys(tmp_path: Path) -> KeyFolder:
    return KeyFolder(tmp_path / "erasable")


@pytest.fixture
def store(database: Database, keys: KeyFolder) -> JournalStore:
    return JournalStore(database, JournalRounds(database, keys))


def reopened(store: JournalStore, tmp_path: Path) -> JournalStore:
    """As a process that was started again opens it."""
    return JournalStore(store.database, JournalRounds(store.database, KeyFolder(tmp_path / "erasable")))


def test_a_round_has_one_key_also_after_a_restart(store: JournalStore, tmp_path: Path) -> None:
    charged(store, ROUND)
    key = store.key(ROUND)
    assert len(key) == 32
    assert store.key(ROUND) == reopened(store, tmp_path).key(ROUND) == key


def test_nothing_is_stored_before_it_is_and_the_first_answer_stands(store: JournalStore, tmp_path: Path) -> None:
    assert store.stored(ROUND, TALLIERS) is None
    charged(store, ROUND)
    assert store.stored(ROUND, TALLIERS) is None
    assert store.store(ROUND, TALLIERS, BODIES) == BODIES
    assert reopened(store, tmp_path).stored(ROUND, TALLIERS) == BODIES
    # A second answer, of other records: what was stored first may have left.
    assert reopened(store, tmp_path).store(ROUND, TALLIERS, [b"another"]) == BODIES
    assert store.stored(ROUND, TALLIERS) == BODIES


@pytest.mark.parametrize("was_stored", [False, True])
def test_an_erased_round_is_refused_for_ever_in_one_sentence(
    store: JournalStore, tmp_path: Path, was_stored: bool
) -> None:
    charged(store, ROUND)
    charged(store, OTHER)
    store.key(ROUND)
    if was_stored:
        store.store(ROUND, TALLIERS, BODIES)
    for _ in range(2):
        store.erase(ROUND)
    for one in (store, reopened(store, tmp_path)):
        for step in (
            lambda one=one: one.stored(ROUND, TALLIERS),
            lambda one=one: one.stored(ROUND, TALLIERS[::-1]),
            lambda one=one: one.key(ROUND),
            lambda one=one: one.store(ROUND, TALLIERS, BODIES),
        ):
            with pytest.raises(PrivacyRefusal) as refused:
                step()
            assert str(refused.value) == NOT_KEPT
    assert store.store(OTHER, TALLIERS, BODIES) == BODIES


def test_stores_do_not_print_what_they_keep(store: JournalStore) -> None:
    charged(store, ROUND)
    store.store(ROUND, TALLIERS, BODIES)
    shown = f"{store!r} {store}"
    assert "body for" not in shown
    assert store.key(ROUND).hex() not in shown


def test_a_round_that_was_not_charged_has_no_key(store: JournalStore) -> None:
    for step in (lambda: store.key(ROUND), lambda: store.store(ROUND, TALLIERS, BODIES)):
        with pytest.raises(PrivacyRefusal):
            step()
    store.erase(ROUND)
    charged(store, ROUND)
    assert store.store(ROUND, TALLIERS, BODIES) == BODIES


def test_nothing_of_an_answer_lies_in_the_journal_and_of_a_key_nowhere_once_it_is_erased(
    store: JournalStore, tmp_path: Path
) -> None:
    charged(store, ROUND)
    key = store.key(ROUND)
    store.store(ROUND, TALLIERS, BODIES)
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert not any(BODIES[0] in path.read_bytes() for path in files)
    assert [path.name for path in files if key.hex().encode() in path.read_bytes()] == [KEYS_FILE]
    store.erase(ROUND)
    kept = [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()]
    assert not any(key in data or key.hex().encode() in data for data in kept)


def test_what_nobody_may_ask_for_any_more_expires_and_only_that(store: JournalStore, keys: KeyFolder) -> None:
    charged(store, ROUND)
    charged(store, OTHER, kept_until=NOW + timedelta(hours=1))
    store.store(ROUND, TALLIERS, BODIES)
    assert store.expire(NOW) == []
    assert store.expire(NOW + timedelta(seconds=1)) == [ROUND]
    assert store.expire(NOW + timedelta(seconds=1)) == []
    assert keys.names() == [OTHER]


def test_a_start_erases_keys_that_open_nothing_and_closes_rounds_whose_key_is_gone(
    store: JournalStore, keys: KeyFolder, database: Database
) -> None:
    charged(store, ROUND)
    store.store(ROUND, TALLIERS, BODIES)
    charged(store, OTHER)
    keys.erase_all([ROUND])
    keys.draw("e" * 64)
    keys.draw("home")
    store.rounds.sweep()
    assert keys.names() == [OTHER, "home"]
    with database.read() as connection:
        rows = connection.execute(text("SELECT round_digest, state FROM agent_rounds")).all()
    assert {row.round_digest: row.state for row in rows} == {ROUND: "erased", OTHER: "charged"}


@contextmanager
def full_disk() -> Iterator[None]:
    """The disk is full from the moment on at which a key is drawn."""
    moments: list[str] = []

    def moment(what: str) -> None:
        moments.append(what)
        if what == "commit" and "keys kept" in moments:
            raise no_room()

    with listening(moment):
        yield


def test_a_key_of_a_charge_that_was_not_kept_is_erased_by_the_process_that_drew_it(
    store: JournalStore, keys: KeyFolder, tmp_path: Path
) -> None:
    charged(store, ROUND)
    store.store(ROUND, TALLIERS, BODIES)
    keys.draw("home")
    for _ in range(2):
        with pytest.raises(StorageFull), full_disk():
            charged(store, OTHER)
        drawn = keys.read(OTHER)
        assert drawn is not None, "a key is durable before its row"
        store.rounds.tidy()
        assert keys.names() == [ROUND, "home"]
        assert not any(drawn in path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    # Charged after all: with another key, which stays.
    charged(store, OTHER)
    store.rounds.tidy()
    assert store.key(OTHER) != drawn
    assert store.stored(ROUND, TALLIERS) == BODIES


def test_a_key_whose_charge_was_kept_although_its_writer_was_told_otherwise_stays(
    store: JournalStore, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = JournalRounds.open

    def told_otherwise() -> None:
        raise StorageFull("its answer was lost")

    def opening(self: JournalRounds, *arguments: Any, **named: Any) -> None:
        opened(self, *arguments, **named)
        database.after_commit(told_otherwise)

    monkeypatch.setattr(JournalRounds, "open", opening)
    with pytest.raises(StorageFull):
        charged(store, ROUND)
    key = store.key(ROUND)
    store.rounds.tidy()
    assert store.key(ROUND) == key


def test_a_key_that_could_not_be_overwritten_is_erased_as_soon_as_it_can(database: Database, tmp_path: Path) -> None:
    class Failing(KeyFolder):
        fails = True

        def erase_all(self, names: Collection[str]) -> None:
            if names and self.fails:
                raise OSError("input/output error")
            super().erase_all(names)

    keys = Failing(tmp_path / "erasable")
    store = JournalStore(database, JournalRounds(database, keys))
    charged(store, ROUND)
    for step in (lambda: store.erase(ROUND), store.rounds.tidy):
        with pytest.raises(OSError, match="input/output"):
            step()
        assert keys.names() == [ROUND]
    keys.fails = False
    store.rounds.tidy()
    assert keys.names() == []
    with pytest.raises(PrivacyRefusal):
        store.key(ROUND)


def test_an_answer_that_was_changed_or_moved_to_another_round_is_found_out(keys: KeyFolder) -> None:
    locked = lock_away(keys.draw(ROUND), ROUND, BODIES)
    assert is_locked_away(locked)
    assert take_out(keys.draw(ROUND), ROUND, locked) == BODIES
    for key, context, data in (
        (keys.draw(OTHER), ROUND, locked),
        (keys.draw(ROUND), OTHER, locked),
        (keys.draw(ROUND), ROUND, locked[:-1] + bytes([locked[-1] ^ 1])),
        (keys.draw(ROUND), ROUND, locked[:20]),
        (keys.draw(ROUND), ROUND, b""),
    ):
        with pytest.raises(BadData):
            take_out(key, context, data)


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE agent_rounds SET state = 'charged', answer = NULL",
        "UPDATE agent_rounds SET answer = x'00'",
        "UPDATE agent_rounds SET kept_until = '2099-01-01T00:00:00.000000Z'",
        "DELETE FROM agent_rounds",
        f"INSERT INTO agent_rounds VALUES ('{OTHER}', 'charged', '2099-01-01T00:00:00.000000Z', NULL)",
    ],
)
def test_the_database_itself_keeps_what_was_stored(store: JournalStore, database: Database, statement: str) -> None:
    charged(store, ROUND)
    store.store(ROUND, TALLIERS, BODIES)
    with pytest.raises(IntegrityError), database.write() as connection:
        connection.execute(text(statement))
    assert store.stored(ROUND, TALLIERS) == BODIES


def test_the_database_itself_never_brings_an_erased_round_back(store: JournalStore, database: Database) -> None:
    charged(store, ROUND)
    store.erase(ROUND)
    with pytest.raises(IntegrityError), database.write() as connection:
        connection.execute(text("UPDATE agent_rounds SET state = 'stored', answer = x'00'"))
