"""Roles as forks of one warmed process: what all of them load is loaded once, not once in each.

`labeler up` starts ten processes on one machine, and each would spend more than a second of a core on importing the
same libraries. On Linux the standard library's fork server (`multiprocessing`) imports them once, in a process that
does nothing else and has one thread, and forks each role from it; `warm` lets it begin while the supervisor makes the
federation. A role is a process of its own all the same: its own session, its own memory (what it writes is its alone),
its own end. It dies with the fork server, by the kernel, and with the supervisor, which it watches. Nothing that is
drawn is shared: keys, noise and nonces come from the operating system, never from a generator whose state a fork
would copy.

Elsewhere, and for everything that is no role of ours, a program is started as a command
(`workers.federation.supervisor.launcher`).
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import forkserver
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Final

from labeler.errors import Unavailable
from workers.federation.supervisor import Process, die_with_parent, put_aside

CAN_FORK: Final = sys.platform.startswith("linux")

WARMED: Final = (
    "workers.commands.parties",
    "workers.commands.roles",
    "workers.agent.service",
    "workers.tallier.service",
    "workers.embedder.service",
    "workers.serve",
    "workers.logs",
    "api.app",
    "api.server",
    "api.coordinator.service",
    # What libraries import when they are first used, which is in every role.
    "anyio._backends._asyncio",
    "httpcore2",
    "uvicorn.lifespan.on",
    "uvicorn.loops.uvloop",
    "uvicorn.protocols.http.httptools_impl",
    # Last.
    "workers.federation.warmed",
)
"""What is imported before the first fork: only modules that start no thread and open no file when they are imported."""

ONE_THREAD: Final = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
"""Many processes share the cores: numerical libraries that each take all of them would get in each other's way."""


def warm() -> None:
    """Begin to import what all roles share, beside whatever this process does until it starts the first of them.

    Call it before this process imports a numerical library: how many threads those start is settled by then.
    """
    for name in ONE_THREAD:
        os.environ.setdefault(name, "1")
    if not CAN_FORK:
        return
    multiprocessing.get_context("forkserver").set_forkserver_preload(list(WARMED))
    if threading.current_thread() is not threading.main_thread():
        forkserver.ensure_running()
        return
    # Ctrl-C at a terminal is for the supervisor, which then ends what it started: the nursery never hears it.
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        forkserver.ensure_running()
    finally:
        signal.signal(signal.SIGINT, before)


class Role:
    """A forked role as its supervisor sees it; see `workers.federation.supervisor.Process`."""

    def __init__(self, process: BaseProcess) -> None:
        self._process = process
        self.pid = process.pid or 0

    def poll(self) -> int | None:
        """Its exit code, negative for the signal that killed it; None while it runs."""
        return self._process.exitcode

    def terminate(self) -> None:
        """Ask it to stop."""
        self._process.terminate()

    def kill(self) -> None:
        """End it at once."""
        self._process.kill()

    def wait(self) -> int:
        """Wait until it has ended; its exit code."""
        self._process.join()
        return self._process.exitcode or 0


def role_launcher(
    name: str, arguments: Sequence[str], *, output: Path, environment: Mapping[str, str]
) -> Callable[[], Process]:
    """How to start a command of `labeler` as a fork; the twin of `workers.federation.supervisor.launcher`.

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
        told = os.environ | dict(environment)
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
"""By how much parties come after whoever answers people, on a machine that all of them share."""

_GROUP: Final = Path("/proc/self/autogroup")
_GROUP_TRIES: Final = 50
_GROUP_PAUSE_S: Final = 0.1
"""Linux takes one such change in a tenth of a second, of all processes together, from whoever is no administrator."""


def _play(arguments: tuple[str, ...], output: str, environment: dict[str, str]) -> None:
    """In the fork: become a program like any other, and run its command to the end."""
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
        # Whoever answers people goes first; parties have their time between answers.
        step_back()
    sys.argv = ["labeler", *arguments]
    from workers.cli import main

    main()


def step_back() -> None:
    """Let this process, which leads a session of its own, come after those of other sessions by `PARTIES_NICE`.

    Where Linux shares out cores among sessions first (autogroup, on by default), `nice` counts within a session alone,
    so a role that leads one says it of its session too.
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
            return  # not shared out that way here
        else:
            return


def _die_with_supervisor() -> None:
    """The fork server outlives a supervisor that was killed as long as a fork lives, so each fork looks for itself."""
    supervisor = multiprocessing.parent_process()
    if supervisor is not None:
        supervisor.join()
        os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":  # `make install`: what every start loads is compiled once, and not by whoever starts first
    for _module in WARMED:
        importlib.import_module(_module)
