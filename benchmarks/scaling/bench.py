"""`labeler bench scale`: images, records, agents, queries and jobs against cost, with slopes and the plan on paper.

Sizes grow within one run and are compared with each other, so what is told are ratios and exponents; slopes are of CPU
seconds, which move less than the clock where a machine does other work beside it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.rows import BenchRow
from benchmarks.scaling import plan
from benchmarks.scaling.embedding import BACKBONE, embed_together, write_images
from benchmarks.scaling.fits import Slope
from benchmarks.scaling.jobs import Served, run_of_queries, serve
from benchmarks.scaling.searching import (
    ONE_CORE,
    Searched,
    Stored,
    has_ray,
    ids_by_definition,
    merged_ids,
    search_together,
    write_features,
)
from labeler.errors import LabelerError
from labeler.tally import QueryBatch
from labeler.task import parse_task
from workers.progress import ProgressCallback, silent
from workers.simulated.sums import traffic_of

GIB = 2**30


@dataclass(frozen=True)
class Sizes:
    """How large a run is; `FULL` takes about a quarter of an hour on two idle cores and 2.2 GB of disk."""

    images: tuple[int, ...]
    records: tuple[int, ...]
    dimension: int
    queries: int
    agents: tuple[int, ...]
    trained: tuple[int, ...]
    asked: tuple[int, ...]
    served_agents: tuple[int, ...]
    requesters: int
    load_s: float


FULL = Sizes(
    images=(64, 128, 256),
    records=(250_000, 1_000_000, 4_000_000),
    dimension=256,
    queries=200,
    agents=(1_000, 10_000, 100_000),
    trained=(1_000, 10_000, 100_000),
    asked=(1_000, 4_000, 16_000),
    served_agents=(3, 9),
    requesters=20,
    load_s=20.0,
)
QUICK = Sizes(
    images=(8, 32),
    records=(50_000, 200_000),
    dimension=256,
    queries=200,
    agents=(1_000, 4_000),
    trained=(1_000, 2_000),
    asked=(500, 2_000),
    served_agents=(3,),
    requesters=6,
    load_s=3.0,
)


def bench_scale(
    *, data: Path | None = None, full: bool = False, out: Path | None = None, progress: ProgressCallback = silent
) -> list[BenchRow]:
    """Measure every dimension of size.

    Args:
        data: folder on whose disk the large shard lies while it is searched; else the system's for temporary files.
        full: the sizes of docs/scale.md.
        out: folder for the picture; none is drawn if None.
        progress: told which dimension it is at.

    Raises:
        LabelerError: a process failed.
    """
    sizes = FULL if full else QUICK
    steps: list[Callable[[], list[BenchRow]]] = []
    measured: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(dir=data) as name:
        folder = Path(name)
        steps = [
            lambda: _images(sizes, folder, measured),
            lambda: _records(sizes, folder, measured),
            lambda: _agents(sizes, measured),
            lambda: _queries(sizes, folder),
            lambda: _jobs(sizes, measured),
        ]
        rows: list[BenchRow] = []
        for number, step in enumerate(steps):
            progress("Scale", number, len(steps))
            rows += step()
        progress("Scale", len(steps), len(steps))
    if out is not None:
        from benchmarks.scaling.picture import draw_slopes

        draw_slopes(measured["slopes"], out)
    return rows + _plan_rows(measured)


def _images(sizes: Sizes, folder: Path, measured: dict[str, Any]) -> list[BenchRow]:
    most = sizes.images[-1]
    write_images(folder / "images", count=most)
    alone = {count: embed_together(folder / "images", count=count, processes=1)[0] for count in sizes.images}
    both = embed_together(folder / "images", count=most, processes=2)
    slope = Slope.of({count: found["cpu_s"] for count, found in alone.items()})
    measured["image_s"] = slope.per_unit_s
    gain = 2 * alone[most]["seconds"] / max(found["seconds"] for found in both)
    settings = {"backbone": BACKBONE, "images": list(sizes.images), "limited_by": "the network's forward pass"}
    return [
        *_slope_rows("images embedded", "one process, one core", slope, "image", settings),
        BenchRow("images embedded", "two processes / one", "throughput ratio", gain, settings=settings),
    ]


def _records(sizes: Sizes, folder: Path, measured: dict[str, Any]) -> list[BenchRow]:
    largest = sizes.records[-1]
    stored = Stored(str(folder / "features.npy"), largest, sizes.dimension, sizes.queries, 50)
    write_features(Path(stored.path), records=largest, dimension=sizes.dimension)
    try:
        alone = {count: search_together(stored, processes=1, folder=folder, records=count) for count in sizes.records}
        both = search_together(stored, processes=2, folder=folder)
        ids, defined = merged_ids(alone[largest]), ids_by_definition(stored, queries=2)
        differ = {
            "two processes, one": int((ids != merged_ids(both)).sum()),
            "one process, the definition (2 queries)": int((ids[: len(defined)] != defined).sum()),
        }
        by_ray = search_together(stored, processes=1, folder=folder, engine="ray") if has_ray() else []
        if by_ray:
            differ["Ray, one process"] = int((ids != merged_ids(by_ray)).sum())
    finally:
        Path(stored.path).unlink()
    slope = Slope.of({count: found[0].cpu_s for count, found in alone.items()})
    measured.setdefault("slopes", {})["records searched"] = slope
    measured["product_s"] = slope.per_unit_s / sizes.queries / sizes.dimension
    settings = {
        "dimension": sizes.dimension,
        "queries": sizes.queries,
        "k": stored.k,
        "records": list(sizes.records),
        "shard_bytes": 2 * largest * sizes.dimension,
        "limited_by": "products of integers on one core",
    }
    case = f"records searched, x {sizes.dimension}"
    peak = max(found.peak_bytes for found in [*alone[largest], *both, *by_ray])
    gains = {"two processes / one": _gain(alone[largest], both)}
    if by_ray:
        gains["Ray on this machine / one process"] = _gain(alone[largest], by_ray)
    return [
        *_slope_rows(case, "one process, one core", slope, "record", settings),
        *(BenchRow(case, name, "throughput ratio", gain, settings=settings) for name, gain in gains.items()),
        BenchRow(
            case, "the largest process", "anonymous memory, GiB", peak / GIB, reference="at most 1", settings=settings
        ),
        *(
            BenchRow(case, between, "neighbours that differ", count, reference="0", settings=settings)
            for between, count in differ.items()
        ),
    ]


def _gain(one: list[Searched], both: list[Searched]) -> float:
    return one[0].seconds / max(found.seconds for found in both)


def _agents(sizes: Sizes, measured: dict[str, Any]) -> list[BenchRow]:
    rows = []
    for method, agents in (("knn", sizes.agents), ("ensemble", sizes.trained)):
        document = simulated(method, agents)
        found = {row["agents"]: row for row in document["rows"]}
        slope = Slope.of({count: sum(row["cpu_seconds"].values()) for count, row in found.items()})
        measured.setdefault("slopes", {})[f"agents, {method}"] = slope
        largest = found[agents[-1]]
        settings = document["settings"] | {"rows": document["rows"], "limited_by": _LIMITS[method]}
        case = f"agents, {method}, 100 queries x 10"
        rows += _slope_rows(case, "one process", slope, "agent", settings)
        rows += [
            BenchRow(case, f"{agents[-1]:,} agents", "seconds", largest["seconds"], settings=settings),
            BenchRow(case, f"{agents[-1]:,} agents", "peak MiB", largest["peak_mib"], settings=settings),
            BenchRow(case, "an agent sends", "kB", largest["bytes"]["agent_sends"] / 1e3, settings=settings),
            BenchRow(case, "a tallier receives", "MB", largest["bytes"]["tallier_receives"] / 1e6, settings=settings),
        ]
        if method == "knn":
            spent = largest["cpu_seconds"]
            measured["round_s"] = (spent["noise_and_shares"] + spent["talliers"]) / agents[-1]
    middle = sizes.agents[-2:-1]
    alone, both = (simulated("knn", middle, processes=count)["rows"][0]["seconds"] for count in (1, 2))
    rows.append(BenchRow(f"agents, knn, {middle[0]:,}", "two processes / one", "throughput ratio", alone / both))
    return rows


def simulated(method: str, agents: Sequence[int], *, processes: int = 1) -> dict[str, Any]:
    """`labeler simulate` in an interpreter of its own, so that its memory is its own.

    Raises:
        LabelerError: it failed; its last line is in the message.
    """
    sizes = ",".join(map(str, agents))
    told = ["--method", method, "--agents", sizes, "--processes", str(processes), "--json"]
    done = subprocess.run(
        [sys.executable, "-m", "workers.cli", "simulate", *told],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | ONE_CORE | {"PYTHONPATH": str(Path(__file__).parents[2])},
    )
    if done.returncode:
        raise LabelerError(f"a simulation failed: {done.stderr.strip().splitlines()[-1:]}")
    found: dict[str, Any] = json.loads(done.stdout)
    return found


_LIMITS = {
    "knn": "an agent's own noise, masks and hashes: calls of a few dozen microseconds each",
    "ensemble": "training: products of small matrices, one agent's after the other's",
}


def _queries(sizes: Sizes, folder: Path) -> list[BenchRow]:
    jobs = folder / "jobs"
    jobs.mkdir()
    found = {count: run_of_queries(count, jobs) for count in sizes.asked}
    slope = Slope.of({count: one["cpu_s"] for count, one in found.items()})
    settings = {"queries": list(sizes.asked), "limited_by": "below a thousand what a job costs anyhow, then the search"}
    return _slope_rows("queries of a job, `run`", "one process, one core", slope, "query", settings)


def _jobs(sizes: Sizes, measured: dict[str, Any]) -> list[BenchRow]:
    few = sizes.served_agents[0]
    runs = [
        serve(agents=agents, cores=cores, requesters=sizes.requesters, seconds=sizes.load_s)
        for agents, cores in [(few, 1), *((agents, 2) for agents in sizes.served_agents)]
    ]
    one, two, *more = runs
    measured["served"] = (two, more[-1] if more else None)
    case = f"jobs of 8 queries, {few} agents, {sizes.requesters} requesters"
    settings = {"runs": [asdict(run) for run in runs], "limited_by": "CPU of all parties, which share the cores"}
    rows = [
        BenchRow(case, f"{run.cores} core{'s' if run.cores > 1 else ''}", "jobs per second", run.jobs / run.wall_s,
                 seconds=run.wall_s, settings=settings)
        for run in (one, two)
    ]  # fmt: skip
    rate = (two.jobs / two.wall_s) / (one.jobs / one.wall_s) if one.jobs else float("nan")
    rows.append(BenchRow(case, "two cores / one", "throughput ratio", rate, settings=settings))
    for run in (two, *more):
        rows.append(
            BenchRow(
                case.replace(f"{few} agents", f"{run.agents} agents"),
                "coordinator",
                "CPU ms per job",
                1e3 * run.coordinator_s / max(1, run.jobs),
                settings=settings,
            )
        )
    return rows


def _slope_rows(case: str, method: str, slope: Slope, unit: str, settings: dict[str, Any]) -> list[BenchRow]:
    told = settings | {"cpu_s": {str(size): spent for size, spent in slope.at.items()}}
    return [
        BenchRow(case, method, f"CPU ms per {unit}", 1e3 * slope.per_unit_s, settings=told),
        BenchRow(case, method, "exponent of the cost", slope.exponent, reference="at most 1.05", settings=told),
    ]


def _plan_rows(measured: dict[str, Any]) -> list[BenchRow]:
    few, many = measured["served"]
    task = parse_task(
        {"name": "plan", "classes": [str(number) for number in range(plan.CLASSES)], "k": 5, "sigma_votes": 100.0,
         "delta": 1e-6, "max_queries": plan.QUERIES, "agents": plan.AGENTS, "colluding_agents": 1,
         "talliers": plan.TALLIERS}
    )  # fmt: skip
    traffic = traffic_of(task, QueryBatch(np.ones((plan.QUERIES, plan.DIMENSION), dtype=np.int16)))
    per_job, per_agent = _coordinator(few, many)
    last = many or few
    costs = plan.UnitCosts(
        image_s=measured["image_s"],
        product_s=measured["product_s"],
        round_s=measured["round_s"],
        coordinator_job_s=per_job,
        coordinator_agent_s=per_agent,
        agent_s=last.agents_s / max(1, last.jobs) / last.agents,
        tallier_s=last.talliers_s / max(1, last.jobs) / last.agents / plan.TALLIERS,
        journal_bytes=last.journal_bytes / max(1, last.jobs) / last.agents * plan.AGENTS,
        asked_bytes=traffic.asked,
        shares_bytes=sum(traffic.shares),
    )
    size = {"records": plan.RECORDS, "agents": plan.AGENTS, "jobs_a_day": plan.JOBS_A_DAY, "queries": plan.QUERIES}
    return [
        BenchRow("on paper", part.name, part.of, part.needed, settings=size | asdict(part))
        for part in plan.paper_plan(costs)
    ]


def _coordinator(few: Served, many: Served | None) -> tuple[float, float]:
    """CPU seconds of the coordinator per job, and per agent of one; all per agent where one size was measured."""
    at = few.coordinator_s / max(1, few.jobs)
    if many is None or not many.jobs:
        return 0.0, at / few.agents
    per_agent = max(0.0, (many.coordinator_s / many.jobs - at) / (many.agents - few.agents))
    return max(0.0, at - few.agents * per_agent), per_agent
