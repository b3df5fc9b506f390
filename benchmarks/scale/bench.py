"""`labeler bench scale`: agents of a round, records of a search and queries of a job against cost, with slopes.

Sizes grow within one run and are compared with each other, so what is told are ratios and exponents; slopes are of CPU
seconds, which move less than the clock where a machine does other work beside it.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import BenchRow
from benchmarks.machine import run_alone
from benchmarks.scale.ballots import SIMULATED
from benchmarks.scale.rounds import Simulation
from benchmarks.scale.searching import Stored, ids_by_definition, merged_ids, search_together, write_features
from benchmarks.speed.speed import write_synthetic_shard
from labeler.errors import InvalidSetting
from labeler.methods import MethodName
from workers.progress import ProgressCallback, silent
from workers.run.folder import open_job_folder
from workers.run.labelling import label
from workers.run.preparation import LabellingJob, prepare
from workers.run.task_file import QueriesTable, TaskFile, TaskTable

AGENTS, RECORDS, DIMENSION, K = 3, 2_000, 256, 20
"""Of a job in one process."""


@dataclass(frozen=True)
class Sizes:
    """How large a run is."""

    records: tuple[int, ...]
    agents: tuple[int, ...]
    asked: tuple[int, ...]


FULL = Sizes((250_000, 1_000_000, 4_000_000), (1_000, 10_000, 100_000), (1_000, 4_000, 16_000))
"""Needs 2.2 GB of disk."""

QUICK = Sizes((50_000, 200_000), (1_000, 4_000), (500, 2_000))


@dataclass(frozen=True)
class Slope:
    """Cost at several sizes, fitted by cost = factor * size^exponent (least squares of logarithms).

    Attributes:
        exponent: 1 where twice the size costs twice as much.
        at: size -> seconds, as measured.
    """

    exponent: float
    at: Mapping[int, float]

    @classmethod
    def of(cls, at: Mapping[int, float]) -> Slope:
        sizes, seconds = np.log(list(at)), np.log(list(at.values()))
        return cls(float(np.polyfit(sizes, seconds, 1)[0]) if len(at) > 1 else float("nan"), dict(at))

    @property
    def per_unit_s(self) -> float:
        """Seconds for one more, at the largest size."""
        largest = max(self.at)
        return self.at[largest] / largest


def bench_scale(
    *,
    data: Path | None = None,
    full: bool = False,
    agents: str | None = None,
    method: str | None = None,
    progress: ProgressCallback = silent,
) -> list[BenchRow]:
    """Measure every dimension of size, or with `agents` or `method` rounds alone.

    Args:
        data: folder on whose disk the large shard lies while it is searched; else the system's for temporary files.
        full: the sizes of docs/scale.md.
        agents: how many answer one round, several numbers with commas between.
        method: what they answer by; knn where only `agents` is given.
        progress: told which dimension it is at.

    Raises:
        InvalidSetting: no such numbers or method.
        LabelerError: a process failed.
    """
    sizes = FULL if full else QUICK
    if agents is not None or method is not None:
        wanted = sizes.agents if agents is None else _numbers(agents)
        return _agents(_method("knn" if method is None else method), wanted, progress)
    with tempfile.TemporaryDirectory(dir=data) as name:
        folder = Path(name)
        progress("Scale", 0, 3)
        rows = _records(sizes.records, folder)
        progress("Scale", 1, 3)
        rows += _queries(sizes.asked, folder)
    progress("Scale", 2, 3)
    for each in ("knn", "ensemble"):
        rows += _agents(_method(each), sizes.agents, silent)
    progress("Scale", 3, 3)
    return rows


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
    for number, size in enumerate(sizes):
        progress(f"Agents, {method}", number, len(sizes))
        (found[size],) = run_alone("benchmarks.scale.rounds", asdict(Simulation(size, method)))
    progress(f"Agents, {method}", len(sizes), len(sizes))
    slope = Slope.of({size: sum(one["cpu_seconds"].values()) for size, one in found.items()})
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
    return _slope_rows(case, "one process", slope, "agent", {}) + rows


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
    slope = Slope.of({count: found[0].cpu_s for count, found in alone.items()})
    gain = alone[largest][0].seconds / max(found.seconds for found in both)
    peak = max(found.peak_bytes for found in [*alone[largest], *both]) / 2**30
    memory = "anonymous memory, GiB"
    return [
        *_slope_rows(case, "one process, one core", slope, "record", settings),
        BenchRow(case, "two processes / one", "throughput ratio", gain, settings=settings),
        BenchRow(case, "the largest process", memory, peak, reference="at most 1", settings=settings),
        *(
            BenchRow(case, between, "neighbours that differ", count, reference="0", settings=settings)
            for between, count in differ.items()
        ),
    ]


def _queries(sizes: Sequence[int], folder: Path) -> list[BenchRow]:
    shards = tuple(folder / f"agent-{number}" for number in range(AGENTS))
    for number, path in enumerate(shards):
        write_synthetic_shard(path, records=RECORDS, dimension=DIMENSION, seed=number + 1)
    found = {}
    for count in (50, *sizes):  # the first one finds nothing warmed, and is not counted
        public = folder / f"public-{count}"
        write_synthetic_shard(public, records=count, dimension=DIMENSION, seed=999, public=True)
        file = TaskFile(task=TaskTable(name="scale", k=K, sigma_votes=25.0, delta=1e-4), queries=QueriesTable())
        job, cpu = (
            LabellingJob(file=file, shards=shards, queries=public, out=folder / f"job-{count}"),
            time.process_time(),
        )
        with open_job_folder(job.out) as opened:
            prepared = prepare(job, opened)
            opened.begin(prepared.plan())
            label(prepared, opened)
        found[count] = time.process_time() - cpu
    slope = Slope.of({count: found[count] for count in sizes})
    return _slope_rows("queries of a job, `run`", "one process", slope, "query", {"queries": list(sizes)})


def _slope_rows(case: str, method: str, slope: Slope, unit: str, settings: dict[str, Any]) -> list[BenchRow]:
    told = settings | {"cpu_s": {str(size): spent for size, spent in slope.at.items()}}
    rows = [BenchRow(case, method, f"CPU ms per {unit}", 1e3 * slope.per_unit_s, settings=told)]
    if len(slope.at) > 1:
        rows.append(
            BenchRow(case, method, "exponent of the cost", slope.exponent, reference="at most 1.05", settings=told)
        )
    return rows
