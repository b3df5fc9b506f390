"""Programs of a few lines as forks of a process that has loaded what they need: real processes, without their start.

    tests    ---- text, arguments, three files ---->  the warm process, which forks for each
    program  takes the first as its input, the second as its output; its exit code is written to the third

A program that opens a journal spends two thirds of a second of a core on imports before it opens anything. The warm
process is a program of its own that is started before any journal is opened in it: it holds no file, lock or thread
of the tests, so neither do its forks, and files are synced there as they are outside of tests.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import traceback
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import IO, NoReturn

_LOADED = ("labeler.ledger.database", "labeler.ledger.ledger", "psycopg", "sqlalchemy.dialects.sqlite")
_MOST = 2**16


class WarmProgram:
    """A program that runs; what tests use of `subprocess.Popen`.

    Args:
        text: of the program, in Python.
        arguments: of its command line.

    Attributes:
        stdin, stdout: its input and output.
    """

    def __init__(self, text: str, *arguments: object) -> None:
        its_input, ours = os.pipe()
        told, its_output = os.pipe()
        ended, its_code = os.pipe()
        order = json.dumps([text, [str(one) for one in arguments]]).encode()
        warm, _ = _warm_process(os.getpid())
        socket.send_fds(warm, [order], [its_input, its_output, its_code])
        for theirs in (its_input, its_output, its_code):
            os.close(theirs)
        self.stdin: IO[str] = os.fdopen(ours, "w")
        self.stdout: IO[str] = os.fdopen(told)
        self._ended: IO[str] = os.fdopen(ended)
        self._pid = int(self._ended.readline())
        self._code: int | None = None

    def kill(self) -> None:
        """At once, where it has not ended."""
        if self._code is None:
            os.kill(self._pid, signal.SIGKILL)

    def wait(self) -> int:
        """Its exit code, once it has ended; negative where a signal ended it."""
        if self._code is None:
            self._code = int(self._ended.readline())
            self._ended.close()
        return self._code

    def close(self) -> None:
        """Let it have no more input, wait for its end, and let go of its files."""
        self.stdin.close()
        self.wait()
        self.stdout.close()


@cache
def _warm_process(_of: int) -> tuple[socket.socket, subprocess.Popen[bytes]]:
    """How to reach the warm process of this one, and itself; it ends when this one does."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        command = [sys.executable, "-m", __name__, str(theirs.fileno())]
        return ours, subprocess.Popen(command, pass_fds=[theirs.fileno()], cwd=Path(__file__).parent.parent)


def _serve(orders: socket.socket) -> None:
    """Fork for each order, and tell the exit code of each fork, until nobody can order any more."""
    codes: dict[int, int] = {}
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    with selectors.EpollSelector() as ready:
        ready.register(orders, selectors.EVENT_READ)
        ready.register(woken, selectors.EVENT_READ)
        while True:
            for key, _ in ready.select():
                if key.fileobj == woken:
                    os.read(woken, _MOST)
                    _tell_the_ended(codes)
                    continue
                order, files, _, _ = socket.recv_fds(orders, _MOST, 3)
                if not order:
                    return
                pid = os.fork()
                if pid == 0:
                    _play(order, files, [orders.fileno(), ready.fileno(), woken, wake, *codes.values()])
                codes[pid] = files[2]
                os.write(files[2], f"{pid}\n".encode())
                os.close(files[0])
                os.close(files[1])


def _tell_the_ended(codes: dict[int, int]) -> None:
    while codes:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            return
        os.write(codes[pid], f"{os.waitstatus_to_exitcode(status)}\n".encode())
        os.close(codes.pop(pid))


def _play(order: bytes, files: list[int], others: list[int]) -> NoReturn:
    code = 1
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.dup2(files[0], 0)
        os.dup2(files[1], 1)
        for one in {*files, *others}:
            os.close(one)
        sys.stdin, sys.stdout = os.fdopen(0), os.fdopen(1, "w")
        text, arguments = json.loads(order)
        sys.argv = ["-c", *arguments]
        exec(compile(text, "program", "exec"), {"__name__": "__main__"})
        code = 0
    except SystemExit as ending:
        code = ending.code if isinstance(ending.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(code)


if __name__ == "__main__":
    for module in _LOADED:
        import_module(module)
    _serve(socket.socket(fileno=int(sys.argv[1])))
