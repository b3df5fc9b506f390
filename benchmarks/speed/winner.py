"""The cost of finding winners among three talliers.

Times are of three processes of this machine, which run already as talliers do, from the shares to the opened winners,
their connections included. The time to start the three is a separate number. The twin is MPyC's own `np_argmax` of the
same shares in the same field, as its documentation runs it: three processes on loopback, no TLS, no checks, its own
start included. The ratio counts the start of ours as well. The twin is an oracle too: written by others, and by other
means.

Each tallier is a separate process, which gets ready, waits for a line, finds winners, and reports the cost:

    python -m benchmarks.speed.winner FOLDER PARTY JOBS

FOLDER holds what `write_trio` wrote. It prints "ready" on standard output, and starts at a line on standard input. Then
it prints the most megabytes of memory it took; winners are in `FOLDER/winners-PARTY.npy`.
"""

from __future__ import annotations

import os
import pickle
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from benchmarks import BenchRow, rows_of
from benchmarks.machine import ONE_CORE
from labeler.errors import LabelerError
from labeler.randomness import os_source
from labeler.release import InProcessWinner
from labeler.sharing import WinnerTerms, comparison_bits, split
from workers.progress import ProgressCallback, silent
from workers.winner.engine import NUM_PARTIES, WinnerOrder
from workers.winner.session import SecureEngine, free_ports, three_jobs

SIZES: Final = ((500, 10), (5_000, 10))
LARGE: Final = (50_000, 10)
TARGETS: Final = {(500, 10): "at most 0.3 s", LARGE: "at most 10 s"}
MANY_JOBS: Final = 50
"""Jobs of ten queries each in one computation, against one after another."""

TERMS: Final = WinnerTerms(scale=100, lowest=-15_150, highest=19_350, row_total=None, threshold=None)
"""Sums of three agents with k = 50 and sigma = 25 on the usual grid."""

_BARE = """
import sys
import numpy as np
from mpyc.runtime import mpc
path, bits, modulus = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
async def main():
    secure = mpc.SecInt(bits, p=modulus).array
    await mpc.start()
    share = np.load(path + f"/{mpc.pid}.npy").astype(object)
    parts = mpc.input(secure(secure.sectype.field.array(share)))
    opened = await mpc.output(mpc.np_argmax(parts[0] + parts[1] + parts[2], axis=1))
    np.save(path + f"/answer-{mpc.pid}.npy", np.array(opened.tolist(), dtype=np.int64))
    await mpc.shutdown()
mpc.run(main())
"""


def bench_winner(*, full: bool = False, progress: ProgressCallback = silent) -> list[BenchRow]:
    """Measure the computation, its twin and its memory."""
    sizes = (*SIZES, LARGE) if full else SIZES
    turns = 3 if full else 1
    steps = len(sizes) + len(SIZES)
    measured, rows = {}, []
    for step, size in enumerate(sizes):
        progress("Winners", step, steps)
        shares = _shares(*size)
        took = min((_ours(shares) for _ in range(turns)), key=lambda took: took.seconds)
        measured[size] = took.seconds + took.start_s
        rows += _rows_of_ours(size, took)
    rows += _many_jobs(turns)
    for step, size in enumerate(SIZES, start=len(sizes)):
        progress("Winners", step, steps)
        bare = min(_bare(_shares(*size)) for _ in range(turns))
        method, ratio = "three talliers / bare np_argmax, same shares and field", measured[size] / bare
        rows.append(BenchRow(_case(size), method, "time ratio, starts included", ratio, seconds=bare))
    progress("Winners", steps, steps)
    return rows


def _rows_of_ours(size: tuple[int, int], took: Took) -> list[BenchRow]:
    method = "three processes, TLS, equal jobs checked"
    found = [
        (method, "seconds", took.seconds, TARGETS.get(size)),
        (method, "milliseconds per label", 1000 * took.seconds / size[0], None),
        (method, "seconds to start the processes", took.start_s, None),
        (method, "peak memory of a tallier's process, MB", took.memory_mb, None),
    ]
    return rows_of(_case(size), found)


def _many_jobs(turns: int) -> list[BenchRow]:
    """Measure small jobs that are due together: in one computation, and one computation each."""
    size = 10 * MANY_JOBS, 10
    shares = _shares(*size)
    together = min(_ours(shares, jobs=MANY_JOBS).seconds for _ in range(turns))
    alone = min(_ours([share[:10] for share in shares]).seconds for _ in range(turns))
    case = f"{MANY_JOBS} jobs of 10 queries x {size[1]} classes"
    ratio = together / (MANY_JOBS * alone)
    return [
        BenchRow(case, "one computation", "seconds", together, seconds=together),
        BenchRow(case, "one computation / a computation each", "time ratio", ratio, seconds=alone),
    ]


def _shares(queries: int, classes: int) -> list[NDArray[np.uint64]]:
    sums = np.random.default_rng(queries).integers(TERMS.lowest, TERMS.highest + 1, (queries, classes))
    # A third of the queries are full of ties.
    sums[::3] = np.random.default_rng(classes).integers(0, 3, sums[::3].shape)
    return [share.expand() for share in split(sums, num_talliers=3, source=os_source(), field=TERMS.field)]


def _ours(shares: list[NDArray[np.uint64]], *, jobs: int = 1) -> Took:
    """Find winners in three processes; the queries are divided among the jobs of one computation."""
    with tempfile.TemporaryDirectory() as name, ExitStack() as owned:
        folder = Path(name)
        write_trio(folder, shares, TERMS)
        started = time.perf_counter()
        processes = [owned.enter_context(_process(name, str(party), str(jobs))) for party in range(NUM_PARTIES)]
        for process in processes:
            _line(process)
        ready = time.perf_counter()
        for process in processes:
            if process.stdin is not None:
                process.stdin.write("go\n")
                process.stdin.flush()
        memory_mb = max(float(_line(process)) for process in processes)
        seconds = time.perf_counter() - ready
        for party in range(NUM_PARTIES):
            _check(np.load(folder / f"winners-{party}.npy"), shares)
    return Took(seconds, ready - started, memory_mb)


def _bare(shares: list[NDArray[np.uint64]]) -> float:
    with tempfile.TemporaryDirectory() as folder:
        for party, share in enumerate(shares):
            np.save(Path(folder) / f"{party}.npy", share)
        bits = comparison_bits(TERMS.lowest, TERMS.highest)
        ports = free_ports(3)
        addresses = [option for port in ports for option in ("-P", f"127.0.0.1:{port}")]
        command = [sys.executable, "-c", _BARE, folder, str(bits), str(TERMS.field.modulus), *addresses, "--no-log"]
        started = time.perf_counter()
        processes = [
            subprocess.Popen(
                [*command, "-I", str(party)],
                env=os.environ | ONE_CORE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
            for party in range(3)
        ]
        try:
            codes = [process.wait(timeout=600) for process in processes]
        finally:
            for process in processes:
                process.kill()
                process.wait()
        seconds = time.perf_counter() - started
        if any(codes):
            raise RuntimeError(f"bare MPyC ended with {codes}")
        _check(np.load(Path(folder) / "answer-0.npy"), shares)
    return seconds


def _check(winners: NDArray[np.integer], shares: list[NDArray[np.uint64]]) -> None:
    if not np.array_equal(winners, InProcessWinner().winners(shares, TERMS)):
        raise RuntimeError("the winners differ from those of the reference")


def _case(size: tuple[int, int]) -> str:
    return f"{size[0]:,} queries x {size[1]} classes"


@dataclass(frozen=True)
class Took:
    """The cost of one computation, at its slowest and largest tallier.

    Attributes:
        seconds: from the word to the winners of all three, connections included.
        start_s: before, from the start of the processes until all were ready.
        memory_mb: of the largest of the three processes.
    """

    seconds: float
    start_s: float
    memory_mb: float


def write_trio(folder: Path, shares: Sequence[NDArray[np.uint64]], terms: WinnerTerms) -> None:
    """Write a job at its three talliers, with certificates, and the share of each."""
    jobs = three_jobs(folder, num_queries=len(shares[0]), num_classes=shares[0].shape[1], terms=terms)
    for party, order in enumerate(map(WinnerOrder, jobs, shares)):
        (folder / f"order-{party}").write_bytes(pickle.dumps(order))


def read_orders(folder: Path, party: int, jobs: int = 1) -> list[WinnerOrder]:
    """Return a tallier's part of what `write_trio` wrote, its queries divided among several jobs."""
    whole: WinnerOrder = pickle.loads((folder / f"order-{party}").read_bytes())
    return [
        WinnerOrder(replace(whole.job, job_id=f"bench-{number:06d}", num_queries=len(part)), part)
        for number, part in enumerate(np.array_split(whole.share, jobs))
    ]


@contextmanager
def _process(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "benchmarks.speed.winner", *arguments]
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


def main(folder: Path, party: int, jobs: int) -> None:
    """Find winners as one tallier; see the module."""
    orders = read_orders(folder, party, jobs)
    _say("ready")
    sys.stdin.readline()
    outcomes = SecureEngine().winners(orders)
    for outcome in outcomes:
        if isinstance(outcome, LabelerError):
            raise outcome
    np.save(folder / f"winners-{party}.npy", np.concatenate([one for one in outcomes if isinstance(one, np.ndarray)]))
    _say(str(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024))


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
