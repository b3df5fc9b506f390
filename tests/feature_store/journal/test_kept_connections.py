"""Connections of who has died in a simulation, and what the end of a transaction says."""

from __future__ import annotations

from pathlib import Path

import pytest
from feature_store.journal.kept_connections import keeping_connections
from sqlalchemy.exc import DBAPIError

from feature_store.journal.database import Database, open_database


def _rows(database: Database) -> int:
    with database.read() as connection:
        return int(connection.exec_driver_sql("SELECT count(*) FROM kept").scalar_one())


def _write_and_undo(database: Database) -> None:
    with database.write() as connection:
        connection.exec_driver_sql("INSERT INTO kept VALUES (1)")
        connection.exec_driver_sql("ROLLBACK")


def test_a_connection_that_is_kept_undoes_what_was_not_committed(tmp_path: Path) -> None:
    with keeping_connections():
        first = open_database(tmp_path / "journal.db", allow_unsynced=True)
        with first.write() as connection:
            connection.exec_driver_sql("CREATE TABLE kept (number INTEGER)")
            connection.exec_driver_sql("INSERT INTO kept VALUES (1)")
            of_first = connection.connection.driver_connection
        of_first.execute("BEGIN IMMEDIATE")
        of_first.execute("INSERT INTO kept VALUES (2)")
        first.close()
        with open_database(tmp_path / "journal.db", allow_unsynced=True) as second:
            with second.write() as connection:
                assert connection.connection.driver_connection is of_first
            assert _rows(second) == 1


def test_outside_of_a_simulation_none_is_kept(tmp_path: Path) -> None:
    found = []
    for _ in range(2):
        with (
            open_database(tmp_path / "journal.db", allow_unsynced=True) as database,
            database.write() as connection,
        ):
            found.append(connection.connection.driver_connection)
    assert found[0] is not found[1]
    with pytest.raises(Exception, match="closed database"):
        found[0].execute("SELECT 1")


def test_what_the_database_has_undone_is_not_acknowledged(tmp_path: Path) -> None:
    """A COMMIT where no transaction is open any more is an error, and never taken for a durable one."""
    with open_database(tmp_path / "journal.db", allow_unsynced=True) as database:
        with database.write() as connection:
            connection.exec_driver_sql("CREATE TABLE kept (number INTEGER)")
        with pytest.raises(DBAPIError, match="no transaction is active"):
            _write_and_undo(database)
        assert _rows(database) == 0
        with database.write() as connection:
            connection.exec_driver_sql("INSERT INTO kept VALUES (1)")
        assert _rows(database) == 1
