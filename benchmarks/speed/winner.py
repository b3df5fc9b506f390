"""The cost of finding winners among three talliers.

Times are of three processes of this machine, which run already as talliers do, from the shares to the opened winners,
their connections included. The time to start the three is a separate number. The twin is MPyC's own `np_argmax` of the
same shares in the same field, as its documentation runs it: three processes on loopback, no TLS, no checks, its own
start included. The ratio counts the start of ours as well. The twin is an oracle too: written by others, and by other
means.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from benchmarks import BenchRow
from benchmarks.speed.winner_party import Took, measure, write_trio
from labeler.randomness import os_source
from labeler.release import InProcessWinner
from labeler.sharing import WinnerTerms, comparison_bits, split
from workers.progress import ProgressCallback, silent
from workers.winner.session import free_ports

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
    method, case = "three processes, TLS, equal jobs checked", _case(size)
    return [
        BenchRow(case, method, "seconds", took.seconds, reference=TARGETS.get(size), seconds=took.seconds),
        BenchRow(case, method, "milliseconds per label", 1000 * took.seconds / size[0]),
        BenchRow(case, method, "seconds to start the processes", took.start_s),
        BenchRow(case, method, "peak memory of a tallier's process, MB", took.memory_mb),
    ]


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
    with tempfile.TemporaryDirectory() as folder:
        write_trio(Path(folder), shares, TERMS)
        took = measure(Path(folder), jobs=jobs)
    _check(took.winners, shares)
    return took


def _bare(shares: list[NDArray[np.uint64]]) -> float:
    with tempfile.TemporaryDirectory() as folder:
        for party, share in enumerate(shares):
            np.save(Path(folder) / f"{party}.npy", share)
        bits = comparison_bits(TERMS.lowest, TERMS.highest)
        ports = free_ports(3)
        addresses = [option for port in ports for option in ("-P", f"127.0.0.1:{port}")]
        environment = os.environ | {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-c", _BARE, folder, str(bits), str(TERMS.field.modulus), *addresses, "--no-log"]
        started = time.perf_counter()
        processes = [
            subprocess.Popen(
                [*command, "-I", str(party)],
                env=environment,
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
