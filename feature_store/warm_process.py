"""Processes of their own that begin at once: forks of one that has loaded what they need, and does nothing else.

    caller   arguments, input, a line  ----->  its warm process: loads libraries once, forks for each call
             poll, wait, kill          <---->  by the line: "begun", then the exit code; closed, it kills the fork

Loading what learns takes 1.5 s of a core, which was most of what labelling the images of a small job cost; loading what
reads Parquet 0.4 s. All else is as `feature_store.own_process` has it: none of our environment, one thread, nobody
hears what is complained of, and bounds that the module sets for itself. A fork begins with nothing that another left,
and ends with who asked for it.

What meets the bytes of strangers has a warm process of its own, which meets none: each file is read by a fork that has
met no other. Forks lie at the same addresses in memory, which separate processes do not; so whoever has them read a
stranger's file ends the warm process with a fork that did not come to a sound end (`Warm.forget`), and nobody can learn
the addresses by trying.

A warm process ends when nobody has called it for a minute, which gives its memory back, and with its caller.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import importlib
import json
import os
import random
import runpy
import selectors
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import IO, Any, Final, NoReturn, Protocol, cast

from feature_store.own_process import start_own_process
from labeler.errors import Unavailable

LOADED: Final = (
    "feature_store.job_files.choosing",
    "feature_store.job_files.image_labelling",
    "feature_store.job_files.answered",
    "feature_store.students.labelling",
    "sklearn.cluster",
    "sklearn.decomposition",
)
"""What is loaded before the first fork. It starts no thread but that of an allocator of Arrow, which is ready for forks
(and not used here)."""

IDLE_S: Final = 60.0

BEGINS_S: Final = 120.0
"""Longest wait for a fork: one that has not begun by then has a warm process that hangs, which is ended."""

ENDS_S: Final = 5.0

_TRIES = 3
_MOST_BYTES = 2**17
_BEGUN = b"begun"
_NOT_BEGUN = b"not begun"
_KILL = b"kill"


class Ending(Protocol):
    """What whoever starts a process needs of it; a `subprocess.Popen` is one."""

    @property
    def returncode(self) -> int | Any:
        """Its exit code, negative for the signal that killed it; None while it runs or was not asked."""

    def poll(self) -> int | None:
        """The exit code if it has ended."""

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end."""

    def kill(self) -> None:
        """End it at once."""

    @property
    def stdout(self) -> IO[bytes] | None:
        """What it answers; None where nobody wants to hear it."""


class WarmProcess:
    """A fork as its caller sees it; see `Ending`."""

    def __init__(self, line: socket.socket, stdout: IO[bytes] | None = None) -> None:
        self._line = line
        self.stdout = stdout
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """See `Ending`."""
        with suppress(BlockingIOError):
            self._hear(0.0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """See `Ending`."""
        try:
            self._hear(timeout)
        except (TimeoutError, BlockingIOError):
            raise subprocess.TimeoutExpired("a warm process", timeout or 0.0) from None
        return cast(int, self.returncode)

    def kill(self) -> None:
        """See `Ending`."""
        if self.returncode is None:
            with suppress(OSError):
                self._line.send(_KILL)

    def _hear(self, timeout: float | None) -> None:
        if self.returncode is not None:
            return
        self._line.settimeout(timeout)
        try:
            told = self._line.recv(16)
        except ConnectionResetError:
            told = b""
        # A line that nobody holds any more: the warm process was killed, and its forks with it.
        self.returncode = int(told) if told else -signal.SIGKILL
        self._line.close()


class Warm:
    """A warm process of this process; begun by the first call.

    Args:
        loaded: what it loads before its first fork.
    """

    def __init__(self, loaded: Callable[[], Sequence[str]]) -> None:
        self._loaded = loaded
        self._lock = threading.Lock()
        self._of = 0
        self._control: socket.socket | None = None
        self._server: subprocess.Popen[bytes] | None = None

    def start(self, module: str, *arguments: str, stdin: IO[bytes] | None = None, answers: bool = False) -> Ending:
        """Start a module as `python -m` does, in a fork of the process that has loaded what it needs.

        The first call waits until that is loaded. Where processes cannot be forked safely, a new one is started.

        Args:
            module, arguments, stdin, answers: see `start_own_process`; who answers has an input.

        Raises:
            Unavailable: no process could be started; nothing was done.
        """
        if not sys.platform.startswith("linux"):
            return start_own_process(module, *arguments, stdin=stdin, answers=answers)
        order = json.dumps([module, *arguments]).encode()
        heard, said = os.pipe() if answers else (None, None)
        handles = [] if stdin is None else [stdin.fileno()]
        try:
            line = self._line_to(order, handles if said is None else [*handles, said])
        except BaseException:
            if heard is not None:
                os.close(heard)
            raise
        finally:
            if said is not None:
                os.close(said)
        return WarmProcess(line, None if heard is None else os.fdopen(heard, "rb"))

    def expect(self) -> None:
        """A call is about to come: begin it now where there is none, so that it loads while its caller does more.

        It waits for nothing, and where no process can be begun the call itself will say so.
        """
        if not sys.platform.startswith("linux"):
            return
        with self._lock, suppress(Unavailable, OSError):
            if self._server is not None and self._of == os.getpid() and self._server.poll() is not None:
                self._forget()  # nobody has called it for a while
            if self._control is None or self._of != os.getpid():
                self._begin()

    def _line_to(self, order: bytes, handles: list[int]) -> socket.socket:
        """The line to a fork that has begun."""
        for _ in range(_TRIES):
            line, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with theirs:
                asked = self.call(order, [theirs.fileno(), *handles])
            if asked is not None:
                line.settimeout(BEGINS_S)
                with suppress(ConnectionResetError, TimeoutError):
                    told = line.recv(16)
                    if told == _BEGUN:
                        return line
                    if told == _NOT_BEGUN:  # others run in forks of it, so it stays
                        line.close()
                        break
                self.forget(asked)
            line.close()
        raise Unavailable("a process of its own cannot be started for this: memory may be short; it is tried again")

    def call(self, order: bytes, handles: list[int]) -> socket.socket | None:
        """Hand an order over, and say to which; None where the warm process is gone, and another try is worth it."""
        with self._lock:
            if self._control is None or self._of != os.getpid():  # a fork of this process has its own
                self._begin()
            assert self._control is not None  # noqa: S101
            try:
                socket.send_fds(self._control, [order], handles)
            except (BrokenPipeError, ConnectionResetError):
                self._forget()
                return None
            return self._control

    def forget(self, gone: socket.socket | None = None) -> None:
        """End it with its forks, or know that it has gone; the next call begins another.

        Args:
            gone: the way to the one that is meant: another that has taken its place since stays. Any where absent.
        """
        with self._lock:
            if gone is None or gone is self._control:
                self._forget()

    def _begin(self) -> None:
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._server = start_own_process(__name__, *self._loaded(), stdin=cast(IO[bytes], theirs))
        self._of = os.getpid()
        atexit.register(self.forget)

    def _forget(self) -> None:
        if self._control is not None:
            self._control.close()
            atexit.unregister(self.forget)
        if self._server is not None and self._of == os.getpid():
            try:
                self._server.wait(ENDS_S)
            except subprocess.TimeoutExpired:
                self._server.kill()
                self._server.wait()
        self._control = self._server = None


_caller = Warm(lambda: LOADED)


def start_warm_process(module: str, *arguments: str, stdin: IO[bytes] | None = None) -> Ending:
    """`Warm.start` in the process that has loaded what learns; only for files that we made ourselves.

    Raises:
        Unavailable: see there.
    """
    return _caller.start(module, *arguments, stdin=stdin)


# The warm process's side.


def _serve(control: socket.socket, loaded: Sequence[str]) -> None:
    for name in loaded:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()
    ended, rung = socket.socketpair()
    rung.setblocking(False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(rung.fileno())
    running: dict[int, socket.socket] = {}
    selector = selectors.DefaultSelector()
    selector.register(control, selectors.EVENT_READ, "call")
    selector.register(ended, selectors.EVENT_READ, "ended")
    while events := selector.select(None if running else IDLE_S):
        for key, _ in events:
            match key.data:
                case "call":
                    order, handles, _, _ = socket.recv_fds(control, _MOST_BYTES, 3)
                    if not order:
                        return  # the caller is gone; forks end with this process
                    line = socket.socket(fileno=handles[0])
                    try:
                        pid = os.fork()
                    except OSError:  # memory is short, or there are too many processes
                        pid = -1
                    if pid == 0:
                        _become(json.loads(order), handles[1:])
                    for handle in handles[1:]:
                        os.close(handle)
                    if pid < 0:
                        with line, suppress(OSError):
                            line.send(_NOT_BEGUN)
                        continue
                    running[pid] = line
                    selector.register(line, selectors.EVENT_READ, pid)
                    with suppress(OSError):
                        line.send(_BEGUN)
                case "ended":
                    ended.recv(4096)
                    _reap(running, selector)
                case pid:  # it is to be killed, or nobody waits for it any more
                    if pid in running:  # else it was reaped a moment ago, and its number may be another's
                        selector.unregister(key.fileobj)
                        os.kill(pid, signal.SIGKILL)


def _reap(running: dict[int, socket.socket], selector: selectors.BaseSelector) -> None:
    while running:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if not pid:
            return
        line = running.pop(pid)
        with suppress(KeyError):
            selector.unregister(line)
        with suppress(OSError):
            line.send(b"%d" % os.waitstatus_to_exitcode(status))
        line.close()


def _become(command: list[str], given: list[int]) -> NoReturn:
    """In the fork: run the module to its end."""
    code = 1
    try:
        _die_with_parent()
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(given[0] if given else nothing, 0)  # which was the way to the caller
        if len(given) > 1:
            os.dup2(given[1], 1)
        os.closerange(3, os.sysconf("SC_OPEN_MAX") if os.sysconf("SC_OPEN_MAX") > 0 else 4096)
        random.seed()
        sys.argv = list(command)
        sys.modules.pop(command[0], None)  # run as a program, as if it were not loaded
        runpy.run_module(command[0], run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    finally:
        os._exit(code)


def _die_with_parent() -> None:
    parent = os.getppid()
    ctypes.CDLL(None).prctl(1, int(signal.SIGKILL), 0, 0, 0)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:
        os._exit(1)


if __name__ == "__main__":
    with socket.socket(fileno=0) as _control:
        _serve(_control, sys.argv[1:])
