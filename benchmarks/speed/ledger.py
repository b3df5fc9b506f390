"""Durable reservations of a ledger per second, and what its reads cost beside a long history.

Reservations are compared with bare SQLite inserts in the same process.

The bare twin writes one row of the same size per commit with the same settings. The ledger adds the chain of hashes,
the balances with their CHECK, the reservation, and the anchor. Both take turns on the same disk. The twin is the least
cost of durability: one row, one commit, one sync.

Reads are measured in CPU milliseconds, each on ledgers of three sizes (`grown`). A read whose cost does not grow with
the history has about the same at all of them. Only the check from the first entry reads everything, and says so.
"""

from __future__ import annotations

import sqlite3
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path

from api.coordinator.budgets import Budgets, ledger_page
from benchmarks import BenchRow, in_turn, seconds_of
from benchmarks.speed.grown import PERIOD, grow
from labeler.ledger.agent_memory import AgentMemory, answered
from labeler.ledger.database import CHECKPOINT_PAGES, open_database
from labeler.ledger.jobs import ForgottenJobs, JobStore
from labeler.ledger.ledger import Charge, Ledger
from labeler.ledger.rounds import FEDERATION
from labeler.ledger.tasks import TaskRecord, TaskStore
from labeler.setting import LEVELS
from labeler.task import Task
from workers.progress import ProgressCallback, silent

CAP = 10**15


def bench_ledger(
    *, data: Path | None = None, full: bool = False, entries: int | None = None, progress: ProgressCallback = silent
) -> list[BenchRow]:
    """Measure reservations with one and with eleven accounts, the check of the whole chain, and reads of long ledgers.

    Args:
        entries: of the longest ledger; the others have a tenth and a hundredth.
    """
    longest = entries or (1_000_000 if full else 10_000)
    rows = _commits(data, full, progress)
    return rows + _reads(data, (longest // 100, longest // 10, longest), progress)


def _commits(data: Path | None, full: bool, progress: ProgressCallback) -> list[BenchRow]:
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


def _reads(data: Path | None, sizes: tuple[int, ...], progress: ProgressCallback) -> list[BenchRow]:
    """Return what each read costs at each size, and the ratio of the last two."""
    found: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory(dir=data) as name:
        folder = Path(name)
        with open_database(folder / "journal.db", anchor=folder / "journal.head") as database:
            ledger = Ledger(database, clock=lambda: datetime.now(UTC))
            accounts = [FEDERATION, *(f"agent:{name}" for name in _NAMES)]
            for account in accounts:
                for level in LEVELS:
                    ledger.open_account(account, level, CAP)
            record = TaskRecord(_TASK, _NAMES, datetime.now(UTC), "tok-1")
            digest = TaskStore(database).add(record).digest
            for size in in_turn(progress, "Long ledgers", sizes):
                started = time.process_time()
                grow(database, size - ledger.head().seq, agents=accounts[1:], task_digest=digest)
                found.setdefault(_MADE, []).append(1e3 * (time.process_time() - started))
                for what, read in _each_read(ledger).items():
                    costs = [seconds_of(read, time.process_time) for _ in range(1 if what in _LINEAR else _TURNS)]
                    found.setdefault(what, []).append(1e3 * statistics.median(costs))
    rows = []
    for what, costs in found.items():
        is_linear = what in _LINEAR
        settings = {"sizes": list(sizes), "turns": 1 if is_linear else _TURNS}
        for size, cost in zip(sizes, costs, strict=True):
            rows.append(BenchRow(f"{size} entries", what, "CPU milliseconds", cost, settings=settings))
        wanted = None if is_linear else "flat or logarithmic"
        ratio = costs[-1] / max(costs[-2], 1e-3)
        rows.append(BenchRow(f"{sizes[-1]} / {sizes[-2]} entries", what, "ratio", ratio, reference=wanted))
    return rows


def _each_read(ledger: Ledger) -> dict[str, Callable[[], object]]:
    database, end = ledger.database, ledger.head().seq
    jobs, tasks = JobStore(database), TaskStore(database)
    memory, now = AgentMemory(database, ledger), datetime.now(UTC)
    middle = jobs.list(limit=20)[-1].cursor
    account = f"agent:{_NAMES[0]}"
    return {
        "budgets of all accounts": lambda: Budgets(ledger, _DELTA).view(),
        "budget of an agent": lambda: Budgets(ledger, _DELTA).view(account=account),
        "page of the ledger": lambda: ledger_page(ledger, end // 2, 100),
        "page of an account": lambda: ledger_page(ledger, end // 2, 100, account=account),
        "page of a search without a match": lambda: ledger_page(ledger, end // 2, 100, search="nowhere"),
        "page of jobs": lambda: jobs.list(limit=50, after=middle),
        "page of a requester's failed jobs": lambda: jobs.list(limit=50, states={"failed"}, created_by="tok-1"),
        "page of tasks": lambda: tasks.list(limit=50),
        "jobs under way": jobs.unfinished_ids,
        "jobs that ended unasked": lambda: jobs.willingness.unasked_until("tok-1", now, most=1000),
        "jobs whose time is over": lambda: ForgottenJobs(database).due(now - 2 * PERIOD),
        "an agent's day": lambda: memory.queries_since(now - PERIOD / 365),
        "rounds on a site's page": lambda: answered(database, last=1000),
        "check at a start": lambda: ledger.verify(is_whole=False),
        _WHOLE: ledger.verify,
    }


_WHOLE = "check from the first entry (journal verify, evidence, backup)"
_MADE = "made by this bench"
_LINEAR = (_MADE, _WHOLE)
_TURNS = 7
_DELTA = 1e-5
_NAMES = ("east", "north", "west")
_TASK = Task(
    name="grown",
    method="knn",
    classes=("cat", "dog"),
    backbone_fingerprint="sha256:" + "0" * 64,
    k=1,
    sigma_votes=20.0,
    agents=len(_NAMES),
    max_queries=100,
    delta=_DELTA,
)

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
