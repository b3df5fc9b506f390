"""Models that an older version kept in an agent's journal are gone after the first start, from every file of it."""

from __future__ import annotations

from pathlib import Path

import pytest
from feature_store.journal.agent_models import agent_models, forget_models
from sqlalchemy import inspect, text

from feature_store.journal.database import Database
from tests.feature_store.journal.conftest import Place

MODEL = b"weights without noise" * 1000


def keep_as_before(database: Database) -> None:
    """As the version before wrote it."""
    database.create(agent_models)
    with database.write() as connection:
        connection.execute(agent_models.insert(), {"shard_version": "v", "name": "m", "numbers": MODEL})


@pytest.mark.parametrize("times", [1, 2])
def test_models_of_an_older_version_are_forgotten(database: Database, times: int) -> None:
    keep_as_before(database)
    for _ in range(times):
        forget_models(database)
    with database.read() as connection:
        assert connection.execute(text("SELECT count(*) FROM agent_models")).scalar() == 0


def test_nothing_of_them_is_left_in_a_file(sqlite_place: Place) -> None:
    database = sqlite_place.open()
    keep_as_before(database)
    forget_models(database)
    folder = Path(sqlite_place.target).parent
    assert not any(b"weights without noise" in path.read_bytes() for path in folder.iterdir())


def test_a_journal_that_never_had_any_stays_as_it_is(database: Database) -> None:
    forget_models(database)
    with database.read() as connection:
        assert not inspect(connection).has_table("agent_models")
