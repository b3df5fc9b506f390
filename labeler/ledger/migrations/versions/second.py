"""The second revision: sums that are kept with the accounts, and every few thousand entries.

No entry of a ledger is touched. What is added is worked out from the entries.
"""

from __future__ import annotations

import json
from typing import Any, Final

from alembic import op
from sqlalchemy import Connection, insert, inspect, select, text

from labeler.budget import UNBOUNDED_NANO
from labeler.ledger.ledger import SUMS_EVERY, WRITTEN_OFF
from labeler.ledger.schema import (
    NEVER_OVERHELD,
    UNASKED,
    agent_rounds,
    answered_sums,
    jobs,
    ledger_entries,
    ledger_sums,
    requester_sums,
    rule_text,
    tallier_rounds,
    tallier_shares,
    tasks,
)

revision = "0002"
down_revision = "0001"

_BATCH: Final = 1000
_STANDS: Final = "CASE WHEN r.state <> 'void' THEN 1 ELSE 0 END"
_BOUNDED: Final = f"CASE WHEN t.agent_nano < {UNBOUNDED_NANO} THEN 1 ELSE 0 END"


def upgrade() -> None:
    """Add the columns and tables, and fill them."""
    connection = op.get_bind()
    whole = "INTEGER" if connection.dialect.name == "sqlite" else "BIGINT"
    for name, rule, check in (
        ("held", "never_overheld", NEVER_OVERHELD),
        ("alone", "", ""),
        ("written_off", "standing", "alone >= 0 AND written_off >= 0"),
    ):
        checked = f"CONSTRAINT ck_ledger_accounts_{rule} CHECK ({check})" if check else ""
        op.execute(f"ALTER TABLE ledger_accounts ADD COLUMN {name} {whole} NOT NULL DEFAULT 0 {checked}")
    op.execute("ALTER TABLE ledger_reservations ADD COLUMN held TEXT")
    ledger_sums.create(connection)
    op.execute("DROP INDEX ix_jobs_state")
    for table in (jobs, tasks, agent_rounds, tallier_rounds, tallier_shares):
        known = {one["name"] for one in inspect(connection).get_indexes(table.name)}
        for index in table.indexes:
            if index.name not in known:
                index.create(connection)
    rule = "returned_queries_unasked"
    op.execute(f"DROP TRIGGER {rule}" + ("" if connection.dialect.name == "sqlite" else " ON returned_queries"))
    for statement in rule_text("returned_queries", "unasked", **UNASKED, dialect=connection.dialect.name):
        op.execute(statement)
    answered_sums.create(connection)
    op.execute(
        "INSERT INTO answered_sums (ledger_seq, task_digest, queries, of_task) SELECT ledger_seq, task_digest, "
        "sum(num_queries) OVER (ORDER BY ledger_seq), "
        "sum(num_queries) OVER (PARTITION BY task_digest ORDER BY ledger_seq) FROM answered_rounds"
    )
    requester_sums.create(connection)
    op.execute(
        "INSERT INTO requester_sums (requester, instance_nano, agent_nano, unbounded, life_nano) SELECT t.requester, "
        f"sum(t.instance_nano * {_STANDS}), sum(t.agent_nano * {_STANDS} * {_BOUNDED}), "
        f"sum({_STANDS} * (1 - {_BOUNDED})), sum(t.life_nano * {_STANDS}) FROM taken_by AS t "
        "JOIN ledger_reservations AS r ON r.reservation_id = t.reservation_id GROUP BY t.requester"
    )
    _fill_standing(connection)
    _fill_sums(connection)


def _fill_standing(connection: Connection) -> None:
    """Count the reservations that stand and charge an account at one level alone."""
    of = f"substr(e.reservation_id, 1, {len(WRITTEN_OFF)})"
    for column, is_one in (("alone", "<>"), ("written_off", "=")):
        found = connection.execute(
            text(
                "SELECT account, level, count(*) FROM (SELECT e.account, min(e.level) AS level "  # constants
                "FROM ledger_entries AS e JOIN ledger_reservations AS r ON r.reservation_id = e.reservation_id "
                f"WHERE e.kind = 'reserve' AND r.state <> 'void' AND {of} {is_one} :written_off "
                "GROUP BY e.account, e.reservation_id HAVING count(*) = 1) AS alone GROUP BY account, level"
            ),
            {"written_off": WRITTEN_OFF},
        ).all()
        for account, level, count in found:
            connection.execute(
                text(
                    f"UPDATE ledger_accounts SET {column} = :count WHERE account = :account AND level = :level"
                ),  # as above
                {"count": count, "account": account, "level": level},
            )


def _fill_sums(connection: Connection) -> None:
    """Keep every account's sums after each few thousand entries, where the entries of a step end."""
    accounts: dict[tuple[str, str], list[Any]] = {}
    step: tuple[str, str] | None = None
    seq, kept = 0, 0
    columns = ledger_entries.c
    page = select(columns.seq, columns.kind, columns.account, columns.level, columns.reservation_id, columns.amount,
                  columns.detail).order_by(columns.seq).limit(_BATCH)  # fmt: skip
    while rows := connection.execute(page.where(columns.seq > seq)).all():
        for row in rows:
            begins = (row.reservation_id, row.kind) != step or not row.reservation_id
            if begins and seq // SUMS_EVERY > kept:
                kept = seq // SUMS_EVERY
                names = [column.name for column in ledger_sums.columns]
                sums = [dict(zip(names, (seq, *key, *of), strict=True)) for key, of in accounts.items()]
                connection.execute(insert(ledger_sums), sums)
            of = accounts.setdefault((row.account, row.level), [None, 0, 0])
            if row.kind in ("open", "cap"):
                of[0] = json.loads(row.detail)["cap"]
            of[1] += {"reserve": row.amount, "void": -row.amount}.get(row.kind, 0)
            of[2] += row.amount if row.kind == "post" else 0
            step, seq = (row.reservation_id, row.kind), row.seq
