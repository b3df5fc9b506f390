"""`labeler bench NAME`: every number in BENCHMARKS.md comes from one of these."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from labeler.errors import InvalidSetting
from workers.bench.rows import BenchRow, bench_document
from workers.progress import ProgressCallback, silent

Bench = Callable[..., list[BenchRow]]


def run_bench(
    name: str, *, data: Path | None = None, full: bool = False, progress: ProgressCallback = silent
) -> dict[str, Any]:
    """Run a bench.

    Args:
        name: office-caltech, digits, speed or ledger.
        data: folder of the real data sets, where the bench needs one.
        full: all repetitions; else a quick version of the same.
        progress: told how far it is.

    Returns:
        {"name", "rows", "seconds", "versions"}; see BenchRow.

    Raises:
        InvalidSetting: no such bench, or it needs data that is not there.
    """
    started = time.perf_counter()
    if name == "speed":
        from workers.bench.speed import bench_speed

        rows = bench_speed(full=full, progress=progress)
    elif name == "office-caltech":
        from workers.bench.office_caltech import bench_office_caltech

        rows = bench_office_caltech(data=data, full=full, progress=progress)
    elif name == "digits":
        from workers.bench.digits import bench_digits

        rows = bench_digits(full=full, progress=progress)
    elif name == "ledger":
        from workers.bench.ledger import bench_ledger

        rows = bench_ledger(data=data, full=full, progress=progress)
    else:
        raise InvalidSetting(f"no bench is called {name!r}; choose office-caltech, digits or speed, or ledger")
    return bench_document(name, rows, time.perf_counter() - started)


__all__ = ["BenchRow", "run_bench"]
