"""A command of `labeler` as a fork of a process that has loaded all it needs: what tests of whole federations start.

`labeler up` as a separate program spends six seconds of a core on imports before it makes anything: once in itself,
once in the process that its roles are forked from (`workers.up.supervisor`). Here both are forks of one fork
server of all processes of tests. Everything else is what the program does: its own session, signals, logs, exit code,
and roles that are processes. `tests/e2e/test_up.py`, the demo and the README's commands start the program itself.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from workers.up.supervisor import ONE_THREAD, WARMED, die_with_parent

_ONLY_UP = (
    "pytest",  # the main module of who asks is imported in every fork
    "workers.commands.federation",
    "workers.up.home",
    "workers.up.up",
    "sklearn.datasets",
)
"""What `up` loads beside its roles."""

_server: Any = forkserver._forkserver  # type: ignore[attr-defined]


def begin_server() -> None:
    """Start the server that commands are forks of, if this process or the one that it is a fork of has not.

    `pytest --forks` does so before it forks: to load what commands need takes four seconds of a core, once.
    """
    if _server._forkserver_pid is None:
        for name in ONE_THREAD:
            os.environ.setdefault(name, "1")
        names = ["tests.quick_syncs", "tests.quick_tables", "tests.stolen_keys", *WARMED, *_ONLY_UP]
        multiprocessing.get_context("forkserver").set_forkserver_preload(names)
        forkserver.ensure_running()
        os.register_at_fork(after_in_child=_trust_the_server)


def _trust_the_server() -> None:
    """In a fork: the server is no child of this process, which therefore cannot ask whether it has ended."""
    _server.ensure_running = forkserver.ensure_running = lambda: None


PATIENCE_S = 300.0
"""When a command counts as stuck; it promises nothing about time, since cores are shared with other tests."""


class ForkedCommand:
    """A command that runs; what tests use of `subprocess.Popen`.

    Args:
        arguments: of the command line, without the program.
        errors: file that takes what it complains about.
        environment: added to that of the tests.
        is_heard: whether `stdout` has what it prints; else the file takes that too.

    Attributes:
        stdout: what it prints.
        pid: its process id.
    """

    def __init__(
        self, *arguments: object, errors: Path, environment: Mapping[str, str] | None = None, is_heard: bool = True
    ) -> None:
        context = multiprocessing.get_context("forkserver")
        begin_server()
        ours, theirs = context.Pipe(duplex=False)
        told = os.environ | {"OMP_NUM_THREADS": "1"} | dict(environment or {})
        words = tuple(map(str, arguments))
        output = theirs if is_heard else None
        self._process = context.Process(
            target=_play, args=(words, output, str(errors), told, _server._forkserver_address)
        )
        self._process.start()
        theirs.close()
        self.stdout = os.fdopen(os.dup(ours.fileno()), encoding="utf-8")
        ours.close()
        self.pid = self._process.pid or 0

    def poll(self) -> int | None:
        """Its exit code; None while it runs."""
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        """Signal it."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """End it at once."""
        self.send_signal(signal.SIGKILL)

    def wait(self, timeout: float | None = None) -> int:
        """Wait until it has ended; its exit code."""
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("labeler", timeout or 0.0)
        return self._process.exitcode

    def end(self) -> None:
        """End it in peace where it can be, and close what it prints."""
        self.send_signal(signal.SIGTERM)
        try:
            self.wait(timeout=PATIENCE_S)
        except subprocess.TimeoutExpired:
            self.kill()
            self.wait()
        self.stdout.close()


def run_forked(*arguments: object) -> tuple[int, str]:
    """Run a command to its end: its exit code, and what it said, on one line."""
    with tempfile.TemporaryDirectory() as folder:
        said = Path(folder) / "said"
        process = ForkedCommand(*arguments, errors=said, is_heard=False)
        process.stdout.close()
        code = process.wait(timeout=PATIENCE_S)
        return code, " ".join(said.read_text().split())


def _play(
    arguments: tuple[str, ...], output: Connection | None, errors: str, environment: dict[str, str], address: Any
) -> None:
    """In the fork: become the program, whose own roles are forks of the same server."""
    os.setsid()
    ask_the_kernel = die_with_parent(os.getppid())
    if ask_the_kernel is not None:
        ask_the_kernel()
    threading.Thread(target=_die_with_tests, name="tests' end", daemon=True).start()
    _server._forkserver_address = address
    _trust_the_server()
    os.environ.clear()
    os.environ.update(environment)
    with Path(errors).open("ab", buffering=0) as file, Path(os.devnull).open("rb") as nothing:
        os.dup2(nothing.fileno(), 0)
        os.dup2((output or file).fileno(), 1)
        os.dup2(file.fileno(), 2)
    if output is not None:
        output.close()
    # The server's remember that they were files which can be sought, and what they are now cannot.
    sys.stdout, sys.stderr = (open(number, "w", closefd=False) for number in (1, 2))  # noqa: SIM115  # for life
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.argv = ["labeler", *arguments]
    from workers.cli import main

    main()


def _die_with_tests() -> None:
    tests = multiprocessing.parent_process()
    if tests is not None:
        tests.join()
        os.kill(os.getpid(), signal.SIGKILL)
