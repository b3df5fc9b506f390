"""`labeler bench simulate`: how many schedules were run, how fast, what went wrong in them, and what was found."""

from __future__ import annotations

import logging
import os
from pathlib import Path

from rich.console import Console

from benchmarks import BenchRow
from labeler.errors import InvalidSetting
from tests.simulation.campaign import (
    LONGEST_S,
    Report,
    Stage,
    memory_folder,
    read_seeds,
    replay_command,
    run_seeds,
)
from tests.simulation.case import case_of
from workers.progress import ProgressCallback, silent

QUICK_SEEDS = "0:100"
FULL_SEEDS = "0:1000000"


def bench_simulate(
    *,
    full: bool = False,
    seeds: str | None = None,
    resume: Path | None = None,
    trace: bool = False,
    progress: ProgressCallback = silent,
    minutes: float | None = None,
) -> list[BenchRow]:
    """Run schedules and report them; with `trace` show one of them step by step.

    Args:
        full: the million seeds that a campaign is about, as many as 45 minutes hold; they go on with `resume`.
        seeds: A:B instead; ranges that do not meet can be run by several machines at once.
        resume: file of a campaign.
        minutes: begin no chunk after them; at most 45, which is the default.
        trace: print every step of the one schedule that `seeds` names.
        progress: told how far it is.

    Raises:
        InvalidSetting: no such range, or a trace of several.
    """
    first, last = read_seeds(seeds or (FULL_SEEDS if full else QUICK_SEEDS))
    if trace:
        if last - first != 1:
            raise InvalidSetting(f"a trace is of one schedule, --seeds A:A+1; found {last - first} of them")
        return _traced(first)
    report = run_seeds(
        first,
        last,
        resume=resume,
        processes=cores(),
        longest_s=LONGEST_S if minutes is None else 60.0 * minutes,
        on_progress=lambda done, total: progress("schedules", done, total),
    )
    return rows_of(report)


def cores() -> int:
    """Return how many this process may use, which may be fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def rows_of(report: Report) -> list[BenchRow]:
    """A report as rows; each seed that was found has its own, with the command that replays it."""
    case = f"seeds {report.first}:{report.following}"

    def per(count: float, of: float, digits: int) -> float:
        return round(count / of, digits) if of else 0.0

    rows = [
        BenchRow(case, "all", "schedules", report.schedules, seconds=round(report.seconds, 1)),
        BenchRow(case, "all", "schedules per second, all processes", per(report.schedules, report.elapsed_s, 1)),
        BenchRow(case, "all", "schedules per second of one process", per(report.schedules, report.seconds, 2)),
        BenchRow(case, "all", "CPU ms per schedule", per(1000 * report.cpu_s, report.schedules, 0)),
        BenchRow(case, "all", "turns", report.steps),
        BenchRow(case, "all", "moments at which somebody could die", report.moments),
        *(BenchRow(case, kind, "faults", count) for kind, count in sorted(report.faults.items())),
        *(BenchRow(case, state, "jobs", count) for state, count in sorted(report.states.items())),
        BenchRow(case, "all", "rules broken", len(report.found)),
    ]
    for seed, found in sorted(report.found.items()):
        rows.append(BenchRow(f"seed {seed}", found, replay_command(seed), seed))
    return rows


def _traced(seed: int) -> list[BenchRow]:
    logging.disable(logging.CRITICAL)
    try:
        with memory_folder() as folder:
            outcome = Stage(folder).run(seed, traced=True)
    finally:
        logging.disable(logging.NOTSET)
    console = Console(stderr=True, highlight=False)
    console.print(str(case_of(seed)), markup=False)
    for line in outcome.trace:
        console.print(line, markup=False)
    report = Report(seed, seed + 1, seed + 1)
    report.add(outcome)
    return rows_of(report)
