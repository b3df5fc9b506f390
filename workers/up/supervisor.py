"""A supervisor of processes: starts them, restarts those that die, stops them in order, and never leaves one behind.

Programs belong to stages. They start stage by stage from the lowest and stop from the highest, each stage all at once:
what others need (the queue) starts first and stops last.

Every program leads a separate session, so that Ctrl-C in a terminal reaches the supervisor alone, which then stops them
in order. On Linux the kernel kills each of them when its parent ends, however it ends (PR_SET_PDEATHSIG). A program
killed like that loses nothing, because all that must last is durable at every step.

Roles are forks of one process (`role_launcher`): `labeler up` starts ten on one machine, and each would spend more than
a second of a core on importing the same libraries. The standard library's fork server (`multiprocessing`) imports them
once, in a process that does nothing else and has one thread. `warm` starts it while the supervisor makes the
federation. A role still has its own process, session, memory and end. Roles share nothing random: keys, noise and
nonces come from the operating system, never from a generator whose state a fork would copy.

One thread does it all: a hook between fork and exec is safe only without other threads.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import logging
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import forkserver
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Final, Protocol

from labeler.errors import TryAgain, Unavailable

log = logging.getLogger("labeler.supervisor")

LONGEST_PAUSE_S: Final = 30.0
"""Longest wait between two starts of a program that keeps dying: 1, 2, 4 .. seconds up to this."""

STEADY_S: Final = 10.0
"""A program that ran this long before it died starts again after the shortest pause."""

GRACE_S: Final = 5.0
"""Seconds that a program may take to stop by itself before it is killed."""

MAX_LOG_BYTES: Final = 16 * 2**20
"""A log larger than this is put aside; one older log is kept."""

LOOK_AT_LOGS_S: Final = 1.0

_PR_SET_PDEATHSIG = 1
_POLL_S = 0.05


class Process(Protocol):
    """The interface of a running program that a supervisor needs; a `subprocess.Popen` is one."""

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
    """A program that ended unasked.

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
        """The process id of every program that runs now."""
        return {child.program.name: child.process.pid for child in self._children if child.process is not None}

    def start(self) -> None:
        """Start every program."""
        for child in self._children:
            child.start(self._clock())

    def tend(self) -> list[Death]:
        """Look once: note dead programs, and restart those whose pause is over.

        Returns:
            The deaths since the last look.
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
            The programs that were killed.
        """
        killed = []
        for stage in sorted({child.program.stage for child in self._children}, reverse=True):
            children = [child for child in self._children if child.program.stage == stage]
            running = [child.process for child in children if child.process is not None]
            for process in running:
                process.terminate()
            until = self._clock() + grace_s
            while any(process.poll() is None for process in running) and self._clock() < until:
                time.sleep(_POLL_S)
            killed += [child.program.name for child in children if child.end()]
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

    def end(self) -> bool:
        """Kill what still runs, and forget the program so that it does not restart; True where it had to be killed."""
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


def put_aside(log_file: Path) -> None:
    """Copy a log that is too large to FILE.1 and empty it; a program that has it open for appending writes on.

    Text written between the copy and the emptying is lost: a line or two, seldom. Where the copy cannot be written (a
    full disk), the log is emptied anyway, because an unbounded one would keep the disk full.
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
    """Return a hook for right after a fork: the kernel kills the child when its parent's thread ends. None where it
    cannot.

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


def end_process(process: subprocess.Popen[bytes], *, within_s: float) -> None:
    """Stop a process; kill it if it does not end in time. Ending it twice changes nothing."""
    process.terminate()
    try:
        process.wait(within_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _clear_session(process: Process) -> None:
    """Kill what the program itself had started: its session bears its process id, even after it died."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)


# Roles, as forks of one process.

WARMED: Final = (
    "workers.commands.parties",
    "workers.commands.federation",
    "workers.agent.service",
    "workers.tallier.service",
    "workers.embedder.service",
    "workers.serve",
    "workers.service_process",
    "api.app",
    "api.server",
    "api.coordinator.service",
    # Libraries import these at their first use, which happens in every role.
    "anyio._backends._asyncio",
    "encodings.idna",
    "httpcore2",
    # Every agent makes the table of its noise with it in its first job: a third of a second each.
    "mpmath",
    "uvicorn.lifespan.on",
    "uvicorn.loops.uvloop",
    "uvicorn.protocols.http.httptools_impl",
)
"""Modules imported before the first fork: only those that start no thread and open no file on import."""

ONE_THREAD: Final = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
"""Many processes share the cores: numerical libraries that each take all of them would get in each other's way."""


def warm() -> None:
    """Start importing what all roles share, while this process does other work until it starts the first of them.

    Call it before this process imports a numerical library: that import fixes how many threads those libraries start.
    """
    for name in ONE_THREAD:
        os.environ.setdefault(name, "1")
    multiprocessing.get_context("forkserver").set_forkserver_preload(list(WARMED))
    if threading.current_thread() is not threading.main_thread():
        forkserver.ensure_running()
        return
    # Ctrl-C at a terminal is for the supervisor, which then ends what it started: the fork server never sees it.
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        forkserver.ensure_running()
    finally:
        signal.signal(signal.SIGINT, before)


class Role:
    """A forked role as its supervisor sees it; see `Process`."""

    def __init__(self, process: BaseProcess) -> None:
        self._process = process
        self.pid = process.pid or 0

    def poll(self) -> int | None:
        """Return its exit code, negative for the signal that killed it; None while it runs."""
        return self._process.exitcode

    def terminate(self) -> None:
        """Ask it to stop."""
        self._process.terminate()

    def kill(self) -> None:
        """End it at once."""
        self._process.kill()

    def wait(self) -> int:
        """Wait until it has ended; return its exit code."""
        self._process.join()
        return self._process.exitcode or 0


def role_launcher(
    name: str, arguments: Sequence[str], *, output: Path, environment: Mapping[str, str] | None = None
) -> Callable[[], Process]:
    """Return a function that starts a command of `labeler` as a fork.

    Args:
        arguments: of the command line, without the program.
        output: file that takes what it prints.
        environment: added to the supervisor's own.
    """
    context = multiprocessing.get_context("forkserver")

    def launch() -> Process:
        output.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        put_aside(output)
        warm()
        told = os.environ | dict(environment or {})
        process = context.Process(target=_play, args=(tuple(arguments), str(output), told), name=name)
        try:
            process.start()
        except OSError as error:
            raise Unavailable(f"cannot start {name}: {error.strerror}") from None
        except EOFError:
            raise Unavailable(f"cannot start {name}: the process that roles are forked from has ended") from None
        return Role(process)

    return launch


PARTIES_NICE: Final = 5
"""Added to the niceness of parties, so that roles that answer people go first on a shared machine."""

_GROUP: Final = Path("/proc/self/autogroup")
_GROUP_TRIES: Final = 50
_GROUP_PAUSE_S: Final = 0.1
"""Linux takes one such change in a tenth of a second, of all processes together, from ordinary users."""


def _play(arguments: tuple[str, ...], output: str, environment: dict[str, str]) -> None:
    """Become a program like any other, in the fork, and run its command to the end."""
    os.setsid()
    ask_the_kernel = die_with_parent(os.getppid())
    if ask_the_kernel is not None:
        ask_the_kernel()
    threading.Thread(target=_die_with_supervisor, name="supervisor's end", daemon=True).start()
    os.environ.clear()
    os.environ.update(environment)
    with Path(output).open("ab", buffering=0) as file, Path(os.devnull).open("rb") as nothing:
        os.dup2(nothing.fileno(), 0)
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    if arguments[:1] != ("serve",):
        # Roles that answer people go first; parties have their time between answers.
        step_back()
    sys.argv = ["labeler", *arguments]
    from workers.cli import main

    main()


def step_back() -> None:
    """Lower the priority of this process, which leads its session, by `PARTIES_NICE` against other sessions.

    Where Linux divides cores among sessions first (autogroup, on by default), `nice` counts within a session alone. So
    a role that leads a session sets it for the session too.
    """
    os.nice(PARTIES_NICE)
    if _GROUP.exists():
        threading.Thread(target=_step_back_together, name="session's place", daemon=True).start()


def _step_back_together() -> None:
    for _ in range(_GROUP_TRIES):
        try:
            _GROUP.write_text(str(PARTIES_NICE))
        except BlockingIOError:
            time.sleep(_GROUP_PAUSE_S)
        except OSError:
            return  # this system does not divide cores that way
        else:
            return


def _die_with_supervisor() -> None:
    """End this fork with the supervisor: the fork server outlives a killed supervisor while a fork lives, so each fork
    checks.
    """
    supervisor = multiprocessing.parent_process()
    if supervisor is not None:
        supervisor.join()
        os.kill(os.getpid(), signal.SIGKILL)


# `make install` runs this, so that what every start loads is compiled once, and not at the first start
if __name__ == "__main__":
    for _module in WARMED:
        importlib.import_module(_module)
