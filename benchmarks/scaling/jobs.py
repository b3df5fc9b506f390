"""Jobs: how their cost grows with their queries, and how many a second a service does on one core and on two.

The service is `labeler up` with all its processes, held to so many cores by the system's scheduler; requesters share
them. CPU seconds are those of its processes, so what else the machine does moves them less than the clock.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.process_costs import cpu_seconds
from benchmarks.requesters import Wanted, put_under_load
from benchmarks.scaling.searching import ONE_CORE
from benchmarks.service import MAX_QUERIES, QUERIES, TASK, RunningService, embed_public, running_service
from benchmarks.speed import write_synthetic_shard
from labeler.errors import LabelerError
from workers.federation.home import make_federation
from workers.federation.up import Plan
from workers.jobs.folder import open_job_folder
from workers.jobs.labelling import label
from workers.jobs.preparation import LabellingJob, prepare
from workers.jobs.task_file import QueriesTable, TaskFile, TaskTable

AGENTS, RECORDS, DIMENSION, K = 3, 2_000, 256, 20
"""Of a job in one process."""

_WARM_S = 1.0


def run_of_queries(queries: int, folder: Path) -> dict[str, float]:
    """Seconds and CPU seconds of one job in one process on one core, from reading shards to the stored release."""
    return _child({"what": "run", "queries": queries, "folder": str(folder)})


@dataclass(frozen=True)
class Served:
    """A load on a service, from the first request to the last label.

    Attributes:
        agents, cores: of the service.
        jobs: completed.
        wall_s: how long it took.
        coordinator_s, agents_s, talliers_s: CPU seconds of these processes.
        journal_bytes: by how much the coordinator's journal grew.
        errors: requests that failed.
    """

    agents: int
    cores: int
    jobs: int
    wall_s: float
    coordinator_s: float
    agents_s: float
    talliers_s: float
    journal_bytes: int
    errors: int


def serve(*, agents: int, cores: int, requesters: int, seconds: float) -> Served:
    """Put a service of that size, on so many cores, under load."""
    order = {"what": "serve", "agents": agents, "cores": cores, "requesters": requesters, "seconds": seconds}
    return Served(**_child(order))


def _child(order: dict[str, Any]) -> dict[str, Any]:
    """In a process of its own: what is started there inherits its cores and threads.

    Raises:
        LabelerError: it failed; its last line is in the message.
    """
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.scaling.jobs", json.dumps(order)],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | ONE_CORE | {"PYTHONPATH": str(Path(__file__).parents[2])},
    )
    if done.returncode:
        raise LabelerError(f"the measuring process failed: {done.stderr.strip().splitlines()[-1:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def _run(queries: int, folder: Path) -> dict[str, float]:
    shards = tuple(folder / f"agent-{number}" for number in range(AGENTS))
    for number, path in enumerate(shards):
        if not path.exists():
            write_synthetic_shard(path, records=RECORDS, dimension=DIMENSION, seed=number + 1)
    for count in (50, queries):
        # The first one finds nothing warmed, and is not counted.
        public = folder / f"public-{count}"
        if not public.exists():
            write_synthetic_shard(public, records=count, dimension=DIMENSION, seed=999, public=True)
        file = TaskFile(task=TaskTable(name="scale", k=K, sigma_votes=25.0, delta=1e-4), queries=QueriesTable())
        with tempfile.TemporaryDirectory(dir=folder) as name:
            job = LabellingJob(file=file, shards=shards, queries=public, out=Path(name) / "job")
            began, cpu = time.perf_counter(), time.process_time()
            with open_job_folder(job.out) as opened:
                prepared = prepare(job, opened)
                opened.begin(prepared.plan())
                label(prepared, opened)
            found = {"seconds": time.perf_counter() - began, "cpu_s": time.process_time() - cpu}
    return found


def _serve(agents: int, cores: int, requesters: int, seconds: float) -> Served:
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:cores])
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        home = folder / "federation"
        home.mkdir(mode=0o700)
        federation = make_federation(home, Plan(agents=agents, instance_epsilon=100.0, agent_epsilon="unlimited"))
        public = embed_public(folder)
        features = public.features[public.rows].astype(float)
        wanted = Wanted(TASK | {"max_queries": MAX_QUERIES}, public.fingerprint, features, QUERIES)
        journal = federation.home / "coordinator"
        with running_service(federation.home) as service:
            put_under_load(service.url, service.token, wanted, requesters=requesters, seconds=_WARM_S)
            before, size = _cpu(service), _bytes(journal)
            load = put_under_load(service.url, service.token, wanted, requesters=requesters, seconds=seconds)
            spent = {kind: cost - before[kind] for kind, cost in _cpu(service).items()}
            grown = _bytes(journal) - size
    return Served(
        agents, cores, len(load.jobs), load.wall_s, spent["coordinator"], spent["agent"], spent["tallier"],
        max(0, grown), len(load.errors),
    )  # fmt: skip


def _cpu(service: RunningService) -> dict[str, float]:
    found = {"coordinator": 0.0, "agent": 0.0, "tallier": 0.0}
    for name, pid in service.process_ids().items():
        for kind in found:
            if name.startswith(kind):
                found[kind] += cpu_seconds(pid) or 0.0
    return found


def _bytes(folder: Path) -> int:
    """Of the database itself: its write-ahead log comes and goes."""
    return sum(path.stat().st_size for path in folder.glob("*.db"))


def _asked(order: dict[str, Any]) -> dict[str, Any]:
    if order["what"] == "run":
        return _run(order["queries"], Path(order["folder"]))
    return asdict(_serve(order["agents"], order["cores"], order["requesters"], order["seconds"]))


if __name__ == "__main__":
    sys.stdout.write(json.dumps(_asked(json.loads(sys.argv[1]))) + "\n")
