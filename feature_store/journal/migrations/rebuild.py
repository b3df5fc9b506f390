"""Tables made anew with their rows, for changes that SQLite's ALTER TABLE does not know.

Order, as SQLite's manual has it: make the new table under another name, copy, drop the old one, take its name, make
indexes and triggers. Rules come last, because some of them forbid the rows that an old table rightly holds (a round
begins as waiting). The new table is STRICT, keyed and checked as its definition says, not as the old one was.
"""

from __future__ import annotations

from collections.abc import Mapping

from sqlalchemy import Connection, Table, inspect, text
from sqlalchemy.schema import CreateIndex, CreateTable

from feature_store.journal.rules import rules_of


def has_table(connection: Connection, name: str) -> bool:
    """Whether a journal has a table of this name."""
    return inspect(connection).has_table(name)


def rebuild(connection: Connection, table: Table, columns: Mapping[str, str]) -> None:
    """Give a table of SQLite another definition and keep its rows. Within `Database.remodel`.

    Args:
        connection: the transaction.
        table: the definition it shall have, under the name it has, with its rules (`feature_store.journal.rules`).
        columns: what each column of the new table is made of: an expression over the old one's columns.

    Raises:
        ValueError: a column is missing in `columns`, or too many are named.
    """
    if columns.keys() != set(table.columns.keys()):
        raise ValueError(f"columns of {table.name} and what they are made of do not agree")
    new = f"{table.name}_of_the_next_version"
    made = str(CreateTable(table).compile(dialect=connection.dialect)).strip()
    head = f"CREATE TABLE {table.name} "
    if not made.startswith(head):
        raise ValueError(f"the definition of {table.name} does not begin with its name")
    connection.exec_driver_sql(f"CREATE TABLE {new} {made.removeprefix(head)}")
    names, values = ", ".join(columns), ", ".join(columns.values())
    connection.exec_driver_sql(f"INSERT INTO {new} ({names}) SELECT {values} FROM {table.name}")
    connection.exec_driver_sql(f"DROP TABLE {table.name}")
    connection.exec_driver_sql(f"ALTER TABLE {new} RENAME TO {table.name}")
    for index in sorted(table.indexes, key=lambda one: str(one.name)):
        connection.execute(CreateIndex(index))
    _make_rules(connection, table)


def renew_rules(connection: Connection, table: Table) -> None:
    """Replace all triggers of a table by the rules of its definition, on either database; its rows stay."""
    if connection.dialect.name == "sqlite":
        query = text("SELECT name FROM sqlite_master WHERE type = 'trigger' AND tbl_name = :name")
        for name in connection.execute(query, {"name": table.name}).scalars().all():
            connection.exec_driver_sql(f'DROP TRIGGER "{name}"')
    else:
        query = text("SELECT tgname FROM pg_trigger WHERE tgrelid = to_regclass(:name) AND NOT tgisinternal")
        for name in connection.execute(query, {"name": table.name}).scalars().all():
            connection.exec_driver_sql(f'DROP TRIGGER "{name}" ON {table.name}')
    _make_rules(connection, table)


def _make_rules(connection: Connection, table: Table) -> None:
    for statement in rules_of(table, connection.dialect.name):
        connection.exec_driver_sql(statement)
