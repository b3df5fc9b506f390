"""Rules of tables, made with the table or again later, on either database: what they forbid, and what they say."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from sqlalchemy import BigInteger, Column, MetaData, Table, Text
from sqlalchemy.exc import IntegrityError

from labeler.ledger.database import Database
from labeler.ledger.schema import forbid, remain, set_once, stay


def a_table() -> Table:
    return Table(
        "things",
        MetaData(),
        Column("number", BigInteger, primary_key=True, autoincrement=False),
        Column("word", Text, nullable=True),
        Column("other", Text, nullable=True),
    )


def make(database: Database, table: Table) -> None:
    with database.write() as connection:
        table.create(connection)
        connection.exec_driver_sql("INSERT INTO things VALUES (1, 'one', 'x'), (2, NULL, NULL)")


def do(database: Database, statement: str) -> None:
    with database.write() as connection:
        connection.exec_driver_sql(statement)


@contextmanager
def refused(because: str) -> Iterator[None]:
    with pytest.raises(IntegrityError) as refusal:
        yield
    assert because in str(refusal.value)


def rows(database: Database) -> list[tuple[object, ...]]:
    with database.read() as connection:
        return [tuple(row) for row in connection.exec_driver_sql("SELECT * FROM things ORDER BY number")]


def test_columns_that_stay_never_change_not_even_from_nothing_to_something(database: Database) -> None:
    table = a_table()
    stay(table, ("number", "word"))
    make(database, table)
    for change in ("word = 'two'", "word = NULL", "number = 7", "word = 'two', other = 'y'"):
        with refused("what was written to things stays"):
            do(database, f"UPDATE things SET {change} WHERE number = 1")
    with refused("what was written to things stays"):
        do(database, "UPDATE things SET word = 'late' WHERE number = 2")
    do(database, "UPDATE things SET other = 'z', word = 'one' WHERE number = 1")
    do(database, "DELETE FROM things WHERE number = 2")
    assert rows(database) == [(1, "one", "z")]


def test_rows_that_remain_are_never_deleted(database: Database) -> None:
    table = a_table()
    remain(table)
    make(database, table)
    with refused("rows of things are kept for ever"):
        do(database, "DELETE FROM things WHERE number = 2")
    if database.dialect == "postgresql":
        with refused("rows of things are kept for ever"):
            do(database, "TRUNCATE things")
    do(database, "UPDATE things SET word = 'changed'")
    assert [row[1] for row in rows(database)] == ["changed", "changed"]


def test_a_deletion_that_is_forbidden_on_a_condition_is_allowed_otherwise(database: Database) -> None:
    table = a_table()
    forbid(table, "named", on="DELETE", when="OLD.word IS NOT NULL", because="what has a word is kept")
    make(database, table)
    with refused("what has a word is kept"):
        do(database, "DELETE FROM things WHERE number = 1")
    do(database, "DELETE FROM things WHERE number = 2")
    assert rows(database) == [(1, "one", "x")]


def test_what_is_set_once_may_be_set_and_not_set_again(database: Database) -> None:
    table = a_table()
    forbid(table, "once", on="UPDATE", when=set_once("word"), because="a word is set once")
    make(database, table)
    do(database, "UPDATE things SET word = 'two' WHERE number = 2")
    do(database, "UPDATE things SET word = 'two' WHERE number = 2")
    for again in ("'three'", "NULL"):
        with refused("a word is set once"):
            do(database, f"UPDATE things SET word = {again} WHERE number = 2")
    assert rows(database)[1] == (2, "two", None)


def test_an_insert_is_refused_on_a_condition_and_taken_otherwise(database: Database) -> None:
    table = a_table()
    forbid(table, "small", on="INSERT", when="NEW.number > 5", because="numbers are small")
    make(database, table)
    with refused("numbers are small"):
        do(database, "INSERT INTO things VALUES (6, 'six', NULL)")
    do(database, "INSERT INTO things VALUES (5, 'five', NULL)")
    assert len(rows(database)) == 3


def test_a_kind_of_change_that_is_forbidden_without_a_condition_never_happens(database: Database) -> None:
    table = a_table()
    forbid(table, "frozen", on="UPDATE", because="nothing here changes")
    make(database, table)
    with refused("nothing here changes"):
        do(database, "UPDATE things SET other = 'y'")
