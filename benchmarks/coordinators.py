"""The same load on one, two and three coordinators side by side, over one journal in PostgreSQL.

A federation as `labeler up` starts it; the second and third coordinator are processes beside it, and requesters are
spread over all of them. Who leads drives the jobs; the others answer what is only read (`api.leading`). Where a machine
has fewer cores than processes, more coordinators only share them.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final

import numpy as np

from benchmarks.process_costs import cpu_seconds
from benchmarks.requesters import Load, put_under_load
from benchmarks.rows import BenchRow
from benchmarks.service import AGENTS, BUDGET_EPSILON, QUERIES, embed_public, running_service, wanted_of
from benchmarks.tied_command import tied_command
from labeler.errors import InvalidSetting, Unavailable
from workers.federation.home import make_federation
from workers.federation.up import Plan
from workers.homes.settings_file import COORDINATOR_FILE, set_line
from workers.progress import ProgressCallback, silent

JOURNAL: Final = "LABELER_BENCH_POSTGRES"
"""Environment variable with the URL of an empty PostgreSQL database."""

MOST: Final = 3
_WARM_S = 1.0
_STOP_S = 30.0


def bench_coordinators(
    *, data: Path | None = None, full: bool = False, progress: ProgressCallback = silent
) -> list[BenchRow]:
    """Jobs a second, latencies and CPU with 1, 2 and 3 coordinators; every job is completed, or it is an error.

    Args:
        data: folder on whose disk the homes lie; else the system's folder for temporary files.
        full: half a minute of load each by thirty requesters; else a few seconds by ten.
        progress: told how far it is.

    Raises:
        InvalidSetting: no database is named.
        Unavailable: something did not start.
    """
    journal = os.environ.get(JOURNAL, "")
    if not journal.startswith("postgresql://"):
        raise InvalidSetting(
            f"coordinators side by side need PostgreSQL: name an empty database in the environment, "
            f"{JOURNAL}=postgresql://USER:PASSWORD@HOST/DATABASE"
        )
    seconds, requesters = (30.0, 30) if full else (5.0, 10)
    rows: list[BenchRow] = []
    with tempfile.TemporaryDirectory(dir=data) as name, ExitStack() as running:
        folder = Path(name)
        home = folder / "federation"
        home.mkdir(mode=0o700)
        plan = Plan(agents=AGENTS, instance_epsilon=BUDGET_EPSILON, agent_epsilon="unlimited")
        federation = make_federation(home, plan)
        settings = federation.coordinator / COORDINATOR_FILE
        set_line(settings, "journal", journal)
        settings.write_text(f"{settings.read_text()}\n[side_by_side]\nlease_s = 5\n")
        wanted = wanted_of(embed_public(folder))
        service = running.enter_context(running_service(federation.home))
        urls, pids = [service.url], [service.process_ids()["coordinator"]]
        for count in range(1, MOST + 1):
            progress("Coordinators", count - 1, MOST)
            if count > 1:
                url, pid = running.enter_context(_another(federation.coordinator, folder / f"{count}.log"))
                urls.append(url)
                pids.append(pid)
            for load_s in (_WARM_S, seconds):
                before = [cpu_seconds(pid) for pid in pids]
                load = put_under_load(
                    service.url,
                    service.token,
                    wanted,
                    requesters=requesters,
                    seconds=load_s,
                    urls=tuple(urls),
                )
            now = [cpu_seconds(pid) for pid in pids]
            spent = [None if a is None or b is None else a - b for a, b in zip(now, before, strict=True)]
            case = f"{count} coordinators, {requesters} requesters, jobs of {QUERIES} queries, {AGENTS} agents"
            about = {"cores": os.cpu_count(), "load_s": seconds, "errors": load.errors[:5]}
            rows += _rows(case, about, load, spent)
        progress("Coordinators", MOST, MOST)
    return rows


def _rows(case: str, about: dict[str, Any], load: Load, spent: list[float | None]) -> list[BenchRow]:
    rows = []

    def row(method: str, metric: str, value: float, reference: str | None = None) -> None:
        rows.append(BenchRow(case, method, metric, value, reference=reference, settings=about))

    jobs = len(load.jobs)
    row("jobs completed", "per second", jobs / load.wall_s)
    row("errors", "count", len(load.errors), "0")
    for kind in ("price", "status", "submit"):
        found = load.seconds[kind] or [0.0]
        for percent in (50, 99):
            row(kind, f"p{percent}, milliseconds", 1e3 * float(np.percentile(found, percent)))
    for number, cpu_s in enumerate(spent):
        if cpu_s is not None and jobs:
            row(f"follower {number}" if number else "the one that leads", "CPU ms per job", 1e3 * cpu_s / jobs)
    return rows


@contextmanager
def _another(home: Path, log: Path) -> Iterator[tuple[str, int]]:
    """One more coordinator of a home, ready, until the block ends: its URL and process."""
    with log.open("wb") as errors:
        process = subprocess.Popen(
            tied_command("serve", "--home", home, "--port", 0, "--json"),
            stdout=subprocess.PIPE,
            stderr=errors,
            start_new_session=True,
        )
    with process:
        try:
            line = process.stdout.readline() if process.stdout is not None else b""
            if not line:
                raise Unavailable(f"a coordinator did not start: {log.read_text(errors='replace')[-1000:]}")
            yield json.loads(line)["url"], process.pid
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(timeout=_STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
