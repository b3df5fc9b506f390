"""`labeler bench scale`: agents of a round, records of a search and queries of a job against cost, with slopes.

Sizes grow within one run and are compared with each other, so the results are ratios and exponents. Slopes are of CPU
seconds, because other work on the machine moves them less than clock time.

A shard larger than the memory for its search is searched in one process, and divided among several. Features are random
unit vectors on the grid of real ones (feature_store.rows), written to a file and mapped. Each search runs in a separate
interpreter on one core. What several processes found over their parts is merged by (similarity, record id), as the
index merges its own parts.
"""

from __future__ import annotations

import itertools
import json
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from benchmarks import BenchRow, in_turn, parts_in_turn, rows_of, seconds_of
from benchmarks.machine import PeakMemory, run_alone
from benchmarks.scale.rounds import SIMULATED, Simulation
from benchmarks.speed.speed import run_job, synthetic_job
from feature_store.index import build_index
from labeler.errors import InvalidSetting
from labeler.methods import MethodName
from workers.progress import ProgressCallback, silent

AGENTS, RECORDS, DIMENSION, K = 3, 2_000, 256, 20
"""Of a job in one process."""


@dataclass(frozen=True)
class Sizes:
    """The sizes of a run."""

    records: tuple[int, ...]
    agents: tuple[int, ...]
    asked: tuple[int, ...]


FULL = Sizes((250_000, 1_000_000, 4_000_000), (1_000, 10_000, 100_000), (1_000, 4_000, 16_000))
"""Needs 2.2 GB of disk."""

QUICK = Sizes((50_000, 200_000), (1_000, 4_000), (500, 2_000))


def bench_scale(
    *,
    data: Path | None = None,
    full: bool = False,
    agents: str | None = None,
    method: str | None = None,
    progress: ProgressCallback = silent,
) -> list[BenchRow]:
    """Measure every dimension of size; with `agents` or `method`, only rounds."""
    sizes = FULL if full else QUICK
    if agents is not None or method is not None:
        wanted = sizes.agents if agents is None else _numbers(agents)
        return _agents(_method("knn" if method is None else method), wanted, progress)
    with tempfile.TemporaryDirectory(dir=data) as name:
        folder = Path(name)
        return parts_in_turn(
            progress,
            "Scale",
            lambda: _records(sizes.records, folder),
            lambda: _queries(sizes.asked, folder),
            lambda: _agents("knn", sizes.agents, silent) + _agents("ensemble", sizes.agents, silent),
        )


def _numbers(text: str) -> tuple[int, ...]:
    try:
        return tuple(sorted({int(part.replace("_", "")) for part in text.split(",")}))
    except ValueError:
        raise InvalidSetting(
            f"--agents takes whole numbers with commas between, as 1000,10000; found {text[:100]!r}"
        ) from None


def _method(text: str) -> MethodName:
    for one in SIMULATED:
        if one == text:
            return one
    raise InvalidSetting(f"--method must be one of {', '.join(SIMULATED)}; found {text[:100]!r}")


def _agents(method: MethodName, sizes: Sequence[int], progress: ProgressCallback) -> list[BenchRow]:
    found = {}
    for size in in_turn(progress, f"Agents, {method}", sizes):
        (found[size],) = run_alone("benchmarks.scale.rounds", asdict(Simulation(size, method)))
    spent = {size: sum(one["cpu_seconds"].values()) for size, one in found.items()}
    case, rows = f"agents, {method}, 100 queries x 10", []
    for size, one in found.items():
        values = {
            "seconds": one["seconds"],
            "peak MiB": one["peak_mib"],
            "labels right, %": 100 * one["labels_right"],
            "a tallier receives, MB": one["bytes"]["tallier_receives"] / 1e6,
        }
        epsilon, delta = one["epsilon"]["agent"], one["settings"]["delta"]
        rows += [
            BenchRow(case, f"{size:,} agents", metric, value, epsilon=epsilon, delta=delta, level="agent", settings=one)
            for metric, value in values.items()
        ]
    last = found[max(sizes)]
    rows.append(BenchRow(case, "an agent sends", "kB", last["bytes"]["agent_sends"] / 1e3))
    return _slope_rows(case, "one process", spent, "agent", {}) + rows


def _records(sizes: Sequence[int], folder: Path) -> list[BenchRow]:
    largest = sizes[-1]
    stored = Stored(str(folder / "features.npy"), largest, 256, 200, 50)
    write_features(Path(stored.path), records=largest, dimension=stored.dimension)
    alone = {count: search_together(stored, processes=1, folder=folder, records=count) for count in sizes}
    both = search_together(stored, processes=2, folder=folder)
    ids, defined = merged_ids(alone[largest]), ids_by_definition(stored, queries=2)
    differ = {
        "two processes, one": int((ids != merged_ids(both)).sum()),
        "one process, the definition (2 queries)": int((ids[: len(defined)] != defined).sum()),
    }
    Path(stored.path).unlink()
    case, settings = f"records searched, x {stored.dimension}", {"queries": 200, "k": 50, "records": list(sizes)}
    spent = {count: found[0].cpu_s for count, found in alone.items()}
    gain = alone[largest][0].seconds / max(found.seconds for found in both)
    peak = max(found.peak_bytes for found in [*alone[largest], *both]) / 2**30
    memory = "anonymous memory, GiB"
    return [
        *_slope_rows(case, "one process, one core", spent, "record", settings),
        BenchRow(case, "two processes / one", "throughput ratio", gain, settings=settings),
        BenchRow(case, "the largest process", memory, peak, reference="at most 1", settings=settings),
        *(
            BenchRow(case, between, "neighbours that differ", count, reference="0", settings=settings)
            for between, count in differ.items()
        ),
    ]


def _queries(sizes: Sequence[int], folder: Path) -> list[BenchRow]:
    found = {}
    for count in (50, *sizes):  # the first run warms up, and is not counted
        job = synthetic_job(folder, agents=AGENTS, records=RECORDS, queries=count, dimension=DIMENSION, k=K)
        found[count] = seconds_of(lambda job=job, count=count: run_job(job(f"job-{count}")), time.process_time)  # type: ignore[misc]
    spent = {count: found[count] for count in sizes}
    return _slope_rows("queries of a job, `run`", "one process", spent, "query", {"queries": list(sizes)})


def _slope_rows(
    case: str, method: str, spent: Mapping[int, float], unit: str, settings: dict[str, Any]
) -> list[BenchRow]:
    """Return the cost of one more at the largest size, and the exponent of cost = factor * size^exponent.

    The exponent is fitted to CPU seconds by size, by least squares of logarithms: 1 where twice the size costs twice as
    much.
    """
    largest, told = max(spent), settings | {"cpu_s": {str(size): seconds for size, seconds in spent.items()}}
    found: list[tuple[str, str, float, str | None]] = [
        (method, f"CPU ms per {unit}", 1e3 * spent[largest] / largest, None)
    ]
    if len(spent) > 1:
        exponent = np.polyfit(np.log(list(spent)), np.log(list(spent.values())), 1)[0]
        found.append((method, "exponent of the cost", float(exponent), "at most 1.05"))
    return rows_of(case, found, settings=told)


LIMIT_BYTES: Final = 512 * 2**20
"""The memory limit of an index. The rest of a GiB is for the interpreter, its libraries and the tables of ids."""

_WRITTEN_AT_ONCE = 1 << 14


@dataclass(frozen=True)
class Stored:
    """A file of features and the search over it.

    Attributes:
        path: int16, (records, dimension).
        records, dimension: of the file.
        queries, k: of the search.
    """

    path: str
    records: int
    dimension: int
    queries: int
    k: int


@dataclass(frozen=True)
class Searched:
    """One process's search.

    Attributes:
        seconds, cpu_s: of building and searching; other work on the machine moves the second less.
        peak_bytes: most anonymous memory of the process.
        found: file of record ids and similarities, shape (queries, k).
    """

    seconds: float
    cpu_s: float
    peak_bytes: int
    found: str


def write_features(path: Path, *, records: int, dimension: int) -> None:
    """Write random unit vectors times 2048, rounded, one block after the other: as features of images are stored."""
    into = np.lib.format.open_memmap(path, mode="w+", dtype=np.int16, shape=(records, dimension))
    rng = np.random.default_rng(0)
    for start in range(0, records, _WRITTEN_AT_ONCE):
        block = rng.standard_normal((min(_WRITTEN_AT_ONCE, records - start), dimension), dtype=np.float32)
        block *= np.float32(2048) / np.linalg.norm(block, axis=1, keepdims=True)
        into[start : start + len(block)] = np.rint(block)
    into.flush()


def search_together(stored: Stored, *, processes: int, folder: Path, records: int | None = None) -> list[Searched]:
    """Search the first `records` rows (all if None), each process an equal part, all at the same time."""
    count = stored.records if records is None else records
    edges = np.linspace(0, count, processes + 1).astype(int).tolist()
    orders = [
        asdict(stored) | {"first": first, "last": last, "found": str(folder / f"found-{processes}-{count}-{first}.npz")}
        for first, last in itertools.pairwise(edges)
    ]
    return [Searched(**found) for found in run_alone("benchmarks.scale.bench", *orders)]


def merged_ids(parts: list[Searched]) -> NDArray[np.int64]:
    """Return the first k record ids of all parts by (similarity descending, id ascending), shape (queries, k)."""
    found = []
    for part in parts:
        with np.load(part.found) as file:
            found.append((file["record_ids"], file["similarities"]))
    ids, similarities = (np.concatenate(columns, axis=1) for columns in zip(*found, strict=True))
    order = np.lexsort((ids, -similarities), axis=1)[:, : found[0][0].shape[1]]
    return np.take_along_axis(ids, order, axis=1)


def ids_by_definition(stored: Stored, *, queries: int) -> NDArray[np.int64]:
    """Return the first k record ids of the first few queries, by 64-bit integers and sorting alone."""
    features = np.load(stored.path, mmap_mode="r")
    asked = np.array(features[:queries]).astype(np.int64)
    similarities = np.concatenate(
        [
            asked @ features[start : start + _WRITTEN_AT_ONCE].astype(np.int64).T
            for start in range(0, len(features), _WRITTEN_AT_ONCE)
        ],
        axis=1,
    )
    ids = record_ids(stored.records)
    return np.stack([ids[np.lexsort((ids, -row))[: stored.k]] for row in similarities])


def record_ids(count: int) -> NDArray[np.int64]:
    """Return random ids in ascending order, as a shard keeps them."""
    steps = np.random.default_rng(1).integers(1, 2**20, count, dtype=np.int64)
    return np.cumsum(steps)


def _search(order: Mapping[str, Any]) -> Searched:
    """Search, in the fresh interpreter."""
    whole = np.load(order["path"], mmap_mode="r")
    part = slice(order["first"], order["last"])
    ids = record_ids(order["records"])[part].copy()
    asked = np.array(whole[: order["queries"]])  # of the first records, whatever part of the file is searched
    # Load the library and its workspace before the clock runs.
    build_index(whole[:600], ids[:600].copy()).search(asked[:8], 1)
    with PeakMemory() as peak:
        began, cpu = time.perf_counter(), time.process_time()
        found = build_index(whole[part], ids, memory_limit_bytes=LIMIT_BYTES).search(asked, order["k"])
        seconds, cpu_s = time.perf_counter() - began, time.process_time() - cpu
    np.savez(order["found"], record_ids=found.record_ids, similarities=found.similarities)
    return Searched(seconds, cpu_s, peak.bytes, order["found"])


if __name__ == "__main__":
    sys.stdout.write(json.dumps(asdict(_search(json.loads(sys.argv[1])))))
