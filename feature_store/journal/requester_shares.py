"""What each requester has taken of an agent's budget: every price that was set aside or charged, with a name beside it.

    reserved, posted    counts for whoever it was set aside for
    void                given back, counts for nobody

A name is the coordinator's word, and one requester may have several: this divides a budget fairly among requesters of a
coordinator that is honest about them, and protects no record: that do the caps of the accounts, whatever names are
said. Jobs of which no name was said share the empty one. What was charged before this table existed counts for nobody.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from sqlalchemy import CheckConstraint, Column, Connection, ForeignKey, Index, Text, insert

from feature_store.journal.columns import WHOLE
from feature_store.journal.database import Database, strict_table
from feature_store.journal.ledger_tables import LEDGER_TABLES
from feature_store.journal.prepared import Parameter, Prepared
from feature_store.journal.rules import keep
from labeler.budget import UNBOUNDED_NANO
from labeler.task import Level

taken_by = strict_table(
    "taken_by",
    Column("reservation_id", Text, ForeignKey("ledger_reservations.reservation_id"), primary_key=True),
    Column("requester", Text, nullable=False),
    Column("instance_nano", WHOLE, nullable=False),
    Column("agent_nano", WHOLE, nullable=False),
    Column("life_nano", WHOLE, nullable=False),
    CheckConstraint("instance_nano >= 0 AND agent_nano >= 0 AND life_nano >= 0", name="amounts"),
    Index(None, "requester"),
)
keep(taken_by)

_ADD = Prepared(insert(taken_by))
# What has no finite price is looked for apart: a sum of many would leave 64 bits.
_TAKEN = Prepared(f"""
SELECT COALESCE(SUM(instance_nano), 0), COALESCE(SUM(life_nano), 0),
    COALESCE(SUM(CASE WHEN agent_nano < {UNBOUNDED_NANO} THEN agent_nano ELSE 0 END), 0), COALESCE(MAX(agent_nano), 0)
FROM taken_by JOIN ledger_reservations AS reserved ON reserved.reservation_id = taken_by.reservation_id
WHERE requester = :requester AND reserved.state != 'void'""")
_WHO = Prepared("SELECT DISTINCT requester FROM taken_by ORDER BY requester")


class RequesterShares:
    """See the module."""

    def __init__(self, database: Database) -> None:
        database.create(*LEDGER_TABLES, taken_by)

    def note(
        self,
        requester: str,
        reservations: Sequence[tuple[str, Mapping[Level, int]]],
        *,
        life_nano: int,
        connection: Connection,
    ) -> None:
        """Remember for whom prices were set aside or charged, in the same transaction.

        Args:
            reservations: the ledger's name of each, and its amounts in nano-units of mu^2.
            life_nano: the most that each takes of any record's votes for life.
        """
        rows: list[dict[str, Parameter]] = [
            {
                "reservation_id": name,
                "requester": requester,
                "instance_nano": amounts.get("instance", 0),
                "agent_nano": amounts.get("agent", 0),
                "life_nano": life_nano,
            }
            for name, amounts in reservations
        ]
        _ADD.run_many(connection, rows)

    def requesters(self, *, connection: Connection) -> list[str]:
        """Everybody for whom something was ever set aside."""
        return [name for (name,) in _WHO.all(connection)]

    def taken(self, requester: str, *, connection: Connection) -> tuple[dict[Level, int], int]:
        """What a requester has taken at each level, and the most it has taken of any record's votes for life."""
        found = _TAKEN.first(connection, requester=requester)
        instance, life, agent, largest = (0, 0, 0, 0) if found is None else map(int, found)
        unbounded = largest if largest >= UNBOUNDED_NANO else 0
        return {"instance": instance, "agent": agent + unbounded}, life
