"""One owner of a journal in PostgreSQL, as a lock file gives to one in SQLite.

    a session's advisory lock    held by a connection of its own for as long as the owner lives; PostgreSQL frees it
                                 when that connection ends, however it ends
    a name in journal_about      written by each owner as it begins; who finds another's has been replaced

Every write transaction looks for both, after it has taken the writers' lock and before it reads anything: the session
that holds the lock must be the one this process opened, and the name must be its own. So a process whose connection
was cut writes nothing until it holds the lock again, and nothing at all once another owner has begun: that one's first
write stands in the same line of writers.
"""

from __future__ import annotations

import secrets
import threading
import time
from contextlib import suppress
from dataclasses import dataclass

from sqlalchemy import Connection, Engine, text
from sqlalchemy.exc import DBAPIError

from feature_store.journal.about import is_laid_out, read_owner, write_owner
from feature_store.journal.outages import translating
from labeler.errors import JournalInUse

POSTGRESQL_OWNER = 0x6C6162656C657202
"""Of the journal's owner, among the advisory locks of one PostgreSQL database."""

PATIENCE_S = 2.0
"""How long to wait at the start: PostgreSQL notices within a moment that a process was killed."""

_TICK_S = 0.05
_NAME_BYTES = 16

_SETTINGS = text(
    "SELECT set_config(name, '0', false) FROM pg_settings "
    "WHERE name IN ('idle_session_timeout', 'idle_in_transaction_session_timeout')"
)
"""The server must not end this session for being idle: being there is all it is for."""

_TAKE = text("SELECT pg_try_advisory_lock(:lock)").bindparams(lock=POSTGRESQL_OWNER)
_FREE = text("SELECT pg_advisory_unlock(:lock)").bindparams(lock=POSTGRESQL_OWNER)

_WHO = text("SELECT pid, CAST(backend_start AS text) FROM pg_stat_get_activity(pg_backend_pid())")

# An advisory lock of one 64-bit key stands in pg_locks as two halves, with objsubid 1.
_HOLDS = text(
    "SELECT 1 FROM pg_locks JOIN pg_stat_get_activity(CAST(:pid AS integer)) AS session USING (pid) "
    "WHERE locktype = 'advisory' AND granted AND classid = :high AND objid = :low AND objsubid = 1 "
    "AND database = (SELECT oid FROM pg_database WHERE datname = current_database()) "
    "AND backend_start = CAST(:began AS timestamptz)"
).bindparams(high=POSTGRESQL_OWNER >> 32, low=POSTGRESQL_OWNER & 0xFFFFFFFF)


@dataclass(frozen=True)
class _Session:
    """A connection that holds the lock, and how it is told from every other, also of the same process number."""

    connection: Connection
    pid: int
    began: str


class Ownership:
    """Of one journal, by one process, for all its threads; made by `own`.

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
        self._name = secrets.token_hex(_NAME_BYTES)
        self._guard = threading.Lock()
        self._is_laid_out = False
        self._session: _Session | None = self._take(patience_s=PATIENCE_S)
        # Read while nobody else can be the owner: whoever begins after this leaves another name.
        with translating(what):
            self._before = self._named(self._session.connection)
        self._is_written = False
        self._is_kept = False

    def confirm(self, connection: Connection) -> None:
        """Be sure, in a write transaction that holds the writers' lock, that this process is still the owner.

        Raises:
            JournalInUse: another one is, or was in the meantime; nothing of this transaction is to be kept.
            Unavailable: the lock was lost, and PostgreSQL cannot be reached to take it again.
        """
        with self._guard:
            if self._session is None or not _holds(connection, self._session):
                self._let_go()
                self._session = self._take(patience_s=0.0)
            found = self._named(connection)
            self._is_written = False
            if found == self._name:
                return
            if self._is_kept or found != self._before:
                raise JournalInUse(
                    f"another process took {self._what} over when this one had lost its connection; one process at a "
                    "time may write it. Stop this one"
                )
            if self._is_laid_out:  # else the name comes with the next transaction
                write_owner(connection, self._name)
                self._is_written = True

    def kept(self) -> None:
        """The transaction that was confirmed last is durable."""
        self._is_kept |= self._is_written

    def end(self) -> None:
        """Free the lock; may be called twice."""
        with self._guard:
            self._let_go()

    def _named(self, connection: Connection) -> str | None:
        """Who is named as the owner before anything of this transaction; None in a journal that has no tables yet.

        Whether it has any is asked until it has: no owner ever drops them.
        """
        self._is_laid_out = self._is_laid_out or is_laid_out(connection)
        return read_owner(connection) if self._is_laid_out else None

    def _take(self, *, patience_s: float) -> _Session:
        until = time.monotonic() + patience_s
        with translating(self._what):
            connection = self._engine.connect().execution_options(isolation_level="AUTOCOMMIT")
            try:
                connection.execute(_SETTINGS)
                while not connection.execute(_TAKE).scalar():
                    if time.monotonic() >= until:
                        raise JournalInUse(
                            f"another process holds {self._what}; one process at a time may write it. Stop the other "
                            "one, give this home a database of its own, or open the journal for reading only"
                        )
                    time.sleep(_TICK_S)
                pid, began = connection.execute(_WHO).one()
            except BaseException:
                _end(connection)
                raise
        return _Session(connection, int(pid), str(began))

    def _let_go(self) -> None:
        if self._session is not None:
            session, self._session = self._session, None
            with suppress(DBAPIError):
                # Now, and not when PostgreSQL comes to see that nobody is there any more.
                session.connection.execute(_FREE)
            _end(session.connection)


def _holds(connection: Connection, session: _Session) -> bool:
    return connection.execute(_HOLDS, {"pid": session.pid, "began": session.began}).first() is not None


def _end(connection: Connection) -> None:
    """End a session instead of giving it back to the pool, where its lock would live on."""
    with suppress(DBAPIError):
        connection.invalidate()
    connection.close()
