"""The process of one job at one tallier: takes job and share from a pipe, computes, and answers on a pipe.

    stdin   length of the order (4 bytes), the order (JSON), the share (8 bytes a word); then open while it is wanted
    stdout  W and the winners (int16), or E and what went wrong (JSON)

MPyC keeps one runtime per process, mixes up jobs that share it, and waits for ever for a party that died. So a
process does one job, and ends by itself when its time, its memory or its parent is gone: an alarm whose handler
is the system's kills it even in the middle of arithmetic.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import os
import resource
import signal
import sys
from pathlib import Path
from typing import Any, BinaryIO, Final

import numpy as np
from numpy.typing import NDArray

from labeler.errors import LabelerError, Unavailable
from workers.winner.engine import Address, WinnerJob
from workers.winner.links import Record

ANSWER: Final = b"W"
FAILURE: Final = b"E"

ALARM_GRACE_S: Final = 5.0
"""How long after the time limit the process is killed that should have ended by itself."""

_ORDER_FIELDS = (
    "job_id",
    "agreement",
    "party",
    "num_queries",
    "num_classes",
    "lowest",
    "highest",
    "threshold",
    "checks_rows",
    "signature",
    "time_limit_s",
    "meeting_limit_s",
    "memory_limit_bytes",
)


def order_to_bytes(job: WinnerJob, share: NDArray[np.uint64], rows: NDArray[np.uint64] | None = None) -> bytes:
    """What the process of this job is given on its pipe. Secret: it holds the share, and row sums where it has some."""
    order = {name: getattr(job, name) for name in _ORDER_FIELDS} | {
        "addresses": [[address.host, address.port] for address in job.addresses],
        "certificates": list(job.certificates),
        "contributors": list(job.contributors),
        "verify_keys": list(job.verify_keys),
        "identity_path": str(job.identity_path),
    }
    text = json.dumps(order, allow_nan=False).encode()
    arrays = [share] if rows is None else [share, rows]
    words = b"".join(np.ascontiguousarray(array, dtype="<u8").tobytes() for array in arrays)
    return len(text).to_bytes(4, "little") + text + words


def main(*, record: Record | None = None) -> int:
    """Do the job that is on standard input.

    Args:
        record: told everything that arrives from other talliers, with the party's number; tests only.

    Returns:
        The exit status: 0 with an answer, 1 with a failure.
    """
    # MPyC, when imported, reads the command line and the environment, and logs to standard output.
    sys.argv[1:] = ["--no-log"]
    for name in [name for name in os.environ if name.startswith("MPYC_")]:
        del os.environ[name]
    logging.basicConfig(level=logging.CRITICAL, handlers=[logging.NullHandler()])
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    try:
        job, share, rows = _read_order(sys.stdin.buffer)
        _limit(job)
        answer = ANSWER + _compute(job, share, rows, record).astype("<i2").tobytes()
    except LabelerError as error:
        answer = _failure(error)
    except MemoryError:
        answer = _failure(Unavailable("the job ran out of its memory limit; give it more, or ask in smaller batches"))
    # Nothing of any other error is passed on: its words could quote a share.
    except Exception as error:
        answer = _failure(Unavailable(f"the computation broke off ({type(error).__name__}); it can be tried again"))
    with answers:
        answers.write(answer)
    return 0 if answer.startswith(ANSWER) else 1


def _read_order(pipe: BinaryIO) -> tuple[WinnerJob, NDArray[np.uint64], NDArray[np.uint64] | None]:
    size = int.from_bytes(_read(pipe, 4), "little")
    order: dict[str, Any] = json.loads(_read(pipe, size))
    job = WinnerJob(
        **{name: order[name] for name in _ORDER_FIELDS},
        addresses=tuple(Address(host, port) for host, port in order["addresses"]),
        certificates=tuple(order["certificates"]),
        contributors=tuple(order["contributors"]),
        verify_keys=tuple(order["verify_keys"]),
        identity_path=Path(order["identity_path"]),
    )
    share = _read_words(pipe, (job.num_queries, job.num_classes))
    rows = _read_words(pipe, (len(job.contributors), job.num_queries)) if job.checks_rows else None
    job.check_share(share, rows)
    return job, share, rows


def _read_words(pipe: BinaryIO, shape: tuple[int, int]) -> NDArray[np.uint64]:
    return np.frombuffer(_read(pipe, 8 * math.prod(shape)), dtype="<u8").astype(np.uint64).reshape(shape)


def _read(pipe: BinaryIO, count: int) -> bytes:
    data = pipe.read(count)
    if len(data) < count:
        raise Unavailable("the order of a job ended early")
    return data


def _limit(job: WinnerJob) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (job.memory_limit_bytes, job.memory_limit_bytes))
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(math.ceil(job.time_limit_s + ALARM_GRACE_S))


def _compute(
    job: WinnerJob, share: NDArray[np.uint64], rows: NDArray[np.uint64] | None, record: Record | None
) -> NDArray[np.int16]:
    from workers.winner.mpyc_party import compute_winners

    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    # The parent holds the other end open; its end of file means that nobody wants the answer any more.
    loop.add_reader(0, lambda: os._exit(1))

    task = loop.create_task(compute_winners(job, share, rows, record=record))
    while not task.done():
        # MPyC stops the loop where a computation fails; the reason is then on its way to the task.
        try:
            loop.run_until_complete(task)
        except RuntimeError:
            if task.done():
                raise
    return task.result()


def _failure(error: LabelerError) -> bytes:
    return FAILURE + json.dumps({"problem": error.problem_type, "sentence": str(error)}).encode()


if __name__ == "__main__":
    # No clean-up of an interpreter full of half-done computations: the answer is out.
    status = main()
    os._exit(status)
