"""Waiting times: `labeler up` until it is ready and until it is gone, and light commands.

Seconds are those of a clock on the wall. CPU seconds are those of every process that had to run, user and system, from
the fork of the first to the moment measured. A first start makes the federation, keys, shards and journals; a second
one opens it.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from benchmarks import BenchRow, in_turn, mean_row
from benchmarks.machine import cpu_seconds_below
from benchmarks.service.federation import running_up
from labeler.errors import Unavailable
from workers.progress import ProgressCallback, silent

PLAN: Final = "plan --method knn --k 50 --queries 206 --epsilon 1 --solve sigma --agents 3"
AGENTS: Final = 5

READY_S: Final = 8.0
STOPPED_S: Final = 3.0
COMMAND_CPU_S: Final = 0.5


@dataclass(frozen=True)
class Run:
    """One start and stop of a federation.

    Attributes:
        ready_s, ready_cpu_s: until jobs could be taken.
        stopped_s: from SIGTERM until nothing of it was left.
        processes: their number.
        killed: what it says it had to kill, in words; empty where nothing.
    """

    ready_s: float
    ready_cpu_s: float
    stopped_s: float
    processes: int
    killed: str


def bench_start(*, full: bool = False, progress: ProgressCallback = silent) -> list[BenchRow]:
    """Measure starts, stops and light commands."""
    times = 5 if full else 1
    runs: dict[str, list[Run]] = {"first start": [], "second start": [], "stopped with a job under way": []}
    commands: dict[str, list[float]] = {"--help": [], "status": [], "plan": []}
    with tempfile.TemporaryDirectory() as name:
        for number in in_turn(progress, "Starts", range(times)):
            home = Path(name) / f"federation-{number}"
            runs["first start"].append(_run(home))
            runs["second start"].append(_run(home, status_cpu=commands["status"]))
            runs["stopped with a job under way"].append(_run(home, with_a_job=True))
            commands["--help"].append(_cpu_of(["--help"]))
            commands["plan"].append(_cpu_of(PLAN.split()))
    return _rows(runs, commands)


def _run(home: Path, *, status_cpu: list[float] | None = None, with_a_job: bool = False) -> Run:
    started = time.monotonic()
    with running_up(home, "--agents", AGENTS) as (pid, told):
        ready_s = time.monotonic() - started
        used = cpu_seconds_below(pid)
        service = {"LABELER_URL": told["url"], "LABELER_TOKEN": told["token"]}
        if status_cpu is not None:
            status_cpu.append(_cpu_of(["status"], **service))
        if with_a_job:
            examples = Path(told["examples"])
            _cpu_of(["submit", examples / "digits.zip", "--task", examples / "task.toml"], **service)
        stopping = time.monotonic()
    stopped_s = time.monotonic() - stopping
    words = home.with_suffix(".log").read_text(errors="replace").splitlines()
    killed = next((line for line in words if "killed" in line), "")
    return Run(ready_s, sum(used.values()), stopped_s, len(used), killed)


def _cpu_of(arguments: Sequence[object], **environment: str) -> float:
    """Return CPU seconds of a command from its start to its end."""
    command = [sys.executable, "-P", "-m", "workers.cli", *map(str, arguments)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, env=os.environ | environment)
    _, code, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(code)
    if process.returncode:
        raise Unavailable(f"`labeler {' '.join(map(str, arguments))}` ended with exit code {process.returncode}")
    return used.ru_utime + used.ru_stime


def _rows(runs: dict[str, list[Run]], commands: dict[str, list[float]]) -> list[BenchRow]:
    settings: dict[str, Any] = {"agents": AGENTS, "cores": os.cpu_count(), "load": round(os.getloadavg()[0], 1)}
    rows = []

    def row(case: str, method: str, metric: str, values: Sequence[float], reference: str | None = None) -> None:
        told = settings | {"repetitions": len(values)}
        rows.append(mean_row(case, method, metric, values, reference=reference, settings=told))

    up = f"labeler up, {AGENTS} agents"
    for method, done in runs.items():
        row(up, method, "seconds until ready", [one.ready_s for one in done], f"at most {READY_S:g}")
        row(up, method, "CPU seconds until ready", [one.ready_cpu_s for one in done])
        row(up, method, "seconds until stopped", [one.stopped_s for one in done], f"at most {STOPPED_S:g}")
        row(up, method, "starts in which something was killed", [float(bool(one.killed)) for one in done], "0")
    row(up, "second start", "processes", [float(one.processes) for one in runs["second start"]])
    for name, used in commands.items():
        row(f"labeler {name}", "one process", "CPU seconds", used, f"at most {COMMAND_CPU_S:g}")
    return rows
