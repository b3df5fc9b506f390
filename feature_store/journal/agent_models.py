"""Models that older versions kept in an agent's journal, in clear; they are forgotten at the first start of this one.

A model that was trained on private records and carries no noise must not outlive its round: it lives in memory only.
"""

from __future__ import annotations

from sqlalchemy import Column, LargeBinary, Text, delete, inspect, select

from feature_store.journal.database import Database, strict_table
from feature_store.journal.rules import stay

agent_models = strict_table(
    "agent_models",
    Column("shard_version", Text, primary_key=True),
    Column("name", Text, primary_key=True),
    Column("numbers", LargeBinary, nullable=False),
)
stay(agent_models, ("shard_version", "name", "numbers"))


def forget_models(database: Database) -> None:
    """Delete every model in the journal, and what the write-ahead log holds of them; nothing happens where none is."""
    with database.read() as connection:
        if not inspect(connection).has_table(agent_models.name):
            return
        if connection.execute(select(agent_models.c.name).limit(1)).first() is None:
            return
    with database.write() as connection:
        connection.execute(delete(agent_models))
    database.forget_log()
