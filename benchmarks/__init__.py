"""What measures the product and reproduces the papers: `labeler bench NAME`, and so every number in BENCHMARKS.md.

Studies use the product; nothing of the product uses a study (an import contract), except that the command `bench`
loads this module when it is run. What only the papers' tables need lives here too: training in simulation
(`learning`), federated accounting (`accounting`). Packages that only studies need
are in the extra `benchmarks`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any, Final

from benchmarks.rows import BenchRow, bench_document
from labeler.errors import InvalidSetting
from workers.progress import ProgressCallback, silent


def _office_caltech(data: Path | None, full: bool, progress: ProgressCallback) -> list[BenchRow]:
    from benchmarks.office_caltech import bench_office_caltech

    return bench_office_caltech(data=data, full=full, progress=progress)


def _answers(data: Path | None, full: bool, progress: ProgressCallback) -> list[BenchRow]:
    return run_answers(data=data, full=full, out=None, progress=progress)


def run_answers(*, data: Path | None, full: bool, out: Path | None, progress: ProgressCallback) -> list[BenchRow]:
    """See `benchmarks.answers`."""
    from benchmarks.answers import bench_answers, draw_answers

    rows = bench_answers(data=data, full=full, progress=progress)
    if out is not None:
        draw_answers(rows, out)
    return rows


def _attributes(data: Path | None, full: bool, progress: ProgressCallback) -> list[BenchRow]:
    from benchmarks.attribute_votes import bench_attributes

    return bench_attributes(data=data, full=full, progress=progress)


def _backbones(data: Path | None, full: bool, progress: ProgressCallback) -> list[BenchRow]:
    from benchmarks.backbones import bench_backbones

    return bench_backbones(data=data, full=full, progress=progress)


def _embed(data: Path | None, full: bool, progress: ProgressCallback) -> list[BenchRow]:
    from benchmarks.embed_speed import bench_embed

    return bench_embed(data=data, full=full, progress=progress)


def _calibration(data: Path | None, full: bool, progress: ProgressCallback) -> list[BenchRow]:
    from benchmarks.calibration import bench_calibration

    return bench_calibration(data=data, full=full, progress=progress)


def _digits(_: Path | None, full: bool, progress: ProgressCallback) -> list[BenchRow]:
    from benchmarks.digits import bench_digits

    return bench_digits(full=full, progress=progress)


def _speed(_: Path | None, full: bool, progress: ProgressCallback) -> list[BenchRow]:
    from benchmarks.speed import bench_speed

    return bench_speed(full=full, progress=progress)


def _device(_: Path | None, full: bool, progress: ProgressCallback) -> list[BenchRow]:
    from benchmarks.device import bench_device

    return bench_device(full=full, progress=progress)


def _start(_: Path | None, full: bool, progress: ProgressCallback) -> list[BenchRow]:
    from benchmarks.start import bench_start

    return bench_start(full=full, progress=progress)


def _ledger(data: Path | None, full: bool, progress: ProgressCallback) -> list[BenchRow]:
    from benchmarks.ledger import bench_ledger

    return bench_ledger(data=data, full=full, progress=progress)


def _service(data: Path | None, full: bool, progress: ProgressCallback) -> list[BenchRow]:
    from benchmarks.service import bench_service

    return bench_service(data=data, full=full, progress=progress)


def _attacks(data: Path | None, full: bool, progress: ProgressCallback) -> list[BenchRow]:
    from benchmarks.attacks import bench_attacks

    return bench_attacks(data=data, full=full, progress=progress)


def _audit(_: Path | None, full: bool, progress: ProgressCallback) -> list[BenchRow]:
    from benchmarks.audit import bench_audit

    return bench_audit(full=full, progress=progress)


def _ray(_: Path | None, full: bool, progress: ProgressCallback) -> list[BenchRow]:
    from benchmarks.cluster import bench_ray

    return bench_ray(full=full, progress=progress)


def _winner(_: Path | None, full: bool, progress: ProgressCallback) -> list[BenchRow]:
    from benchmarks.winner import bench_winner

    return bench_winner(full=full, progress=progress)


def _strategies(data: Path | None, full: bool, progress: ProgressCallback) -> list[BenchRow]:
    from benchmarks.strategies import bench_strategies

    return bench_strategies(data=data, full=full, progress=progress)


def _ball(data: Path | None, full: bool, progress: ProgressCallback) -> list[BenchRow]:
    from benchmarks.ball import bench_ball

    return bench_ball(data=data, full=full, progress=progress)


def _life(data: Path | None, full: bool, progress: ProgressCallback) -> list[BenchRow]:
    from benchmarks.life import bench_life

    return bench_life(data=data, full=full, progress=progress)


def _simulate(_: Path | None, full: bool, progress: ProgressCallback) -> list[BenchRow]:
    return run_schedules(full=full, seeds=None, resume=None, trace=False, minutes=None, progress=progress)


def _scale(data: Path | None, full: bool, progress: ProgressCallback) -> list[BenchRow]:
    return run_scale(data=data, full=full, out=None, progress=progress)


def run_scale(*, data: Path | None, full: bool, out: Path | None, progress: ProgressCallback) -> list[BenchRow]:
    """See `benchmarks.scaling.bench`."""
    from benchmarks.scaling.bench import bench_scale

    return bench_scale(data=data, full=full, out=out, progress=progress)


def _thousand_agents(data: Path | None, full: bool, progress: ProgressCallback) -> list[BenchRow]:
    from benchmarks.thousand_agents import bench_thousand_agents

    return bench_thousand_agents(data=data, full=full, progress=progress)


def _rivals(data: Path | None, full: bool, progress: ProgressCallback) -> list[BenchRow]:
    from benchmarks.rivals.office import bench_rivals

    return bench_rivals(data=data, full=full, progress=progress)


def _noise_by_talliers(data: Path | None, full: bool, progress: ProgressCallback) -> list[BenchRow]:
    from benchmarks.tallier_noise import bench_tallier_noise

    return bench_tallier_noise(data=data, full=full, progress=progress)


def _steps(data: Path | None, full: bool, progress: ProgressCallback) -> list[BenchRow]:
    from benchmarks.rivals.steps import bench_steps

    return bench_steps(data=data, full=full, progress=progress)


def _curves(data: Path | None, full: bool, progress: ProgressCallback) -> list[BenchRow]:
    return run_curves(data=data, full=full, out=None, progress=progress)


def run_curves(*, data: Path | None, full: bool, out: Path | None, progress: ProgressCallback) -> list[BenchRow]:
    """See `benchmarks.rivals.cifar10`."""
    from benchmarks.rivals.cifar10 import bench_curves

    return bench_curves(data=data, full=full, out=out, progress=progress)


def _harder(data: Path | None, full: bool, progress: ProgressCallback) -> list[BenchRow]:
    from benchmarks.rivals.harder import bench_harder

    return bench_harder(data=data, full=full, progress=progress)


def run_schedules(
    *,
    full: bool,
    seeds: str | None,
    resume: Path | None,
    trace: bool,
    minutes: float | None,
    progress: ProgressCallback,
) -> list[BenchRow]:
    """See tests/simulation/bench.py: test code, which no module of ours may import by name."""
    bench = import_module("tests.simulation.bench")
    rows: list[BenchRow] = bench.bench_simulate(
        full=full, seeds=seeds, resume=resume, trace=trace, minutes=minutes, progress=progress
    )
    return rows


def _sampled_training(_: Path | None, full: bool, progress: ProgressCallback) -> list[BenchRow]:
    from benchmarks.sampled_training import bench_sampled_training

    return bench_sampled_training(full=full, progress=progress)


BENCHES: Final[dict[str, Callable[[Path | None, bool, ProgressCallback], list[BenchRow]]]] = {
    "office-caltech": _office_caltech,
    "answers": _answers,
    "attributes": _attributes,
    "backbones": _backbones,
    "embed": _embed,
    "calibration": _calibration,
    "digits": _digits,
    "speed": _speed,
    "device": _device,
    "start": _start,
    "ledger": _ledger,
    "service": _service,
    "attacks": _attacks,
    "audit": _audit,
    "ray": _ray,
    "winner": _winner,
    "scale": _scale,
    "thousand-agents": _thousand_agents,
    "rivals": _rivals,
    "ball": _ball,
    "strategies": _strategies,
    "noise-by-talliers": _noise_by_talliers,
    "curves": _curves,
    "steps": _steps,
    "harder": _harder,
    "simulate": _simulate,
    "life": _life,
    "sampled-training": _sampled_training,
}
"""Every bench but the papers' tables, by its name. Each is loaded when it is run: naming them loads no library."""

NAMES: Final = f"{', '.join(BENCHES)} or papers"
"""All names in words, for help and refusals."""


def run_bench(
    name: str,
    paper: str | None = None,
    *,
    data: Path | None = None,
    full: bool = False,
    out: Path | None = None,
    seeds: str | None = None,
    resume: Path | None = None,
    trace: bool = False,
    minutes: float | None = None,
    progress: ProgressCallback = silent,
) -> dict[str, Any]:
    """Run a bench.

    Args:
        name: one of BENCHES, or "papers".
        paper: whose table, where name is "papers"; all of them if None.
        data: folder of the real data sets, or on the disk to measure, where the bench needs one.
        full: all repetitions; else a quick version of the same.
        out: papers, answers, scale and curves only: a folder for documents and pictures.
        seeds, resume, trace, minutes: simulate only; see tests/simulation/bench.py.
        progress: told how far it is.

    Returns:
        {"name", "rows", "seconds", "versions"}; see BenchRow.

    Raises:
        InvalidSetting: no such bench, or it needs data that is not there.
    """
    started = time.perf_counter()
    if name != "simulate" and (seeds is not None or resume is not None or trace or minutes is not None):
        raise InvalidSetting("--seeds, --resume, --trace and --minutes are for bench simulate; leave them out")
    if name == "papers":
        from benchmarks.papers import bench_papers

        rows = bench_papers(paper, data=data, full=full, out=out, progress=progress)
        name = name if paper is None else f"{name} {paper}"
    elif name not in BENCHES:
        raise InvalidSetting(f"no bench is called {name!r}; choose {NAMES}")
    elif paper is not None or (out is not None and name not in ("scale", "answers", "curves")):
        raise InvalidSetting(f"bench {name} has no parts and writes no files; leave out what only papers takes")
    elif name == "answers":
        rows = run_answers(data=data, full=full, out=out, progress=progress)
    elif name == "curves":
        rows = run_curves(data=data, full=full, out=out, progress=progress)
    elif name == "scale":
        rows = run_scale(data=data, full=full, out=out, progress=progress)
    elif name == "simulate":
        rows = run_schedules(full=full, seeds=seeds, resume=resume, trace=trace, minutes=minutes, progress=progress)
    else:
        rows = BENCHES[name](data, full, progress)
    return bench_document(name, rows, time.perf_counter() - started)


__all__ = ["BENCHES", "NAMES", "BenchRow", "run_bench"]
