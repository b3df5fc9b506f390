"""What an agent trained and answered with, in its journal: kept before the answer leaves, and never changed.

An answer is replayed under the same noise, so it must be the same. A model that was trained again could differ in its
last bits, and the difference of two answers would leave without noise. In the journal it shares the fate of the
charges: whoever restores one restores the other, and an older copy is found out.
"""

from __future__ import annotations

import io
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray
from sqlalchemy import Column, LargeBinary, Table, Text, delete, insert, select

from feature_store.journal.database import Database, metadata
from feature_store.journal.rules import stay
from labeler.errors import JournalBroken

agent_models = Table(
    "agent_models",
    metadata,
    Column("shard_version", Text, primary_key=True),
    Column("name", Text, primary_key=True),
    Column("numbers", LargeBinary, nullable=False),
    sqlite_strict=True,
)
stay(agent_models, ("shard_version", "name", "numbers"))


class JournalModels:
    """A `workers.voting.model_store.ModelStore` in an agent's journal. Private: as secret as the records.

    Args:
        database: the agent's journal.
    """

    def __init__(self, database: Database) -> None:
        self._database = database
        database.create(agent_models)

    def once(self, version: str, name: str, make: Callable[[], NDArray[np.int64]]) -> NDArray[np.int64]:
        """What is kept under (version, name); made and kept, durably, where there is nothing yet.

        What was made of another version of the records is forgotten: a deleted record must not live on in a model.

        Raises:
            JournalBroken: what is kept is damaged.
        """
        table = agent_models
        with self._database.read() as connection:
            this = (table.c.shard_version == version) & (table.c.name == name)
            kept = connection.execute(select(table.c.numbers).where(this)).scalar()
        if kept is not None:
            return _numbers(bytes(kept))
        made = make()
        buffer = io.BytesIO()
        np.save(buffer, made, allow_pickle=False)
        with self._database.write() as connection:
            connection.execute(delete(table).where(table.c.shard_version != version))
            connection.execute(insert(table), {"shard_version": version, "name": name, "numbers": buffer.getvalue()})
        return made

    def __repr__(self) -> str:
        return "JournalModels(<private>)"


def _numbers(data: bytes) -> NDArray[np.int64]:
    try:
        numbers = np.load(io.BytesIO(data), allow_pickle=False)
    except (ValueError, EOFError, OSError):
        numbers = None
    if not isinstance(numbers, np.ndarray) or numbers.dtype != np.int64:
        raise JournalBroken("a model that this agent had answered with is damaged; restore the journal from a backup")
    return numbers
