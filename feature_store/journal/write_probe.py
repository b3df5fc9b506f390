"""Whether a journal takes writes now: one row, written durably; what the service's readiness asks.

write_probes        one row for ever, counted up; says nothing but that writing works
"""

from __future__ import annotations

from sqlalchemy import CheckConstraint, Column, insert, select, update

from feature_store.journal.columns import WHOLE
from feature_store.journal.database import Database, strict_table

write_probes = strict_table(
    "write_probes",
    Column("probe", WHOLE, primary_key=True, autoincrement=False),
    Column("writes", WHOLE, nullable=False),
    CheckConstraint("probe = 0 AND writes >= 1", name="one_row"),
)


class WriteProbe:
    """Writes one row again and again."""

    def __init__(self, database: Database) -> None:
        self._database = database
        database.create(write_probes)

    def write(self) -> None:
        """Write, durably.

        Raises:
            StorageFull: there is no room.
            Unavailable: the journal cannot be written for another reason.
        """
        with self._database.write() as connection:
            changed = connection.execute(update(write_probes).values(writes=write_probes.c.writes + 1))
            if not changed.rowcount:
                connection.execute(insert(write_probes), {"probe": 0, "writes": 1})

    @property
    def writes(self) -> int:
        """How many writes there were."""
        with self._database.read() as connection:
            return int(connection.execute(select(write_probes.c.writes)).scalar() or 0)
