"""An example of a migration, on both databases: an older journal is brought on, a newer one refused.

The example is a revision as a later version would have it: a new column of a table that others refer to, whose rules
name it, and which SQLite therefore makes again. Entries of the ledger stay as they are, byte for byte.
"""

from __future__ import annotations

import sqlite3
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import psycopg
import pytest
from sqlalchemy import inspect, text

from labeler.budget import NothingLeft
from labeler.errors import InvalidSetting, JournalBroken, JournalInUse
from labeler.ledger import migrations, schema
from labeler.ledger.chain import GENESIS, Anchor, Head, entry_hash
from labeler.ledger.database import Database
from labeler.ledger.ledger import Charge, Ledger
from labeler.ledger.tasks import TaskRecord, TaskStore
from tests.labeler.evidence.conftest import AGENTS, task_with
from tests.labeler.ledger.conftest import Clock, Place, refuses

LATER = """
from alembic import op
from sqlalchemy import CheckConstraint, Column, Text

from labeler.ledger.schema import rule_text

revision = "0004"
down_revision = "0003"


def upgrade():
    is_sqlite = op.get_bind().dialect.name == "sqlite"
    with op.batch_alter_table(
        "tasks",
        recreate="always" if is_sqlite else "never",
        table_kwargs={"sqlite_strict": True},
        table_args=[CheckConstraint("next_query >= 0 AND next_query <= max_queries", name="ck_tasks_queries")],
    ) as table:
        table.add_column(Column("remark", Text, nullable=False, server_default="none"))
    if not is_sqlite:
        return  # altered in place, with its rules
    for name, on, when, because in (
        ("remain", "DELETE", "TRUE", "rows of tasks are kept for ever"),
        ("advance", "UPDATE", "NEW.next_query < OLD.next_query", "a query of a task is given out once"),
    ):
        for statement in rule_text("tasks", name, on=on, because=because, when=when, dialect="sqlite"):
            op.execute(statement)
"""


@pytest.fixture
def later(tmp_path: Path) -> Iterator[pytest.MonkeyPatch]:
    """A program that knows one revision more; leaving its context is being this program again."""
    folder = tmp_path / "revisions"
    folder.mkdir()
    (folder / "later.py").write_text(LATER)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(schema, "REVISION", "0004")
        patch.setattr(migrations, "VERSIONS", [*migrations.VERSIONS, folder])
        yield patch


@pytest.fixture
def filled(place: Place, clock: Clock) -> Place:
    """A journal of this program, with a ledger and a task that a share refers to."""
    database = place.open()
    ledger = Ledger(database, clock=clock)
    ledger.open_account("federation", "instance", 100)
    ledger.reserve("job", [Charge("federation", "instance", 10)])
    ledger.post("job")
    task = TaskStore(database).add(TaskRecord(task_with(), AGENTS, clock(), "tok-1"))
    with database.write() as connection:
        connection.execute(
            schema.task_shares.insert(), {"task_digest": task.digest, "token_id": "t", "shared_at": clock()}
        )
    place.close()
    return place


def rows(database: Database, table: str) -> list[tuple[object, ...]]:
    with database.read() as connection:
        return [tuple(row) for row in connection.execute(text(f"SELECT * FROM {table}"))]


def test_a_journal_of_an_earlier_revision_is_brought_to_this_one_with_its_chain_and_rules(
    filled: Place, clock: Clock, later: pytest.MonkeyPatch
) -> None:
    with pytest.raises(
        InvalidSetting, match="has tables of revision 0003, and this program works with 0004: start its"
    ):
        filled.open(read_only=True)
    later.undo()
    database = filled.open()
    head, entries, (task,) = (
        Ledger(database, clock=clock).head(),
        rows(database, "ledger_entries"),
        rows(database, "tasks"),
    )
    filled.close()
    later.setattr(schema, "REVISION", "0004")
    later.setattr(migrations, "VERSIONS", [*migrations.VERSIONS, filled.anchor.parent / "revisions"])
    database = filled.open()
    ledger = Ledger(database, clock=clock)
    assert ledger.verify() == head
    assert rows(database, "ledger_entries") == entries
    assert rows(database, "tasks") == [(*task, "none")]
    assert rows(database, "alembic_version") == [("0004",)]
    refuses(database, "DELETE FROM tasks", "UPDATE tasks SET next_query = -1", "DELETE FROM ledger_entries")
    assert len(TaskStore(database).list(open_to="t")) == 1
    ledger.reserve("another", [Charge("federation", "instance", 10)])
    with pytest.raises(JournalInUse):  # a program of any revision: the lock comes first
        filled.open(with_anchor=False)


def test_a_journal_of_a_newer_revision_is_refused_and_not_touched(filled: Place, clock: Clock) -> None:
    database = filled.open()
    with database.write() as connection:
        connection.execute(text("UPDATE alembic_version SET version_num = '0009'"))
    filled.close()
    for read_only in (False, True):
        with pytest.raises(InvalidSetting, match="revision 0009"):
            filled.open(read_only=read_only)


def test_an_upgrade_that_fails_or_changes_the_ledger_leaves_the_journal_as_it_was(
    filled: Place, clock: Clock, later: pytest.MonkeyPatch
) -> None:
    revision = filled.anchor.parent / "revisions" / "later.py"
    for harm, error in (
        ("raise KeyError", KeyError),
        ("op.execute('UPDATE ledger_accounts SET spent = 11')", JournalBroken),
    ):
        revision.write_text(LATER + f"    {harm}\n")
        if filled.dialect == "postgresql":
            revision.write_text(LATER.replace("return  # altered", f"{harm}; return  # altered"))
        with pytest.raises(error):
            filled.open()
        filled.close()
    later.undo()
    database = filled.open()
    assert Ledger(database, clock=clock).verify().seq == 3
    assert len(rows(database, "tasks")[0]) == len(schema.tasks.columns)
    refuses(database, "DELETE FROM tasks")


def test_a_journal_that_names_no_revision_is_broken(filled: Place) -> None:
    database = filled.open()
    with database.write() as connection:
        connection.execute(text("DELETE FROM alembic_version"))
    filled.close()
    with pytest.raises(JournalBroken, match="names no revision of its tables"):
        filled.open()


def test_the_schema_is_of_the_last_revision_that_the_package_has() -> None:
    from alembic.config import Config
    from alembic.script import ScriptDirectory

    config = Config()
    config.set_main_option("script_location", str(Path(migrations.__file__).parent))
    assert ScriptDirectory.from_config(config).get_current_head() == schema.REVISION


# From the first revision to the second.


def first_revision(place: Place) -> None:
    """Make the tables of the first revision, as its program did."""
    made = (Path(__file__).parent / f"revision_0001_{place.dialect}.sql").read_text()
    statements = [
        *made.split(";\n-- next\n"),
        "CREATE TABLE alembic_version (version_num VARCHAR(32) NOT NULL PRIMARY KEY)",
    ]
    statements.append("INSERT INTO alembic_version VALUES ('0001')")
    if place.dialect == "sqlite":
        Path(place.target).touch(mode=0o600)
        with closing(sqlite3.connect(place.target, isolation_level=None)) as connection:
            for statement in statements:
                connection.execute(statement)
        return
    with psycopg.connect(place.target) as connection:
        for statement in statements:
            connection.execute(statement)  # type: ignore[call-overload]  # a statement of this test


def shape(database: Database) -> dict[str, object]:
    """What a database says of its tables, in no order that depends on how they were made."""
    with database.read() as connection:
        look = inspect(connection)
        tables = sorted(look.get_table_names())
        query = "SELECT name, sql FROM sqlite_master WHERE type = 'trigger'"
        if database.dialect != "sqlite":
            query = (
                "SELECT tgname, pg_get_triggerdef(pg_trigger.oid), prosrc FROM pg_trigger "
                "JOIN pg_proc ON pg_proc.oid = tgfoid WHERE NOT tgisinternal"
            )
        rules = [tuple(row) for row in connection.execute(text(query))]
        columns = {
            name: [(one["name"], str(one["type"]), one["nullable"], one["default"]) for one in look.get_columns(name)]
            for name in tables
        }
        return {
            "columns": columns,
            "indexes": {
                name: sorted((one["name"], one["column_names"]) for one in look.get_indexes(name)) for name in tables
            },
            "checks": {name: sorted(str(one["name"]) for one in look.get_check_constraints(name)) for name in tables},
            "rules": sorted(rules),
        }


def insert_old(database_target: Place, rows: list[dict[str, object]]) -> None:
    """Write entries, and the sums over them that the first revision had."""
    accounts: dict[tuple[str, str], list[object]] = {}
    reservations: dict[str, list[object]] = {}
    for row in rows:
        of = accounts.setdefault((str(row["account"]), str(row["level"])), [10**9, 0, 0])
        name, amount = str(row["reservation_id"]), int(str(row["amount"]))
        known = reservations.setdefault(name, ["reserved", row["seq"], 0, None])
        match row["kind"]:
            case "reserve":
                of[1] += amount  # type: ignore[operator]  # a list of mixed values
                known[2] += 1  # type: ignore[operator]  # as above
            case "post" | "void" as kind:
                of[2 if kind == "post" else 1] += amount if kind == "post" else -amount  # type: ignore[operator]  # as above
                known[0], known[3] = ("posted" if kind == "post" else "void"), known[3] or row["seq"]
    del reservations[""]
    filled = [
        ("ledger_entries", [tuple(row.values()) for row in rows]),
        ("ledger_accounts", [(*key, *of) for key, of in accounts.items()]),
        ("ledger_reservations", [(name, *of) for name, of in reservations.items()]),
    ]
    if database_target.dialect == "sqlite":
        with closing(sqlite3.connect(database_target.target)) as connection, connection:
            for table, values in filled:
                connection.executemany(f"INSERT INTO {table} VALUES ({', '.join('?' * len(values[0]))})", values)
        return
    with psycopg.connect(database_target.target) as connection, connection.cursor() as cursor:
        for table, values in filled:
            cursor.executemany(f"INSERT INTO {table} VALUES ({', '.join(['%s'] * len(values[0]))})", values)  # type: ignore[arg-type]  # as above


def old_entries() -> list[dict[str, object]]:
    """Reservations of both levels and of one: given back, made final and written off."""
    both = [("a", "instance"), ("a", "agent"), ("b", "instance"), ("b", "agent")]
    steps: list[tuple[str, str, list[tuple[str, str]]]] = [("open", "", [one]) for one in both]
    for number in range(6):
        steps += [("reserve", f"job-{number}", both), (("void", "post")[number % 2], f"job-{number}", both)]
    steps += [("reserve", "one", both[:1]), ("post", "one", both[:1])]
    steps += [("reserve", "gone", both[3:]), ("void", "gone", both[3:]), ("reserve", "open", both[2:3])]
    for number, of in ((50, both[1:2]), (52, both[:1]), (54, both[3:])):
        steps += [("reserve", f"written-off-{number}", of), ("post", f"written-off-{number}", of)]
    rows: list[dict[str, object]] = []
    for kind, name, of in steps:
        for account, level in of:
            row: dict[str, object] = {
                "seq": len(rows) + 1, "at": "2026-03-01T12:00:00.000000Z", "kind": kind, "account": account,
                "level": level, "reservation_id": name, "amount": 10**9 if kind == "open" else 5,
                "detail": '{"cap":1000000000}' if kind == "open" else "{}",
                "previous_hash": rows[-1]["hash"] if rows else GENESIS,
            }  # fmt: skip
            rows.append(row | {"hash": entry_hash(row)})
    return rows


def test_a_journal_of_the_first_revision_becomes_what_this_program_makes(
    place: Place, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    fresh = shape(place.open())
    place.close()
    empty(place)
    first_revision(place)
    written = old_entries()
    insert_old(place, written)
    Anchor(place.anchor).replace(Head(len(written), str(written[-1]["hash"])))
    monkeypatch.setattr("labeler.ledger.ledger.SUMS_EVERY", 7)
    database = place.open()
    assert shape(database) == fresh
    assert rows(database, "ledger_entries") == [tuple(row.values()) for row in written]
    ledger = Ledger(database, clock=clock)
    assert ledger.verify() == Head(len(written), str(written[-1]["hash"]))
    assert ledger.charged_without() == {"instance": {"b"}, "agent": {"a", "b"}}
    kept = {row[0] for row in rows(database, "ledger_sums")}
    assert kept
    for seq in range(len(written) + 1):
        change = {"reserve": 1, "void": -1}
        sums = Counter()  # type: Counter[tuple[str, str]]
        for row in written[:seq]:
            sums[str(row["account"]), str(row["level"])] += change.get(str(row["kind"]), 0) * int(str(row["amount"]))
        assert {key: spent for key, spent in ledger.spent_at(seq).items() if spent} == {
            k: v for k, v in sums.items() if v
        }
    monkeypatch.setattr("labeler.ledger.verification.RECENT", 3)
    assert ledger.verify(is_whole=False).seq == len(written)
    ledger.void("open", NothingLeft("open", "never-asked"))
    assert ledger.charged_without() == {"instance": {"b"}, "agent": {"a"}}
    refuses(
        database,
        "UPDATE ledger_entries SET amount = 1",
        "DELETE FROM ledger_sums",
        "UPDATE ledger_accounts SET held = 10000000000",
    )


def empty(place: Place) -> None:
    """Remove the tables of a journal."""
    place.anchor.unlink(missing_ok=True)
    if place.dialect == "sqlite":
        for ending in ("", "-wal", "-shm"):
            Path(place.target + ending).unlink(missing_ok=True)
        return
    with psycopg.connect(place.target) as connection:
        connection.execute("DROP SCHEMA public CASCADE")
        connection.execute("CREATE SCHEMA public")
