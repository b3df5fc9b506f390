"""One owner of a journal in PostgreSQL, as a lock file gives to one in SQLite.

    a session's advisory lock    held by a connection of its own for as long as the owner lives; PostgreSQL frees it
                                 when that connection ends, however it ends
    a name in journal_owner      written by each owner as it begins; who finds another's has been replaced

Every write transaction looks for both, after it has taken the writers' lock and before it reads anything: the session
that holds the lock must be the one this process opened, and the name must be its own. So a process whose connection
was cut writes nothing until it holds the lock again, and nothing at all once another owner has begun: that one's first
write stands in the same line of writers.
"""

from __future__ import annotations

import secrets
import time
from contextlib import suppress
from typing import Final

from sqlalchemy import Connection, Engine, delete, insert, select, text
from sqlalchemy.exc import DBAPIError

from labeler.errors import JournalInUse
from labeler.ledger.outages import translating
from labeler.ledger.schema import journal_owner

POSTGRESQL_OWNER: Final = 0x6C6162656C657202
"""Of the journal's owner, among the advisory locks of one PostgreSQL database."""

PATIENCE_S = 2.0
"""How long to wait at the start: PostgreSQL notices within a moment that a process was killed."""

_TICK_S = 0.05

# The server must not end this session for being idle: being there is all it is for.
_SETTINGS = text(
    "SELECT set_config(name, '0', false) FROM pg_settings "
    "WHERE name IN ('idle_session_timeout', 'idle_in_transaction_session_timeout')"
)
_TAKE = text("SELECT pg_try_advisory_lock(:lock)").bindparams(lock=POSTGRESQL_OWNER)
_FREE = text("SELECT pg_advisory_unlock(:lock)").bindparams(lock=POSTGRESQL_OWNER)
# How a session is told from every other, also of the same process number.
_WHO = text("SELECT pid, CAST(backend_start AS text) AS began FROM pg_stat_get_activity(pg_backend_pid())")
# An advisory lock of one 64-bit key stands in pg_locks as two halves, with objsubid 1.
_HOLDS = text(
    "SELECT 1 FROM pg_locks JOIN pg_stat_get_activity(CAST(:pid AS integer)) AS session USING (pid) "
    "WHERE locktype = 'advisory' AND granted AND classid = :high AND objid = :low AND objsubid = 1 "
    "AND database = (SELECT oid FROM pg_database WHERE datname = current_database()) "
    "AND backend_start = CAST(:began AS timestamptz)"
).bindparams(high=POSTGRESQL_OWNER >> 32, low=POSTGRESQL_OWNER & 0xFFFFFFFF)


class Ownership:
    """Of one journal, by one process, for all its threads, of which one writes at a time.

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
        """Name this process as the owner, in the first write transaction: whoever was it before finds another name."""
        connection.execute(delete(journal_owner))
        connection.execute(insert(journal_owner), {"name": self._name})
        self._is_named = True

    def confirm(self, connection: Connection) -> None:
        """Be sure, in a write transaction that holds the writers' lock, that this process is still the owner.

        Raises:
            JournalInUse: another one is, or was in the meantime; nothing of this transaction is to be kept.
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
                # Now, and not when PostgreSQL comes to see that nobody is there any more.
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
