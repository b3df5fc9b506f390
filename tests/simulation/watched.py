"""A SQLite journal that somebody else writes: whether anybody has committed since, and what came into its ledger.

SQLite tells each connection whether another one has committed (`PRAGMA data_version`), for a hundredth of what reading
a table takes. So who looks after every step reads what is new, and misses nothing. For simulations.
"""

from __future__ import annotations

from typing import Any

from labeler.ledger.chain import Entry, entry_of
from labeler.ledger.database import Database
from labeler.ledger.schema import ledger_entries

_COLUMNS = tuple(column.name for column in ledger_entries.columns)
_ENTRIES = f"SELECT {', '.join(_COLUMNS)} FROM ledger_entries WHERE seq > ? ORDER BY seq"  # names of columns
_LIVED = "SELECT round_digest FROM life_rounds WHERE seq > ? ORDER BY seq"
_SPENT = "SELECT digest, spent FROM life_spends"


class WatchedJournal:
    """One such journal, opened for looking only by the one thread that looks: it is asked by the same connection."""

    def __init__(self, database: Database) -> None:
        with database.read() as connection:
            self._connection: Any = connection.connection.driver_connection

    def version(self) -> int:
        """Another number whenever somebody has committed."""
        number: int = self._connection.execute("PRAGMA data_version").fetchone()[0]
        return number

    def entries(self, *, after: int) -> list[Entry]:
        """Entries of the ledger behind a sequence number, all of them."""
        rows = self._connection.execute(_ENTRIES, (after,)).fetchall()
        return [entry_of(dict(zip(_COLUMNS, row, strict=True))) for row in rows]

    def spent_for_life(self, *, after: int) -> tuple[list[str], dict[bytes, int]]:
        """Digests of the rounds that have spent votes for life behind so many, and what every image has spent now."""
        self._connection.execute("BEGIN")  # both of one moment
        try:
            rounds = self._connection.execute(_LIVED, (after,)).fetchall()
            return [digest for (digest,) in rounds], dict(self._connection.execute(_SPENT).fetchall())
        finally:
            self._connection.execute("COMMIT")
