"""`labeler bench papers [NAME]`: a table per paper, our rows next to what the paper prints.

Every paper's module offers `cells(root, full=...)`: units of work that are kept when they are done, so that an
interrupted `--full` continues.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Final

from benchmarks import BenchRow, bench_document, commit_of_checkout, in_turn, installed_versions
from benchmarks.data import cache_folder, data_root
from labeler.errors import InvalidSetting
from labeler.system.files import replace_file
from workers.progress import ProgressCallback, silent

PAPERS: Final[dict[str, str]] = {
    "ae-dpfl": "Zhu et al. 2020, 2021: AE-DPFL, with and without domain adaptation",
    "theorem-7": "their epsilon that follows the votes, and why it is no guarantee",
    "attributes": "their votes on attributes, on digits in the place of CelebA",
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
    """Measure one paper's table, or all."""
    if paper is not None and paper not in PAPERS:
        raise InvalidSetting(f"no paper's table is called {paper!r}; choose {NAMES}, or none of them for all")
    root = data_root(data)
    rows: list[BenchRow] = []
    for one in PAPERS if paper is None else (paper,):
        started = time.perf_counter()
        # Loaded when it is run: importing this package loads no library.
        module = import_module(f"{__name__}.{one.replace('-', '_')}")
        found = run_cells(
            one, module.cells(root, full=full), keep=cache_folder() / "papers" if full else None, progress=progress
        )
        rows += found
        if out is not None:
            out.mkdir(parents=True, exist_ok=True)
            took, options = time.perf_counter() - started, {"data": root, "full": full} if full else {"data": root}
            document = bench_document(f"papers {one}", found, took, commit=commit_of_checkout(), options=options)
            replace_file(out / f"{one}.json", json.dumps(document, indent=1, allow_nan=False).encode())
    if out is not None:
        from benchmarks.papers.chart import draw_chart

        draw_chart(rows, out / "accuracy_vs_epsilon.png")
    return rows


@dataclass(frozen=True)
class Cell:
    """One resumable unit of a paper's table.

    Attributes:
        key: what it measures and with which settings, in words; unique within its paper.
        run: measures it.
    """

    key: str
    run: Callable[[ProgressCallback], list[BenchRow]]


def run_cells(
    paper: str, cells: Sequence[Cell], *, keep: Path | None = None, progress: ProgressCallback = silent
) -> list[BenchRow]:
    """Return the rows of all cells, in order.

    Args:
        paper: whose table it is.
        cells: what to measure.
        keep: folder in which finished cells are kept; None measures everything and keeps nothing. A kept cell counts as
            long as the code of this project and the versions of libraries are the same.
    """
    rows: list[BenchRow] = []
    for cell in in_turn(progress, paper, cells):
        rows += _measured(paper, cell, keep, progress)
    return rows


def _measured(paper: str, cell: Cell, keep: Path | None, progress: ProgressCallback) -> list[BenchRow]:
    if keep is None:
        return _timed(cell, progress)
    made_by = [paper, cell.key, _code_digest(), installed_versions()]
    name = hashlib.sha256(json.dumps(made_by).encode()).hexdigest()
    path = keep / paper / f"{name[:32]}.json"
    if path.is_file():
        return [BenchRow(**row) for row in json.loads(path.read_text(encoding="utf-8"))["rows"]]
    rows = _timed(cell, progress)
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, json.dumps({"cell": cell.key, "rows": [asdict(row) for row in rows]}, indent=1).encode())
    return rows


def _timed(cell: Cell, progress: ProgressCallback) -> list[BenchRow]:
    started = time.perf_counter()
    rows = cell.run(progress)
    seconds = time.perf_counter() - started
    return [row if row.seconds is not None else BenchRow(**(asdict(row) | {"seconds": seconds})) for row in rows]


@cache
def _code_digest() -> str:
    """Return the SHA-256 of all code that a cell may rest on: a kept cell must not outlive what measured it."""
    digest, sources = hashlib.sha256(), Path(__file__).resolve().parents[2]
    for package in ("benchmarks", "feature_store", "labeler", "workers"):
        for path in sorted((sources / package).rglob("*.py")):
            digest.update(f"{path.relative_to(sources)}\0".encode() + hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()
