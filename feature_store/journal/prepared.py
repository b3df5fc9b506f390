"""Statements compiled once and handed to the driver: a commit should cost its sync, not the making of its SQL."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property, lru_cache
from typing import Any

from sqlalchemy import Connection, Dialect
from sqlalchemy.exc import DBAPIError
from sqlalchemy.sql import ClauseElement

Parameter = int | str | bytes | None


@lru_cache(maxsize=512)
def prepared(make: Callable[[], ClauseElement], dialect: Dialect) -> Prepared:
    """A statement compiled once for a dialect; all SQLite journals of a process share one (engines).

    Args:
        make: a function of a module that writes the statement.
        dialect: of the database.
    """
    return Prepared(make(), dialect)


class Prepared:
    """A statement as its database's driver takes it; parameters and columns are whole numbers, texts and bytes
    only, so what a column type would translate (times, JSON) the caller writes as it is stored.

    It runs inside the transaction of the connection it is given, and fails with SQLAlchemy's errors.
    """

    def __init__(self, statement: ClauseElement, dialect: Dialect) -> None:
        compiled = statement.compile(dialect=dialect)
        self._dialect = dialect
        self._errors = dialect.loaded_dbapi.Error
        self._text = str(compiled)
        order = getattr(compiled, "positiontup", None)  # set where the driver wants parameters in order
        self._order = None if order is None else tuple(order)
        self._columns = tuple(getattr(statement, "selected_columns", {}).keys())

    def first(self, connection: Connection, **parameters: Parameter) -> tuple[Any, ...] | None:
        """The first row it finds."""
        found, _ = self._execute(connection, parameters, fetch=True)
        return found[0] if found else None

    def all(self, connection: Connection, **parameters: Parameter) -> list[tuple[Any, ...]]:
        """Every row it finds."""
        return self._execute(connection, parameters, fetch=True)[0]

    def named(self, connection: Connection, **parameters: Parameter) -> list[Any]:
        """Every row a SELECT finds, by the names of its columns: a named tuple each."""
        row = self._row
        return [row(*one) for one in self.all(connection, **parameters)]

    @cached_property
    def _row(self) -> Any:
        return namedtuple("Row", self._columns)

    def run(self, connection: Connection, **parameters: Parameter) -> int:
        """Execute it once; how many rows it has written."""
        return self._execute(connection, parameters, fetch=False)[1]

    def run_many(self, connection: Connection, rows: Sequence[Mapping[str, Parameter]]) -> None:
        """Execute it once per row."""
        if rows:
            arranged = [self._arranged(row) for row in rows]
            with self._cursor(connection) as cursor:
                cursor.executemany(self._text, arranged)

    def _execute(
        self, connection: Connection, row: Mapping[str, Parameter], *, fetch: bool
    ) -> tuple[list[tuple[Any, ...]], int]:
        arranged = self._arranged(row)
        with self._cursor(connection) as cursor:
            cursor.execute(self._text, arranged)
            return list(cursor.fetchall()) if fetch else [], cursor.rowcount

    def _arranged(self, row: Mapping[str, Parameter]) -> Any:
        return dict(row) if self._order is None else tuple([row[name] for name in self._order])

    @contextmanager
    def _cursor(self, connection: Connection) -> Iterator[Any]:
        cursor = connection.connection.cursor()
        try:
            yield cursor
        except self._errors as error:
            raise DBAPIError.instance(
                self._text, None, error, self._errors, hide_parameters=True, dialect=self._dialect
            ) from error
        finally:
            cursor.close()
