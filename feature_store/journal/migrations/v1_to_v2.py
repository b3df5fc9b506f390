"""Version 2: an answer remembers whom its shares went to, and numbers of messages are kept per sender and key.

    answered_rounds   + recipients, fixed for ever: shares of one answer in other hands could be put together
    sequences_taken   + verify_key, part of the key: whoever signs under another's name with a key of its own cannot
                      use up that one's numbers

Of version 1 nobody knows the recipients. They are written as an empty list, which equals no list of talliers: an
answer of version 1 is never sent again, which refuses where version 2 would replay. A number that was taken under
version 1 has no key; it is kept under the empty one and counts for every key (`Sequences`), so that no old message
can come again.

The chain stays valid: ledger_entries is not touched, and answered_rounds keeps its references to it. (On SQLite the
table is made anew, row by row; PostgreSQL adds columns.) Tables that only version 2 has are made by their stores.
"""

from __future__ import annotations

from sqlalchemy import CheckConstraint, Column, Connection, ForeignKey, MetaData, Table, Text, UniqueConstraint

from feature_store.journal.about import metadata as conventions
from feature_store.journal.columns import WHOLE
from feature_store.journal.migrations.rebuild import has_table, rebuild, renew_rules
from feature_store.journal.migrations.step import Step
from feature_store.journal.rules import forbid, remain, stay

NO_RECIPIENTS = "[]"
NO_KEY = ""

_tables = MetaData(naming_convention=conventions.naming_convention)

Table("ledger_entries", _tables, Column("seq", WHOLE, primary_key=True))  # only to be referred to

_answered_rounds = Table(
    "answered_rounds",
    _tables,
    Column("round_digest", Text, primary_key=True),
    Column("shard_version", Text, nullable=False),
    Column("reservation_id", Text, nullable=False),
    Column("ledger_seq", WHOLE, ForeignKey("ledger_entries.seq"), nullable=False),
    Column("num_queries", WHOLE, nullable=False),
    Column("task_digest", Text, nullable=False),
    Column("recipients", Text, nullable=False),
    UniqueConstraint("reservation_id"),
    UniqueConstraint("ledger_seq"),
    CheckConstraint("num_queries >= 1", name="queries"),
    sqlite_strict=True,
)
stay(_answered_rounds, tuple(_answered_rounds.columns.keys()))
remain(_answered_rounds)
forbid(
    _answered_rounds,
    "paid",
    on="INSERT",
    when="NOT EXISTS (SELECT 1 FROM ledger_entries WHERE ledger_entries.seq = NEW.ledger_seq "
    "AND ledger_entries.kind = 'post' AND ledger_entries.reservation_id = NEW.reservation_id)",
    because="an answer is paid for by an entry of the ledger",
)

_sequences_taken = Table(
    "sequences_taken",
    _tables,
    Column("sender", Text, primary_key=True),
    Column("verify_key", Text, primary_key=True),
    Column("last", WHOLE, nullable=False),
    CheckConstraint("last >= 1", name="last"),
    sqlite_strict=True,
)
remain(_sequences_taken)
forbid(_sequences_taken, "rise", on="UPDATE", when="NEW.last <= OLD.last", because="sequence numbers only go up")


def apply(connection: Connection) -> None:
    """See the module."""
    added = {_answered_rounds: ("recipients", NO_RECIPIENTS), _sequences_taken: ("verify_key", NO_KEY)}
    for table, (column, value) in added.items():
        if not has_table(connection, table.name):
            continue
        if connection.dialect.name == "sqlite":
            same = {name: name for name in table.columns.keys()}  # noqa: SIM118  # a collection of columns, no dict
            rebuild(connection, table, same | {column: f"'{value}'"})
            continue
        connection.exec_driver_sql(f"ALTER TABLE {table.name} ADD COLUMN {column} TEXT NOT NULL DEFAULT '{value}'")
        connection.exec_driver_sql(f"ALTER TABLE {table.name} ALTER COLUMN {column} DROP DEFAULT")
        if table is _sequences_taken:
            connection.exec_driver_sql("ALTER TABLE sequences_taken DROP CONSTRAINT pk_sequences_taken")
            connection.exec_driver_sql(
                "ALTER TABLE sequences_taken ADD CONSTRAINT pk_sequences_taken PRIMARY KEY (sender, verify_key)"
            )
        renew_rules(connection, table)


STEP = Step(1, 2, apply)
