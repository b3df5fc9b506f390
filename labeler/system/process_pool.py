"""Processes that meet what strangers sent: programs of ours without our environment, whose room the system bounds.

    caller   starts a module, perhaps with a file as its input  ----->  bounds itself (`bound_process`), works
             checks every length before it takes anything       <-----  frames: a head in JSON, then bytes

Whatever a file does to a library, fill its memory, hang or crash it, happens over there. A process serves one file of a
stranger and ends, so that no file meets what another left; it holds no secret, no handle of ours and no address that
another process has. It ends with whoever started it. What labels small jobs reads files that were written here, so it
may serve one job after the other (`api.coordinator.retention`).

Pools of the usual libraries (`concurrent.futures`, loky, pebble) are not used for this: their workers share a pipe on
which they send pickles, and whoever took over a worker with a file could then run code in the process that reads them.
Here nothing that a process says is more than numbers, names and bytes of a length that was checked.
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
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, BinaryIO, Final

_KEPT = ("LD_LIBRARY_PATH", "SYSTEMROOT", "TMPDIR")
"""Of our environment: where libraries are found, and where temporary files go."""

_PARENT: Final = "LABELER_PARENT_PID"
_LOOK_S = 0.2
_SIZE_BYTES = 4


def start_process(
    module: str,
    *arguments: str,
    stdin: IO[bytes] | int | None = None,
    answers: bool = False,
) -> subprocess.Popen[bytes]:
    """Start a module; what it complains of is heard by nobody, since it could quote what it was sent.

    Its libraries take one thread each, so that it costs the core it was given. The caller kills it and waits for it.

    Args:
        module: run as `python -m` runs it.
        arguments: of its command line, which other users of the machine can read.
        stdin: a file that it reads, or `subprocess.PIPE`; else nothing.
        answers: whether its standard output is a pipe for us to read.
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
            # As workers.cli has it: nothing of what is validated is shown to packages that extend pydantic.
            "PYDANTIC_DISABLE_PLUGINS": "__all__",
        },
    )


def bound_process(room_bytes: int, cpu_s: int | None = None) -> None:
    """Bound this process: its memory, its time from now on, its parent's life, and that it leaves no core behind.

    Where memory of the machine is short the system shall end this process, and not another one. Call it again where
    the room is another. On systems other than Linux memory is not bounded.

    Args:
        room_bytes: of data, beyond which an allocation fails.
        cpu_s: seconds of processors after which it is ended; None for no limit.
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
    # Not by PR_SET_PDEATHSIG: that looks at the thread that started this process, which may end earlier.
    while os.getppid() == parent:
        time.sleep(_LOOK_S)
    os._exit(1)


def write_frame(out: BinaryIO, head: dict[str, Any], *parts: bytes) -> None:
    """Send a head and bytes whose lengths it tells; the process's side of `Frames`."""
    text = json.dumps(head).encode()
    out.write(len(text).to_bytes(_SIZE_BYTES, "big") + text)
    for part in parts:
        out.write(part)
    out.flush()


class UnsoundProcess(Exception):
    """A process broke off, was silent for too long, or said what no sound one says."""


class Frames:
    """Reads what a process sends. It met hostile bytes, so nothing it says is believed without a bound.

    Args:
        pipe: its standard output.
        most_head_bytes: of one head.
        silence_s: how long nothing may come.
        look: called every moment; what it raises ends the reading.
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
        """The next head.

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
        """So many bytes, which the caller has bounded.

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
