"""`labeler bench papers [NAME]`: a table per paper, our rows beside what the paper prints.

Every paper's module offers `cells(root, full=...)`, units of work that are kept when they are done, so that an
interrupted `--full` goes on; and, where it has more to show than numbers, `pictures(rows, out)`.
"""

from __future__ import annotations

import json
import time
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Final

from benchmarks import BenchRow, bench_document
from benchmarks.data import data_root
from benchmarks.papers.runner import Cell, kept_cells_folder, run_cells
from labeler.errors import InvalidSetting
from labeler.system.files import replace_file
from workers.progress import ProgressCallback, silent

PAPERS: Final[dict[str, str]] = {
    "ae-dpfl": "Zhu et al. 2020, 2021: AE-DPFL, with and without domain adaptation",
    "federated": "their baselines: FedAvg, DP-FedAvg, DP-FedSGD",
    "prifedsync": "Zheng et al. 2021: federated f-DP and PriFedSync",
    "fedauxfdp": "Hoech et al. 2022: FedAUXfdp",
    "dp-helmet": "Kirschte et al. 2022: DP-Helmet",
}
"""Every paper's table by its name, in the order of running."""

NAMES: Final = ", ".join(PAPERS)


def bench_papers(
    paper: str | None = None,
    *,
    data: Path | None = None,
    full: bool = False,
    out: Path | None = None,
    progress: ProgressCallback = silent,
) -> list[BenchRow]:
    """Measure one paper's table, or all.

    Args:
        paper: one of PAPERS; None for all.
        data: folder of the real data sets.
        full: all sizes and repetitions, as in BENCHMARKS.md, kept cell by cell; else a quick version of the same.
        out: folder for a JSON document per table and the pictures; None writes nothing.
        progress: told how far it is.

    Returns:
        The rows of all tables measured.

    Raises:
        InvalidSetting: no such table, or the data are not there.
    """
    if paper is not None and paper not in PAPERS:
        raise InvalidSetting(f"no paper's table is called {paper!r}; choose {NAMES}, or none of them for all")
    root = data_root(data)
    rows: list[BenchRow] = []
    for one in PAPERS if paper is None else (paper,):
        rows += _one(one, root, full, out, progress)
    if out is not None:
        from benchmarks.papers.chart import draw_chart

        draw_chart(rows, out / "accuracy_vs_epsilon.png")
    return rows


def _one(paper: str, root: Path, full: bool, out: Path | None, progress: ProgressCallback) -> list[BenchRow]:
    started = time.perf_counter()
    module = _module(paper)
    cells: list[Cell] = module.cells(root, full=full)
    keep = kept_cells_folder() if full else None
    rows = run_cells(paper, cells, code=module.__name__, keep=keep, progress=progress)
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        document = bench_document(f"papers {paper}", rows, time.perf_counter() - started)
        replace_file(out / f"{paper}.json", json.dumps(document, indent=1, allow_nan=False).encode())
        if hasattr(module, "pictures"):
            module.pictures(rows, out)
    return rows


def _module(paper: str) -> ModuleType:
    # Loaded when it is run, so that naming it loads no library.
    return import_module(f"{__name__}.{paper.replace('-', '_')}")
