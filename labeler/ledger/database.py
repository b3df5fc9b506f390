"""Access to a SQL database that keeps what it acknowledged: SQLite in a file, or PostgreSQL by URL.

One process writes a journal. It holds a lock file for SQLite, or a session's advisory lock in PostgreSQL
(`Ownership`); a second process is refused with a message. Writers are serialized: one write transaction runs at a
time. So a chain of entries has no gaps and no races, and a transaction that reads a balance and charges it cannot be
overtaken. When `write` is left without an error, what was written survives a power cut; when it is left with one,
nothing was written.

Asking for a setting does not ensure it: SQLite falls back silently (no WAL on some file systems), and PostgreSQL may
be configured for speed. So each new connection is asked what it really does.

More than 600 lines: all differences between the two dialects are here.

A database's own errors are translated into the tree of `labeler.errors` if they are about its storage: full,
unreadable, locked, out of reach, damaged. A broken constraint is a mistake of the caller and passes through, without
the rows: PostgreSQL quotes what it refused ("Failing row contains", "Key (...)=(...)"), which may be a share.

A journal in PostgreSQL has one owner, as a lock file gives to one in SQLite.

    a session's advisory lock    held on a separate connection while the owner lives; PostgreSQL frees it
                                 when that connection ends, however it ends.
    a name in journal_owner      written by each owner when it starts; an owner that finds another name was replaced.

Every write transaction checks both, after it has taken the writers' lock and before it reads anything. The session
that holds the lock must be the one this process opened, and the name must be this process's. So a process whose
connection was cut writes nothing until it holds the lock again. Once another owner has started, it writes nothing at
all, because the new owner's first write takes the same writers' lock.
"""

from __future__ import annotations

import base64
import json
import secrets
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

from sqlalchemy import (
    Column,
    ColumnElement,
    CursorResult,
    Engine,
    Insert,
    Select,
    Table,
    Update,
    bindparam,
    create_engine,
    delete,
    event,
    insert,
    literal,
    select,
    text,
    tuple_,
    update,
)
from sqlalchemy import Connection as Connection
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError, DBAPIError, IntegrityError, NoSuchModuleError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from sqlalchemy.pool import QueuePool

from labeler.errors import (
    InvalidSetting,
    JournalBroken,
    JournalInUse,
    LabelerError,
    OutputInUse,
    StorageFull,
    Unavailable,
    UnsafeStorage,
)
from labeler.ledger.chain import time_of, time_text
from labeler.ledger.schema import journal_owner, write_probes
from labeler.system.clock import now_utc as now_utc
from labeler.system.faults import between
from labeler.system.files import check_private, check_synced, create_private, exclusive, sync_folder

MAX_PAGE: Final = 1000
"""Most rows of one page of a list."""

POSTGRESQL_LOCK = 0x6C6162656C657201
"""Key of the writers' lock among the advisory locks of one PostgreSQL database."""

CHECKPOINT_PAGES = 4000
"""Pages in the write-ahead log, 16 MB: a ledger commit writes a handful, and a checkpoint costs two more syncs."""

POSTGRESQL_SETTINGS = {
    "fsync": ("on",),
    "full_page_writes": ("on",),
    "synchronous_commit": ("on", "remote_apply"),
    "session_replication_role": ("origin",),  # "replica" would switch the triggers off
}
"""Required answers of PostgreSQL, so that a commit survives a power cut and entries stay as they are."""

READER_PAGES_KIB = 512
"""Page cache of one reader of a SQLite journal. Any write makes it worthless, so under load a large cache only costs
memory: by default eight readers grow to 16 MiB, and read no faster."""

SQLITE_VERSION = sqlite3.sqlite_version
"""Version of the library that keeps journals in files."""

_READERS = 8
_SYNCHRONOUS_FULL = 2
_MAX_CURSOR = 1000


class Database:
    """An open journal; made by `open_database`, shared by all threads of a process.

    Attributes:
        what: the journal in words, for messages: a file name, or host and database; never a password.
        is_read_only: True if `write` is refused.
        anchor: the small file that remembers the ledger's head, if there is one.
        path: the SQLite file; None if the journal is in PostgreSQL.
        undone: how often a write was undone. A store that caches what it wrote (one process writes a journal) reads it
            again when this has changed.
    """

    def __init__(
        self,
        writer: Engine,
        reader: Engine,
        *,
        what: str,
        is_read_only: bool,
        anchor: Path | None,
        owned: ExitStack,
        path: Path | None = None,
        ownership: Ownership | None = None,
    ) -> None:
        self.what = what
        self.is_read_only = is_read_only
        self.anchor = anchor
        self.path = path
        self.undone = 0
        self._writer = writer
        self._reader = reader
        self._owned = owned
        self._ownership = ownership
        self._pen = threading.Lock()
        self._pen_holder: int | None = None
        self._after_commit: dict[object, Callable[[], None]] = {}

    def __repr__(self) -> str:
        return f"Database({self.what!r})"

    def __enter__(self) -> Database:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def dialect(self) -> str:
        """ "sqlite" or "postgresql"."""
        return self._writer.dialect.name

    @contextmanager
    def write(self) -> Iterator[Connection]:
        """Open a write transaction, alone in its journal; durable when the block ends, undone whole if it raises.

        It must not be nested in the same thread: pass the connection on instead.

        Raises:
            Unavailable: the disk is full, the database locked or out of reach.
            JournalInUse: another process took over a journal in PostgreSQL.
            InvalidSetting: the journal was opened for reading only.
        """
        if self.is_read_only:
            raise InvalidSetting(f"{self.what} was opened for reading only")
        if self._pen_holder == threading.get_ident():
            raise RuntimeError("a write transaction is open in this thread; pass its connection on")
        with self._pen:
            self._pen_holder = threading.get_ident()
            self._after_commit.clear()
            try:
                with translating(self.what), self._writer.begin() as connection:
                    if self._ownership is not None:
                        # Taken first: every later statement of the transaction sees what the last writer committed.
                        connection.execute(text("SELECT pg_advisory_xact_lock(:lock)"), {"lock": POSTGRESQL_LOCK})
                        self._ownership.confirm(connection)
                    yield connection
                    between("commit")
                    raw: Any = connection.connection.driver_connection
                    if self.dialect == "sqlite" and not raw.in_transaction:
                        # Undone by SQLite, as on a full disk, after an error that was ignored.
                        raise Unavailable(
                            f"{self.what}: SQLite has undone this step. Nothing of it was kept; repeat it"
                        )
                between("committed")
                failed: Exception | None = None
                for step in self._after_commit.values():
                    try:
                        step()
                    except Exception as error:
                        # Run the other steps all the same: what they follow is durable.
                        failed = failed or error
                if failed is not None:
                    raise failed
            except BaseException:
                self.undone += 1
                raise
            finally:
                self._pen_holder = None

    def after_commit(self, step: Callable[[], None], *, last_of: object = None) -> None:
        """Run a step once this thread's open write transaction is durable, before the next one begins.

        Args:
            last_of: of the steps of one transaction that share this value, only the last one runs.
        """
        if self._pen_holder != threading.get_ident():
            raise RuntimeError("no write transaction is open in this thread")
        key = object() if last_of is None else last_of
        self._after_commit.pop(key, None)
        self._after_commit[key] = step

    @contextmanager
    def attempt(self, connection: Connection) -> Iterator[None]:
        """Run a part of a write transaction; if the block raises, undo it alone, with its `after_commit` steps.

        So one transaction can hold the steps of many rounds, and a refused one does not undo the others.
        """
        before = dict(self._after_commit)
        savepoint = connection.begin_nested()
        try:
            yield
            savepoint.commit()
        except BaseException as error:
            try:
                savepoint.rollback()
            except Exception:
                # On a full disk SQLite undoes the whole transaction, and the error that says so ends it. No other
                # error may be caught to continue the transaction: nothing would undo what follows.
                if isinstance(error, LabelerError):
                    raise
                raise error from None
            self.undone += 1
            self._after_commit.clear()
            self._after_commit.update(before)
            raise

    def claim(self) -> None:
        """Name this process as the owner of a journal in PostgreSQL. Call it before anything else is written."""
        if self._ownership is not None:
            with self.write() as connection:
                self._ownership.claim(connection)

    @contextmanager
    def read(self) -> Iterator[Connection]:
        """Open a read transaction: a single moment of the journal, in which nothing can be written.

        Raises:
            Unavailable: the database cannot be read now.
        """
        with translating(self.what), self._reader.begin() as connection:
            yield connection

    def writing(self, connection: Connection | None) -> AbstractContextManager[Connection]:
        """Return the caller's write transaction, or a new one."""
        return self.write() if connection is None else nullcontext(connection)

    def reading(self, connection: Connection | None) -> AbstractContextManager[Connection]:
        """Return the caller's transaction, which sees its own writes, or a new read transaction."""
        return self.read() if connection is None else nullcontext(connection)

    @contextmanager
    def remodel(self) -> Iterator[Connection]:
        """Open a write transaction in which tables may be rebuilt (`labeler.ledger.migrations`).

        SQLite drops a table that others refer to only while foreign keys are off; all of them are checked before the
        transaction is committed. PostgreSQL alters tables in place and enforces foreign keys throughout.

        Raises:
            JournalBroken: a row refers to one that is not there any more; nothing was kept.
        """
        if self.dialect != "sqlite":
            with self.write() as connection:
                yield connection
            return
        self._follow_references(False)
        try:
            with self.write() as connection:
                yield connection
                lost = connection.exec_driver_sql("PRAGMA foreign_key_check").fetchall()
                if lost:
                    raise JournalBroken(
                        f"{self.what}: a row of {lost[0][0]} refers to one of {lost[0][2]} that is not there. Nothing "
                        "was kept; restore the newest backup"
                    )
        finally:
            self._follow_references(True)

    def _follow_references(self, wanted: bool) -> None:
        with self._outside() as raw:
            raw.execute(f"PRAGMA foreign_keys = {int(wanted)}")
            # Legacy mode: while a table is renamed, SQLite does not look for it in the triggers of others that name it.
            raw.execute(f"PRAGMA legacy_alter_table = {int(not wanted)}")
            if raw.execute("PRAGMA foreign_keys").fetchone()[0] != int(wanted):
                raise UnsafeStorage("SQLite does not switch the following of references; stop whoever else writes")

    def forget_log(self) -> None:
        """Empty the write-ahead log of SQLite, which would keep deleted rows until it is overwritten.

        If somebody reads at this moment it stays, and the next call empties it. PostgreSQL keeps its log for replicas
        and backups, so there the operator decides.

        Raises:
            Unavailable: the disk is full, or does not write.
        """
        if self.dialect != "sqlite" or self.is_read_only:
            return
        if self._pen_holder == threading.get_ident():
            raise RuntimeError("a write transaction is open in this thread; the log is emptied after it")
        with self._pen, translating(self.what), self._outside() as raw:
            _empty_log(raw)

    def compact(self) -> None:
        """Return the pages of deleted rows to the disk if the journal is a SQLite file.

        Rows and rules stay as they are. It needs room for a second file while it runs. PostgreSQL does this by itself.

        Raises:
            Unavailable: the disk is full, or somebody reads.
        """
        if self.dialect != "sqlite" or self.is_read_only:
            return
        with self._pen, translating(self.what), self._outside() as raw:
            raw.execute("VACUUM")
            _empty_log(raw)

    @contextmanager
    def _outside(self) -> Iterator[Any]:
        """Lend SQLite's own writing connection, outside of any transaction."""
        with self._writer.connect() as connection:
            raw: Any = connection.connection.driver_connection
            try:
                yield raw
            except sqlite3.Error as error:
                raise DBAPIError("PRAGMA", None, error) from error

    def probe(self) -> int:
        """Write one row durably, to test that the journal takes writes now; return how often that was done.

        Raises:
            StorageFull: there is no room.
            Unavailable: the journal cannot be written for another reason.
        """
        with self.write() as connection:
            row = connection.execute(update(write_probes).values(writes=write_probes.c.writes + 1)).rowcount
            if not row:
                connection.execute(insert(write_probes), {"probe": 0, "writes": 1})
            return int(connection.execute(write_probes.select()).one().writes)

    def close(self) -> None:
        """Close every connection and the file; may be called twice."""
        self._owned.close()
        self._reader.dispose()
        self._writer.dispose()


def open_database(
    target: str | Path,
    *,
    anchor: Path | None = None,
    read_only: bool = False,
    allow_unsynced: bool = False,
    busy_timeout_s: float = 10.0,
) -> Database:
    """Open a journal, or refuse it if an acknowledged charge could be lost.

    A new journal gets its tables; one of an earlier revision is upgraded to this program's.

    Args:
        target: path of a SQLite file (created if missing), or a URL: sqlite:///PATH, postgresql://...
        anchor: a local file that remembers the ledger's head; see `labeler.ledger.chain`.
        read_only: only read; allowed while another process owns the journal.
        allow_unsynced: accept file systems in memory.
        busy_timeout_s: how long to wait for another connection's transaction.

    Raises:
        InvalidSetting: the target is neither a file nor a known URL, or its tables are of another revision.
        UnsafeStorage: memory, a network file system, loose permissions, or settings that give up durability.
        JournalInUse: another process owns the journal.
        JournalBroken: it is damaged, or it does not name the revision of its tables.
        Unavailable: the database cannot be reached or opened.
    """
    from labeler.ledger.migrations import check_revision, prepare

    url = parsed(target)
    with ExitStack() as owned:
        if url.get_backend_name() == "sqlite":
            path = Path(url.database or "").resolve()  # so that two names of one file share one lock
            what, ownership = f"the journal {path.name}", None
            _own_file(path, owned, what=what, read_only=read_only, allow_unsynced=allow_unsynced)
            reader = _sqlite_engine(path, what=what, is_writer=False, timeout_s=busy_timeout_s)
            writer = reader if read_only else _sqlite_engine(path, what=what, is_writer=True, timeout_s=busy_timeout_s)
        else:
            path = None
            what = f"the journal {url.database or ''} at {url.host or 'the local socket'}"
            writer = _postgresql_engine(url, what=what, read_only=read_only, busy_timeout_s=busy_timeout_s)
            owned.callback(writer.dispose)
            # Each reading transaction sees one moment of the journal, in which nothing can be written.
            reader = writer.execution_options(isolation_level="REPEATABLE READ", postgresql_readonly=True)
            ownership = None if read_only else Ownership(writer, what)
            if ownership is not None:
                owned.callback(ownership.end)
        database = Database(
            writer,
            reader,
            what=what,
            is_read_only=read_only,
            anchor=anchor,
            owned=owned.pop_all(),
            path=path,
            ownership=ownership,
        )
    try:
        if not read_only:
            prepare(database)  # first: it makes the file a journal, which readers then find
        check_revision(database)
    except BaseException:
        database.close()
        raise
    return database


def _own_file(path: Path, owned: ExitStack, *, what: str, read_only: bool, allow_unsynced: bool) -> None:
    """Create a SQLite file if it is missing and hold its lock while the process lives."""
    if not path.parent.is_dir():
        raise InvalidSetting(f"{what}: its folder does not exist; make it first")
    if not allow_unsynced:
        check_synced(path)
    if read_only and not path.exists():
        raise InvalidSetting(f"{what} does not exist, and was to be opened for reading only")
    if not read_only:
        lock = path.with_name(path.name + ".lock")
        create_private(lock)
        try:
            owned.enter_context(exclusive(lock, what))
        except OutputInUse:
            raise JournalInUse(
                f"another process holds {what}; one process at a time may write it. Stop the other one, or open the "
                "journal for reading only"
            ) from None
        if create_private(path):
            sync_folder(path.parent)
    check_private(path)


def parsed(target: str | Path) -> URL:
    """Parse the location of a journal.

    Raises:
        InvalidSetting, UnsafeStorage: a journal may not be there.
    """
    if isinstance(target, Path) or "://" not in target:
        if str(target) in ("", ".", ":memory:") or str(target).startswith("file:"):
            raise UnsafeStorage("a journal in memory forgets every charge; give it a file")
        return URL.create("sqlite", database=str(target))
    try:
        url = make_url(target)
    except (ArgumentError, ValueError):
        # The text may hold a password, so it is not repeated.
        raise InvalidSetting("the journal's URL cannot be read; use postgresql://USER:PASSWORD@HOST/DATABASE") from None
    if url.get_backend_name() == "sqlite":
        if url.database in (None, "", ":memory:") or str(url.database).startswith("file:"):
            raise UnsafeStorage("a journal in memory forgets every charge; give it a file")
        if url.query:
            raise InvalidSetting("a SQLite journal takes no options in its URL; give it a path")
        return url
    if url.get_backend_name() != "postgresql":
        raise InvalidSetting("a journal is a SQLite file or a postgresql:// URL")
    return url.set(drivername="postgresql+psycopg")


def _sqlite_engine(path: Path, *, what: str, is_writer: bool, timeout_s: float) -> Engine:
    """Return the one writing connection of a SQLite journal, or the pool of its readers."""
    uri = f"file:{quote(str(path))}?mode={'rw' if is_writer else 'ro'}"

    def connect() -> sqlite3.Connection:
        # isolation_level=None: transactions begin and end where this project says so, and nowhere else.
        connection = sqlite3.connect(uri, uri=True, timeout=timeout_s, isolation_level=None, check_same_thread=False)
        try:
            _prepare_sqlite(connection, what=what, writable=is_writer)
        except BaseException:
            connection.close()
            raise
        return connection

    engine = create_engine(
        "sqlite://",
        creator=connect,
        poolclass=QueuePool,
        pool_size=1 if is_writer else _READERS,
        max_overflow=0,
        pool_timeout=timeout_s,
        hide_parameters=True,
    )

    @event.listens_for(engine, "begin")
    def begin(connection: Connection) -> None:
        connection.exec_driver_sql("BEGIN IMMEDIATE" if is_writer else "BEGIN")

    return engine


def _prepare_sqlite(connection: sqlite3.Connection, *, what: str, writable: bool) -> None:
    if writable:
        connection.execute("PRAGMA journal_mode = WAL").fetchall()
        connection.execute("PRAGMA secure_delete = ON").fetchall()  # what is deleted is overwritten, not only forgotten
    else:
        connection.execute("PRAGMA query_only = ON")
        connection.execute(f"PRAGMA cache_size = -{READER_PAGES_KIB}")
    connection.execute("PRAGMA synchronous = FULL")
    connection.execute("PRAGMA foreign_keys = ON")
    connection.execute(f"PRAGMA wal_autocheckpoint = {CHECKPOINT_PAGES}")
    connection.execute("PRAGMA recursive_triggers = ON")  # so that INSERT OR REPLACE cannot pass a delete trigger
    connection.execute("PRAGMA fullfsync = ON")  # where the system's fsync stops at the disk's cache (macOS)
    connection.execute("PRAGMA checkpoint_fullfsync = ON")
    wanted = {"journal_mode": "wal", "synchronous": _SYNCHRONOUS_FULL, "foreign_keys": 1, "recursive_triggers": 1}
    if writable:
        wanted["secure_delete"] = 1
    for name, value in wanted.items():
        found = connection.execute(f"PRAGMA {name}").fetchone()[0]
        if found != value:
            raise UnsafeStorage(
                f"{what}: SQLite answers {name} = {found}, and a journal needs {value}: otherwise charges could be "
                "lost. Use a local disk that supports shared memory files, or PostgreSQL"
            )


def _empty_log(raw: Any) -> None:
    """Move the write-ahead log of a SQLite journal into its file, unless somebody reads, and truncate it."""
    patience_ms = raw.execute("PRAGMA busy_timeout").fetchone()[0]
    try:
        raw.execute("PRAGMA busy_timeout = 0")
        raw.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
    finally:
        raw.execute(f"PRAGMA busy_timeout = {int(patience_ms)}")


def _postgresql_engine(url: URL, *, what: str, read_only: bool, busy_timeout_s: float) -> Engine:
    """Return a pool of connections whose durability was checked."""
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


# Statements of one table. Each is built once: building one costs several times as much as running it.


def select_rows(
    connection: Connection, table: Table, in_order: tuple[str, ...] = (), /, **by: Any
) -> CursorResult[Any]:
    """Select the rows in which these columns hold these values; a list matches any of its values.

    Args:
        in_order: columns to sort by.
    """
    is_list = tuple((name, isinstance(value, list)) for name, value in by.items())
    return connection.execute(_rows_query(table, is_list, in_order), by)


def insert_rows(connection: Connection, table: Table, /, *new: Mapping[str, Any]) -> None:
    """Insert rows; no rows change nothing."""
    if new:
        connection.execute(_insert_statement(table), new)


def update_rows(connection: Connection, table: Table, values: Mapping[str, Any], /, **by: Any) -> int:
    """Set columns in the rows whose other columns hold these values; return the number of rows."""
    which = {f"of_{name}": value for name, value in by.items()}
    return connection.execute(_update_statement(table, tuple(by)), {**which, **values}).rowcount


@cache
def _rows_query(table: Table, is_list: tuple[tuple[str, bool], ...], in_order: tuple[str, ...]) -> Select[Any]:
    found = [
        table.c[name].in_(bindparam(name, expanding=True)) if listed else table.c[name] == bindparam(name)
        for name, listed in is_list
    ]
    return select(table).where(*found).order_by(*(table.c[name] for name in in_order))


@cache
def _insert_statement(table: Table) -> Insert:
    return insert(table)


@cache
def _update_statement(table: Table, by: tuple[str, ...]) -> Update:
    return update(table).where(*(table.c[name] == bindparam(f"of_{name}") for name in by))


# Lists that are read page by page, newest first.


def cursor_text(at: datetime, row_id: str) -> str:
    """Encode the end of a page as an opaque text: the time and the id of its last row."""
    return base64.urlsafe_b64encode(json.dumps([time_text(at), row_id]).encode()).decode().rstrip("=")


def before(cursor: str, at: Column[datetime], row_id: Column[str]) -> ColumnElement[bool]:
    """Return the condition that a row comes after the cursor in a list sorted newest first.

    Raises:
        InvalidSetting: `cursor_text` wrote no such text.
    """
    try:
        if not isinstance(cursor, str) or len(cursor) > _MAX_CURSOR:
            raise ValueError
        padded = cursor.encode("ascii") + b"=" * (-len(cursor) % 4)
        written, last = json.loads(base64.b64decode(padded, altchars=b"-_", validate=True))
        if type(written) is not str or type(last) is not str or "\0" in last:
            raise ValueError
        moment = time_of(written)
        last.encode()
    except (ValueError, TypeError, RecursionError):
        raise InvalidSetting(
            "after: not a position in this list; pass on `next` of the page before unchanged, or leave it out"
        ) from None
    # As one comparison: so an index of both begins at the cursor.
    return tuple_(at, row_id) < tuple_(literal(moment, at.type), literal(last, row_id.type))


def check_limit(limit: int) -> int:
    """Return the page size if it is allowed.

    Raises:
        InvalidSetting: fewer than 1 or more than MAX_PAGE.
    """
    if type(limit) is not int or not 1 <= limit <= MAX_PAGE:
        raise InvalidSetting(f"limit: a page has 1 to {MAX_PAGE} entries")
    return limit


_KEPT = "Nothing of this step was kept; it can be repeated"
_IN_DOUBT = "Whether this step was kept is not known; repeat it, twice equals once"


@contextmanager
def translating(what: str) -> Iterator[None]:
    """Raise Unavailable or JournalBroken if the database reports trouble with its storage.

    Args:
        what: the journal in words, without a password.
    """
    try:
        yield
    except DBAPIError as error:
        translated = translate(error, what)
        if translated is None:
            forget_rows(error)
            raise
        raise translated from error
    except PoolTimeout as error:
        raise Unavailable(f"{what}: every connection is busy. {_KEPT} later") from error


def forget_rows(error: DBAPIError) -> None:
    """Strip an error of PostgreSQL to what was broken and where, without the values of a row."""
    diagnosis = getattr(error.orig, "diag", None)
    if error.orig is None or diagnosis is None:
        return
    state = diagnosis.sqlstate or "no code"
    # The primary message of class 22 quotes the value that does not fit.
    said = "a value that the column cannot hold" if state.startswith("22") else diagnosis.message_primary
    place = ", ".join(name for name in (diagnosis.table_name, diagnosis.constraint_name) if name)
    sentence = f"{said or type(error.orig).__name__} ({state}{f'; {place}' if place else ''})"
    # The original keeps the row in its result, an attribute that no traceback's text shows.
    error.orig.args = (sentence,)
    error.args = (f"({type(error.orig).__module__}.{type(error.orig).__qualname__}) {sentence}",)


def translate(error: DBAPIError, what: str) -> LabelerError | None:
    """Translate a database's error to one of this project; None if it is about the statement itself."""
    if isinstance(error, IntegrityError):
        return None
    if isinstance(error.orig, sqlite3.Error):
        return _of_sqlite(error.orig, what)
    return _of_postgresql(error, what)


def _of_sqlite(error: sqlite3.Error, what: str) -> LabelerError | None:
    code = getattr(error, "sqlite_errorcode", None)
    primary = None if code is None else code & 0xFF
    name = getattr(error, "sqlite_errorname", "")
    if primary == sqlite3.SQLITE_FULL:
        return StorageFull(f"{what}: the disk is full. {_KEPT} once there is room")
    if primary in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
        return Unavailable(f"{what}: another connection holds it locked. {_KEPT} when that one is done")
    if primary == sqlite3.SQLITE_IOERR:
        return Unavailable(f"{what}: the disk does not read or write ({name}). {_IN_DOUBT} after looking at the disk")
    if primary in (sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_PERM, sqlite3.SQLITE_READONLY):
        return Unavailable(f"{what}: it cannot be opened or written ({name}). {_KEPT} once its permissions allow it")
    if primary in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
        return JournalBroken(f"{what}: the file is damaged ({name}). Restore the newest backup")
    return None


def _of_postgresql(error: DBAPIError, what: str) -> LabelerError | None:
    state = getattr(error.orig, "sqlstate", None) or ""
    if error.connection_invalidated or state.startswith(("08", "57P")):
        return Unavailable(f"{what}: the connection to PostgreSQL was lost. {_IN_DOUBT}")
    if state == "53100":
        return StorageFull(f"{what}: the disk of PostgreSQL is full. {_KEPT} once there is room")
    if state.startswith("53"):
        return Unavailable(f"{what}: PostgreSQL is out of memory or connections ({state}). {_KEPT} later")
    if state in ("55P03", "57014", "40001", "40P01"):
        return Unavailable(f"{what}: another connection holds it locked ({state}). {_KEPT} when that one is done")
    if state.startswith("58"):
        return Unavailable(f"{what}: the disk of PostgreSQL does not read or write ({state}). {_IN_DOUBT}")
    if state in ("XX001", "XX002"):
        return JournalBroken(f"{what}: PostgreSQL reports damaged data ({state}). Restore the newest backup")
    if not state and type(error.orig).__name__ == "OperationalError":
        return Unavailable(f"{what}: PostgreSQL cannot be reached or refused the login")
    return None


POSTGRESQL_OWNER: Final = 0x6C6162656C657202
"""Key of the owner's lock among the advisory locks of one PostgreSQL database."""

PATIENCE_S = 2.0
"""How long to wait at the start: PostgreSQL takes a moment to notice that a process was killed."""

_TICK_S = 0.05

# The server must not end this session for being idle: holding the lock is its only purpose.
_SETTINGS = text(
    "SELECT set_config(name, '0', false) FROM pg_settings "
    "WHERE name IN ('idle_session_timeout', 'idle_in_transaction_session_timeout')"
)
_TAKE = text("SELECT pg_try_advisory_lock(:lock)").bindparams(lock=POSTGRESQL_OWNER)
_FREE = text("SELECT pg_advisory_unlock(:lock)").bindparams(lock=POSTGRESQL_OWNER)
# Identifies a session, even among sessions with the same process number.
_WHO = text("SELECT pid, CAST(backend_start AS text) AS began FROM pg_stat_get_activity(pg_backend_pid())")
# pg_locks shows an advisory lock of one 64-bit key as two halves, with objsubid 1.
_HOLDS = text(
    "SELECT 1 FROM pg_locks JOIN pg_stat_get_activity(CAST(:pid AS integer)) AS session USING (pid) "
    "WHERE locktype = 'advisory' AND granted AND classid = :high AND objid = :low AND objsubid = 1 "
    "AND database = (SELECT oid FROM pg_database WHERE datname = current_database()) "
    "AND backend_start = CAST(:began AS timestamptz)"
).bindparams(high=POSTGRESQL_OWNER >> 32, low=POSTGRESQL_OWNER & 0xFFFFFFFF)


class Ownership:
    """Ownership of one journal by one process, for all its threads, of which one writes at a time.

    Args:
        engine: makes connections whose settings were checked.
        what: the journal in words, for messages.

    Raises:
        JournalInUse: another process owns it.
        Unavailable: PostgreSQL cannot be reached.
    """

    def __init__(self, engine: Engine, what: str) -> None:
        self._engine = engine
        self._what = what
        self._name = secrets.token_hex(16)
        self._is_named = False
        self._session: Connection | None = None
        self._who: dict[str, object] = {}
        self._take(patience_s=PATIENCE_S)

    def claim(self, connection: Connection) -> None:
        """Name this process as the owner, in the first write transaction: an earlier owner then finds another name."""
        connection.execute(delete(journal_owner))
        connection.execute(insert(journal_owner), {"name": self._name})
        self._is_named = True

    def confirm(self, connection: Connection) -> None:
        """Check, in a write transaction that holds the writers' lock, that this process is still the owner.

        Raises:
            JournalInUse: another process is or was the owner; discard this transaction.
            Unavailable: the lock was lost, and PostgreSQL cannot be reached to take it again.
        """
        if self._session is None or connection.execute(_HOLDS, self._who).first() is None:
            self.end()
            self._take(patience_s=0.0)
        if self._is_named and connection.execute(select(journal_owner.c.name)).scalar() != self._name:
            raise JournalInUse(
                f"another process took {self._what} over when this one had lost its connection; one process at a time "
                "may write it. Stop this one"
            )

    def end(self) -> None:
        """Free the lock; may be called twice."""
        session, self._session = self._session, None
        if session is not None:
            with suppress(DBAPIError):
                # Now, and not when PostgreSQL notices that the client is gone.
                session.execute(_FREE)
            _end(session)

    def _take(self, *, patience_s: float) -> None:
        until = time.monotonic() + patience_s
        with translating(self._what):
            session = self._engine.connect().execution_options(isolation_level="AUTOCOMMIT")
            try:
                session.execute(_SETTINGS)
                while not session.execute(_TAKE).scalar():
                    if time.monotonic() >= until:
                        raise JournalInUse(
                            f"another process holds {self._what}; one process at a time may write it. Stop the other "
                            "one, give this home a database of its own, or open the journal for reading only"
                        )
                    time.sleep(_TICK_S)
                self._who = dict(session.execute(_WHO).one()._mapping)
            except BaseException:
                _end(session)
                raise
        self._session = session


def _end(session: Connection) -> None:
    """End a session instead of giving it back to the pool, where its lock would live on."""
    with suppress(DBAPIError):
        session.invalidate()
    session.close()
