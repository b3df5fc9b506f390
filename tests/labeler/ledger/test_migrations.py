"""An example of a migration, on both databases: an older journal is brought on, a newer one refused.

The example is a revision as a later version would have it: a new column of a table that others refer to, whose rules
name it, and which SQLite therefore makes again. Entries of the ledger stay as they are, byte for byte.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import text

from labeler.errors import InvalidSetting, JournalBroken, JournalInUse
from labeler.ledger import migrations, schema
from labeler.ledger.database import Database
from labeler.ledger.ledger import Charge, Ledger
from labeler.ledger.tasks import TaskRecord, TaskStore
from tests.labeler.evidence.conftest import AGENTS, task_with
from tests.labeler.ledger.conftest import Clock, Place, refuses

LATER = """
from alembic import op
from sqlalchemy import CheckConstraint, Column, Text

from labeler.ledger.schema import rule_text

revision = "0002"
down_revision = "0001"


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
        patch.setattr(schema, "REVISION", "0002")
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
        InvalidSetting, match="has tables of revision 0001, and this program works with 0002: start its"
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
    later.setattr(schema, "REVISION", "0002")
    later.setattr(migrations, "VERSIONS", [*migrations.VERSIONS, filled.anchor.parent / "revisions"])
    database = filled.open()
    ledger = Ledger(database, clock=clock)
    assert ledger.verify() == head
    assert rows(database, "ledger_entries") == entries
    assert rows(database, "tasks") == [(*task, "none")]
    assert rows(database, "alembic_version") == [("0002",)]
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
