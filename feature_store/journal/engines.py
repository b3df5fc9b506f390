"""Connections with settings that keep what was committed, read back and checked on every one of them.

A setting that was asked for is not a setting that took: SQLite falls back silently (no WAL on some file systems), and
PostgreSQL may be configured for speed. Each new connection is therefore asked what it really does.
"""

from __future__ import annotations

import sqlite3
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import quote

from sqlalchemy import Connection, Engine, create_engine, event
from sqlalchemy.engine import URL
from sqlalchemy.exc import DBAPIError, NoSuchModuleError
from sqlalchemy.pool import QueuePool

from feature_store.journal.kept_connections import connect as connect_to
from feature_store.journal.kept_connections import kept_connection
from labeler.errors import InvalidSetting, UnsafeStorage

POSTGRESQL_LOCK = 0x6C6162656C657201
"""Of the journal's writers, among the advisory locks of one PostgreSQL database."""

SYNCHRONOUS_FULL = 2

CHECKPOINT_PAGES = 4000
"""Of the write-ahead log, 16 MB: a commit of the ledger writes a handful, and a checkpoint costs two more syncs."""

POSTGRESQL_SETTINGS = {
    "fsync": ("on",),
    "full_page_writes": ("on",),
    "synchronous_commit": ("on", "remote_apply"),
    "session_replication_role": ("origin",),  # "replica" would switch the triggers off
}
"""What PostgreSQL must answer so that a commit survives a power cut and entries stay as they are."""

_READERS = 8

READER_PAGES_KIB = 512
"""What one reader of a SQLite journal keeps of it. Whatever it keeps is worthless as soon as anybody writes, so under a
load a large one is memory alone: by default eight readers grow to 16 MiB, and read no faster."""


def sqlite_version() -> str:
    """Of the library that keeps journals in files."""
    return sqlite3.sqlite_version


def sqlite_engines(path: Path, *, what: str, read_only: bool, busy_timeout_s: float) -> tuple[Engine, Engine]:
    """The one writing connection of a SQLite journal, and the pool of its readers."""
    reader = _sqlite_engine(path, what=what, mode="ro", timeout_s=busy_timeout_s, connections=_READERS)
    if read_only:
        return reader, reader
    return _sqlite_engine(path, what=what, mode="rw", timeout_s=busy_timeout_s, connections=1), reader


def postgresql_engine(url: URL, *, what: str, read_only: bool, busy_timeout_s: float) -> Engine:
    """A pool of connections whose durability was checked."""
    timeout_ms = max(1, round(1000 * busy_timeout_s))
    options = f"-c lock_timeout={timeout_ms} -c idle_in_transaction_session_timeout={60_000 + timeout_ms}"
    if read_only:
        options += " -c default_transaction_read_only=on"
    try:
        engine = create_engine(
            url,
            hide_parameters=True,
            pool_pre_ping=True,
            pool_size=_READERS,
            max_overflow=_READERS,
            pool_timeout=busy_timeout_s,
            connect_args={"options": options, "connect_timeout": 10, "application_name": "labeler"},
        )
    except (ImportError, NoSuchModuleError):
        raise InvalidSetting("PostgreSQL needs the package psycopg: install private-labeler[postgres]") from None

    @event.listens_for(engine, "connect")
    def check(connection: Any, _: object) -> None:
        with connection.cursor() as cursor:
            for name, good in POSTGRESQL_SETTINGS.items():
                found = cursor.execute(f"SHOW {name}").fetchone()[0]
                if found not in good:
                    raise UnsafeStorage(
                        f"{what}: PostgreSQL runs with {name} = {found}, and a journal needs {name} = {good[0]}: "
                        "otherwise charges could be lost or rewritten. Change it and start again"
                    )
        connection.rollback()

    return engine


def empty_log(connection: Connection) -> None:
    """Bring the write-ahead log of a SQLite journal into its file, unless somebody reads, and cut it to nothing."""
    raw: Any = connection.connection.driver_connection
    statement = "PRAGMA wal_checkpoint(TRUNCATE)"
    patience_ms = raw.execute("PRAGMA busy_timeout").fetchone()[0]
    try:
        raw.execute("PRAGMA busy_timeout = 0")
        raw.execute(statement).fetchall()
    except sqlite3.Error as error:
        raise DBAPIError(statement, None, error) from error
    finally:
        raw.execute(f"PRAGMA busy_timeout = {int(patience_ms)}")


def overwrite_deleted(connection: Connection, wanted: bool) -> None:
    """Have what a SQLite journal deletes be overwritten, or only where its page is written anyway."""
    raw: Any = connection.connection.driver_connection
    raw.execute(f"PRAGMA secure_delete = {'ON' if wanted else 'FAST'}").fetchall()


def rewrite(connection: Connection) -> None:
    """Write a SQLite journal anew, without the pages of what was deleted; outside of any transaction."""
    raw: Any = connection.connection.driver_connection
    statement = "VACUUM"
    try:
        raw.execute(statement)
    except sqlite3.Error as error:
        raise DBAPIError(statement, None, error) from error


def follow_references(engine: Engine, wanted: bool) -> None:
    """Have the one writing connection of a SQLite journal follow references between tables, or not.

    Raises:
        UnsafeStorage: SQLite did not take the setting.
    """
    with engine.connect() as connection:
        raw: Any = connection.connection.driver_connection
        raw.execute(f"PRAGMA foreign_keys = {int(wanted)}")
        # Old: a renamed table is not looked for in the triggers of others, which name it while it is away.
        raw.execute(f"PRAGMA legacy_alter_table = {int(not wanted)}")
        if raw.execute("PRAGMA foreign_keys").fetchone()[0] != int(wanted):
            raise UnsafeStorage("SQLite does not switch the following of references; stop whoever else writes")


def _sqlite_engine(path: Path, *, what: str, mode: str, timeout_s: float, connections: int) -> Engine:
    uri = f"file:{quote(str(path))}?mode={mode}"

    def connect() -> Any:
        kept = kept_connection(uri)
        if kept is not None:
            return kept
        # isolation_level=None: transactions begin and end where this project says so, and nowhere else.
        connection = connect_to(uri, timeout=timeout_s, isolation_level=None, check_same_thread=False)
        try:
            _prepare_sqlite(connection, what=what, writable=mode == "rw")
        except BaseException:
            connection.close()
            raise
        return connection

    first = _first_of_all()
    # By hand, as `create_engine` does it with forty options that are not asked for here: a journal is opened at every
    # start of a party, and this is a third of what opening it took.
    pool = QueuePool(connect, pool_size=connections, max_overflow=0, timeout=timeout_s, dialect=first.dialect)
    engine = Engine(pool, first.dialect, first.url, hide_parameters=True)
    engine._compiled_cache = first._compiled_cache
    return engine


@cache
def _first_of_all() -> Engine:
    """The engine whose dialect and compiled statements every SQLite journal of this process uses.

    A compiled statement belongs to a dialect, and an engine makes one of its own: without this each opening of a
    journal would compile everything anew, which takes several times as long as what it then executes. Connected once,
    to nothing: a dialect learns on its first connection which SQLite it speaks to.
    """
    first = create_engine("sqlite://")
    with first.connect():
        pass
    first.dispose()
    return first


def _prepare_sqlite(connection: sqlite3.Connection, *, what: str, writable: bool) -> None:
    if writable:
        connection.execute("PRAGMA journal_mode = WAL").fetchall()
        # What is deleted is overwritten and not only forgotten, unless it is noise by then (Database.dropping_noise).
        connection.execute("PRAGMA secure_delete = ON").fetchall()
    else:
        connection.execute("PRAGMA query_only = ON")
        connection.execute(f"PRAGMA cache_size = -{READER_PAGES_KIB}")
    connection.execute("PRAGMA synchronous = FULL")
    connection.execute("PRAGMA foreign_keys = ON")
    connection.execute(f"PRAGMA wal_autocheckpoint = {CHECKPOINT_PAGES}")
    connection.execute("PRAGMA recursive_triggers = ON")  # so that INSERT OR REPLACE cannot pass a delete trigger
    connection.execute("PRAGMA fullfsync = ON")  # where the system's fsync stops at the disk's cache (macOS)
    connection.execute("PRAGMA checkpoint_fullfsync = ON")
    wanted = {"journal_mode": "wal", "synchronous": SYNCHRONOUS_FULL, "foreign_keys": 1, "recursive_triggers": 1}
    if writable:
        wanted["secure_delete"] = 1
    for name, value in wanted.items():
        found = connection.execute(f"PRAGMA {name}").fetchone()[0]
        if found != value:
            raise UnsafeStorage(
                f"{what}: SQLite answers {name} = {found}, and a journal needs {value}: otherwise charges could be "
                "lost. Use a local disk that supports shared memory files, or PostgreSQL"
            )
