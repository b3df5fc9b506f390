"""The speed of a job, as a ratio to the bare library calls in the same process, and other speeds and sizes.

The bare twin of a job is what every job needs: one FAISS index per agent, one search of the queries, votes counted by
numpy, no exact ties, no privacy. In reverse kNN that index is over the queries, and the records are searched for.
Both twins start from the same shards on disk and take turns, so that a change of the machine's speed hits both. The
bare twin of a search is FAISS's.

The memory that a search under a limit adds to a process is measured in a fresh interpreter, over a shard it maps from a
file. It is the anonymous memory while the index is built and searched (`benchmarks.machine`). A small search comes
first: it loads the matrix library and its fixed workspace.
"""

from __future__ import annotations

import ctypes
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import faiss
import numpy as np
from numpy.typing import NDArray

from benchmarks import BenchRow, parts_in_turn, seconds_of
from benchmarks.machine import PeakMemory, run_alone
from feature_store.index.build import build_index, processor_engine
from feature_store.index.definition import NeighborIndex
from feature_store.index.exact_index import every_query_tied
from feature_store.query_selection import select_queries
from feature_store.rows import quantize
from feature_store.shard import Shard
from feature_store.shard_writer import ShardWriter
from feature_store.students import NoisyAnswers
from feature_store.students.labeling import label_images
from labeler.methods import MethodName
from labeler.noise import DiscreteGaussian
from labeler.planning import price
from labeler.randomness import os_source
from labeler.task import parse_task
from workers.progress import ProgressCallback, silent
from workers.run.folder import open_job_folder
from workers.run.labeling import label
from workers.run.preparation import LabelingJob, prepare
from workers.run.task_file import QueriesTable, TaskFile, TaskTable

CLASSES = tuple(f"class {number}" for number in range(10))


def bench_speed(*, full: bool = False, progress: ProgressCallback = silent) -> list[BenchRow]:
    """Measure jobs and searches against their bare twins; then the noise sampler, a price, labels and clusters of many
    public images, and a search under a memory limit.
    """
    agents, records, queries = (10, 10_000, 2_000) if full else (3, 4_000, 500)
    with tempfile.TemporaryDirectory() as name:
        folder, turns = Path(name), 5 if full else 3
        return parts_in_turn(
            progress,
            "Speed",
            lambda: [
                row
                for method, k in (("knn", 50), ("reverse-knn", 1))
                for row in _job_against_bare(
                    folder, method=method, k=k, agents=agents, records=records, queries=queries, turns=turns
                )
            ],
            lambda: _search_against_bare(records=records, queries=queries, turns=turns),
            lambda: [_noise(), _price()],
            lambda: [_labels(images=10_000 if full else 1_000), _clusters(images=100_000 if full else 2_000)],
            lambda: _memory(folder),
        )


def write_synthetic_shard(path: Path, *, records: int, dimension: int, seed: int, public: bool = False) -> None:
    """Write a shard of random unit vectors around ten class centers."""
    rng = np.random.default_rng(seed)
    centres = np.random.default_rng(0).normal(size=(len(CLASSES), dimension))
    labels = rng.integers(0, len(CLASSES), records).astype(np.int16)
    features = centres[labels] + 2 * rng.normal(size=(records, dimension)).astype(np.float32)
    with ShardWriter(path, classes=CLASSES, fingerprint="synthetic", dimension=dimension, public=public) as writer:
        writer.append(features, labels, [f"record {number}" for number in range(records)])
        writer.finish()


def run_job(request: LabelingJob) -> None:
    """Run a job as `labeler run` does until the release; the student and the report are left out."""
    with open_job_folder(request.out) as opened:
        prepared = prepare(request, opened)
        opened.begin(prepared.plan())
        label(prepared, opened)


def synthetic_job(
    folder: Path,
    *,
    agents: int,
    records: int,
    queries: int,
    dimension: int,
    k: int = 50,
    method: MethodName = "knn",
    **asked: Any,
) -> Callable[[str], LabelingJob]:
    """Write shards of agents and of public images into a folder; return a job over them for each name of an output."""
    shards = tuple(folder / f"agent-{number}" for number in range(agents))
    for number, path in enumerate(shards):
        if not path.exists():
            write_synthetic_shard(path, records=records, dimension=dimension, seed=number + 1)
    public = folder / f"public-{queries}"
    if not public.exists():
        write_synthetic_shard(public, records=queries, dimension=dimension, seed=999, public=True)
    table = TaskTable(name="speed", method=method, k=k, sigma_votes=25.0, delta=1e-4)
    file = TaskFile(task=table, queries=QueriesTable())
    return lambda name: LabelingJob(file=file, shards=shards, queries=public, out=folder / name, **asked)


def beside_bare(
    job: Callable[[str], LabelingJob], index_of: Callable[[NDArray[np.int16]], faiss.Index], *, turns: int
) -> list[tuple[float, float]]:
    """Return seconds of the bare twin and of the job, in turns.

    The twin is the obvious code: a flat FAISS index of each agent's records, one search, votes counted by numpy. In
    reverse kNN the index is of the questions, and the records are searched for.
    """
    twin = job("twin")
    k, is_reverse = twin.file.task.k, twin.file.task.method == "reverse-knn"

    def bare() -> None:
        questions = Shard.open(twin.queries, verify=False).features
        around = index_of(questions) if is_reverse else None
        for path in twin.shards:
            shard = Shard.open(path, verify=False)
            labels = np.asarray(shard.labels)
            if around is None:
                _, rows = index_of(shard.features).search(np.asarray(questions, np.float32), k)
                cells = np.arange(len(rows))[:, None] * len(CLASSES) + labels[rows]
            else:
                _, nearest = around.search(np.asarray(shard.features, np.float32), k)
                cells = nearest * len(CLASSES) + labels[:, None]
            np.bincount(cells.ravel(), minlength=len(questions) * len(CLASSES))

    bare()
    return [(seconds_of(bare), seconds_of(lambda turn=turn: run_job(job(f"job-{turn}")))) for turn in range(turns)]  # type: ignore[misc]


def _job_against_bare(
    folder: Path, *, method: MethodName, k: int, agents: int, records: int, queries: int, turns: int
) -> list[BenchRow]:
    settings: dict[str, Any] = {"agents": agents, "records": records, "dimension": 1280, "queries": queries, "k": k}
    job = synthetic_job(folder, method=method, **settings)
    pairs = beside_bare(lambda name: job(f"{method}-{name}"), flat_index, turns=turns)
    ratio = statistics.median(ours / theirs for theirs, ours in pairs)
    ours = statistics.median(pair[1] for pair in pairs)
    case = f"{agents} x {records} x 1280, {queries} queries, {method} k = {k}"
    told = settings | {"method": method, "turns": turns}
    return [
        BenchRow(case, "run / bare FAISS and numpy", "time ratio", ratio, reference="at most 1.35", settings=told),
        BenchRow(case, "run", "labels per second", queries / ours, seconds=ours, settings=told),
    ]


def _search_against_bare(*, records: int, queries: int, turns: int) -> list[BenchRow]:
    """Measure exact searches as ratios to FAISS's own over the same rows, both with an index that is there.

    In seconds of the processor, both ways round. "Every query tied" is the most that ties can cost,
    and what a public clock plans for.
    """
    found = []
    many, few = _public_images(records)[0], _public_images(queries)[0][::-1].copy()
    for name, rows, asked in (("queries among records", many, few), ("records among queries", few, many)):
        index, bare = build_index(rows, np.arange(len(rows)), engine=processor_engine()), flat_index(rows)
        case = f"{len(rows)} x 1280, {len(asked)} searches, k = 50: {name}"
        settings = {"records": len(rows), "dimension": 1280, "queries": len(asked), "k": 50, "turns": turns}

        def ours(index: NeighborIndex = index, asked: NDArray[np.int16] = asked) -> None:
            index.search(asked, 50)

        def ours_tied(ours: Callable[[], None] = ours) -> None:
            with every_query_tied():
                ours()

        def theirs(bare: faiss.Index = bare, asked: NDArray[np.int16] = asked) -> None:
            bare.search(asked.astype(np.float32), 50)

        works: dict[str, Callable[[], None]] = {"exact search": ours, "exact search, every query tied": ours_tied}
        theirs()
        for what, work in works.items():
            work()
            pairs = [(seconds_of(theirs, time.process_time), seconds_of(work, time.process_time)) for _ in range(turns)]
            ratio = statistics.median(exact / inexact for inexact, exact in pairs)
            wanted = "at most 1.15" if work is ours else ""
            found.append(
                BenchRow(case, f"{what} / bare FAISS", "time ratio", ratio, reference=wanted, settings=settings)
            )
    return found


def _noise() -> BenchRow:
    noise, source, count = DiscreteGaussian(400.0), os_source(), 4_000_000
    noise.sample(source, 1000)
    seconds = min(seconds_of(lambda: noise.sample(source, count)) for _ in range(3))
    return BenchRow(
        "sigma 400 grid units", "discrete Gaussian sampler, one core", "million samples per second",
        count / seconds / 1e6, reference="at least 5", seconds=seconds, settings={"count": count},
    )  # fmt: skip


def _price() -> BenchRow:
    task = parse_task(
        {"name": "price", "method": "knn", "classes": list(CLASSES), "k": 50, "sigma_votes": 25.0, "delta": 1e-4,
         "max_queries": 206, "agents": 3, "colluding_agents": 1}
    )  # fmt: skip
    price(task)
    seconds = statistics.median(seconds_of(lambda: price(task)) for _ in range(20))
    return BenchRow(
        "206 queries", "price, warm", "milliseconds", 1e3 * seconds, reference="at most 50", seconds=seconds
    )


def _public_images(images: int) -> tuple[NDArray[np.int16], NDArray[np.int64]]:
    """Return public features around ten class centers, and the class of each."""
    rng = np.random.default_rng(0)
    centers, truth = rng.normal(size=(len(CLASSES), 1280)).astype(np.float32), np.arange(images) % len(CLASSES)
    rows = [quantize(centers[own] + 2 * rng.normal(size=(len(own), 1280))) for own in np.array_split(truth, 20)]
    return np.concatenate(rows), truth


def _labels(*, images: int) -> BenchRow:
    """Measure the labels of all images from a release about each of them: what the service does after such a job."""
    features, truth = _public_images(images)
    sigma = 5.0
    votes = 5.0 * np.eye(len(CLASSES))[truth] + np.random.default_rng(1).normal(0, sigma, (images, len(CLASSES)))
    each = np.arange(images)
    answers = NoisyAnswers(features, votes.argmax(axis=1), sigma, len(CLASSES), noisy_votes=votes, assignment=each)
    began = time.process_time()
    label_images(answers, features, rows=each)
    seconds = time.process_time() - began
    return BenchRow(f"{images:,} images x 1280, all asked", "labels of all images", "CPU seconds", seconds)


def _clusters(*, images: int) -> BenchRow:
    features, _ = _public_images(images)
    began = time.process_time()
    select_queries(features, strategy="clustered", count=500)
    seconds = time.process_time() - began
    return BenchRow(f"{images:,} vectors x 1280", "choosing 500 clusters", "CPU seconds", seconds)


def _memory(folder: Path) -> list[BenchRow]:
    use = measure_search_memory(folder)
    settings = {"shard_bytes": use.shard_bytes, "limit_bytes": use.limit_bytes}
    return [
        BenchRow(
            f"shard {use.shard_bytes / use.limit_bytes:.1f} times its memory limit", "search in blocks",
            "added memory / limit", use.added_bytes / use.limit_bytes, reference="at most 1", seconds=use.seconds,
            settings=settings,
        )
    ]  # fmt: skip


@dataclass(frozen=True)
class MemoryUse:
    """Memory and time of one search.

    Attributes:
        shard_bytes: the features on disk (int16).
        limit_bytes: the limit that was set.
        added_bytes: most anonymous memory added while building and searching, less what was returned.
        seconds: building and searching.
    """

    shard_bytes: int
    limit_bytes: int
    added_bytes: int
    seconds: float


def measure_search_memory(
    folder: Path, *, records: int = 20_000, queries: int = 500, engine: str = "faiss"
) -> MemoryUse:
    """Search a shard of synthetic features, four times its memory limit, for 50 neighbors in a separate process.

    Args:
        folder: where the features are written (records x 1,280 x 2 bytes) and removed again.
    """
    path, dimension = folder / "memory_probe_features.npy", 1280
    generator = np.random.default_rng(0)
    shard = np.lib.format.open_memmap(path, mode="w+", dtype=np.int16, shape=(records, dimension))
    bound = int(2048 / np.sqrt(dimension))
    for start in range(0, records, 1000):
        shard[start : start + 1000] = generator.integers(-bound, bound + 1, shard[start : start + 1000].shape)
    shard.flush()
    order = {"path": str(path), "queries": queries, "k": 50, "limit_bytes": int(shard.nbytes) // 4, "engine": engine}
    del shard
    try:
        (found,) = run_alone("benchmarks.speed.speed", order, one_core=False)
    finally:
        path.unlink()
    return MemoryUse(**found)


def _measure(path: str, queries: int, k: int, limit_bytes: int, engine: str) -> MemoryUse:
    """Measure, in the fresh interpreter."""
    features = np.load(path, mmap_mode="r")
    record_ids = np.random.default_rng(1).permutation(len(features)).astype(np.int64)
    asked = np.array(features[:: max(1, len(features) // queries)][:queries])
    few = np.array(features[:600])
    few_at_a_time = 40 * 600 + (1 << 20) + 24 * few.shape[1] * 150
    for limit in (None, few_at_a_time):
        build_index(few, record_ids[:600], engine=engine, memory_limit_bytes=limit).search(asked[:100], k)
    # Otherwise heap that the warm-up freed but the allocator kept would be reused unseen.
    ctypes.CDLL(None).malloc_trim(0)
    with PeakMemory() as peak:
        began = time.perf_counter()
        found = build_index(features, record_ids, engine=engine, memory_limit_bytes=limit_bytes).search(asked, k)
        seconds = time.perf_counter() - began
    returned = found.record_ids.nbytes + found.similarities.nbytes + found.rows.nbytes
    added = peak.bytes - peak.before_bytes - returned
    return MemoryUse(int(features.nbytes), limit_bytes, added, seconds)


def flat_index(features: NDArray[np.int16]) -> faiss.Index:
    """Return a flat FAISS index of features, shape (n, d)."""
    index = faiss.IndexFlatIP(features.shape[1])
    index.add(np.asarray(features, np.float32))
    return index


def device_index(features: NDArray[np.int16]) -> faiss.Index:
    """Return the same index on a CUDA device."""
    config = faiss.GpuIndexFlatConfig()
    config.use_cuvs = False
    index = faiss.GpuIndexFlatIP(_resources(), features.shape[1], config)
    index.add(np.asarray(features, np.float32))
    return index


@cache
def _resources() -> faiss.StandardGpuResources:
    return faiss.StandardGpuResources()


if __name__ == "__main__":
    sys.stdout.write(json.dumps(asdict(_measure(**json.loads(sys.argv[1])))))
