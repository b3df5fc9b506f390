"""What an agent trained is kept once: read again by a retry, forgotten with the records, seen by nobody else."""

from __future__ import annotations

import stat
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from feature_store.journal.agent_models import JournalModels, agent_models
from feature_store.journal.database import open_database
from labeler.errors import BadData, JournalBroken
from workers.voting.model_store import FolderModels, InMemoryModels, ModelStore

MODEL = np.array([[3, -4], [5, 2**60]], dtype=np.int64)


@pytest.fixture(params=["memory", "folder", "journal"])
def open_store(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[], ModelStore]:
    """Opens the same store each time, as a process does that was started again; memory lives as long as its object."""
    if request.param == "memory":
        kept = InMemoryModels()
        return lambda: kept
    if request.param == "folder":
        return lambda: FolderModels(tmp_path / "models")
    return lambda: JournalModels(open_database(tmp_path / "journal.db"))


def never() -> np.ndarray:
    raise AssertionError("trained again")


def test_a_model_is_made_once_and_read_back_exactly(open_store: Callable[[], ModelStore]) -> None:
    assert np.array_equal(open_store().once("v1", "m", lambda: MODEL), MODEL)
    again = open_store().once("v1", "m", never)
    assert again.dtype == np.int64
    assert np.array_equal(again, MODEL)


def test_two_names_are_two_models(open_store: Callable[[], ModelStore]) -> None:
    store = open_store()
    store.once("v1", "m", lambda: MODEL)
    assert np.array_equal(store.once("v1", "other", lambda: MODEL + 1), MODEL + 1)
    assert np.array_equal(store.once("v1", "m", never), MODEL)


def test_a_deleted_record_does_not_live_on_in_a_model(open_store: Callable[[], ModelStore]) -> None:
    store = open_store()
    store.once("v1", "m", lambda: MODEL)
    store.once("v2", "m", lambda: MODEL + 1)
    made_again: list[bool] = []
    store.once("v1", "m", lambda: (made_again.append(True), MODEL)[1])
    assert made_again


def test_a_failed_training_leaves_nothing(open_store: Callable[[], ModelStore]) -> None:
    with pytest.raises(AssertionError):
        open_store().once("v1", "m", never)
    assert np.array_equal(open_store().once("v1", "m", lambda: MODEL), MODEL)


def test_files_are_for_their_owner_only_and_damage_is_found(tmp_path: Path) -> None:
    store = FolderModels(tmp_path / "models")
    store.once("v1", "m", lambda: MODEL)
    (path,) = (tmp_path / "models").iterdir()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE((tmp_path / "models").stat().st_mode) == 0o700
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(BadData, match="cannot be repeated"):
        store.once("v1", "m", never)


def test_a_model_in_the_journal_cannot_be_changed_and_damage_is_found(tmp_path: Path) -> None:
    database = open_database(tmp_path / "journal.db")
    JournalModels(database).once("v1", "m", lambda: MODEL)
    with pytest.raises(Exception, match="what was written to agent_models stays"), database.write() as connection:
        connection.execute(agent_models.update().values(numbers=b"x"))
    with database.write() as connection:
        connection.execute(agent_models.delete())
        connection.execute(agent_models.insert(), {"shard_version": "v1", "name": "m", "numbers": b"no array"})
    with pytest.raises(JournalBroken, match="damaged"):
        JournalModels(database).once("v1", "m", never)


def test_stores_do_not_print_what_they_keep(open_store: Callable[[], ModelStore]) -> None:
    store = open_store()
    store.once("v1", "m", lambda: MODEL)
    assert str(2**60) not in repr(store)
