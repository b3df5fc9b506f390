"""Statements compiled once and handed to the driver: a commit should cost its sync, not the making of its SQL."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from operator import attrgetter, methodcaller
from typing import Any

from sqlalchemy import Connection, Dialect, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.sql import ClauseElement

Parameter = int | str | bytes | None


class Prepared:
    """A statement that a module writes once at its top, compiled once for a dialect; all SQLite journals of a process
    share one (engines).

    Parameters and columns are whole numbers, texts and bytes only: what a column type would translate (times, JSON)
    the caller writes as it is stored. It runs inside the transaction of the connection it is given, and fails with
    SQLAlchemy's errors.

    Args:
        statement: SQL that both databases read, with :names for parameters; or one of SQLAlchemy's, as `insert(table)`.
    """

    def __init__(self, statement: str | ClauseElement) -> None:
        self._statement = text(statement) if isinstance(statement, str) else statement
        self._compiled: dict[Dialect, tuple[str, tuple[str, ...] | None]] = {}

    def first(self, connection: Connection, **parameters: Parameter) -> tuple[Any, ...] | None:
        """The first row it finds."""
        found = self.all(connection, **parameters)
        return found[0] if found else None

    def all(self, connection: Connection, **parameters: Parameter) -> list[tuple[Any, ...]]:
        """Every row it finds."""
        return list(self._execute(connection, (parameters,), _ROWS))

    def named(self, connection: Connection, **parameters: Parameter) -> list[Any]:
        """Every row it finds, by the names of its columns: a named tuple each."""
        return list(self._execute(connection, (parameters,), _named))

    def run(self, connection: Connection, **parameters: Parameter) -> int:
        """Execute it once; how many rows it has written."""
        return int(self._execute(connection, (parameters,), _WRITTEN))

    def run_many(self, connection: Connection, rows: Sequence[Mapping[str, Parameter]]) -> None:
        """Execute it once per row."""
        if rows:
            self._execute(connection, rows, _WRITTEN)

    def _execute(
        self, connection: Connection, rows: Sequence[Mapping[str, Parameter]], take: Callable[[Any], Any]
    ) -> Any:
        dialect = connection.dialect
        compiled = self._compiled.get(dialect)
        if compiled is None:
            made = self._statement.compile(dialect=dialect)
            places = getattr(made, "positiontup", None)  # set where the driver wants parameters in order
            compiled = self._compiled[dialect] = (str(made), None if places is None else tuple(places))
        written, order = compiled
        arranged: list[Any] = [dict(row) if order is None else tuple([row[name] for name in order]) for row in rows]
        cursor = connection.connection.cursor()
        try:
            if len(rows) == 1:
                cursor.execute(written, arranged[0])
            else:
                cursor.executemany(written, arranged)
            return take(cursor)
        except dialect.loaded_dbapi.Error as error:
            raise DBAPIError.instance(
                written, None, error, dialect.loaded_dbapi.Error, hide_parameters=True, dialect=dialect
            ) from error
        finally:
            cursor.close()


_ROWS, _WRITTEN = methodcaller("fetchall"), attrgetter("rowcount")


def _named(cursor: Any) -> list[Any]:
    row = _row(tuple([column[0] for column in cursor.description]))
    return [row(*one) for one in cursor.fetchall()]


@lru_cache(maxsize=128)
def _row(columns: tuple[str, ...]) -> Any:
    return namedtuple("Row", columns)
