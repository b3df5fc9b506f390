"""Models in an agent's journal, on either database: kept once, never changed, forgotten with their records."""

from __future__ import annotations

import numpy as np
import pytest

from feature_store.journal.agent_models import JournalModels, agent_models
from feature_store.journal.database import Database

MODEL = np.arange(-6, 6, dtype=np.int64).reshape(3, 4) * 2**50


def test_a_model_is_read_back_exactly_and_forgotten_with_its_version(database: Database) -> None:
    models = JournalModels(database)
    assert np.array_equal(models.once("v1", "m", lambda: MODEL), MODEL)
    assert np.array_equal(JournalModels(database).once("v1", "m", lambda: MODEL + 1), MODEL)
    models.once("v2", "m", lambda: MODEL + 2)
    assert np.array_equal(models.once("v1", "m", lambda: MODEL + 3), MODEL + 3)


def test_the_database_itself_refuses_to_change_a_model(database: Database) -> None:
    JournalModels(database).once("v1", "m", lambda: MODEL)
    with pytest.raises(Exception, match="what was written to agent_models stays"), database.write() as connection:
        connection.execute(agent_models.update().values(numbers=b"other"))
