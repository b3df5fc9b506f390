"""Measuring processes of this machine: in interpreters of their own, by the CPU and memory that Linux tells of."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, Self

from labeler.errors import LabelerError

ONE_CORE: Final = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


def run_alone(module: str, *orders: Mapping[str, Any], one_core: bool = True) -> list[dict[str, Any]]:
    """Run a module once for each order, all at the same time, each in a fresh interpreter.

    Args:
        module: takes its order as JSON in its only argument, and prints what it found as JSON in its last line.
        orders: what each is told.
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


def cpu_seconds(pid: int) -> float | None:
    """CPU seconds of a process and all its threads, in user and system mode; None where nobody tells."""
    try:
        # The name stands in parentheses and may hold anything.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def memory_bytes(kind: str, pid: int | str = "self") -> int | None:
    """Memory of a process by one line of Linux's status, as VmRSS, VmHWM or RssAnon; None where nobody tells."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return None
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith(f"{kind}:")), None)


class PeakMemory:
    """The most anonymous memory of this process while the context lasts, looked at by a thread.

    Mapped pages of a file are page cache, which the system takes back when it needs to, and are not counted.

    Attributes:
        before_bytes: when the watch began.
        bytes: the most that was seen.
    """

    def __init__(self) -> None:
        self.before_bytes = self.bytes = memory_bytes("RssAnon") or 0
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
            self.bytes = max(self.bytes, memory_bytes("RssAnon") or 0)
