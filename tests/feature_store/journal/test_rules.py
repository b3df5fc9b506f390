"""Rules of tables, made with the table or again later, on either database: what they forbid, and what they say."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from feature_store.journal.migrations.rebuild import has_table, rebuild, renew_rules
from sqlalchemy import BigInteger, Column, MetaData, Table, Text
from sqlalchemy.exc import IntegrityError

from feature_store.journal.database import Database
from feature_store.journal.schema import add_rule, forbid, remain, rules_of, set_once, stay


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


def test_rules_can_be_asked_for_by_database_in_the_order_they_were_given() -> None:
    """Statement by statement: what both databases are told, and the names under which a later version finds it."""
    table = a_table()
    assert rules_of(table, "sqlite") == rules_of(table, "postgresql") == []
    stay(table, ("number", "word"))
    remain(table)
    add_rule(table, "sqlite", "a third statement")
    assert rules_of(table, "sqlite") == [
        "CREATE TRIGGER things_stay BEFORE UPDATE ON things WHEN NEW.number IS NOT OLD.number OR NEW.word IS NOT "
        "OLD.word BEGIN SELECT RAISE(ABORT, 'what was written to things stays'); END",
        "CREATE TRIGGER things_remain BEFORE DELETE ON things WHEN 1 "
        "BEGIN SELECT RAISE(ABORT, 'rows of things are kept for ever'); END",
        "a third statement",
    ]
    code = "USING ERRCODE = 'integrity_constraint_violation';"
    kept = f"RAISE EXCEPTION 'rows of things are kept for ever' {code}"
    assert rules_of(table, "postgresql") == [
        "CREATE OR REPLACE FUNCTION things_stay() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN IF NEW.number IS "
        "DISTINCT FROM OLD.number OR NEW.word IS DISTINCT FROM OLD.word THEN RAISE EXCEPTION 'what was written to "
        f"things stays' {code} END IF; RETURN NEW; END $$",
        "CREATE TRIGGER things_stay BEFORE UPDATE ON things FOR EACH ROW EXECUTE FUNCTION things_stay()",
        "CREATE OR REPLACE FUNCTION things_remain() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN IF TRUE THEN "
        f"{kept} END IF; RETURN OLD; END $$",
        "CREATE TRIGGER things_remain BEFORE DELETE ON things FOR EACH ROW EXECUTE FUNCTION things_remain()",
        f"CREATE OR REPLACE FUNCTION things_remain_all() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN {kept} END $$",
        "CREATE TRIGGER things_remain_all BEFORE TRUNCATE ON things FOR EACH STATEMENT EXECUTE FUNCTION "
        "things_remain_all()",
    ]


def test_emptying_a_table_is_forbidden_where_every_deletion_is_and_nowhere_else() -> None:
    for on, when, count in (("DELETE", "TRUE", 4), ("DELETE", "OLD.number = 1", 2), ("UPDATE", "TRUE", 2)):
        table = a_table()
        forbid(table, "one", on=on, when=when, because="why")  # type: ignore[arg-type]  # the three are kinds of change
        rules = rules_of(table, "postgresql")
        assert len(rules) == count
        assert any("TRUNCATE" in rule for rule in rules) == (count == 4)


def test_rules_are_renewed_in_place_of_all_that_were_there(database: Database) -> None:
    old, new = a_table(), a_table()
    forbid(old, "former", on="UPDATE", because="an old rule")
    make(database, old)
    remain(new)
    with database.write() as connection:
        renew_rules(connection, new)
    do(database, "UPDATE things SET other = 'y'")
    with refused("kept for ever"):
        do(database, "DELETE FROM things")


def test_a_table_made_anew_has_its_new_columns_old_rows_and_rules(database: Database) -> None:
    if database.dialect != "sqlite":
        pytest.skip("PostgreSQL alters tables in place")
    make(database, a_table())
    new = Table(
        "things",
        MetaData(),
        Column("number", BigInteger, primary_key=True, autoincrement=False),
        Column("words", Text, nullable=False, unique=True),
    )
    stay(new, ("words",))
    with database.remodel() as connection:
        with pytest.raises(ValueError, match="do not agree"):
            rebuild(connection, new, {"number": "number"})
        rebuild(connection, new, {"number": "number * 10", "words": "coalesce(word, 'none')"})
        assert has_table(connection, "things")
        assert not has_table(connection, "things_of_the_next_version")
    assert rows(database) == [(10, "one"), (20, "none")]
    with refused("stays"):
        do(database, "UPDATE things SET words = 'x' WHERE number = 10")
    with refused("UNIQUE"):
        do(database, "INSERT INTO things VALUES (30, 'one')")
