"""A tallier in a separate process for measuring: it gets ready, waits for a line, finds winners, and reports the cost.

    python -m benchmarks.speed.winner_party FOLDER PARTY [JOBS]

FOLDER holds what `write_trio` wrote. It prints "ready" on standard output, and starts at a line on standard input. Then
it prints a line of JSON, the most megabytes of memory it took; winners are in `FOLDER/winners-PARTY.npy`.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from labeler.errors import LabelerError, ProtocolViolation
from labeler.sharing import WinnerTerms
from workers.winner.engine import NUM_PARTIES, Address, WinnerJob, WinnerOrder
from workers.winner.session import SecureEngine, three_jobs

COMMAND = (sys.executable, "-m", "benchmarks.speed.winner_party")


@dataclass(frozen=True)
class Took:
    """The cost of one computation, at its slowest and largest tallier.

    Attributes:
        seconds: from the word to the winners of all three, connections included.
        start_s: before, from the start of the processes until all were ready.
        memory_mb: of the largest of the three processes.
        winners: of the queries of all jobs, one job after the other.
    """

    seconds: float
    start_s: float
    memory_mb: float
    winners: NDArray[np.int16]


def write_trio(folder: Path, shares: Sequence[NDArray[np.uint64]], terms: WinnerTerms) -> None:
    """Write a job at its three talliers, with certificates, and the share of each."""
    jobs = three_jobs(folder, num_queries=len(shares[0]), num_classes=shares[0].shape[1], terms=terms)
    job = jobs[0]
    told = {
        "certificates": list(job.certificates),
        "addresses": [[one.host, one.port] for one in job.addresses],
        "lowest": job.lowest,
        "highest": job.highest,
        "threshold": job.threshold,
        "time_limit_s": job.time_limit_s,
    }
    (folder / "job.json").write_text(json.dumps(told))
    for party, share in enumerate(shares):
        np.save(folder / f"share-{party}.npy", share)


def measure(folder: Path, *, jobs: int = 1) -> Took:
    """Run what `write_trio` wrote in three processes.

    Args:
        folder: of its files.
        jobs: the number of jobs of one computation, among which the queries are divided.
    """
    started = time.perf_counter()
    with ExitStack() as owned:
        processes = [
            owned.enter_context(_process([*COMMAND, str(folder), str(party), str(jobs)]))
            for party in range(NUM_PARTIES)
        ]
        for process in processes:
            _line(process)
        ready = time.perf_counter()
        for process in processes:
            if process.stdin is not None:
                process.stdin.write("go\n")
                process.stdin.flush()
        lines = [json.loads(_line(process)) for process in processes]
        seconds = time.perf_counter() - ready
    found = [np.load(folder / f"winners-{party}.npy") for party in range(NUM_PARTIES)]
    if any(not np.array_equal(found[0], other) for other in found[1:]):
        raise ProtocolViolation("the three talliers have opened different winners")
    return Took(seconds, ready - started, max(line["memory_mb"] for line in lines), found[0])


@contextmanager
def _process(command: Sequence[str]) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        command, cwd=Path(__file__).parents[2], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def _line(process: subprocess.Popen[str]) -> str:
    line = process.stdout.readline() if process.stdout is not None else ""
    if not line:
        raise RuntimeError("a tallier of a bench ended before it answered")
    return line


def _orders(folder: Path, party: int, jobs: int) -> list[WinnerOrder]:
    told = json.loads((folder / "job.json").read_text())
    share = np.load(folder / f"share-{party}.npy")
    whole = WinnerJob(
        job_id="bench",
        agreement="0" * 64,
        party=party,
        addresses=tuple(Address(host, port) for host, port in told["addresses"]),
        certificates=tuple(told["certificates"]),
        identity_path=folder / f"tallier-{party}.pem",
        num_queries=len(share),
        num_classes=share.shape[1],
        lowest=told["lowest"],
        highest=told["highest"],
        threshold=told["threshold"],
        time_limit_s=told["time_limit_s"],
    )
    parts = np.array_split(share, jobs)
    return [
        WinnerOrder(replace(whole, job_id=f"bench-{number:06d}", num_queries=len(part)), part)
        for number, part in enumerate(parts)
    ]


def main(folder: Path, party: int, jobs: int) -> int:
    """See the module."""
    orders = _orders(folder, party, jobs)
    _say("ready")
    sys.stdin.readline()
    outcomes = SecureEngine().winners(orders)
    for outcome in outcomes:
        if isinstance(outcome, LabelerError):
            raise outcome
    np.save(folder / f"winners-{party}.npy", np.concatenate([one for one in outcomes if isinstance(one, np.ndarray)]))
    memory_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    _say(json.dumps({"memory_mb": memory_mb}))
    return 0


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]) if len(sys.argv) > 3 else 1))
