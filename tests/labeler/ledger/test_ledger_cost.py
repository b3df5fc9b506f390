"""The cost of a reservation, counted and not timed: one commit, and as many statements however long the ledger is.

`labeler bench ledger` measures the seconds; on shared cores a test that asserts a ratio of them fails for no reason.
"""

from __future__ import annotations

import sqlite3
from contextlib import closing

from labeler.ledger.ledger import Charge, Ledger
from tests.labeler.ledger.conftest import Clock, Place


def test_a_reservation_is_one_commit_and_reads_no_table_from_end_to_end(sqlite_place: Place, clock: Clock) -> None:
    database = sqlite_place.open()
    ledger = Ledger(database, clock=clock)
    for account in ("federation", "agent:a", "agent:b"):
        ledger.open_account(account, "instance", 10**12)
    with database.write() as connection:
        raw = connection.connection.driver_connection
    charges = [Charge("agent:a", "instance", 1), Charge("federation", "instance", 1)]
    of_length = {}
    for number in range(100):
        statements: list[str] = []
        raw.set_trace_callback(statements.append)
        ledger.reserve(f"r-{number}", charges)
        raw.set_trace_callback(None)
        of_length[number] = [one.split()[0].upper() for one in statements if not one.startswith("--")]
        if number not in (0, 99):
            continue
        assert of_length[number].count("COMMIT") == of_length[number].count("BEGIN") == 1
        with closing(sqlite3.connect(sqlite_place.target)) as reader:
            for one in statements:
                if one.split()[0].upper() in ("SELECT", "UPDATE", "INSERT"):
                    plan = " ".join(str(row[3]) for row in reader.execute(f"EXPLAIN QUERY PLAN {one}"))
                    # The last entry is found from the end of its table, and no further.
                    is_last = "LIMIT" in one and "TEMP B-TREE" not in plan
                    assert "SCAN ledger_" not in plan or is_last, f"{plan}: {one[:80]}"
    assert of_length[99] == of_length[0], "as many statements after 100 reservations as at the first"
