"""The cost of a reservation, counted and not timed: one commit, and as many statements however long the ledger is.

`labeler bench ledger` measures the seconds; on shared cores a test that asserts a ratio of them fails for no reason.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path

import pytest

from labeler.ledger.database import Database, open_database
from labeler.ledger.ledger import Charge, Ledger

CAP = 10**12


@pytest.fixture
def said(tmp_path: Path) -> tuple[Ledger, Callable[[Callable[[], object]], list[str]], sqlite3.Connection]:
    """A ledger, a way to hear every statement that SQLite runs for it, and a connection to explain them on."""
    database: Database = open_database(tmp_path / "journal.db", anchor=tmp_path / "journal.head")
    ledger = Ledger(database, clock=lambda: datetime(2026, 3, 1, tzinfo=UTC))
    for account in ("federation", "agent:a", "agent:b"):
        ledger.open_account(account, "instance", CAP)
    with database.write() as connection:
        raw = connection.connection.driver_connection
    assert isinstance(raw, sqlite3.Connection)

    def heard(work: Callable[[], object]) -> list[str]:
        statements: list[str] = []
        raw.set_trace_callback(statements.append)
        try:
            work()
        finally:
            raw.set_trace_callback(None)
        return statements

    return ledger, heard, sqlite3.connect(tmp_path / "journal.db")


def test_a_reservation_is_one_commit_and_reads_no_table_from_end_to_end(said: tuple) -> None:  # type: ignore[type-arg]
    ledger, heard, reader = said
    charges = [Charge("agent:a", "instance", 1), Charge("federation", "instance", 1)]
    of_length = {}
    for number in range(100):
        statements = heard(lambda number=number: ledger.reserve(f"r-{number}", charges))
        of_length[number] = [one.split()[0].upper() for one in statements if not one.startswith("--")]
        if number in (0, 99):
            heads = of_length[number]
            assert heads.count("COMMIT") == 1
            assert heads.count("BEGIN") == 1
            with closing(reader.cursor()) as cursor:
                for one in statements:
                    if one.split()[0].upper() in ("SELECT", "UPDATE", "INSERT"):
                        plan = " ".join(str(row[3]) for row in cursor.execute(f"EXPLAIN QUERY PLAN {one}"))
                        # The last entry is found from the end of its table, and no further.
                        is_last = "LIMIT" in one and "TEMP B-TREE" not in plan
                        assert "SCAN ledger_" not in plan or is_last, f"{plan}: {one[:80]}"
    assert of_length[99] == of_length[0], "as many statements after 100 reservations as at the first"
    reader.close()
