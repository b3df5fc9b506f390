"""What finding winners among three talliers costs, and what abstaining brings.

Times are of three processes on this machine from the shares to the opened winners, their start and their connections
included. The twin is MPyC's own `np_argmax` of the same shares in the same field, as its documentation runs it: three
processes on loopback, no TLS, no checks, its own start included; it is what nobody who uses MPyC can do without.
Label quality is that of five agents on handwritten digits at a noise where some answers are guesses.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Final

import numpy as np
import pyarrow.parquet as pq
from numpy.typing import NDArray

from feature_store.shard import Shard
from labeler.batch import QueryBatch
from labeler.budget import Account
from labeler.collusion import resolve_colluding_agents
from labeler.field import comparison_bits
from labeler.randomness import os_source
from labeler.release import InProcessWinner
from labeler.sharing import split
from labeler.task import Task
from labeler.winner import WinnerTerms
from workers.agent.agent import Agent
from workers.agent.ledger import InMemoryLedger
from workers.digits import AGENTS, CLASSES, write_digits
from workers.progress import ProgressCallback, silent
from workers.studies.one_round import run_round
from workers.studies.rows import BenchRow
from workers.winner.in_process import ThreeProcesses, free_ports

SIZES: Final = ((500, 10), (5_000, 10))
LARGE: Final = (50_000, 10)
TARGETS: Final = {(500, 10): "at most 4 s", (5_000, 10): "at most 30 s", LARGE: "tallier under 1 GB"}
BARE_REFERENCE: Final = "at most 1.3"

TERMS: Final = WinnerTerms(scale=100, lowest=-15_150, highest=19_350, row_total=None, threshold=None)
"""Sums of three agents with k = 50 and sigma = 25 on the usual grid."""

SIGMA_VOTES, K = 9.0, 5
ABSTAIN_BELOW: Final = (None, 15, 20, 25)

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
    """Measure the computation, its twin and its memory, then label quality with and without abstaining."""
    sizes = (*SIZES, LARGE) if full else SIZES
    turns = 3 if full else 1
    steps = 2 * len(sizes) + 1
    measured, rows = {}, []
    # Before any other child: the largest memory of a child is known for all that ended, not for each.
    for step, size in enumerate(sizes):
        progress("Winners", step, steps)
        shares = _shares(*size)
        once = 1 if size == LARGE else turns
        measured[size] = min(_ours(shares) for _ in range(once))
        rows += _rows_of_ours(size, measured[size])
    for step, size in enumerate(SIZES, start=len(sizes)):
        progress("Winners", step, steps)
        bare = min(_bare(_shares(*size)) for _ in range(turns))
        rows.append(
            BenchRow(
                case=_case(size),
                method="three talliers / bare np_argmax, same shares and field",
                metric="time ratio",
                value=measured[size] / bare,
                reference=BARE_REFERENCE,
                seconds=bare,
            )
        )
    progress("Winners", steps - 1, steps)
    rows += _quality(repetitions=5 if full else 2)
    progress("Winners", steps, steps)
    return rows


def _rows_of_ours(size: tuple[int, int], seconds: float) -> list[BenchRow]:
    method = "MPyC in three processes, TLS, equal jobs checked"
    peak_mb = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024
    return [
        BenchRow(
            case=_case(size),
            method=method,
            metric="seconds",
            value=seconds,
            reference=TARGETS.get(size),
            seconds=seconds,
        ),
        BenchRow(case=_case(size), method=method, metric="milliseconds per label", value=1000 * seconds / size[0]),
        BenchRow(case=_case(size), method=method, metric="peak memory of a tallier's process, MB", value=peak_mb),
    ]


def _shares(queries: int, classes: int) -> list[NDArray[np.uint64]]:
    sums = np.random.default_rng(queries).integers(TERMS.lowest, TERMS.highest + 1, (queries, classes))
    # A third of the queries are full of ties.
    sums[::3] = np.random.default_rng(classes).integers(0, 3, sums[::3].shape)
    return [share.expand() for share in split(sums, num_talliers=3, source=os_source(), field=TERMS.field)]


def _ours(shares: list[NDArray[np.uint64]]) -> float:
    started = time.perf_counter()
    winners = ThreeProcesses().winners(shares, TERMS)
    seconds = time.perf_counter() - started
    _check(winners, shares)
    return seconds


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


def _quality(*, repetitions: int) -> list[BenchRow]:
    """Accuracy of answered labels and the share answered, on all public digits, by threshold."""
    from feature_store.backbones import load_backbone
    from feature_store.embedding import embed_source

    with tempfile.TemporaryDirectory() as folder:
        parts = write_digits(Path(folder), seed=0)
        embedder = load_backbone("pixels:8")
        shards = []
        for number in range(AGENTS):
            path = Path(folder) / f"{number}.shard"
            embed_source(parts[f"agent-{number + 1}"], embedder, path, classes=CLASSES)
            shards.append(Shard.open(path))
        public = Path(folder) / "public.shard"
        embed_source(parts["public"], embedder, public, classes=CLASSES, public=True)
        questions = Shard.open(public)
        batch = QueryBatch(np.asarray(questions.features), first_query=0)
        names = pq.read_table(parts["public"])["label"].to_pylist()
        truth = np.array([CLASSES.index(str(name)) for name in names])
        return [
            row
            for threshold in ABSTAIN_BELOW
            for row in _quality_of(threshold, shards, batch, truth, embedder.fingerprint, repetitions)
        ]


def _quality_of(
    threshold: int | None,
    shards: list[Shard],
    batch: QueryBatch,
    truth: NDArray[np.int64],
    fingerprint: str,
    repetitions: int,
) -> list[BenchRow]:
    right, answered = [], []
    for repetition in range(repetitions):
        task = Task(
            name="digits",
            classes=CLASSES,
            method="knn",
            k=K,
            sigma_votes=SIGMA_VOTES,
            delta=1e-5,
            max_queries=len(batch),
            release="winner",
            agents=len(shards),
            colluding_agents=resolve_colluding_agents(None, agents=len(shards)),
            abstain_below=threshold,
            backbone_fingerprint=fingerprint,
            nonce=str(repetition),
        )
        agents = [
            Agent(
                f"agent-{number}",
                shard,
                noise_secret=os.urandom(32),
                ledger=InMemoryLedger({"instance": Account(f"agent-{number}", "instance", 10**15)}),
                engine="numpy",
            )
            for number, shard in enumerate(shards)
        ]
        labels = run_round(task, batch, agents, post_charge=lambda _: None).labels
        is_answered = labels >= 0
        answered.append(100 * float(is_answered.mean()))
        right.append(100 * float((labels == truth)[is_answered].mean()))
    case = f"handwritten digits, {len(shards)} agents, k {K}, sigma {SIGMA_VOTES:g}"
    method = "winner, never abstains" if threshold is None else f"winner, abstains below {threshold} votes"
    spread = float(np.std(right, ddof=1)) if len(right) > 1 else None
    return [
        BenchRow(
            case=case, method=method, metric="accuracy of answered labels, %", value=float(np.mean(right)), sd=spread
        ),
        BenchRow(case=case, method=method, metric="answered, %", value=float(np.mean(answered))),
    ]


def _case(size: tuple[int, int]) -> str:
    return f"{size[0]:,} queries x {size[1]} classes"
