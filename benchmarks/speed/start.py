"""Waiting times: `labeler up` until it is ready and until it is gone, and light commands.

Seconds are those of a clock on the wall. CPU seconds are those of every process that had to run, user and system, from
the fork of the first to the moment measured. A first start makes the federation, keys, shards and journals; a second
one opens it.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from benchmarks import BenchRow, in_turn, mean_row
from benchmarks.service.federation import tied_command
from labeler.errors import InvalidSetting, Unavailable
from workers.progress import ProgressCallback, silent

PLAN: Final = [
    "plan",
    "--method",
    "knn",
    "--k",
    "50",
    "--queries",
    "206",
    "--epsilon",
    "1",
    "--solve",
    "sigma",
    "--agents",
    "3",
]
AGENTS: Final = 5

READY_S: Final = 8.0
STOPPED_S: Final = 3.0
COMMAND_CPU_S: Final = 0.5

_STOP_S = 60.0


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
    if not sys.platform.startswith("linux"):
        raise InvalidSetting("this bench reads /proc, which Linux alone has")
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
            commands["plan"].append(_cpu_of(PLAN))
    return _rows(runs, commands)


def _run(home: Path, *, status_cpu: list[float] | None = None, with_a_job: bool = False) -> Run:
    said = home.with_suffix(".said")
    command = tied_command("up", "--home", home, "--agents", AGENTS, "--port", 0, "--json")
    with said.open("wb") as errors:
        started = time.monotonic()
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, start_new_session=True)
    with process:
        try:
            line = process.stdout.readline() if process.stdout is not None else b""
            ready_s = time.monotonic() - started
            used = cpu_seconds_below(process.pid)
            if not line:
                raise Unavailable(f"the federation did not start: {said.read_text(errors='replace')[-1000:]}")
            told = json.loads(line)
            service = {"LABELER_URL": told["url"], "LABELER_TOKEN": told["token"]}
            if status_cpu is not None:
                status_cpu.append(_cpu_of(["status"], **service))
            if with_a_job:
                examples = Path(told["examples"])
                _cpu_of(["submit", examples / "digits.zip", "--task", examples / "task.toml"], **service)
        finally:
            stopping = time.monotonic()
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(timeout=_STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
        stopped_s = time.monotonic() - stopping
    words = said.read_text(errors="replace").splitlines()
    killed = next((line for line in words if "killed" in line), "")
    return Run(ready_s, sum(used.values()), stopped_s, len(used), killed)


def cpu_seconds_below(pid: int) -> dict[int, float]:
    """Return CPU seconds, user and system, of a process and of all its descendants, by process id.

    The children that a process has waited for count as its own.
    """
    found: dict[int, tuple[int, float]] = {}
    ticks = os.sysconf("SC_CLK_TCK")
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            try:
                fields = (folder / "stat").read_text().rsplit(")", 1)[1].split()
            except OSError:
                continue
            found[int(folder.name)] = (int(fields[1]), sum(map(int, fields[11:15])) / ticks)
    below = {pid}
    while more := {child for child, (parent, _) in found.items() if parent in below} - below:
        below |= more
    return {one: found[one][1] for one in below if one in found}


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
