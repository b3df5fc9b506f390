"""A supervisor of processes: starts them, restarts those that die, stops them in order, and never leaves one behind.

Programs belong to stages. They start stage by stage from the lowest and stop from the highest, each stage all at
once: what others need (the queue) starts first and stops last.

Every program leads a session of its own, so that Ctrl-C in a terminal reaches the supervisor alone, which then stops
them in order. On Linux the kernel kills each of them when the supervisor's thread ends, however it ends
(PR_SET_PDEATHSIG); a program killed like that loses nothing, because all that must last is durable at every step.
Elsewhere a supervisor that is killed with SIGKILL leaves its programs running.

One thread does it all: `subprocess` with a hook between fork and exec is safe only without other threads.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

from labeler.errors import TryAgain, Unavailable

log = logging.getLogger("labeler.supervisor")

LONGEST_PAUSE_S: Final = 30.0
"""Longest wait between two starts of a program that keeps dying: 1, 2, 4 .. seconds up to this."""

STEADY_S: Final = 10.0
"""A program that ran this long before it died starts again after the shortest pause."""

GRACE_S: Final = 5.0
"""How long a program may take to stop by itself before it is killed."""

MAX_LOG_BYTES: Final = 16 * 2**20
"""A log larger than this is put aside; one older log is kept."""

LOOK_AT_LOGS_S: Final = 1.0

_PR_SET_PDEATHSIG = 1
_POLL_S = 0.05


class Process(Protocol):
    """What a supervisor needs of a running program; a `subprocess.Popen` is one."""

    @property
    def pid(self) -> int: ...
    def poll(self) -> int | None: ...
    def terminate(self) -> None: ...
    def kill(self) -> None: ...
    def wait(self) -> int: ...


@dataclass(frozen=True)
class Program:
    """One program to keep running.

    Attributes:
        stage: programs start from the lowest stage and stop from the highest.
        output: the file that takes what it prints, if there is one.
    """

    name: str
    stage: int
    launch: Callable[[], Process]
    output: Path | None = None


@dataclass(frozen=True)
class Death:
    """A program that ended although nobody asked it to.

    Attributes:
        code: its exit code; negative: the signal that killed it.
        restart_in_s: when it is started again.
        deaths: how often in a row it has died.
    """

    name: str
    code: int
    restart_in_s: float
    deaths: int


class Supervisor:
    """Keeps programs running; call from one thread.

    Args:
        clock: seconds that never go back.
    """

    def __init__(self, programs: Sequence[Program], *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._logs_at = 0.0
        self._children = [_Child(program) for program in sorted(programs, key=lambda program: program.stage)]

    @property
    def pids(self) -> dict[str, int]:
        """Process id of every program that runs now."""
        return {child.program.name: child.process.pid for child in self._children if child.process is not None}

    def start(self, *, stage: int | None = None) -> None:
        """Start every program of one stage, or all that do not run."""
        for child in self._children:
            if child.process is None and stage in (None, child.program.stage):
                child.start(self._clock())

    def tend(self) -> list[Death]:
        """Look once: note who died, start again whose pause is over.

        Returns:
            Who died since the last look.
        """
        now = self._clock()
        if now >= self._logs_at:
            self._logs_at = now + LOOK_AT_LOGS_S
            for child in self._children:
                if child.program.output is not None:
                    put_aside(child.program.output)
        deaths = [death for child in self._children if (death := child.note_death(now)) is not None]
        for child in self._children:
            if child.process is None and child.start_at is not None and now >= child.start_at:
                try:
                    child.start(now)
                except Unavailable:
                    deaths.append(child.pause(now, TryAgain.exit_code))
        return deaths

    def stop(self, *, grace_s: float = GRACE_S) -> list[str]:
        """Stop everything, the highest stage first; of a stage, whatever does not stop within `grace_s` is killed.

        Returns:
            What was killed.
        """
        killed = []
        for stage in sorted({child.program.stage for child in self._children}, reverse=True):
            running = [child for child in self._children if child.program.stage == stage and child.process is not None]
            for child in running:
                child.terminate()
            until = self._clock() + grace_s
            while any(child.is_running() for child in running) and self._clock() < until:
                time.sleep(_POLL_S)
            killed += [child.program.name for child in running if child.end()]
        return killed


class _Child:
    def __init__(self, program: Program) -> None:
        self.program = program
        self.process: Process | None = None
        self.start_at: float | None = None
        self._started_at = 0.0
        self._deaths = 0

    def start(self, now: float) -> None:
        self.process = self.program.launch()
        self.start_at = None
        self._started_at = now
        log.info("started", extra={"program": self.program.name, "pid": self.process.pid})

    def is_running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def note_death(self, now: float) -> Death | None:
        code = None if self.process is None else self.process.poll()
        if self.process is None or code is None:
            return None
        _clear_session(self.process)
        self.process = None
        return self.pause(now, code)

    def pause(self, now: float, code: int) -> Death:
        """Note that it is dead, and when to try again."""
        self._deaths = 1 if now - self._started_at >= STEADY_S else self._deaths + 1
        pause = min(2.0 ** (self._deaths - 1), LONGEST_PAUSE_S)
        self.start_at = now + pause
        log.warning("died", extra={"program": self.program.name, "code": code, "restart_in_s": pause})
        return Death(name=self.program.name, code=code, restart_in_s=pause, deaths=self._deaths)

    def terminate(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.terminate()

    def end(self) -> bool:
        """Kill what still runs, and forget the program: it is not started again; True where it had to be killed."""
        is_late = False
        if self.process is not None:
            is_late = self.process.poll() is None
            if is_late:
                log.warning("killed: it did not stop in time", extra={"program": self.program.name})
                self.process.kill()
            self.process.wait()
            _clear_session(self.process)
        self.process = None
        self.start_at = None
        return is_late


def launcher(
    name: str, command: Sequence[str], *, output: Path, environment: Mapping[str, str]
) -> Callable[[], subprocess.Popen[bytes]]:
    """How to start a command that writes to a log file.

    Args:
        output: file that takes what it prints.
        environment: added to the supervisor's own.
    """

    def launch() -> subprocess.Popen[bytes]:
        output.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        put_aside(output)
        try:
            with output.open("ab") as file:
                return subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=file,
                    stderr=file,
                    env=os.environ | dict(environment),
                    start_new_session=True,
                    preexec_fn=die_with_parent(),
                )
        except OSError as error:
            raise Unavailable(f"cannot start {name} ({command[0]}): {error.strerror}") from None

    return launch


def put_aside(log_file: Path) -> None:
    """Copy a log that is too large to FILE.1 and empty it; a program that has it open for appending writes on.

    What is written between the copy and the emptying is lost: a line or two, seldom. Where the copy cannot be written
    (a full disk), the log is emptied all the same, because an unbounded one would keep the disk full.
    """
    try:
        if log_file.stat().st_size <= MAX_LOG_BYTES:
            return
    except FileNotFoundError:
        return
    older = log_file.with_name(f"{log_file.name}.1")
    try:
        shutil.copyfile(log_file, older)
        older.chmod(0o600)
    except OSError as error:
        log.warning("a log could not be put aside, and was emptied", extra={"reason": error.strerror})
        older.unlink(missing_ok=True)
    os.truncate(log_file, 0)


def die_with_parent(parent: int | None = None) -> Callable[[], None] | None:
    """A hook for right after a fork: the kernel kills the child when its parent's thread ends. None where it cannot.

    Args:
        parent: process id of the parent; this process where absent.
    """
    if not sys.platform.startswith("linux"):
        return None
    parent = os.getpid() if parent is None else parent
    prctl = ctypes.CDLL(None, use_errno=True).prctl

    def ask_the_kernel() -> None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:
            # The supervisor died between the fork and the line above: nobody would kill this process.
            os._exit(1)

    return ask_the_kernel


def _clear_session(process: Process) -> None:
    """Kill what the program itself had started: its session bears its process id, also after it died."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
