"""Version 3: every round that was asked before shares were noted counts as having passed shares on.

`round_shares` came while tables were of version 2. A journal from before it lacks the table, and a store would make it
empty: "no share was ever passed on", for rounds of which nobody knows. If then every agent refused, their charge would
be given back although shares may have left. So where the table is missing it is made here, with a row for each round
that was ever asked: their charges stay, whatever is refused later. In doubt charge more.

The number itself is the other half: programs of version 2 know nothing of tables that were added since and would pass
over what stands in them; they refuse a journal of version 3.

The chain stays valid: ledger_entries is read by nothing here and not touched.
"""

from __future__ import annotations

from sqlalchemy import Column, Connection, ForeignKeyConstraint, MetaData, Table, Text

from feature_store.journal.about import metadata as conventions
from feature_store.journal.columns import WHOLE
from feature_store.journal.migrations.rebuild import has_table
from feature_store.journal.migrations.step import Step
from feature_store.journal.rules import remain, stay

_tables = MetaData(naming_convention=conventions.naming_convention)

Table(  # only to be referred to
    "rounds", _tables, Column("job_id", Text, primary_key=True), Column("number", WHOLE, primary_key=True)
)

_round_shares = Table(
    "round_shares",
    _tables,
    Column("job_id", Text, primary_key=True),
    Column("number", WHOLE, primary_key=True, autoincrement=False),
    ForeignKeyConstraint(["job_id", "number"], ["rounds.job_id", "rounds.number"]),
    sqlite_strict=True,
)
stay(_round_shares, ("job_id", "number"))
remain(_round_shares)


def apply(connection: Connection) -> None:
    """See the module."""
    if not has_table(connection, "rounds") or has_table(connection, _round_shares.name):
        return
    _round_shares.create(connection)
    connection.exec_driver_sql(
        "INSERT INTO round_shares (job_id, number) SELECT job_id, number FROM rounds WHERE state <> 'waiting'"
    )


STEP = Step(2, 3, apply)
