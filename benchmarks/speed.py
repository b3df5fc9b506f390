"""How fast a job runs, as a ratio to the bare library calls in the same process, and other speeds and sizes.

The bare twin of a job is what nobody can do without: one FAISS index per agent, one search of the queries, votes
counted by numpy. Both twins start from the same shards on disk and take turns, so that a change of the machine's
speed hits both.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks.bare import bare_votes
from benchmarks.rows import BenchRow
from benchmarks.search_memory import measure_search_memory
from feature_store.shard import Shard
from feature_store.shard_writer import ShardWriter
from labeler.noise import DiscreteGaussian
from labeler.planning import price
from labeler.randomness import os_source
from labeler.task import parse_task
from workers.jobs.folder import open_job_folder
from workers.jobs.labelling import label
from workers.jobs.preparation import LabellingJob, prepare
from workers.jobs.task_file import QueriesTable, TaskFile, TaskTable
from workers.progress import ProgressCallback, silent

CLASSES = tuple(f"class {number}" for number in range(10))


def bench_speed(*, full: bool = False, progress: ProgressCallback = silent) -> list[BenchRow]:
    """Measure the job against its bare twin, the noise sampler, a price, and a search under a memory limit."""
    agents, records, queries = (10, 10_000, 2_000) if full else (3, 4_000, 500)
    steps = 4
    with tempfile.TemporaryDirectory() as folder:
        progress("Speed", 0, steps)
        rows = _job_against_bare(Path(folder), agents=agents, records=records, queries=queries, turns=5 if full else 3)
        progress("Speed", 1, steps)
        rows.append(_noise())
        progress("Speed", 2, steps)
        rows.append(_price())
        progress("Speed", 3, steps)
        rows += _memory(Path(folder), records=20_000)
        progress("Speed", steps, steps)
    return rows


def write_synthetic_shard(path: Path, *, records: int, dimension: int, seed: int, public: bool = False) -> None:
    """A shard of random unit vectors around ten class centres."""
    rng = np.random.default_rng(seed)
    centres = np.random.default_rng(0).normal(size=(len(CLASSES), dimension))
    labels = rng.integers(0, len(CLASSES), records).astype(np.int16)
    features = centres[labels] + 2 * rng.normal(size=(records, dimension)).astype(np.float32)
    with ShardWriter(path, classes=CLASSES, fingerprint="synthetic", dimension=dimension, public=public) as writer:
        writer.append(features, labels, [f"record {number}" for number in range(records)])
        writer.finish()


def _job_against_bare(folder: Path, *, agents: int, records: int, queries: int, turns: int) -> list[BenchRow]:
    dimension, k = 1280, 50
    shards = tuple(folder / f"agent-{number}" for number in range(agents))
    for number, path in enumerate(shards):
        write_synthetic_shard(path, records=records, dimension=dimension, seed=number + 1)
    public = folder / "public"
    write_synthetic_shard(public, records=queries, dimension=dimension, seed=999, public=True)
    file = TaskFile(task=TaskTable(name="speed", k=k, sigma_votes=25.0, delta=1e-4), queries=QueriesTable())

    def bare() -> NDArray[np.int64]:
        questions = Shard.open(public, verify=False).features
        votes = np.zeros((queries, len(CLASSES)), np.int64)
        for path in shards:
            shard = Shard.open(path, verify=False)
            votes += bare_votes(shard.features, np.asarray(shard.labels), questions, k, len(CLASSES))
        return votes

    def job(turn: int) -> None:
        request = LabellingJob(file=file, shards=shards, queries=public, out=folder / f"job-{turn}")
        with open_job_folder(request.out) as opened:
            prepared = prepare(request, opened)
            opened.begin(prepared.plan())
            label(prepared, opened)

    bare()
    pairs = [(_seconds(bare), _seconds(lambda turn=turn: job(turn))) for turn in range(turns)]  # type: ignore[misc]
    ratio = statistics.median(ours / theirs for theirs, ours in pairs)
    ours = statistics.median(pair[1] for pair in pairs)
    settings = {
        "agents": agents,
        "records": records,
        "dimension": dimension,
        "queries": queries,
        "k": k,
        "turns": turns,
    }
    case = f"{agents} x {records} x {dimension}, {queries} queries"
    return [
        BenchRow(case, "run / bare FAISS and numpy", "time ratio", ratio, reference="at most 0.8", settings=settings),
        BenchRow(case, "run", "labels per second", queries / ours, seconds=ours, settings=settings),
    ]


def _noise() -> BenchRow:
    noise, source, count = DiscreteGaussian(400.0), os_source(), 4_000_000
    noise.sample(source, 1000)
    seconds = min(_seconds(lambda: noise.sample(source, count)) for _ in range(3))
    return BenchRow(
        "sigma 400 grid units", "discrete Gaussian sampler, one core", "million samples per second",
        count / seconds / 1e6, reference="at least 5", seconds=seconds, settings={"count": count},
    )  # fmt: skip


def _price() -> BenchRow:
    task = parse_task(
        {"name": "price", "classes": list(CLASSES), "k": 50, "sigma_votes": 25.0, "delta": 1e-4,
         "max_queries": 206, "agents": 3, "colluding_agents": 1}
    )  # fmt: skip
    price(task)
    seconds = statistics.median(_seconds(lambda: price(task)) for _ in range(20))
    return BenchRow(
        "206 queries", "price, warm", "milliseconds", 1e3 * seconds, reference="at most 50", seconds=seconds
    )


def _memory(folder: Path, *, records: int) -> list[BenchRow]:
    use = measure_search_memory(folder, records=records)
    settings = {"shard_bytes": use.shard_bytes, "limit_bytes": use.limit_bytes}
    return [
        BenchRow(
            f"shard {use.shard_bytes / use.limit_bytes:.1f} times its memory limit", "search in blocks",
            "added memory / limit", use.added_bytes / use.limit_bytes, reference="at most 1", seconds=use.seconds,
            settings=settings,
        )
    ]  # fmt: skip


def _seconds(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started
