"""Statements compiled once and handed to the driver: a commit should cost its sync, not the making of its SQL."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import Connection, Dialect
from sqlalchemy.exc import DBAPIError
from sqlalchemy.sql import ClauseElement

Parameter = int | str | None


class Prepared:
    """A statement as its database's driver takes it; parameters and columns are whole numbers and texts only.

    It runs inside the transaction of the connection it is given, and fails with SQLAlchemy's errors.
    """

    def __init__(self, statement: ClauseElement, dialect: Dialect) -> None:
        compiled = statement.compile(dialect=dialect)
        self._dialect = dialect
        self._errors = dialect.loaded_dbapi.Error
        self._text = str(compiled)
        order = getattr(compiled, "positiontup", None)  # set where the driver wants parameters in order
        self._order = None if order is None else tuple(order)

    def first(self, connection: Connection, **parameters: Parameter) -> tuple[Any, ...] | None:
        """The first row it finds."""
        found = self._execute(connection, parameters, fetch=True)
        return found[0] if found else None

    def all(self, connection: Connection, **parameters: Parameter) -> list[tuple[Any, ...]]:
        """Every row it finds."""
        return self._execute(connection, parameters, fetch=True)

    def run(self, connection: Connection, **parameters: Parameter) -> None:
        """Execute it once."""
        self._execute(connection, parameters, fetch=False)

    def run_many(self, connection: Connection, rows: Sequence[Mapping[str, Parameter]]) -> None:
        """Execute it once per row."""
        for row in rows:
            self._execute(connection, row, fetch=False)

    def _execute(self, connection: Connection, row: Mapping[str, Parameter], *, fetch: bool) -> list[tuple[Any, ...]]:
        arranged: Any = dict(row) if self._order is None else tuple([row[name] for name in self._order])
        cursor = connection.connection.cursor()
        try:
            cursor.execute(self._text, arranged)
            return list(cursor.fetchall()) if fetch else []
        except self._errors as error:
            raise DBAPIError.instance(
                self._text, None, error, self._errors, hide_parameters=True, dialect=self._dialect
            ) from error
        finally:
            cursor.close()
