"""Who of several coordinators on one PostgreSQL drives now: a lease with an end, which another takes once it is over.

    coordinator_leases      name | owner | url | term | until       times are PostgreSQL's own: clocks need not agree
    take       the row FOR UPDATE SKIP LOCKED, where it has ended: of those that come at once one gets it, nobody waits
    renew      only by its owner, only while it lasts
    give back  at a stop, so that the next begins at once

A lease says who should drive; that nobody else writes is not left to it. Whoever has it ends the session of the owner
before (`end_owner`) and becomes the journal's owner itself (`feature_store.journal.ownership`), whose lock and name are
confirmed in every write transaction. So a coordinator that was stopped for longer than its lease, or cut off, and comes
back, has none of its writes kept: it finds another's name, and ends.

The table is apart from the journal's: it holds nothing that a backup needs, and SQLite has none.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from sqlalchemy import Connection, Engine, text
from sqlalchemy.engine import URL

from feature_store.journal.database import parsed
from feature_store.journal.engines import SIDE_BY_SIDE, postgresql_engine
from feature_store.journal.outages import translating
from feature_store.journal.ownership import POSTGRESQL_OWNER
from labeler.errors import InvalidSetting

_DRIVING = "driving"
_NAME_BYTES = 16
_BUSY_S = 5.0
_MAKING = 0x6C6162656C657203
"""Among the advisory locks of one database: two that make the table at once would meet in its name."""

_MAKE = text(
    "CREATE TABLE IF NOT EXISTS coordinator_leases ("
    "name TEXT PRIMARY KEY, owner TEXT NOT NULL, url TEXT NOT NULL, term BIGINT NOT NULL, until TIMESTAMPTZ NOT NULL)"
)
_FIRST = text(
    "INSERT INTO coordinator_leases VALUES (:name, '', '', 0, '-infinity') ON CONFLICT (name) DO NOTHING"
).bindparams(name=_DRIVING)
_FREE = text(
    "SELECT term FROM coordinator_leases WHERE name = :name AND until < clock_timestamp() FOR UPDATE SKIP LOCKED"
).bindparams(name=_DRIVING)
_TAKE = text(
    "UPDATE coordinator_leases SET owner = :owner, url = :url, term = term + 1, "
    "until = clock_timestamp() + make_interval(secs => :seconds) WHERE name = :name"
).bindparams(name=_DRIVING)
_RENEW = text(
    "UPDATE coordinator_leases SET until = clock_timestamp() + make_interval(secs => :seconds) "
    "WHERE name = :name AND owner = :owner AND until >= clock_timestamp()"
).bindparams(name=_DRIVING)
_GIVE_BACK = text("UPDATE coordinator_leases SET until = '-infinity' WHERE name = :name AND owner = :owner").bindparams(
    name=_DRIVING
)
_HOLDER = text(
    "SELECT owner, url, term FROM coordinator_leases WHERE name = :name AND until >= clock_timestamp()"
).bindparams(name=_DRIVING)
_END_OWNER = text(
    "SELECT pg_terminate_backend(pid, 1000) FROM pg_locks JOIN pg_stat_activity USING (pid) "
    "WHERE locktype = 'advisory' AND granted AND application_name = :shares "
    "AND classid = :high AND objid = :low AND objsubid = 1 AND pid <> pg_backend_pid() "
    "AND pg_locks.database = (SELECT oid FROM pg_database WHERE datname = current_database()) "
    "AND EXISTS (SELECT 1 FROM coordinator_leases "
    "WHERE name = :name AND owner = :owner AND until >= clock_timestamp())"
).bindparams(name=_DRIVING, shares=SIDE_BY_SIDE, high=POSTGRESQL_OWNER >> 32, low=POSTGRESQL_OWNER & 0xFFFFFFFF)


@dataclass(frozen=True)
class Holder:
    """Who has the lease now.

    Attributes:
        owner: its name, drawn at its start.
        url: where the other coordinators reach it.
        term: how often the lease was taken.
    """

    owner: str
    url: str
    term: int


class Leases:
    """The lease of one journal, as one process sees it; used by one thread at a time.

    Args:
        journal: URL of a PostgreSQL database.
        url: where the other coordinators reach this one.
        lease_s: how long it lasts unless it is renewed.

    Raises:
        InvalidSetting: the journal is no PostgreSQL database.
        Unavailable: it cannot be reached.
    """

    def __init__(self, journal: str, *, url: str, lease_s: float) -> None:
        place: URL | None = parsed(journal) if "://" in journal else None
        if place is None or place.get_backend_name() != "postgresql":
            raise InvalidSetting(
                "coordinators side by side share a journal in PostgreSQL, and this home's is a SQLite file, which one "
                "process at a time may write. Give it a postgresql:// URL, or leave [side_by_side] out"
            )
        self.owner = secrets.token_hex(_NAME_BYTES)
        self._what = f"the journal {place.database or ''} at {place.host or 'the local socket'}"
        self._url = url
        self._lease_s = lease_s
        self._engine: Engine = postgresql_engine(place, what=self._what, read_only=False, busy_timeout_s=_BUSY_S)
        with self._begin() as connection:
            connection.execute(text("SELECT pg_advisory_xact_lock(:lock)"), {"lock": _MAKING})
            connection.execute(_MAKE)
            connection.execute(_FIRST)

    def take(self) -> bool:
        """Take the lease, where nobody has it.

        Raises:
            Unavailable: PostgreSQL cannot be reached.
        """
        with self._begin() as connection:
            if connection.execute(_FREE).first() is None:
                return False
            connection.execute(_TAKE, {"owner": self.owner, "url": self._url, "seconds": self._lease_s})
        return True

    def renew(self) -> bool:
        """Keep the lease for longer; False where it has ended, or is another's.

        Raises:
            Unavailable: PostgreSQL cannot be reached; it lasts until its end.
        """
        with self._begin() as connection:
            return connection.execute(_RENEW, {"owner": self.owner, "seconds": self._lease_s}).rowcount == 1

    def give_back(self) -> None:
        """End the lease, where it is this process's.

        Raises:
            Unavailable: PostgreSQL cannot be reached; it ends by itself.
        """
        with self._begin() as connection:
            connection.execute(_GIVE_BACK, {"owner": self.owner})

    def holder(self) -> Holder | None:
        """Who has it now.

        Raises:
            Unavailable: PostgreSQL cannot be reached.
        """
        with self._begin() as connection:
            found = connection.execute(_HOLDER).first()
        return None if found is None else Holder(found.owner, found.url, int(found.term))

    def end_owner(self) -> bool:
        """End the session by which the leader before holds the journal: its lease is over, and it may hang.

        Only whoever has the lease can: one that hung while it opened the journal would else end who leads by now.

        Returns:
            Whether there was one. Of an owner that shares with nobody nothing is ended.

        Raises:
            Unavailable: PostgreSQL cannot be reached.
        """
        with self._begin() as connection:
            return bool(connection.execute(_END_OWNER, {"owner": self.owner}).fetchall())

    def close(self) -> None:
        """Let go of every connection."""
        self._engine.dispose()

    @contextmanager
    def _begin(self) -> Iterator[Connection]:
        with translating(self._what), self._engine.begin() as connection:
            yield connection
