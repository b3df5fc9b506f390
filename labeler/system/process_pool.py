"""Processes for untrusted input: our programs without our environment, with limits that the system enforces.

    caller   starts a module, perhaps with a file as its input  ----->  `serve_process`: bounds itself, works.
             checks every length before it takes anything       <-----  frames: a head in JSON, then bytes.

If a file makes a library fill its memory, hang or crash, that happens in the child process. A process serves one
untrusted file and ends, so that no file meets the traces of another. It holds no secret, no handle of ours and no
address of another process, and it ends with its parent. The process that labels small jobs reads files that were
written here, so it may serve one job after another (`feature_store.results.job_process`).

The usual pools (`concurrent.futures`, loky, pebble) are not used for this. Their workers send pickles through a shared
pipe, so a file that took over a worker could run code in the process that reads them. Here a process can only send
numbers, names and bytes of a checked length.
"""

from __future__ import annotations

import json
import os
import resource
import select
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, BinaryIO, Final, NoReturn

_KEPT = ("LD_LIBRARY_PATH", "SYSTEMROOT", "TMPDIR")
"""Inherited environment variables: where libraries are found, and where temporary files go."""

_PARENT: Final = "LABELER_PARENT_PID"
_LOOK_S = 0.2
_SIZE_BYTES = 4


LEAST_PRIORITY: Final = 19
"""The nice value of work beside an agent's answers."""


def all_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextmanager
def least_priority() -> Iterator[None]:
    """Run with the least priority, so that a running agent's answers stay on the public clock.

    On Linux a priority is a thread's, and that of the threads that it begins. Afterwards it is as before, where the
    system lets a process raise it again.
    """
    if sys.platform != "linux":
        yield
        return
    thread = threading.get_native_id()
    before = os.getpriority(os.PRIO_PROCESS, thread)
    os.setpriority(os.PRIO_PROCESS, thread, LEAST_PRIORITY)
    try:
        yield
    finally:
        with suppress(PermissionError):
            os.setpriority(os.PRIO_PROCESS, thread, before)


def start_process(
    module: str,
    *arguments: str,
    stdin: IO[bytes] | int | None = None,
    answers: bool = False,
) -> subprocess.Popen[bytes]:
    """Start a module. Its standard error is discarded, since it could quote its input.

    Its libraries use one thread each, so that it occupies one core. The caller kills it and waits for it.

    Args:
        module: run as `python -m` runs it.
        arguments: of its command line, which other users of the machine can read.
        stdin: a file that it reads, or `subprocess.PIPE`; else nothing.
        answers: True if its standard output is a pipe for us to read.
    """
    return subprocess.Popen(
        [sys.executable, "-P", "-m", module, *arguments],
        stdin=subprocess.DEVNULL if stdin is None else stdin,
        stdout=subprocess.PIPE if answers else subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={key: os.environ[key] for key in _KEPT if key in os.environ}
        | {
            "PYTHONPATH": os.pathsep.join(entry or str(Path.cwd()) for entry in sys.path),
            _PARENT: str(os.getpid()),
            "ARROW_DEFAULT_MEMORY_POOL": "system",
            "OMP_NUM_THREADS": "1",
            "OPENBLAS_NUM_THREADS": "1",
            # As in workers.cli: packages that extend pydantic see nothing that is validated.
            "PYDANTIC_DISABLE_PLUGINS": "__all__",
        },
    )


def serve_process(work: Callable[[Sequence[str], BinaryIO, BinaryIO], int]) -> NoReturn:
    """Do the work of a module that `start_process` has started, then end with the exit code that it returns.

    Args:
        work: takes the module's arguments, its input and its output.
    """
    with open(0, "rb", closefd=False) as given, open(1, "wb", closefd=False) as answer:
        code = work(sys.argv[1:], given, answer)
    sys.exit(code)


def bound_process(room_bytes: int, cpu_s: int | None = None) -> None:
    """Limit this process's memory and its time from now on, end it with its parent, and let it write no core file.

    If the machine runs out of memory the system ends this process first. Call this again to change the limit. On
    systems other than Linux memory is not limited.

    Args:
        room_bytes: of data, beyond which an allocation fails.
        cpu_s: processor seconds after which it is ended; None for no limit.
    """
    _bound(resource.RLIMIT_DATA, room_bytes)
    if cpu_s is not None:
        _bound(resource.RLIMIT_CPU, cpu_s + int(time.process_time()))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")
    if parent := os.environ.pop(_PARENT, ""):
        threading.Thread(target=_end_with, args=(int(parent),), name="parent's end", daemon=True).start()


def _bound(kind: int, most: int) -> None:
    resource.setrlimit(kind, (most, resource.getrlimit(kind)[1]))


def _end_with(parent: int) -> None:
    # Not by PR_SET_PDEATHSIG: that watches the thread that started this process, which may end earlier.
    while os.getppid() == parent:
        time.sleep(_LOOK_S)
    os._exit(1)


def write_frame(out: BinaryIO, head: dict[str, Any], *parts: bytes) -> None:
    """Send a head and the bytes whose lengths it states; the process's side of `Frames`."""
    text = json.dumps(head).encode()
    out.write(len(text).to_bytes(_SIZE_BYTES, "big") + text)
    for part in parts:
        out.write(part)
    out.flush()


class UnsoundProcess(Exception):
    """A process ended early, was silent for too long, or sent something that no sound one sends."""


class Frames:
    """Reads the frames that a process sends. It met hostile bytes, so everything it sends is checked against limits.

    Args:
        pipe: its standard output.
        most_head_bytes: of one head.
        silence_s: the longest silence.
        look: called regularly; an exception it raises ends the reading.
    """

    def __init__(
        self,
        pipe: IO[bytes] | None,
        *,
        most_head_bytes: int,
        silence_s: float,
        look: Callable[[], None] = lambda: None,
    ) -> None:
        assert pipe is not None  # noqa: S101  # a pipe was asked for
        self._pipe = pipe
        self._most_head_bytes = most_head_bytes
        self._silence_s = silence_s
        self._look = look

    def head(self) -> dict[str, Any]:
        """Return the next head.

        Raises:
            UnsoundProcess: see there.
        """
        size = int.from_bytes(self.exactly(_SIZE_BYTES), "big")
        if size > self._most_head_bytes:
            raise UnsoundProcess
        with suppress(ValueError, RecursionError):
            head = json.loads(self.exactly(size))
            if isinstance(head, dict):
                return head
        raise UnsoundProcess

    def exactly(self, size: int) -> bytes:
        """Return exactly `size` bytes; the caller has bounded the number.

        Raises:
            UnsoundProcess: see there.
        """
        data = bytearray()
        poll = select.poll()  # `select` takes no handle beyond 1023
        poll.register(self._pipe, select.POLLIN)
        until = time.monotonic() + self._silence_s
        while len(data) < size:
            self._look()
            if poll.poll(1000 * _LOOK_S):
                piece = os.read(self._pipe.fileno(), size - len(data))
                if not piece:
                    raise UnsoundProcess
                data += piece
            elif time.monotonic() > until:
                raise UnsoundProcess
        return bytes(data)
