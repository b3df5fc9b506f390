"""What a ledger's commit is compared with: a bare SQLite insert of one such row, with the same settings.

Nobody can be durable for less: one row, one commit, one sync. No chain, no balances, no checks.
"""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

from labeler.ledger.database import CHECKPOINT_PAGES

_TABLE = """CREATE TABLE rows (
    seq INTEGER PRIMARY KEY, at TEXT, kind TEXT, account TEXT, level TEXT, reservation_id TEXT, amount INTEGER,
    detail TEXT, previous_hash TEXT, hash TEXT) STRICT"""

_ROW = ("2026-01-01T00:00:00.000000Z", "reserve", "federation", "instance", "a reservation of the ledger bench", 1,
        "{}", "0" * 64, "f" * 64)  # fmt: skip


def bare_inserts(path: Path, *, commits: int) -> None:
    """Insert rows of a ledger entry's size, one commit each, at full durability.

    Args:
        path: a file that does not exist yet, or was made by this function.
        commits: how many.
    """
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("PRAGMA journal_mode = WAL").fetchall()
        connection.execute("PRAGMA secure_delete = ON").fetchall()
        connection.execute("PRAGMA synchronous = FULL")
        connection.execute("PRAGMA foreign_keys = ON")
        connection.execute(f"PRAGMA wal_autocheckpoint = {CHECKPOINT_PAGES}")
        connection.execute(_TABLE.replace("TABLE", "TABLE IF NOT EXISTS", 1))
        first = connection.execute("SELECT coalesce(max(seq), 0) + 1 FROM rows").fetchone()[0]
        for seq in range(first, first + commits):
            connection.execute("BEGIN IMMEDIATE")
            connection.execute("INSERT INTO rows VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)", (seq, *_ROW))
            connection.execute("COMMIT")
