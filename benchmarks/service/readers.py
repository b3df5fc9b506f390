"""A well-behaved requester's jobs beside viewers who read budgets and the ledger, in a federation with a long history.

The readers are in a process of their own, so that they take no thread of the requester's. Each has a viewer's token and
reads the accounts, an agent's accounts, a page of the ledger, the jobs and the metrics in turn, one a second, as a
dashboard does.
"""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import httpx2
import numpy as np

from benchmarks import BenchRow, rows_of, seconds_of
from benchmarks.service.federation import new_federation, running_service
from benchmarks.service.requesters import Wanted, WellBehaved, new_token
from benchmarks.speed.grown import grow
from labeler.ledger.database import open_database
from workers.party.home import ANCHOR_FILE, JOURNAL_FILE

READERS: Final = 60
MOST_TIMES: Final = 1.5
"""A job may take this many times its quiet time, at the 99th percentile."""

_AGAIN_S: Final = 1.0
_LEAVE_S: Final = 60.0


def beside_readers(folder: Path, wanted: Wanted, *, agents: int, entries: int, jobs: int) -> list[BenchRow]:
    """Measure jobs and look-ups in quiet and while others read.

    Args:
        folder: an empty one.
        entries: of the coordinator's ledger.
        jobs: in quiet, and again while others read.
    """
    federation = new_federation(folder / "federation", agents)
    with running_service(federation.home) as service:
        token = new_token(service.url, service.token, "well-behaved")
        with WellBehaved(service.url, token, wanted) as good:
            task_id = good.task_id
            good.job_seconds()
    home = federation.coordinator
    with open_database(home / JOURNAL_FILE, anchor=home / ANCHOR_FILE) as database:
        names = [f"agent:{name}" for name in federation.agents]
        grown = seconds_of(lambda: grow(database, entries, agents=names, task_digest=task_id))
    started = time.perf_counter()
    with ExitStack() as running:
        service = running.enter_context(running_service(federation.home))
        ready = time.perf_counter() - started
        good = running.enter_context(WellBehaved(service.url, token, wanted))
        viewers = [new_token(service.url, service.token, f"viewer {place}", "viewer") for place in range(READERS)]
        good.job_seconds()
        quiet = [good.job_seconds() for _ in range(jobs)]
        probes = running.enter_context(httpx2.Client(base_url=service.url, timeout=60))
        spawn = multiprocessing.get_context("spawn")
        stop, answers = spawn.Event(), spawn.Queue()
        readers = spawn.Process(
            target=read_on, args=(service.url, viewers, next(iter(federation.agents)), stop, answers)
        )
        readers.start()
        try:
            answers.get(timeout=_LEAVE_S)  # they have begun
            beside, probed = [], []
            for _ in range(jobs):
                beside.append(good.job_seconds())
                probed.append(seconds_of(lambda: probes.get("/readyz")))
        finally:
            stop.set()
        found: dict[str, Any] = answers.get(timeout=_LEAVE_S)
        readers.join(_LEAVE_S)
    settings = {
        "jobs": jobs,
        "agents": agents,
        "entries": entries,
        "readers": READERS,
        "cores": os.cpu_count(),
        "answers": found["answers"],
    }
    usual, now = (float(np.percentile(some, 99)) for some in (quiet, beside))
    measured = [
        ("in quiet", "seconds, 99th percentile", usual, None),
        ("under attack", "seconds, 99th percentile", now, None),
        ("in quiet", "seconds, median", float(np.median(quiet)), None),
        ("under attack", "seconds, median", float(np.median(beside)), None),
        ("attack / quiet", "time ratio, 99th percentile", now / usual, f"at most {MOST_TIMES:g}"),
        ("under attack", "seconds of a readiness probe, longest", max(probed), None),
        ("under attack", "seconds of a read, 99th percentile", found["read_s"], None),
        ("start", "seconds until ready", ready, None),
        ("grown", "seconds", grown, None),
    ]
    return rows_of(f"{READERS} readers beside {entries} entries of the ledger", measured, settings=settings)


def read_on(url: str, tokens: list[str], agent: str, stop: Any, answers: Any) -> None:
    """Read with every token, each in one thread, until told to stop; the whole of a child process."""
    places = ("/v1/budget", f"/v1/budget/agents/{agent}", "/v1/ledger?limit=100", "/v1/jobs?limit=50", "/metrics")
    statuses: Counter[int] = Counter()
    times: list[float] = []

    def work(token: str, place: int) -> None:
        with httpx2.Client(base_url=url, headers={"Authorization": f"Bearer {token}"}, timeout=60) as client:
            while not stop.wait(_AGAIN_S):
                began = time.perf_counter()
                try:
                    statuses[client.get(places[place % len(places)]).status_code] += 1
                except httpx2.HTTPError:
                    statuses[0] += 1
                times.append(time.perf_counter() - began)
                place += 1

    threads = [threading.Thread(target=work, args=(token, place)) for place, token in enumerate(tokens)]
    for thread in threads:
        thread.start()
    answers.put(None)
    for thread in threads:
        thread.join()
    told = {str(status): count for status, count in sorted(statuses.items())}
    answers.put({"answers": told, "read_s": float(np.percentile(times or [0.0], 99))})
