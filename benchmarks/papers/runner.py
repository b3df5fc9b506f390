"""Runs a paper's table cell by cell, keeps each finished cell, and goes on where it was interrupted."""

from __future__ import annotations

import ast
import hashlib
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

from benchmarks import BenchRow, installed_versions
from benchmarks.data import cache_folder
from labeler.system.files import replace_file
from workers.progress import ProgressCallback, silent


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
    paper: str, cells: Sequence[Cell], *, code: str, keep: Path | None = None, progress: ProgressCallback = silent
) -> list[BenchRow]:
    """The rows of all cells, in order.

    Args:
        paper: whose table it is.
        cells: what to measure.
        code: name of the module that measures.
        keep: folder in which finished cells are kept; None measures everything and keeps nothing. A kept cell counts
            as long as the code that measured it and the versions of libraries are the same.
        progress: told how many cells are done, and what a cell says of itself.
    """
    rows: list[BenchRow] = []
    for done, cell in enumerate(cells):
        progress(paper, done, len(cells))
        rows += _measured(paper, cell, code, keep, progress)
    progress(paper, len(cells), len(cells))
    return rows


def kept_cells_folder() -> Path:
    """Where `--full` keeps finished cells: `papers` in the user's cache folder."""
    return cache_folder() / "papers"


def _measured(paper: str, cell: Cell, code: str, keep: Path | None, progress: ProgressCallback) -> list[BenchRow]:
    if keep is None:
        return _timed(cell, progress)
    made_by = [paper, cell.key, _code_digest(code), installed_versions()]
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
def _code_digest(module: str) -> str:
    """SHA-256 over a module and every module of this project it imports, directly or not.

    A kept cell must not outlive the code that measured it, and need not be measured again when other code changes.
    """
    sources, found, open_ends = Path(__file__).resolve().parents[2], dict[str, bytes](), [module]
    while open_ends:
        name = open_ends.pop()
        path = sources.joinpath(*name.split("."))
        file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        if name in found or not file.is_file():
            continue
        found[name] = file.read_bytes()
        for node in ast.walk(ast.parse(found[name])):
            if isinstance(node, ast.Import):
                open_ends += [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module:
                open_ends += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    digest = hashlib.sha256()
    for name in sorted(found):
        digest.update(name.encode() + b"\0" + hashlib.sha256(found[name]).digest())
    return digest.hexdigest()
