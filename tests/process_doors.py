"""A reader of untrusted input as a thread: what it reads and answers is what the process would, and only its limits
are missing.

A process takes half a second to import what it needs, and tests start hundreds. Tests that are marked `process` get
processes (tests.guard), and it is they that see limits, kills and crashes.

Imported before anything of the product, by `tests/conftest.py`.
"""

from __future__ import annotations

import os
import subprocess
import threading
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from typing import IO, Any

from PIL import Image

from labeler.system import process_pool

_start, _bound = process_pool.start_process, process_pool.bound_process

wants_processes: list[Callable[[], bool]] = []
"""Whether the running test gets processes; the guard says so."""


class ProcessDoor:
    """The side of `subprocess.Popen` that the product uses, before a thread that serves the same module."""

    def __init__(self, module: str, *arguments: str, stdin: IO[bytes] | int | None, answers: bool) -> None:
        self.stdin: IO[bytes] | None = None
        self.stdout: IO[bytes] | None = None
        self.returncode: int | None = None
        if stdin == subprocess.PIPE:
            given, ours = os.pipe()
            self.stdin = os.fdopen(ours, "wb")
        else:
            given = os.dup(stdin.fileno()) if hasattr(stdin, "fileno") else os.open(os.devnull, os.O_RDONLY)
        if answers:
            theirs, answer = os.pipe()
            self.stdout = os.fdopen(theirs, "rb")
        else:
            answer = os.open(os.devnull, os.O_WRONLY)
        serve = import_module(module).serve
        most_pixels = Image.MAX_IMAGE_PIXELS

        def work() -> None:
            code = 1
            with suppress(BaseException), os.fdopen(given, "rb") as file, os.fdopen(answer, "wb") as out:
                code = serve(arguments, file, out)
            Image.MAX_IMAGE_PIXELS = most_pixels
            self._code = code

        self._code = 1
        self._thread = threading.Thread(target=work, name=f"door of {module}", daemon=True)
        self._thread.start()

    def poll(self) -> int | None:
        """Return the exit code, or None while it works."""
        if self.returncode is None and not self._thread.is_alive():
            self.returncode = self._code
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end."""
        self._thread.join(timeout)
        if self.poll() is None:
            raise subprocess.TimeoutExpired("door", timeout or 0.0)
        return self.returncode or 0

    def kill(self) -> None:
        """Take away what it reads from and writes to: a thread cannot be killed."""
        for pipe in (self.stdin, self.stdout):
            if pipe is not None:
                with suppress(OSError):
                    pipe.close()

    def communicate(self) -> None:
        """Wait for its end; what hangs must be in a process, which can be killed."""
        self.kill()
        self.wait(60.0)


def start_process(module: str, *arguments: str, stdin: IO[bytes] | int | None = None, answers: bool = False) -> Any:
    """As `process_pool.start_process`, or a door."""
    if any(wants() for wants in wants_processes):
        return _start(module, *arguments, stdin=stdin, answers=answers)
    return ProcessDoor(module, *arguments, stdin=stdin, answers=answers)


def bound_process(room_bytes: int, cpu_s: int | None = None) -> None:
    """As `process_pool.bound_process`, but no thread behind a door bounds the process of all tests."""
    if not threading.current_thread().name.startswith("door"):
        _bound(room_bytes, cpu_s)


process_pool.start_process, process_pool.bound_process = start_process, bound_process  # type: ignore[assignment]
