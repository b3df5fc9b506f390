"""The MPyC engine at a tallier: one process per job, its answer, and its end for certain.

The share goes to the process over a pipe, never by a command line or a file. Whatever happens, when
`winners` returns or raises, the process is gone; and it ends by itself where this one is killed, because
the pipe closes, and where time or memory run out (workers.winner.party).
"""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from typing import IO, Final

import numpy as np
from numpy.typing import NDArray

from labeler.errors import Forged, InvalidSetting, LabelerError, ProtocolViolation, Unavailable, WrongDigest
from workers.winner.engine import ABSTAINED, WinnerJob
from workers.winner.party import ALARM_GRACE_S, ANSWER, FAILURE, order_to_bytes

COMMAND: Final = (sys.executable, "-P", "-m", "workers.winner.party")
"""How the process of a job is started."""

_POLL_S = 0.05
_PIECE_BYTES = 1 << 16
_MAX_FAILURE_BYTES = 65_536
_ERRORS: dict[str, type[LabelerError]] = {
    error.problem_type: error for error in (Forged, InvalidSetting, ProtocolViolation, Unavailable, WrongDigest)
}


class MpycEngine:
    """Computes winners with MPyC in a process of its own; see `WinnerEngine`. Jobs may run at the same time.

    Args:
        command: starts the process of a job; tests start one that records or misbehaves.
    """

    def __init__(self, *, command: Sequence[str] = COMMAND) -> None:
        self._command = tuple(command)

    def winners(
        self,
        job: WinnerJob,
        share: NDArray[np.uint64],
        stop: threading.Event | None = None,
        *,
        rows: NDArray[np.uint64] | None = None,
    ) -> NDArray[np.int16]:
        """See `WinnerEngine.winners`."""
        job.check_share(share, rows)
        deadline = time.monotonic() + job.time_limit_s + ALARM_GRACE_S
        process = subprocess.Popen(
            self._command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            # A traceback could quote a share.
            stderr=subprocess.DEVNULL,
            env=_environment(),
            start_new_session=True,
        )
        if process.stdin is None or process.stdout is None:
            raise Unavailable("the process of a winner job started without its pipes")
        try:
            data = _converse(
                process.stdin, process.stdout, order_to_bytes(job, share, rows), _most_bytes(job), deadline, stop
            )
        finally:
            process.kill()
            process.wait()
            process.stdout.close()
            _close(process.stdin)
        return _winners_of(data, job)


def _converse(
    orders: IO[bytes],
    answers: IO[bytes],
    order: bytes,
    most_bytes: int,
    deadline: float,
    stop: threading.Event | None,
) -> bytes:
    """Write the order and read all of the answer, with an eye on the clock."""
    os.set_blocking(orders.fileno(), False)
    left, data = memoryview(order), bytearray()
    with selectors.DefaultSelector() as selector:
        selector.register(answers, selectors.EVENT_READ)
        selector.register(orders, selectors.EVENT_WRITE)
        while True:
            if stop is not None and stop.is_set():
                raise Unavailable("the winner job was stopped; it can be tried again with the same shares")
            if time.monotonic() > deadline:
                raise Unavailable("the winner job did not end within its time limit; try again with the same shares")
            for key, _ in selector.select(_POLL_S):
                if key.fileobj is answers:
                    piece = os.read(answers.fileno(), _PIECE_BYTES)
                    if not piece:
                        return bytes(data)
                    data += piece
                    if len(data) > most_bytes:
                        raise ProtocolViolation("the process of a winner job answered with more than winners")
                    continue
                try:
                    left = left[os.write(orders.fileno(), left[:_PIECE_BYTES]) :]
                except BrokenPipeError:
                    left = left[:0]
                # The pipe stays open: its end would tell the process that nobody wants the answer.
                if not left:
                    selector.unregister(orders)


def _winners_of(data: bytes, job: WinnerJob) -> NDArray[np.int16]:
    kind, content = data[:1], data[1:]
    if kind == ANSWER and len(content) == 2 * job.num_queries:
        winners = np.frombuffer(content, dtype="<i2").astype(np.int16)
        least = 0 if job.threshold is None else ABSTAINED
        if winners.min() < least or winners.max() >= job.num_classes:
            raise ProtocolViolation("what was opened is no class of the job, so a share was damaged or of another job")
        return winners
    if kind == FAILURE:
        failure = json.loads(content)
        raise _ERRORS.get(failure["problem"], ProtocolViolation)(failure["sentence"])
    raise Unavailable(
        "the process of the winner job died before it answered (killed, or out of time or memory); "
        "the job can be tried again with the same shares"
    )


def _most_bytes(job: WinnerJob) -> int:
    return 1 + max(2 * job.num_queries, _MAX_FAILURE_BYTES)


def _environment() -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("MPYC_")}
    # More threads would only take up address space: nothing here multiplies matrices of floats.
    return kept | {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}


def _close(pipe: IO[bytes]) -> None:
    try:
        pipe.close()
    except BrokenPipeError:
        return
