"""Measurement of processes of this machine: in separate interpreters, by the CPU and memory that Linux reports."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, Self

from labeler.errors import InvalidSetting, LabelerError

_TICKS = os.sysconf("SC_CLK_TCK")
ONE_CORE: Final = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


def run_alone(module: str, *orders: Mapping[str, Any], one_core: bool = True) -> list[dict[str, Any]]:
    """Run a module once for each order, all at the same time, each in a fresh interpreter.

    Args:
        module: takes its order as JSON in its only argument, and prints what it found as JSON in its last line.
        orders: one for each run.
        one_core: matrix libraries of each compute on one core.
    """
    about = {"PYTHONPATH": str(Path(__file__).parents[1])} | (ONE_CORE if one_core else {})
    running = [
        subprocess.Popen(
            [sys.executable, "-m", module, json.dumps(order)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | about,
        )
        for order in orders
    ]
    said = [process.communicate() for process in running]
    for process, (_, errors) in zip(running, said, strict=True):
        if process.returncode:
            raise LabelerError(f"a measuring process of {module} failed: {errors.strip().splitlines()[-1:]}")
    return [json.loads(out.splitlines()[-1]) for out, _ in said]


def cpu_seconds(pid: int) -> float:
    """Return the CPU seconds of a process and all its threads, in user and system mode."""
    return sum(map(int, _stat(pid)[11:13])) / _TICKS


def cpu_seconds_below(pid: int) -> dict[int, float]:
    """Return CPU seconds, user and system, of a process and of all its descendants, by process id.

    The children that a process has waited for count as its own.
    """
    found = {pid: _stat(pid)}
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(InvalidSetting):  # it has ended
            found[int(folder.name)] = _stat(int(folder.name))
    below = {pid}
    while more := {child for child, fields in found.items() if int(fields[1]) in below} - below:
        below |= more
    return {one: sum(map(int, found[one][11:15])) / _TICKS for one in below if one in found}


def _stat(pid: int) -> list[str]:
    # The name is in parentheses and may hold anything.
    return _told(f"/proc/{pid}/stat").rpartition(")")[2].split()


def memory_bytes(kind: str, pid: int | str = "self") -> int:
    """Return the memory of a process by one line of Linux's status, such as VmRSS, VmHWM or RssAnon."""
    lines = _told(f"/proc/{pid}/status").splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(f"{kind}:"))


def _told(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        raise InvalidSetting("this bench reads /proc, which Linux alone has") from None


class PeakMemory:
    """The most anonymous memory of this process while the context lasts, sampled by a thread.

    Mapped pages of a file are page cache, which the system takes back when it needs to, and are not counted.

    Attributes:
        before_bytes: at the start of the context.
        bytes: the most that was seen.
    """

    def __init__(self) -> None:
        self.before_bytes = self.bytes = memory_bytes("RssAnon")
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._done.wait(0.0005):
            self.bytes = max(self.bytes, memory_bytes("RssAnon"))
