"""Tests make the tables of a journal from statements that were compiled once.

SQLAlchemy compiles 150 statements for each new journal, three quarters of the work of opening one, and tests open
thousands. The statements are the same, and so are the tables; on PostgreSQL a copy of a made journal saves more
(`tests/postgres_server.py`). Imported by `tests/conftest.py` and by the server that federations are forked from
(`tests/forked_command.py`).
"""

from __future__ import annotations

from contextlib import closing
from functools import lru_cache
from typing import Any

from sqlalchemy import Connection, create_mock_engine

from labeler.ledger import schema


@lru_cache
def _statements() -> tuple[str, ...]:
    """What makes the tables of a journal in SQLite, with their indexes and rules, in order."""
    found: list[str] = []

    def note(statement: Any, *_: Any, **__: Any) -> None:
        found.append(str(statement.compile(dialect=engine.dialect)))

    engine = create_mock_engine("sqlite://", note)
    _compiled_anew(engine, checkfirst=False)
    return tuple(found)


def _create_all(connection: Any, **how: Any) -> None:
    if not isinstance(connection, Connection) or connection.dialect.name != "sqlite" or how != {"checkfirst": False}:
        _compiled_anew(connection, **how)
        return
    with closing(connection.connection.cursor()) as cursor:
        for statement in _statements():
            cursor.execute(statement)


def undo() -> None:
    """Compile the statements for every journal again: what they are made of may be a changed form of it."""
    schema.metadata.create_all = _compiled_anew  # type: ignore[method-assign]


_compiled_anew = schema.metadata.create_all
schema.metadata.create_all = _create_all  # type: ignore[method-assign, assignment]
_statements()  # before processes are forked, which then have them
