"""The ledger's tables. The entries are the truth; the other two tables are sums over them, kept for speed and safety.

    ledger_entries      append-only; triggers refuse UPDATE and DELETE, and any sequence number but the next
    ledger_accounts     cap and what is spent of it; a CHECK refuses overspending, whatever program writes
    ledger_reservations how far each charge has come, and where its entries are

`Ledger.verify` makes the other two again from the entries and compares.
"""

from __future__ import annotations

from sqlalchemy import BigInteger, CheckConstraint, Column, Index, Integer, Text

from feature_store.journal.chain import KINDS
from feature_store.journal.database import strict_table
from feature_store.journal.rules import add_rule

_WHOLE = BigInteger().with_variant(Integer, "sqlite")  # STRICT tables know INTEGER only; it has 64 bits there
_LEVELS = "level IN ('instance', 'agent')"

ledger_entries = strict_table(
    "ledger_entries",
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
    CheckConstraint(f"kind IN ({', '.join(repr(kind) for kind in KINDS)})", name="kind"),
    CheckConstraint(_LEVELS, name="level"),
    CheckConstraint("amount >= 0", name="amount"),
    Index(None, "account", "level", "seq"),
)

ledger_accounts = strict_table(
    "ledger_accounts",
    Column("account", Text, primary_key=True),
    Column("level", Text, primary_key=True),
    Column("cap", _WHOLE, nullable=True),
    Column("spent", _WHOLE, nullable=False),
    Column("posted", _WHOLE, nullable=False),
    CheckConstraint(_LEVELS, name="level"),
    CheckConstraint("cap IS NULL OR cap >= 0", name="cap"),
    CheckConstraint("spent >= 0 AND (cap IS NULL OR spent <= cap)", name="never_overspent"),
    CheckConstraint("posted >= 0 AND posted <= spent", name="posted"),
    sqlite_with_rowid=False,
)

ledger_reservations = strict_table(
    "ledger_reservations",
    Column("reservation_id", Text, primary_key=True),
    Column("state", Text, nullable=False),
    Column("first_seq", _WHOLE, nullable=False),
    Column("charges", _WHOLE, nullable=False),
    Column("settled_seq", _WHOLE, nullable=True),
    CheckConstraint("state IN ('reserved', 'posted', 'void')", name="state"),
    CheckConstraint("(state = 'reserved') = (settled_seq IS NULL)", name="settled"),
    sqlite_with_rowid=False,
)

_SQLITE_TRIGGERS = (
    """CREATE TRIGGER ledger_entries_stay BEFORE UPDATE ON ledger_entries
    BEGIN SELECT RAISE(ABORT, 'ledger entries are append-only'); END""",
    """CREATE TRIGGER ledger_entries_remain BEFORE DELETE ON ledger_entries
    BEGIN SELECT RAISE(ABORT, 'ledger entries are append-only'); END""",
    # Before anything else an INSERT OR REPLACE would do.
    """CREATE TRIGGER ledger_entries_follow BEFORE INSERT ON ledger_entries
    WHEN NEW.seq <> (SELECT coalesce(max(seq), 0) + 1 FROM ledger_entries)
    BEGIN SELECT RAISE(ABORT, 'ledger entries have no gaps'); END""",
)

_POSTGRESQL_TRIGGERS = (
    """CREATE OR REPLACE FUNCTION ledger_entries_stay() RETURNS trigger LANGUAGE plpgsql AS $$
    BEGIN RAISE EXCEPTION 'ledger entries are append-only' USING ERRCODE = 'integrity_constraint_violation'; END $$""",
    """CREATE TRIGGER ledger_entries_stay BEFORE UPDATE OR DELETE ON ledger_entries
    FOR EACH ROW EXECUTE FUNCTION ledger_entries_stay()""",
    """CREATE TRIGGER ledger_entries_remain BEFORE TRUNCATE ON ledger_entries
    FOR EACH STATEMENT EXECUTE FUNCTION ledger_entries_stay()""",
    """CREATE OR REPLACE FUNCTION ledger_entries_follow() RETURNS trigger LANGUAGE plpgsql AS $$
    BEGIN
        IF NEW.seq <> (SELECT coalesce(max(seq), 0) + 1 FROM ledger_entries) THEN
            RAISE EXCEPTION 'ledger entries have no gaps' USING ERRCODE = 'integrity_constraint_violation';
        END IF;
        RETURN NEW;
    END $$""",
    """CREATE TRIGGER ledger_entries_follow BEFORE INSERT ON ledger_entries
    FOR EACH ROW EXECUTE FUNCTION ledger_entries_follow()""",
)

for _trigger in _SQLITE_TRIGGERS:
    add_rule(ledger_entries, "sqlite", _trigger)
for _trigger in _POSTGRESQL_TRIGGERS:
    add_rule(ledger_entries, "postgresql", _trigger)

LEDGER_TABLES = (ledger_entries, ledger_accounts, ledger_reservations)
