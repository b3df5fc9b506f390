"""Version 4: entries of a ledger may say that an answer was stored, and their details begin with a salt.

`ledger_entries` checks of which kind an entry is, and version 3 does not know "answer". Entries that are there stay as
they are, without a salt: others keep their hashes as witnesses.

SQLite knows no change of a check, so there the table is made anew, row by row; a rule of `answered_rounds` names it,
and is made anew behind it.
"""

from __future__ import annotations

from sqlalchemy import BigInteger, CheckConstraint, Column, Connection, Index, Integer, MetaData, Table, Text, text

from feature_store.journal.about import metadata as conventions
from feature_store.journal.migrations.rebuild import has_table, rebuild
from feature_store.journal.migrations.step import Step
from feature_store.journal.rules import add_rule

_KINDS = "kind IN ('open', 'cap', 'reserve', 'post', 'answer', 'void')"
_WHOLE = BigInteger().with_variant(Integer, "sqlite")

_ledger_entries = Table(
    "ledger_entries",
    MetaData(naming_convention=conventions.naming_convention),
    Column("seq", _WHOLE, primary_key=True, autoincrement=False),
    Column("at", Text, nullable=False),
    Column("kind", Text, nullable=False),
    Column("account", Text, nullable=False),
    Column("level", Text, nullable=False),
    Column("reservation_id", Text, nullable=False),
    Column("amount", _WHOLE, nullable=False),
    Column("detail", Text, nullable=False),
    Column("previous_hash", Text, nullable=False),
    Column("hash", Text, nullable=False),
    CheckConstraint("seq >= 1", name="seq"),
    CheckConstraint(_KINDS, name="kind"),
    CheckConstraint("level IN ('instance', 'agent')", name="level"),
    CheckConstraint("amount >= 0", name="amount"),
    Index(None, "account", "level", "seq"),
    sqlite_strict=True,
)
for _rule in (
    """CREATE TRIGGER ledger_entries_stay BEFORE UPDATE ON ledger_entries
    BEGIN SELECT RAISE(ABORT, 'ledger entries are append-only'); END""",
    """CREATE TRIGGER ledger_entries_remain BEFORE DELETE ON ledger_entries
    BEGIN SELECT RAISE(ABORT, 'ledger entries are append-only'); END""",
    """CREATE TRIGGER ledger_entries_follow BEFORE INSERT ON ledger_entries
    WHEN NEW.seq <> (SELECT coalesce(max(seq), 0) + 1 FROM ledger_entries)
    BEGIN SELECT RAISE(ABORT, 'ledger entries have no gaps'); END""",
):
    add_rule(_ledger_entries, "sqlite", _rule)


def apply(connection: Connection) -> None:
    """See the module."""
    if not has_table(connection, _ledger_entries.name):
        return
    if connection.dialect.name != "sqlite":
        connection.exec_driver_sql("ALTER TABLE ledger_entries DROP CONSTRAINT ck_ledger_entries_kind")
        connection.exec_driver_sql(f"ALTER TABLE ledger_entries ADD CONSTRAINT ck_ledger_entries_kind CHECK ({_KINDS})")
        return
    named = text(
        "SELECT name, sql FROM sqlite_master WHERE type = 'trigger' AND tbl_name <> 'ledger_entries' "
        "AND sql LIKE '%ledger_entries%' ORDER BY name"
    )
    others = connection.execute(named).all()
    for name, _ in others:
        connection.exec_driver_sql(f'DROP TRIGGER "{name}"')
    rebuild(connection, _ledger_entries, {name: name for name in _ledger_entries.columns.keys()})  # noqa: SIM118  # a collection of columns, no dict
    for _, sql in others:
        connection.exec_driver_sql(sql)


STEP = Step(3, 4, apply)
