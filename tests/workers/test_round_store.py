"""An agent keeps of a round: one key, the first answer, and in the end nothing."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
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
from labeler.system.erasable import KEYS_FILE, ErasableKeys, KeyFolder, is_locked_away, lock_away, take_out
from labeler.system.faults import listening
from tests.full_disk import no_room
from tests.workers.journal_store import JournalStore

NOW = datetime(2026, 11, 20, 12, tzinfo=UTC)
ROUND, OTHER = "a" * 64, "b" * 64
TALLIERS: Recipients = (("tallier-0", "c" * 64), ("tallier-1", "d" * 64))
BODIES = (b"body for tallier 0", b"", b"body for tallier 2" * 1000)


def journal_store(database: Database, folder: Path, keys: ErasableKeys | None = None) -> JournalStore:
    return JournalStore(database, JournalRounds(database, keys or KeyFolder(folder / "erasable")))


def charged(store: JournalStore, round_digest: str, *, kept_until: datetime) -> None:
    """Take the price of a round and begin it, as workers.agent.ledger does."""
    database, rounds = store.database, store.rounds
    ledger = Ledger(database, clock=lambda: NOW)
    ledger.open_account("agent:a", "instance", 1000)
    memory = AgentMemory(database, ledger)
    with database.write() as connection:
        if memory.charge(
            round_digest=round_digest,
            shard_version="v",
            reservation_id=round_digest,
            charges=[Charge("agent:a", "instance", 1)],
            num_queries=1,
            task_digest="f" * 64,
            max_queries=100,
            recipients=TALLIERS,
            connection=connection,
        ):
            rounds.open({round_digest: kept_until}, connection=connection)


@dataclass
class Kept:
    """A store, how a round's price is taken for it, and how a process that was started again opens it."""

    store: JournalStore
    charge: Callable[[str], None]
    reopen: Callable[[], JournalStore]


@pytest.fixture
def database(tmp_path: Path) -> Iterator[Database]:
    with open_database(tmp_path / "journal.db", anchor=tmp_path / "journal.head", allow_unsynced=True) as database:
        yield database


@pytest.fixture
def kept(database: Database, tmp_path: Path) -> Kept:
    store = journal_store(database, tmp_path)
    until = NOW + timedelta(hours=1)
    return Kept(store, lambda one: charged(store, one, kept_until=until), lambda: journal_store(database, tmp_path))


def test_a_round_has_one_key_also_after_a_restart(kept: Kept) -> None:
    kept.charge(ROUND)
    key = kept.store.key(ROUND)
    assert len(key) == 32
    assert kept.store.key(ROUND) == kept.reopen().key(ROUND) == key


def test_nothing_is_stored_before_it_is_and_the_first_answer_stands(kept: Kept) -> None:
    assert kept.store.stored(ROUND, TALLIERS) is None
    kept.charge(ROUND)
    assert kept.store.stored(ROUND, TALLIERS) is None
    assert kept.store.store(ROUND, TALLIERS, BODIES) == BODIES
    assert kept.reopen().stored(ROUND, TALLIERS) == BODIES
    # A second answer, of other records: what was stored first may have left.
    assert kept.reopen().store(ROUND, TALLIERS, [b"another"]) == BODIES
    assert kept.store.stored(ROUND, TALLIERS) == BODIES


@pytest.mark.parametrize("was_stored", [False, True])
def test_an_erased_round_is_refused_for_ever_in_one_sentence(kept: Kept, was_stored: bool) -> None:
    kept.charge(ROUND)
    kept.charge(OTHER)
    kept.store.key(ROUND)
    if was_stored:
        kept.store.store(ROUND, TALLIERS, BODIES)
    for _ in range(2):
        kept.store.erase(ROUND)
    for store in (kept.store, kept.reopen()):
        for step in (
            lambda store=store: store.stored(ROUND, TALLIERS),
            lambda store=store: store.stored(ROUND, TALLIERS[::-1]),
            lambda store=store: store.key(ROUND),
            lambda store=store: store.store(ROUND, TALLIERS, BODIES),
        ):
            with pytest.raises(PrivacyRefusal) as refused:
                step()
            assert str(refused.value) == NOT_KEPT
    assert kept.store.store(OTHER, TALLIERS, BODIES) == BODIES


def test_stores_do_not_print_what_they_keep(kept: Kept) -> None:
    kept.charge(ROUND)
    kept.store.store(ROUND, TALLIERS, BODIES)
    shown = f"{kept.store!r} {kept.store}"
    assert "body for" not in shown
    assert kept.store.key(ROUND).hex() not in shown


def test_a_round_that_was_not_charged_has_no_key(database: Database, tmp_path: Path) -> None:
    rounds = journal_store(database, tmp_path)
    for step in (lambda: rounds.key(ROUND), lambda: rounds.store(ROUND, TALLIERS, BODIES)):
        with pytest.raises(PrivacyRefusal):
            step()
    rounds.erase(ROUND)
    charged(rounds, ROUND, kept_until=NOW)
    assert rounds.store(ROUND, TALLIERS, BODIES) == BODIES


def test_nothing_of_an_answer_lies_in_the_journal_and_of_a_key_nowhere_once_it_is_erased(
    database: Database, tmp_path: Path
) -> None:
    rounds = journal_store(database, tmp_path)
    charged(rounds, ROUND, kept_until=NOW)
    key = rounds.key(ROUND)
    rounds.store(ROUND, TALLIERS, BODIES)
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert not any(BODIES[0] in path.read_bytes() for path in files)
    assert [path.name for path in files if key.hex().encode() in path.read_bytes()] == [KEYS_FILE]
    rounds.erase(ROUND)
    kept = [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()]
    assert not any(key in data or key.hex().encode() in data for data in kept)


def test_what_nobody_may_ask_for_any_more_expires_and_only_that(database: Database, tmp_path: Path) -> None:
    keys = KeyFolder(tmp_path / "erasable")
    rounds = journal_store(database, tmp_path, keys)
    charged(rounds, ROUND, kept_until=NOW)
    charged(rounds, OTHER, kept_until=NOW + timedelta(hours=1))
    rounds.store(ROUND, TALLIERS, BODIES)
    assert rounds.expire(NOW) == []
    assert rounds.expire(NOW + timedelta(seconds=1)) == [ROUND]
    assert rounds.expire(NOW + timedelta(seconds=1)) == []
    assert keys.names() == [OTHER]


def test_a_start_erases_keys_that_open_nothing_and_closes_rounds_whose_key_is_gone(
    database: Database, tmp_path: Path
) -> None:
    keys = KeyFolder(tmp_path / "erasable")
    rounds = journal_store(database, tmp_path, keys)
    charged(rounds, ROUND, kept_until=NOW)
    rounds.store(ROUND, TALLIERS, BODIES)
    charged(rounds, OTHER, kept_until=NOW)
    keys.erase_all([ROUND])
    keys.draw("e" * 64)
    keys.draw("home")
    rounds.rounds.sweep()
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
    database: Database, tmp_path: Path
) -> None:
    keys = KeyFolder(tmp_path / "erasable")
    rounds = journal_store(database, tmp_path, keys)
    charged(rounds, ROUND, kept_until=NOW)
    rounds.store(ROUND, TALLIERS, BODIES)
    keys.draw("home")
    for _ in range(2):
        with pytest.raises(StorageFull), full_disk():
            charged(rounds, OTHER, kept_until=NOW)
        drawn = keys.read(OTHER)
        assert drawn is not None, "a key is durable before its row"
        rounds.rounds.tidy()
        assert keys.names() == [ROUND, "home"]
        assert not any(drawn in path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    # Charged after all: with another key, which stays.
    charged(rounds, OTHER, kept_until=NOW)
    rounds.rounds.tidy()
    assert rounds.key(OTHER) != drawn
    assert rounds.stored(ROUND, TALLIERS) == BODIES


def test_a_key_whose_charge_was_kept_although_its_writer_was_told_otherwise_stays(
    database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rounds = journal_store(database, tmp_path)
    opened = JournalRounds.open

    def told_otherwise() -> None:
        raise StorageFull("its answer was lost")

    def opening(self: JournalRounds, *arguments: Any, **named: Any) -> None:
        opened(self, *arguments, **named)
        database.after_commit(told_otherwise)

    monkeypatch.setattr(JournalRounds, "open", opening)
    with pytest.raises(StorageFull):
        charged(rounds, ROUND, kept_until=NOW)
    key = rounds.key(ROUND)
    rounds.rounds.tidy()
    assert rounds.key(ROUND) == key


def test_a_key_that_could_not_be_overwritten_is_erased_as_soon_as_it_can(database: Database, tmp_path: Path) -> None:
    class Failing(KeyFolder):
        fails = True

        def erase_all(self, names: Collection[str]) -> None:
            if names and self.fails:
                raise OSError("input/output error")
            super().erase_all(names)

    keys = Failing(tmp_path / "erasable")
    rounds = journal_store(database, tmp_path, keys)
    charged(rounds, ROUND, kept_until=NOW)
    for step in (lambda: rounds.erase(ROUND), rounds.rounds.tidy):
        with pytest.raises(OSError, match="input/output"):
            step()
        assert keys.names() == [ROUND]
    keys.fails = False
    rounds.rounds.tidy()
    assert keys.names() == []
    with pytest.raises(PrivacyRefusal):
        rounds.key(ROUND)


def test_an_answer_that_was_changed_or_moved_to_another_round_is_found_out(database: Database, tmp_path: Path) -> None:
    keys = KeyFolder(tmp_path / "erasable")
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
def test_the_database_itself_keeps_what_was_stored(database: Database, tmp_path: Path, statement: str) -> None:
    rounds = journal_store(database, tmp_path)
    charged(rounds, ROUND, kept_until=NOW)
    rounds.store(ROUND, TALLIERS, BODIES)
    with pytest.raises(IntegrityError), database.write() as connection:
        connection.execute(text(statement))
    assert rounds.stored(ROUND, TALLIERS) == BODIES


def test_the_database_itself_never_brings_an_erased_round_back(database: Database, tmp_path: Path) -> None:
    rounds = journal_store(database, tmp_path)
    charged(rounds, ROUND, kept_until=NOW)
    rounds.erase(ROUND)
    with pytest.raises(IntegrityError), database.write() as connection:
        connection.execute(text("UPDATE agent_rounds SET state = 'stored', answer = x'00'"))
