"""The door to SQL: what it refuses to open, and what it says when the storage fails."""

from __future__ import annotations

import os
import sqlite3
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import psycopg
import pytest
from sqlalchemy import BigInteger, Column, MetaData, Table, Text, insert, text
from sqlalchemy.exc import DBAPIError

from labeler.errors import InvalidSetting, JournalBroken, JournalInUse, LabelerError, Unavailable, UnsafeStorage
from labeler.ledger.database import POSTGRESQL_LOCK, Database, open_database
from labeler.ledger.ledger import Charge, Ledger
from labeler.system.files import check_synced
from tests.labeler.ledger.conftest import Clock, Place, at_once, undone
from tests.postgres_server import PASSWORD, PostgresServer
from tests.quick_syncs import real_syncs

rows = Table("rows_of_this_test", MetaData(), Column("number", BigInteger, primary_key=True), Column("word", Text))


@pytest.fixture
def with_rows(database: Database) -> Database:
    with database.write() as connection:
        rows.metadata.create_all(connection)
    return database


def count(database: Database) -> int:
    with database.read() as connection:
        return int(connection.execute(text("SELECT count(*) FROM rows_of_this_test")).scalar() or 0)


@pytest.mark.process
def test_a_block_that_raises_leaves_nothing_behind(with_rows: Database) -> None:
    with undone(with_rows) as connection:
        connection.execute(insert(rows), {"number": 1, "word": "one"})
    assert count(with_rows) == 0
    with with_rows.write() as connection:
        connection.execute(insert(rows), {"number": 1, "word": "one"})
    assert count(with_rows) == 1


def test_a_reader_sees_one_moment_and_cannot_write(with_rows: Database) -> None:
    with with_rows.read() as connection:
        assert connection.execute(rows.select()).all() == []
        with with_rows.write() as writing:
            writing.execute(insert(rows), {"number": 1, "word": "one"})
        assert connection.execute(rows.select()).all() == []
    with pytest.raises(Exception, match=r"(?i)read-?\s?only|permissions"), with_rows.read() as connection:
        connection.execute(insert(rows), {"number": 2, "word": "two"})
    assert count(with_rows) == 1


@pytest.mark.process
def test_writers_of_one_process_stand_in_line(with_rows: Database) -> None:
    """Each reads the largest number and adds one: a lost update would break the primary key."""

    def add(_: int) -> None:
        for _ in range(10):
            with with_rows.write() as connection:
                last = connection.execute(text("SELECT coalesce(max(number), 0) FROM rows_of_this_test")).scalar()
                time.sleep(0.0005)
                connection.execute(insert(rows), {"number": int(last or 0) + 1, "word": "x"})

    at_once(8, add)
    assert count(with_rows) == 80


@pytest.mark.process
def test_whoever_waits_for_a_connection_gets_the_next_that_becomes_idle(tmp_path: Path) -> None:
    with open_database(tmp_path / "journal.db", allow_unsynced=True, busy_timeout_s=240) as database:
        own = Ledger(database, clock=Clock(), anchored=False)
        with ThreadPoolExecutor(4) as pool:
            with ExitStack() as held:
                for _ in range(8):
                    held.enter_context(database.read())
                waiting = [pool.submit(own.head) for _ in range(4)]
                time.sleep(0.3)  # in which they begin to wait; those that do not are no test of anything
                assert not any(one.done() for one in waiting)
            assert [one.result().seq for one in waiting] == [0] * 4


def test_a_nested_write_is_a_mistake_that_is_told_and_not_a_deadlock(with_rows: Database) -> None:
    with with_rows.write(), pytest.raises(RuntimeError, match="pass its connection on"), with_rows.write():
        pass
    with pytest.raises(RuntimeError, match="no write transaction"):
        with_rows.after_commit(lambda: None)
    assert count(with_rows) == 0


def test_what_follows_a_commit_runs_once_and_only_after_it(with_rows: Database) -> None:
    seen: list[int] = []
    with with_rows.write() as connection:
        connection.execute(insert(rows), {"number": 1, "word": "one"})
        with_rows.after_commit(lambda: seen.append(count(with_rows)))
        assert seen == []
    assert seen == [1]
    with undone(with_rows):
        with_rows.after_commit(lambda: seen.append(99))
    with with_rows.write():
        pass
    assert seen == [1]


def test_a_step_that_fails_after_a_commit_keeps_no_other_from_following_it(with_rows: Database) -> None:
    """The rows are durable by then: a caller that waits to hear of it must be told."""
    seen: list[str] = []

    def anchor() -> None:
        raise Unavailable("the anchor's disk is full")

    def write() -> None:
        with with_rows.write() as connection:
            connection.execute(insert(rows), {"number": 1, "word": "one"})
            with_rows.after_commit(anchor)
            with_rows.after_commit(lambda: seen.append("noted"))

    with pytest.raises(Unavailable, match="anchor"):
        write()
    assert seen == ["noted"]
    assert count(with_rows) == 1


def test_an_attempt_that_fails_is_undone_alone_with_what_was_to_follow_it(with_rows: Database) -> None:
    seen: list[str] = []

    def fail(connection: Any) -> None:
        with with_rows.attempt(connection):
            connection.execute(insert(rows), {"number": 2, "word": "two"})
            with_rows.after_commit(lambda: seen.append("undone"), last_of="head")
            raise KeyError

    with with_rows.write() as connection:
        with with_rows.attempt(connection):
            connection.execute(insert(rows), {"number": 1, "word": "one"})
            with_rows.after_commit(lambda: seen.append("first"), last_of="head")
        undone = with_rows.undone
        with pytest.raises(KeyError):
            fail(connection)
        assert with_rows.undone == undone + 1
        with with_rows.attempt(connection):
            connection.execute(insert(rows), {"number": 3, "word": "three"})
    assert seen == ["first"]
    assert count(with_rows) == 2


def test_of_the_steps_of_one_kind_only_the_last_follows_a_commit(with_rows: Database) -> None:
    seen: list[int] = []
    with with_rows.write():
        for number in range(3):
            with_rows.after_commit(lambda number=number: seen.append(number), last_of="head")
    assert seen == [2]


def test_a_broken_rule_of_a_table_passes_through_without_the_values(with_rows: Database) -> None:
    with with_rows.write() as connection:
        connection.execute(insert(rows), {"number": 1, "word": "secret"})
    with pytest.raises(Exception, match=r"(?i)unique") as error, with_rows.write() as connection:
        connection.execute(insert(rows), {"number": 1, "word": "secret"})
    assert not isinstance(error.value, LabelerError)
    assert "secret" not in str(error.value)


@pytest.mark.parametrize(
    "statement",
    [
        "INSERT INTO kept VALUES (2, 'share of mallory', 'x')",
        "INSERT INTO kept VALUES (3, 'share of mallory', '\\x7368617265206f66')",
        "UPDATE kept SET secret = 'share of mallory', number = 0",
        "INSERT INTO kept VALUES (1, 'share of mallory', NULL)",
        "INSERT INTO kept (number, secret) VALUES (4, NULL)",
        "SELECT CAST('share of mallory' AS integer) + number FROM kept",
    ],
    ids=["unique", "unique bytes", "check", "primary key", "not null", "no number"],
)
def test_a_row_that_postgresql_refuses_stands_in_no_part_of_the_error(
    postgres_server: PostgresServer, tmp_path: Path, statement: str
) -> None:
    """PostgreSQL itself says: Failing row contains (...)."""
    with open_database(postgres_server.new_database(), anchor=tmp_path / "head") as database:
        with database.write() as connection:
            connection.exec_driver_sql(
                "CREATE TABLE kept (number integer PRIMARY KEY CHECK (number > 0), "
                "secret text NOT NULL UNIQUE, data text)"
            )
            connection.exec_driver_sql("INSERT INTO kept VALUES (1, 'share of mallory', 'share of bob')")
        with pytest.raises(DBAPIError) as broken, database.write() as connection:
            connection.exec_driver_sql(statement)
    said = "".join(traceback.format_exception(broken.value)) + repr(broken.value) + repr(broken.value.orig)
    for line in said.splitlines():
        assert "share of" not in line.replace(statement, ""), line
        assert "Failing row" not in line
        assert "DETAIL" not in line
    assert str(broken.value.orig).rstrip(")").split("(")[-1][:5] in ("23505", "23514", "23502", "22P02")


def test_a_sqlite_journal_has_one_owner_and_any_number_of_readers(sqlite_place: Place) -> None:
    sqlite_place.open()
    for name in (sqlite_place.target, f"sqlite:///{sqlite_place.target}"):
        with pytest.raises(JournalInUse, match=r"another process holds the journal journal.db"):
            open_database(name)
    sqlite_place.open(read_only=True)
    sqlite_place.close()
    sqlite_place.open()


def test_a_sqlite_journal_is_durable_private_and_says_so(sqlite_place: Place) -> None:
    with real_syncs():
        database = sqlite_place.open()
        with database.write() as connection:
            found = [connection.execute(text(f"PRAGMA {name}")).scalar() for name in ("journal_mode", "synchronous")]
            assert connection.execute(text("PRAGMA foreign_keys")).scalar() == 1
            connection.execute(text("CREATE TABLE one (number INTEGER)"))
    assert found == ["wal", 2]
    for file in Path(sqlite_place.target).parent.glob("journal.db*"):
        assert file.stat().st_mode & 0o777 == 0o600, file.name


def test_the_log_is_emptied_at_once_or_left_while_somebody_reads(sqlite_place: Place) -> None:
    database = open_database(sqlite_place.target, busy_timeout_s=200)
    sqlite_place.opened.append(database)
    with database.write() as connection:
        rows.metadata.create_all(connection)
    log = Path(f"{sqlite_place.target}-wal")
    with database.read() as reading:
        reading.execute(text("SELECT count(*) FROM rows_of_this_test"))
        with database.write() as connection:
            connection.execute(insert(rows), {"number": 1, "word": "one"})
        begun = time.monotonic()
        database.forget_log()
        assert time.monotonic() - begun < 150.0  # another connection is waited for 200
        assert log.stat().st_size > 0
    database.forget_log()
    assert log.stat().st_size == 0
    with database.write() as connection:
        assert connection.exec_driver_sql("PRAGMA busy_timeout").scalar() == 200_000
        with pytest.raises(RuntimeError, match="after it"):
            database.forget_log()
    assert count(database) == 1


def test_a_journal_that_others_could_read_is_refused(sqlite_place: Place) -> None:
    sqlite_place.open().close()
    os.chmod(sqlite_place.target, 0o640)  # noqa: PTH101
    with pytest.raises(UnsafeStorage, match=r"permissions 0640.*chmod 600"):
        sqlite_place.open()
    sqlite_place.close()


@pytest.mark.parametrize("target", [":memory:", "", "sqlite://", "sqlite:///:memory:", "file:x?mode=memory"])
def test_a_journal_in_memory_is_refused(target: str) -> None:
    with pytest.raises(UnsafeStorage, match="forgets every charge"):
        open_database(target)


def test_a_place_that_does_not_sync_is_refused(tmp_path: Path) -> None:
    mounts = tmp_path / "mounts"
    journal = tmp_path / "a folder" / "journal.db"
    journal.parent.mkdir()
    point = str(journal.parent).replace(" ", "\\040")
    for kind, options, refused in (
        ("ext4", "rw,relatime", None),
        ("tmpfs", "rw", "type tmpfs"),
        ("nfs4", "rw,sync", "type nfs4"),
        ("9p", "rw", "type 9p"),
        ("ext4", "rw,nobarrier", "mounted with nobarrier"),
        ("overlay", "rw,volatile", "mounted with volatile"),
    ):
        mounts.write_text(f"disk / ext4 rw 0 0\nother /elsewhere tmpfs rw 0 0\nit {point} {kind} {options} 0 0\n")
        if refused is None:
            check_synced(journal, mounts=mounts)
        else:
            with pytest.raises(UnsafeStorage, match=refused):
                check_synced(journal, mounts=mounts)
    check_synced(journal, mounts=tmp_path / "none")


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="no file system in memory on this machine")
def test_a_real_file_system_in_memory_is_refused_unless_a_test_allows_it() -> None:
    import tempfile

    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        with pytest.raises(UnsafeStorage, match="tmpfs"):
            open_database(Path(folder) / "journal.db")
        assert list(Path(folder).iterdir()) == []
        open_database(Path(folder) / "journal.db", allow_unsynced=True).close()


def test_a_target_that_is_no_journal_is_refused_without_repeating_it(tmp_path: Path) -> None:
    for target in ("mysql://user:hush@host/db", "postgresql://user:hush@host:port/db", "sqlite:///x?cache=hush"):
        with pytest.raises(InvalidSetting) as error:
            open_database(target)
        assert "hush" not in str(error.value)
    with pytest.raises(InvalidSetting, match="folder does not exist"):
        open_database(tmp_path / "nowhere" / "journal.db")
    with pytest.raises(InvalidSetting, match="does not exist"):
        open_database(tmp_path / "journal.db", read_only=True)
    (tmp_path / "noise.db").write_bytes(b"not a database at all" * 100)
    (tmp_path / "noise.db").chmod(0o600)
    with pytest.raises(JournalBroken, match="damaged"):
        open_database(tmp_path / "noise.db")


def test_a_full_disk_is_told_and_undone_whole(sqlite_place: Place, clock: Clock) -> None:
    database = sqlite_place.open()
    ledger = Ledger(database, clock=clock)
    ledger.open_account("federation", "instance", 10**9)
    with database.write() as connection:
        pages = connection.execute(text("PRAGMA page_count")).scalar()
    with database.write() as connection:
        connection.execute(text(f"PRAGMA max_page_count = {int(pages or 0) + 2}"))
    made = 0

    def charge_until_it_is_full() -> None:
        nonlocal made
        for made in range(1000):
            ledger.reserve(f"job-{made}", [Charge("federation", "instance", 1)], detail={"filler": "x" * 500})

    with pytest.raises(Unavailable, match=r"the journal journal.db: the disk is full.*Nothing of this step was kept"):
        charge_until_it_is_full()
    assert ledger.state(f"job-{made}") is None
    assert ledger.balance("federation", "instance").spent == made == ledger.verify().seq - 1
    with database.write() as connection:
        connection.execute(text("PRAGMA max_page_count = 1000000"))
    ledger.reserve(f"job-{made}", [Charge("federation", "instance", 1)])
    assert ledger.verify().seq == made + 2


def test_a_locked_sqlite_journal_is_told(sqlite_place: Place) -> None:
    database = open_database(sqlite_place.target, busy_timeout_s=0.05)
    sqlite_place.opened.append(database)
    with closing(sqlite3.connect(sqlite_place.target, isolation_level=None)) as stranger:
        stranger.execute("BEGIN IMMEDIATE")
        with pytest.raises(Unavailable, match="holds it locked"), database.write():
            pass
    with database.write():
        pass


def test_a_locked_postgresql_journal_is_told(postgres_server: PostgresServer) -> None:
    url = postgres_server.new_database()
    with open_database(url, busy_timeout_s=0.1) as database, psycopg.connect(url) as stranger:
        stranger.execute("SELECT pg_advisory_xact_lock(%s)", (POSTGRESQL_LOCK,))
        with pytest.raises(Unavailable, match="holds it locked"), database.write():
            pass
        stranger.rollback()
        with database.write():
            pass


def test_a_lost_postgresql_connection_is_told_and_found_again(postgres_server: PostgresServer, clock: Clock) -> None:
    url = postgres_server.new_database()
    with open_database(url) as database:
        ledger = Ledger(database, clock=clock)
        ledger.open_account("federation", "instance", 10)
        with psycopg.connect(url, autocommit=True) as stranger:
            kill = (
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
                "WHERE pid <> pg_backend_pid() AND datname = current_database()"
            )

            def step() -> None:
                with database.write() as connection:
                    ledger.reserve("lost", [Charge("federation", "instance", 1)], connection=connection)
                    stranger.execute(kill)
                    ledger.post("lost", connection=connection)

            with pytest.raises(Unavailable, match=r"lost|cannot be reached"):
                step()
            stranger.execute(kill)
        assert ledger.state("lost") is None
        ledger.reserve("job", [Charge("federation", "instance", 1)])
        assert ledger.verify().seq == 2


@pytest.mark.parametrize(
    ("setting", "value"), [("synchronous_commit", "off"), ("synchronous_commit", "local"),
                           ("session_replication_role", "replica")]
)  # fmt: skip
def test_a_postgresql_that_gives_up_durability_is_refused(
    postgres_server: PostgresServer, setting: str, value: str
) -> None:
    url = postgres_server.new_database()
    name = url.rsplit("/", 1)[1]
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(f'ALTER DATABASE "{name}" SET {setting} = {value}')
    with pytest.raises(UnsafeStorage, match=f"runs with {setting} = {value}"):
        open_database(url)


@pytest.mark.process
def test_a_password_is_neither_in_an_error_nor_in_a_repr(postgres_server: PostgresServer) -> None:
    url = postgres_server.new_database()
    with open_database(url) as database:
        assert PASSWORD not in repr(database) + database.what
        assert "127.0.0.1" in repr(database)
    wrong: list[Any] = [
        url.replace(PASSWORD.replace(" ", "%20"), "hush%20hush"),
        "postgresql://labeler:hush%20hush@127.0.0.1:1/none",
    ]
    for target in wrong:
        with pytest.raises(Unavailable, match="cannot be reached or refused the login") as error:
            open_database(target)
        chain: BaseException | None = error.value
        while chain is not None:
            assert "hush" not in str(chain) + repr(chain)
            chain = chain.__cause__ or chain.__context__
