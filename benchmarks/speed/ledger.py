"""Durable reservations of a ledger per second, as a ratio to bare SQLite inserts in the same process.

The bare twin writes one row of the same size per commit with the same settings. The ledger adds the chain of hashes,
the balances with their CHECK, the reservation, and the anchor. Both take turns on the same disk. The twin is the least
cost of durability: one row, one commit, one sync.
"""

from __future__ import annotations

import sqlite3
import statistics
import tempfile
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path

from benchmarks import BenchRow, in_turn, seconds_of
from labeler.ledger.database import CHECKPOINT_PAGES, open_database
from labeler.ledger.ledger import Charge, Ledger
from workers.progress import ProgressCallback, silent

CAP = 10**15


def bench_ledger(
    *, data: Path | None = None, full: bool = False, progress: ProgressCallback = silent
) -> list[BenchRow]:
    """Measure reservations with one and with eleven accounts, and the check of the whole chain at a start."""
    turns, commits = (9, 1000) if full else (3, 200)
    with tempfile.TemporaryDirectory(dir=data) as name:
        folder = Path(name)
        with open_database(folder / "journal.db", anchor=folder / "journal.head") as database:
            ledger = Ledger(database, clock=lambda: datetime.now(UTC))
            accounts = ["federation", *(f"agent-{number}" for number in range(10))]
            for account in accounts:
                ledger.open_account(account, "instance", CAP)

            def reserve(count: int, label: str) -> None:
                charges = [Charge(account, "instance", 1) for account in accounts[:count]]
                for number in range(commits):
                    ledger.reserve(f"{label}-{number}", charges)

            bare, one, many = [], [], []
            for turn in in_turn(progress, "Ledger", range(turns)):
                bare.append(seconds_of(lambda: bare_inserts(folder / "bare.db", commits=commits)))
                one.append(seconds_of(lambda turn=turn: reserve(1, f"one-{turn}")))  # type: ignore[misc]
                many.append(seconds_of(lambda turn=turn: reserve(11, f"many-{turn}")))  # type: ignore[misc]
            check = seconds_of(ledger.verify)
            entries = ledger.head().seq
    settings = {"turns": turns, "commits_per_turn": commits, "journal_mode": "wal", "synchronous": "full"}
    case = f"SQLite, {turns} x {commits} commits"

    def row(method: str, metric: str, value: float, seconds: float, reference: str | None = None) -> BenchRow:
        return BenchRow(case, method, metric, value, reference=reference, seconds=seconds, settings=settings)

    def per_second(seconds: list[float]) -> float:
        return commits / statistics.median(seconds)

    def ratio(seconds: list[float]) -> float:
        return statistics.median(ours / theirs for ours, theirs in zip(seconds, bare, strict=True))

    return [
        row("bare insert", "commits per second", per_second(bare), sum(bare)),
        row("reserve, 1 account", "commits per second", per_second(one), sum(one)),
        row("reserve, 1 account / bare insert", "time ratio", ratio(one), sum(one), "as near 1 as the disk allows"),
        row("reserve, 11 accounts", "commits per second", per_second(many), sum(many)),
        row("reserve, 11 accounts / bare insert", "time ratio", ratio(many), sum(many)),
        row("verify the whole chain", "entries per second", entries / check, check),
    ]


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
