"""How many reservations a ledger makes durable in a second, as a ratio to bare SQLite inserts in the same process.

The bare twin writes one row of the same size per commit with the same settings; the ledger adds the chain of hashes,
the balances with their CHECK, the reservation, and the anchor. Both take turns on the same disk.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

from benchmarks import BenchRow
from benchmarks.speed.bare_inserts import bare_inserts
from labeler.ledger.database import open_database
from labeler.ledger.ledger import Charge, Ledger
from workers.progress import ProgressCallback, silent

CAP = 10**15


def bench_ledger(
    *, data: Path | None = None, full: bool = False, progress: ProgressCallback = silent
) -> list[BenchRow]:
    """Measure reservations with one and with eleven accounts, and the check of the whole chain at a start.

    Args:
        data: the folder whose disk is measured; else the system's folder for temporary files.
    """
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
            for turn in range(turns):
                progress("Ledger", turn, turns)
                bare.append(_seconds(lambda: bare_inserts(folder / "bare.db", commits=commits)))
                one.append(_seconds(lambda turn=turn: reserve(1, f"one-{turn}")))  # type: ignore[misc]
                many.append(_seconds(lambda turn=turn: reserve(11, f"many-{turn}")))  # type: ignore[misc]
            progress("Ledger", turns, turns)
            check = _seconds(ledger.verify)
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


def _seconds(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started
