"""One door to a SQL database that keeps what it acknowledged: SQLite beside the data, or PostgreSQL by URL.

Writers stand in one line: a write transaction holds the only pen, in this process (a lock) and among processes (one
owner: by a lock file beside SQLite, by `ownership` in PostgreSQL, whose writers share one advisory lock besides). So a
chain of entries has no gaps and no races, and a transaction that reads a balance and charges it cannot be overtaken.
When `write` is left without an error, what was written survives a power cut; when it is left with one, nothing of it
was.

A little over 400 lines: both dialects are told apart here and nowhere else.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from sqlalchemy import Connection, Engine, Table, text
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError

from feature_store.durable import exclusive, sync_folder
from feature_store.faults import between
from feature_store.journal.about import (
    VERSION,
    About,
    check_current,
    journal_about,
    metadata,
    read_about,
    strict_table,
    tables_of,
    write_version,
)
from feature_store.journal.connections import Connections
from feature_store.journal.engines import (
    POSTGRESQL_LOCK,
    empty_log,
    follow_references,
    overwrite_deleted,
    postgresql_engine,
    rewrite,
    sqlite_engines,
)
from feature_store.journal.outages import translating
from feature_store.journal.ownership import Ownership
from feature_store.journal.storage import check_private, check_synced, create_private
from labeler.errors import InvalidSetting, JournalBroken, JournalInUse, LabelerError, OutputInUse, UnsafeStorage

READER_FRESH_S = 1.0
"""How long a process that only reads a journal, while another one writes it, may answer with what it has read."""

__all__ = [
    "READER_FRESH_S",
    "VERSION",
    "Connection",
    "Database",
    "journal_about",
    "metadata",
    "open_database",
    "strict_table",
]


class Database:
    """An open journal; made by `open_database`, shared by all threads of a process.

    Attributes:
        what: the journal in words, for messages: a file name, or host and database; never a password.
        is_read_only: True where `write` is refused.
        anchor: the small file that remembers the ledger's head, where there is one.
        path: the SQLite file; None where the journal is in PostgreSQL.
        undone: how often something that was written was undone again. Who keeps in memory what it wrote (one process
            writes a journal) reads it anew when this has changed.
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
        is_file = path is not None
        begin = "BEGIN" if is_read_only else "BEGIN IMMEDIATE"
        self._writing = Connections(writer, begin=begin if is_file else None)
        self._reading = self._writing if reader is writer else Connections(reader, begin="BEGIN" if is_file else None)
        self._pen = threading.Lock()
        self._pen_holder: int | None = None
        self._after_commit: dict[object, Callable[[], None]] = {}
        self._listeners: list[Callable[[str, str], None]] = []
        self._present: frozenset[str] = frozenset()

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
        """One write transaction, alone in its journal; durable when the block ends, undone whole if it raises.

        It must not be nested in the same thread: pass the connection on instead.

        Raises:
            Unavailable: the disk is full, the database locked or out of reach.
            JournalInUse: another process took a journal in PostgreSQL over.
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
                with translating(self.what), self._writing.begin() as connection:
                    if self.dialect == "postgresql":
                        # Taken first: every later statement of the transaction sees what the last writer committed.
                        connection.execute(text("SELECT pg_advisory_xact_lock(:lock)"), {"lock": POSTGRESQL_LOCK})
                    if self._ownership is not None:
                        self._ownership.confirm(connection)
                    yield connection
                    between("commit")
                between("committed")
                if self._ownership is not None:
                    self._ownership.kept()
                failed: BaseException | None = None
                for step in self._after_commit.values():
                    try:
                        step()
                    except Exception as error:
                        # The others are done all the same: what they follow is durable.
                        failed = failed or error
                if failed is not None:
                    raise failed
            except BaseException:
                self.undone += 1
                raise
            finally:
                self._pen_holder = None

    def after_commit(self, step: Callable[[], None], *, last_of: object = None) -> None:
        """Do something once the write transaction that is open in this thread is durable, before the next begins.

        Args:
            last_of: of the steps of one transaction that share this, only the last one is done.
        """
        if self._pen_holder != threading.get_ident():
            raise RuntimeError("no write transaction is open in this thread")
        key = object() if last_of is None else last_of
        self._after_commit.pop(key, None)
        self._after_commit[key] = step

    def changed(self, kind: str, name: str) -> None:
        """Something that others may remember is another once the transaction of this thread is durable: tell them then.

        Args:
            kind: of what, as "job".
            name: which one.
        """
        if self._listeners:
            self.after_commit(lambda: self._tell(kind, name), last_of=(kind, name))

    def listen(self, listener: Callable[[str, str], None]) -> None:
        """Be told (kind, name) of everything that has changed, before the next write begins; do nothing slow then.

        One process writes a journal, so whoever remembers what it read and listens is never behind it for long.
        """
        self._listeners.append(listener)

    def _tell(self, kind: str, name: str) -> None:
        for listener in self._listeners:
            listener(kind, name)

    @contextmanager
    def attempt(self, connection: Connection) -> Iterator[None]:
        """A part of a write transaction that is undone by itself where the block raises, with what was to follow it.

        So a turn can keep the steps of many rounds in one transaction, of which one that is refused takes none of the
        others with it.
        """
        before = dict(self._after_commit)
        # By hand: a savepoint of the library's own has another name each time, and is compiled each time.
        cursor = connection.connection.cursor()
        cursor.execute("SAVEPOINT attempt")
        try:
            yield
            cursor.execute("RELEASE SAVEPOINT attempt")
        except BaseException as error:
            try:
                cursor.execute("ROLLBACK TO SAVEPOINT attempt")
                cursor.execute("RELEASE SAVEPOINT attempt")
            except Exception:
                # Where a disk is full SQLite undoes the whole transaction, and the error that says so ends it. No other
                # error may be caught and the transaction go on: nothing would undo what follows.
                if isinstance(error, LabelerError):
                    raise
                raise error from None
            self.undone += 1
            self._after_commit.clear()
            self._after_commit.update(before)
            raise
        finally:
            cursor.close()

    @contextmanager
    def dropping_noise(self, connection: Connection) -> Iterator[None]:
        """What a write transaction deletes in the block is left on free pages, not overwritten; in SQLite.

        Only for what is encrypted under a key that is erased with it (`feature_store.erasable`), and large: it is noise
        already, as in every backup and in the log, and zeros over it would be written, and synced, twice.
        """
        if self.dialect != "sqlite":
            yield
            return
        overwrite_deleted(connection, False)
        try:
            yield
        finally:
            overwrite_deleted(connection, True)

    @contextmanager
    def read(self) -> Iterator[Connection]:
        """One read transaction: a single moment of the journal, in which nothing can be written.

        Raises:
            Unavailable: the database cannot be read now.
        """
        with translating(self.what), self._reading.begin() as connection:
            yield connection

    def create(self, *tables: Table) -> None:
        """Make the given tables where they are missing, with all that hangs on them.

        Raises:
            InvalidSetting: the journal was made by another version, or is read-only and lacks a table.
            JournalBroken: an upgrade of it stopped half way.
        """
        wanted = [journal_about, *tables]
        if self._present.issuperset(table.name for table in wanted):
            return  # looked at when another store was opened, and nobody drops a table
        if not self._present or self.is_read_only:
            self._present = self._found()
        missing = [table for table in wanted if table.name not in self._present]
        if missing and self.is_read_only:
            raise InvalidSetting(
                f"{self.what} has no table {missing[0].name!r} yet, which its owner makes when it starts: start it once"
            )
        if missing:
            with self.write() as connection:
                # One process owns a journal, so what was missing is missing still: nothing is asked again.
                metadata.create_all(connection, tables=missing, checkfirst=False)
                if journal_about in missing:
                    write_version(connection, VERSION)
            self._present |= {table.name for table in missing}

    def has(self, *tables: Table) -> bool:
        """Whether all of them are there.

        Raises:
            InvalidSetting: the journal was made by another version.
        """
        return self._found().issuperset(table.name for table in tables)

    def _found(self) -> frozenset[str]:
        with self.read() as connection:
            present = tables_of(connection)
            about = read_about(connection, self.what, tables=present)
        if not about.is_new:
            check_current(about, self.what)
        return present

    def laid_out_with(self, *tables: Table) -> None:
        """Take it as known that these tables are there: whoever opened this journal has just laid it (`blank`)."""
        self._present |= {journal_about.name, *(table.name for table in tables)}

    def about(self) -> About:
        """What the journal says about itself.

        Raises:
            JournalBroken: it says what no program wrote.
        """
        with self.read() as connection:
            return read_about(connection, self.what)

    @contextmanager
    def remodel(self) -> Iterator[Connection]:
        """A write transaction in which tables may be made anew (`feature_store.journal.migrations`).

        SQLite drops a table that others refer to only while nobody follows references; all of them are checked
        before the transaction is committed. PostgreSQL alters tables in place and follows references throughout.

        Raises:
            JournalBroken: a row refers to one that is not there any more; nothing was kept.
        """
        self._present = frozenset()
        if self.dialect != "sqlite":
            with self.write() as connection:
                yield connection
            return
        self._writing.close()  # it is the engine's one connection that is told
        follow_references(self._writer, False)
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
            self._writing.close()
            follow_references(self._writer, True)

    def forget_log(self) -> None:
        """Empty the write-ahead log of SQLite, in which what was deleted would stand until it is written over.

        Where somebody reads at this moment it stays, and the next call empties it. PostgreSQL keeps its log for
        replicas and backups, so there it is the operator's.

        Raises:
            Unavailable: the disk is full, or does not write.
        """
        if self.dialect != "sqlite" or self.is_read_only:
            return
        if self._pen_holder == threading.get_ident():
            raise RuntimeError("a write transaction is open in this thread; the log is emptied after it")
        with self._pen, translating(self.what), self._writing.outside() as connection:
            # Not by way of the engine's own transaction: a checkpoint runs outside of any.
            empty_log(connection)

    def compact(self) -> None:
        """Give the pages of what was deleted back to the disk, where the journal is a SQLite file.

        Rows and rules stay as they are. It takes room for a second file while it runs. PostgreSQL does it by itself.

        Raises:
            Unavailable: the disk is full, or somebody reads.
        """
        if self.dialect != "sqlite" or self.is_read_only:
            return
        with self._pen, translating(self.what), self._writing.outside() as connection:
            rewrite(connection)
            empty_log(connection)

    def close(self) -> None:
        """Let go of every connection and of the file; may be called twice."""
        self._writing.close()
        self._reading.close()
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
    one_connection: bool = False,
) -> Database:
    """Open a journal, and refuse it where an acknowledged charge could be lost.

    Args:
        target: path of a SQLite file (made where it is missing), or a URL: sqlite:///PATH, postgresql://...
        anchor: a local file that remembers the ledger's head; see `feature_store.journal.anchor`.
        read_only: look only; allowed while another process owns a SQLite journal.
        allow_unsynced: accept file systems in memory. For tests.
        busy_timeout_s: how long to wait for another connection's transaction.
        one_connection: read through the writer's connection; for one thread that does one thing at a time, in a
            journal that is open for a moment.

    Raises:
        InvalidSetting: the target is no file and no known URL.
        UnsafeStorage: memory, a network file system, loose permissions, or settings that give up durability.
        JournalInUse: another process owns the journal.
        Unavailable: the database cannot be reached or opened.
    """
    url = parsed(target)
    if url.get_backend_name() == "sqlite":
        return _open_sqlite(
            Path(url.database or ""),
            anchor=anchor,
            read_only=read_only,
            allow_unsynced=allow_unsynced,
            busy_timeout_s=busy_timeout_s,
            one_connection=one_connection,
        )
    what = f"the journal {url.database or ''} at {url.host or 'the local socket'}"
    engine = postgresql_engine(url, what=what, read_only=read_only, busy_timeout_s=busy_timeout_s)
    # One moment of the journal per reading transaction, in which nothing can be written.
    reader = engine.execution_options(isolation_level="REPEATABLE READ", postgresql_readonly=True)
    with ExitStack() as owned:
        owned.callback(engine.dispose)
        ownership = None
        if not read_only:
            ownership = Ownership(engine, what)
            owned.callback(ownership.end)
        database = Database(
            engine,
            reader,
            what=what,
            is_read_only=read_only,
            anchor=anchor,
            owned=owned.pop_all(),
            ownership=ownership,
        )
    return _opened(database)


def _open_sqlite(
    path: Path,
    *,
    anchor: Path | None,
    read_only: bool,
    allow_unsynced: bool,
    busy_timeout_s: float,
    one_connection: bool,
) -> Database:
    path = path.resolve()  # so that two names of one file share one lock
    what = f"the journal {path.name}"
    if not path.parent.is_dir():
        raise InvalidSetting(f"{what}: its folder does not exist; make it first")
    if not allow_unsynced:
        check_synced(path)
    with ExitStack() as owned:
        if read_only and not path.exists():
            raise InvalidSetting(f"{what} does not exist, and was to be opened for reading only")
        if not read_only:
            _own(path, owned)
            if create_private(path):
                sync_folder(path.parent)
        check_private(path)
        writer, reader = sqlite_engines(path, what=what, read_only=read_only, busy_timeout_s=busy_timeout_s)
        if one_connection:
            reader = writer
        database = Database(
            writer, reader, what=what, is_read_only=read_only, anchor=anchor, owned=owned.pop_all(), path=path
        )
    return _opened(database)


def _own(path: Path, owned: ExitStack) -> None:
    lock = path.with_name(path.name + ".lock")
    create_private(lock)
    try:
        owned.enter_context(exclusive(lock, f"the journal {path.name}"))
    except OutputInUse:
        raise JournalInUse(
            f"another process holds the journal {path.name}; one process at a time may write it. Stop the other one, "
            "or open the journal for reading only"
        ) from None


def _opened(database: Database) -> Database:
    """Connect once, so that settings are checked at the start and not at the first charge."""
    try:
        if not database.is_read_only:
            with database.write():  # first: it makes the file a journal, which readers then find
                pass
        with database.read():
            pass
    except BaseException:
        database.close()
        raise
    return database


def parsed(target: str | Path) -> URL:
    """Where a journal is.

    Raises:
        InvalidSetting, UnsafeStorage: nowhere that it may be.
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
