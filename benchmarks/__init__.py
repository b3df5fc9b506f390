"""Benchmarks: `labeler bench NAME` reproduces a paper's table or measures speed; its results make BENCHMARKS.md.

Benches use the product, and nothing of the product imports a bench (an import contract): `labeler` loads the command
`bench` by name (benchmarks.command). Packages that only benches need are in the extra `benchmarks`.
"""

from __future__ import annotations

import contextlib
import inspect
import statistics
import subprocess
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final, TypeVar

from labeler.errors import InvalidSetting
from workers.progress import ProgressCallback, silent

BENCHES: Final = {
    "papers": "benchmarks.papers:bench_papers",
    "office-caltech": "benchmarks.accuracy.office_caltech:bench_office_caltech",
    "styles": "benchmarks.accuracy.styles:bench_styles",
    "calibration": "benchmarks.accuracy.calibration:bench_calibration",
    "digits": "benchmarks.accuracy.digits:bench_digits",
    "rivals": "benchmarks.accuracy.rivals.bench:bench_rivals",
    "medical": "benchmarks.accuracy.medical:bench_medical",
    "learners": "benchmarks.learning.learners:bench_learners",
    "audit": "benchmarks.accuracy.digits:bench_audit",
    "speed": "benchmarks.speed.speed:bench_speed",
    "embed": "benchmarks.speed.embed:bench_embed",
    "device": "benchmarks.speed.device:bench_device",
    "winner": "benchmarks.speed.winner:bench_winner",
    "ledger": "benchmarks.speed.ledger:bench_ledger",
    "start": "benchmarks.speed.start:bench_start",
    "scale": "benchmarks.scale.bench:bench_scale",
    "service": "benchmarks.service.service:bench_service",
    "attacks": "benchmarks.service.attacks:bench_attacks",
    "soak": "benchmarks.service.soak:bench_soak",
    "simulate": "tests.simulation.bench:bench_simulate",
}
"""Every bench and its function, which is loaded when it is run: importing this module loads no library."""

PACKAGES: Final = (
    "private-labeler",
    "faiss-gpu",
    "faiss-cpu",
    "onnxruntime",
    "torch",
    "torchvision",
    "timm",
    "numpy",
    "scikit-learn",
    "dp-accounting",
)


@dataclass(frozen=True)
class BenchRow:
    """One measured number.

    Attributes:
        case: on what (a server domain, a size).
        method: how it was reached.
        metric: what the value is, with its unit.
        value: the measurement; a mean if `sd` is given.
        sd: standard deviation over repetitions.
        epsilon, delta, level: the guarantee the value was reached under.
        reference: what it is to be compared with.
        seconds: how long it took.
        settings: everything needed to repeat it.
    """

    case: str
    method: str
    metric: str
    value: float
    sd: float | None = None
    epsilon: float | None = None
    delta: float | None = None
    level: str | None = None
    reference: str | None = None
    seconds: float | None = None
    settings: dict[str, Any] = field(default_factory=dict)


T = TypeVar("T")


def mean_row(case: str, method: str, metric: str, values: Iterable[float], **told: Any) -> BenchRow:
    """Return a row of repetitions: their mean and, of several, their deviation; `told` are its other fields."""
    found = [float(value) for value in values]
    sd = statistics.stdev(found) if len(found) > 1 else None
    return BenchRow(case, method, metric, statistics.fmean(found), sd, **told)


def rows_of(case: str, found: Iterable[tuple[str, str, float, str | None]], **told: Any) -> list[BenchRow]:
    """Return a row for each (method, metric, value, reference) of one case; `told` are its other fields."""
    return [
        BenchRow(case, method, metric, float(value), reference=wanted, **told)
        for method, metric, value, wanted in found
    ]


def in_turn(progress: ProgressCallback, stage: str, items: Collection[T]) -> Iterator[T]:
    """Yield one item after the other, and report progress."""
    for number, item in enumerate(items):
        progress(stage, number, len(items))
        yield item
    progress(stage, len(items), len(items))


def parts_in_turn(progress: ProgressCallback, stage: str, *parts: Callable[[], list[BenchRow]]) -> list[BenchRow]:
    """Measure one part of a bench after the other, and report progress."""
    return [row for part in in_turn(progress, stage, parts) for row in part()]


def seconds_of(work: Callable[[], object], clock: Callable[[], float] = time.perf_counter) -> float:
    """Return the seconds that some work takes."""
    started = clock()
    work()
    return clock() - started


def run_bench(name: str, *, progress: ProgressCallback = silent, **options: Any) -> dict[str, Any]:
    """Run a bench.

    Args:
        name: one of BENCHES.
        options: keyword arguments of its function (data, full, out, paper, seeds, agents ...); None or False counts as
            not given.

    Returns:
        The document of `labeler bench --json`; see `bench_document`.

    Raises:
        InvalidSetting: no such bench, an option that it does not take, or missing data.
    """
    if name not in BENCHES:
        raise InvalidSetting(f"no bench is called {name!r}; choose {', '.join(BENCHES)}")
    commit = commit_of_checkout()
    module, function = BENCHES[name].split(":")
    bench = getattr(import_module(module), function)
    given = {option: value for option, value in options.items() if value is not None and value is not False}
    taken = inspect.signature(bench).parameters
    for option in given:
        if option not in taken:
            others = ", ".join(one for one in taken if one != "progress")
            raise InvalidSetting(f"bench {name} takes no {option}; it takes {others}")
    started = time.perf_counter()
    rows = bench(progress=progress, **given)
    paper = f" {given.pop('paper')}" if "paper" in given else ""
    return bench_document(name + paper, rows, time.perf_counter() - started, commit=commit, options=given)


def bench_document(
    name: str, rows: list[BenchRow], seconds: float, *, commit: str, options: Mapping[str, object]
) -> dict[str, Any]:
    """Return the document of `labeler bench --json`: {"name", "command", "commit", "rows", "seconds", "versions"}."""
    shown = {"data": "DATA"} | {option: None for option, value in options.items() if value is True}
    flags = [f"--{option} {shown.get(option, value) or ''}".strip() for option, value in options.items()]
    return {
        "name": name,
        "command": " ".join(["labeler bench", name, *(flag for flag in flags if not flag.startswith("--out "))]),
        "commit": commit,
        "rows": [asdict(row) for row in rows],
        "seconds": round(seconds, 3),
        "versions": installed_versions(),
    }


def commit_of_checkout() -> str:
    """Return the commit of this checkout, with a plus sign where files differ from it; "unknown" outside of git."""
    git = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty=+", "--abbrev=8", "--exclude=*"]
    with contextlib.suppress(OSError, subprocess.CalledProcessError):
        return subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()
    return "unknown"


def installed_versions() -> dict[str, str]:
    """Return the versions of installed packages on which results depend."""
    found = {}
    for package in PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            found[package] = version(package)
    return found
