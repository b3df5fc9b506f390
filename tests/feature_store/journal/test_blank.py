"""A journal that begins as a copy has what one has whose stores made their tables."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

from feature_store.journal.blank import lay_blank

from feature_store.clock import now_utc
from feature_store.journal.database import Database, open_database
from feature_store.journal.jobs import JobStore
from feature_store.journal.ledger import Ledger
from feature_store.journal.schema import JOB_TABLES, job_answers, job_asked

TABLES = (*JOB_TABLES, job_answers, job_asked)


def schema(database: Database) -> list[tuple[str, ...]]:
    with database.read() as connection:
        found = connection.exec_driver_sql("SELECT type, name, tbl_name, sql FROM sqlite_master ORDER BY type, name")
        return [tuple(map(str, row)) for row in found]


def test_a_blank_journal_has_the_tables_and_rules_of_one_that_its_stores_made(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    lay_blank(tmp_path / "blank.db", TABLES)
    found = []
    for name in ("blank.db", "made.db"):
        with closing(open_database(tmp_path / name, allow_unsynced=True)) as database:
            Ledger(database, clock=now_utc)
            JobStore(database)
            found.append(schema(database))
            assert database.about().version > 0
    assert found[0] == found[1]
    assert any(kind == "trigger" for kind, *_ in found[0])


def test_a_journal_that_is_there_is_left_alone(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    path = tmp_path / "journal.db"
    lay_blank(path, TABLES)
    assert path.stat().st_mode & 0o077 == 0
    with closing(open_database(path, allow_unsynced=True)) as database:
        Ledger(database, clock=now_utc).open_account("a", "instance", 7)
    lay_blank(path, TABLES)
    with closing(open_database(path, allow_unsynced=True)) as database:
        assert Ledger(database, clock=now_utc).balance("a", "instance").cap == 7
