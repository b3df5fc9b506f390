"""The whole service under load: fifty requesters with small jobs against real processes, and the same jobs by `run`.

A federation is started as `labeler up` starts it: coordinator, embedder, five agents, three talliers and redis-server.
Each is a process on this machine, with every limit at its default. The requesters share its cores. The twin is the same
job in one process, without messages, sealing or SQL: read and check the shards, price, vote, noise, tally, release. As
in the speed bench, the student and the report are left out.

At the end every label has to have been charged exactly once: the completed jobs against the journals, entry by entry,
read after everything has stopped. This covers the coordinator's journal and that of every agent, whose chains are
checked from the first entry to the last. Differences are reported in words; an empty list is the proof.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, TypeVar

import numpy as np
from numpy.typing import NDArray

from benchmarks import BenchRow, rows_of, seconds_of
from benchmarks.machine import cpu_seconds, memory_bytes
from benchmarks.service.federation import (
    AGENTS,
    RunningService,
    complaints,
    embed_public,
    new_federation,
    running_service,
    seconds_inside,
)
from benchmarks.service.requesters import Load, PaidJob, Wanted, WellBehaved, new_token, put_under_load
from benchmarks.speed.speed import run_job
from feature_store.shard import Shard
from feature_store.shard_writer import ShardWriter
from labeler.ledger.database import open_database
from labeler.ledger.ledger import Balance, Entry, Ledger
from workers.digits import CLASSES
from workers.party.home import ANCHOR_FILE, COORDINATOR_FILE, JOURNAL_FILE
from workers.progress import ProgressCallback, silent
from workers.run.preparation import LabelingJob
from workers.run.task_file import TaskFile, TaskTable
from workers.up.home import LocalFederation

REQUESTERS: Final = 50
QUERIES: Final = 8
TASK: Final[dict[str, Any]] = {
    "name": "load",
    "method": "knn",
    "k": 5,
    "sigma_votes": 100.0,
    "delta": 1e-5,
    "colluding_agents": 1,
}
"""Settings of both the service and `run`."""

MAX_QUERIES: Final = 10_000
MANY_JOBS: Final = 1000
"""After this many jobs the coordinator's memory is compared with what it was."""

RATIOS: Final = {500: "at most 3", 5000: "at most 2", 50_000: "at most 1.3"}

_MORE_S = 30.0
_MOST_S = 240.0
_WARM_S = 1.0
"""Seconds in which every requester starts at least one job."""


def bench_service(
    *, data: Path | None = None, full: bool = False, progress: ProgressCallback = silent
) -> list[BenchRow]:
    """Measure the service under load, check that every label was charged exactly once, and measure its twin."""
    seconds, twins = (60.0, 200) if full else (6.0, 20)
    sizes = (500, 5000, 50_000) if full else (500,)
    with tempfile.TemporaryDirectory(dir=data) as name:
        folder = Path(name)
        progress("Service", 0, 3)
        federation = new_federation(folder / "federation", AGENTS)
        public = embed_public(folder)
        with running_service(federation.home) as service:
            progress("Service", 1, 3)
            before = service.process_ids()
            wanted = wanted_of(public)
            # A first job of each; after it threads and caches stay as they are.
            warm = put_under_load(service.url, service.token, wanted, requesters=REQUESTERS, seconds=_WARM_S)
            at_first = _cost(service)
            load = put_under_load(service.url, service.token, wanted, requesters=REQUESTERS, seconds=seconds)
            spent = _cost(service) - at_first
            inside = seconds_inside(federation.logs, load.began_at)
            loads = [warm, load]
            if full:
                loads += _on_to(MANY_JOBS, service, wanted, done=len(load.jobs))
            grown = _cost(service) - at_first
            errors = [sentence for one in loads for sentence in one.errors] + complaints(federation)
            died = [name for name, pid in service.process_ids().items() if before.get(name) != pid]
            errors += [f"{name} died and was started again" for name in died]
        progress("Service", 2, 3)
        # A separate federation, so that the journals of the load hold only the jobs of the load.
        quiet = _alone(public, folder, jobs=20 if full else 5, sizes=sizes)
        jobs = [job for one in loads for job in one.jobs]
        wrong = discrepancies(federation, jobs)
        wrong += [sentence for one in loads for sentence in one.queries_not_used_once(MAX_QUERIES)]
        alone_s = _in_process(federation, public, folder, jobs=twins)
        large_s = {
            size: _in_process(federation, public, folder, jobs=3 if size <= MAX_QUERIES else 1, queries=size)
            for size in sizes
        }
        progress("Service", 3, 3)
    rows = _rows(load, errors, wrong, alone_s, inside, seconds=seconds, twins=twins)
    grown_over = len(jobs) - len(warm.jobs)
    return rows + _quiet_rows(quiet, large_s) + _cost_rows(spent, len(load.jobs), grown, grown_over)


def _cost(service: RunningService) -> NDArray[np.float64]:
    """Return the cost of a service: CPU seconds and resident MiB of its coordinator, CPU seconds of all its parties."""
    pids = service.process_ids()
    parties = sum(cpu_seconds(pid) for name, pid in pids.items() if name.startswith(("agent", "tallier")))
    coordinator = pids["coordinator"]
    return np.array([cpu_seconds(coordinator), memory_bytes("VmRSS", coordinator) / 2**20, parties])


def _on_to(jobs: int, service: RunningService, wanted: Wanted, *, done: int) -> list[Load]:
    """Continue the same load until `jobs` jobs were completed or `_MOST_S` have passed."""
    loads: list[Load] = []
    until_s = time.monotonic() + _MOST_S
    while done < jobs and time.monotonic() < until_s and not any(one.errors for one in loads):
        more = put_under_load(service.url, service.token, wanted, requesters=REQUESTERS, seconds=_MORE_S)
        loads.append(more)
        done += len(more.jobs)
    return loads


def _alone(public: Shard, folder: Path, *, jobs: int, sizes: tuple[int, ...]) -> dict[int, list[float]]:
    """Return seconds from submission to labels of jobs that have a service to themselves, by their queries."""
    federation, labels = new_federation(folder / "quiet", AGENTS), folder / "alone.parquet"
    settings = federation.home / "coordinator" / COORDINATOR_FILE
    # More vectors than one job may bring by default.
    settings.write_text(f"{settings.read_text()}\n[limits]\nmax_images = {max(20_000, *sizes)}\n")
    with running_service(federation.home) as service:
        token = new_token(service.url, service.token, "alone")
        with WellBehaved(service.url, token, wanted_of(public)) as requester:
            requester.job_seconds(labels=labels)  # the first job warms up
            found = {QUERIES: [requester.job_seconds(labels=labels) for _ in range(jobs)]}
        for size in sizes:
            measured, warming = (3, 1) if size <= MAX_QUERIES else (1, 0)  # as many as a site answers in a day
            wanted = wanted_of(public, max_queries=size * (measured + warming))
            with WellBehaved(service.url, token, wanted) as requester:
                took = [
                    requester.job_seconds(queries=size, deadline_s=600, labels=labels)
                    for _ in range(warming + measured)
                ]
            found[size] = took[warming:]
    return found


def _quiet_rows(quiet: dict[int, list[float]], in_process: dict[int, list[float]]) -> list[BenchRow]:
    rows = []
    for size, found in quiet.items():
        case, settings = f"one job of {size} queries alone, {AGENTS} agents", {"jobs": len(found), "task": TASK}
        seconds = float(np.median(found))
        reference = "at most 0.6" if size == QUERIES else None
        told = [("submit to labels", "seconds, median", seconds, reference)]
        if size in in_process:
            alone = float(np.median(in_process[size]))
            told.append(("run, in one process", "seconds, median", alone, None))
            told.append(("the service / run", "time ratio", seconds / alone, RATIOS.get(size)))
        rows += rows_of(case, told, settings=settings)
    return rows


def _cost_rows(spent: NDArray[np.float64], jobs: int, grown: NDArray[np.float64], grown_over: int) -> list[BenchRow]:
    case = f"{REQUESTERS} requesters, jobs of {QUERIES} queries, {AGENTS} agents"
    found = [
        ("coordinator", "CPU ms per job", 1e3 * spent[0] / jobs, "at most 50"),
        (f"{AGENTS} agents and 3 talliers, together", "CPU ms per job", 1e3 * spent[2] / jobs, "at most 70"),
    ]
    memory = f"MiB grown over {grown_over:,} jobs", grown[1], f"at most 20 over {MANY_JOBS:,} jobs"
    return rows_of(case, found, settings={"jobs": jobs}) + rows_of(
        case, [("coordinator", *memory)], settings={"jobs": grown_over}
    )


def wanted_of(public: Shard, *, max_queries: int = MAX_QUERIES) -> Wanted:
    """Return the request of every requester."""
    fields = TASK | {"max_queries": max_queries, "backbone_fingerprint": public.fingerprint}
    return Wanted(fields, public.fingerprint, np.asarray(public.features, dtype=np.float64), QUERIES)


def _in_process(
    federation: LocalFederation, public: Shard, folder: Path, *, jobs: int, queries: int = QUERIES
) -> list[float]:
    """Return seconds of each of the same jobs as `labeler run` does them, over the agents' own shards."""
    shards = tuple(home / "images.shard" for home in federation.agents.values())
    file = TaskFile(task=TaskTable.model_validate(TASK))
    features = np.asarray(public.features, dtype=np.float64)
    choose = np.random.default_rng(0)
    seconds = []
    for number in range(jobs):
        source = folder / f"queries-{queries}-{number}.shard"
        rows = choose.choice(len(features), queries, replace=queries > len(features))
        with ShardWriter(
            source, classes=CLASSES, fingerprint=public.fingerprint, dimension=features.shape[1], public=True
        ) as writer:
            writer.append(features[rows], np.full(queries, -1, np.int16), [f"digit-{row}" for row in rows.tolist()])
            writer.finish()
        job = LabelingJob(
            file=file, shards=shards, queries=source, out=folder / f"run-{queries}-{number}", engine="numpy"
        )
        seconds.append(seconds_of(lambda job=job: run_job(job)))  # type: ignore[misc]
    return seconds


def _rows(
    load: Load,
    errors: list[str],
    wrong: list[str],
    alone_s: list[float],
    inside: Mapping[str, list[float]],
    *,
    seconds: float,
    twins: int,
) -> list[BenchRow]:
    case = f"{REQUESTERS} requesters, jobs of {QUERIES} queries, {AGENTS} agents"
    settings = {
        "requesters": REQUESTERS,
        "queries": QUERIES,
        "agents": AGENTS,
        "task": TASK,
        "load_s": seconds,
        "cores": os.cpu_count(),
        "jobs_in_process": twins,
    }
    rows = []

    def row(method: str, metric: str, value: float, reference: str | None = None, took_s: float | None = None) -> None:
        rows.append(BenchRow(case, method, metric, value, reference=reference, seconds=took_s, settings=settings))

    for kind in ("price", "submit", "status", "labels", "job"):
        found = load.seconds[kind] or [0.0]
        for percent in (50, 99):
            row(kind, f"p{percent}, milliseconds", 1e3 * float(np.percentile(found, percent)))
            if inside.get(kind):
                told = 1e3 * float(np.percentile(inside[kind], percent))
                row(f"{kind}, by the coordinator's log", f"p{percent}, milliseconds", told)
    if load.jobs:
        row("the requesters themselves", "CPU ms per job", 1e3 * load.cpu_s / len(load.jobs))
    labels = sum(job.labels for job in load.jobs)
    together = labels / load.wall_s
    alone = QUERIES * len(alone_s) / sum(alone_s)
    requests = sum(len(found) for kind, found in load.seconds.items() if kind != "job")
    row("requests", "count", requests, took_s=load.wall_s)
    row("jobs completed", "count", len(load.jobs), took_s=load.wall_s)
    row("jobs per second", "per second", len(load.jobs) / load.wall_s, reference="at least 10", took_s=load.wall_s)
    row("the service, end to end", "labels per second", together, took_s=load.wall_s)
    row("run, in one process", "labels per second", alone, took_s=sum(alone_s))
    row("run / the service", "throughput ratio", alone / together if together else float("inf"))
    settings_found = settings | {"errors": errors[:20], "not_charged_once": wrong[:20]}
    counted = [("errors", "count", len(errors), "0"), ("charges that do not add up", "count", len(wrong), "0")]
    return rows + rows_of(case, counted, settings=settings_found)


_PAGE = 1000

Line = TypeVar("Line", bound=tuple[object, ...])


@dataclass(frozen=True)
class Book:
    """A journal's ledger as it was found, its chain checked.

    Attributes:
        name: of its party.
        entries: all.
        balances: as derived by the ledger.
    """

    name: str
    entries: tuple[Entry, ...]
    balances: tuple[Balance, ...]


def read_book(name: str, home: Path) -> Book:
    """Read a ledger of a party that has stopped."""
    with open_database(home / JOURNAL_FILE, anchor=home / ANCHOR_FILE) as database:
        ledger = Ledger(database, clock=lambda: datetime.now(UTC))
        ledger.verify()
        entries: list[Entry] = []
        while page := ledger.entries(after=entries[-1].seq if entries else 0, limit=_PAGE):
            entries += page
        return Book(name, tuple(entries), tuple(ledger.balances()))


def discrepancies(federation: LocalFederation, jobs: Sequence[PaidJob]) -> list[str]:
    """Return everything that does not add up between completed jobs and the ledgers of the coordinator and of every
    agent.
    """
    found = check_coordinator(
        read_book("coordinator", federation.coordinator), jobs, [f"agent:{name}" for name in federation.agents]
    )
    for name, home in federation.agents.items():
        found += check_agent(read_book(name, home), jobs)
    return found


def check_coordinator(book: Book, jobs: Sequence[PaidJob], agent_accounts: Collection[str]) -> list[str]:
    """Check that the federation reserves each job and gives it back as it is divided, and that every account reserves
    and posts its round, once each.

    Nothing else was charged or void. In a journal of an earlier program the agents' accounts reserve each job too.

    Small jobs have one round each. A job of several rounds is reported as a discrepancy, since its rounds' prices are
    not known.
    """
    accounts = ["federation", *agent_accounts]
    # In a journal of an earlier program the agents' accounts reserve a proposed job too.
    proposing = {"federation", *(one.account for one in book.entries if one.reservation_id.endswith("/proposed"))}
    expected: Counter[tuple[str, str, str, str, int]] = Counter()
    for job in jobs:
        if job.rounds != 1:
            return [f"{book.name}: job {job.job_id} has {job.rounds} rounds; this check is for jobs of one"]
        for account in accounts:
            for level, amount in job.charges.items():
                proposed = [("reserve", "proposed"), ("void", "proposed")] if account in proposing else []
                for kind, name in (*proposed, ("reserve", "0"), ("post", "0")):
                    expected[kind, f"{job.job_id}/{name}", account, level, amount] += 1
    actual: Counter[tuple[str, str, str, str, int]] = Counter(
        (entry.kind, entry.reservation_id, entry.account, entry.level, entry.amount)
        for entry in book.entries
        if entry.kind not in ("open", "cap")
    )
    return _differences(book, expected, actual) + _sums(book, jobs)


def check_agent(book: Book, jobs: Sequence[PaidJob]) -> list[str]:
    """Check that the agent charged itself once per job, the same amounts; its reservations name rounds, not jobs."""
    reservations: dict[tuple[str, str], list[tuple[str, int]]] = {}
    for entry in book.entries:
        if entry.kind not in ("open", "cap"):
            reservations.setdefault((entry.reservation_id, entry.kind), []).append((entry.level, entry.amount))
    actual = Counter((kind, tuple(sorted(charged))) for (_, kind), charged in reservations.items())
    expected = Counter((kind, tuple(sorted(job.charges.items()))) for job in jobs for kind in ("reserve", "post"))
    return _differences(book, expected, actual) + _sums(book, jobs)


def _differences(book: Book, expected: Counter[Line], actual: Counter[Line]) -> list[str]:
    missing, surplus = expected - actual, actual - expected
    return [f"{book.name}: {count} x {what} is missing" for what, count in missing.items()] + [
        f"{book.name}: {count} x {what} belongs to no completed job" for what, count in surplus.items()
    ]


def _sums(book: Book, jobs: Sequence[PaidJob]) -> list[str]:
    found = []
    for balance in book.balances:
        paid = sum(job.charges[balance.level] for job in jobs)
        if (balance.posted, balance.reserved) != (paid, 0):
            found.append(
                f"{book.name}: {balance.account} ({balance.level}) has {balance.posted} posted and {balance.reserved} "
                f"reserved, and the jobs cost {paid}"
            )
    return found
