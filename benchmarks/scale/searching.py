"""A shard larger than the memory that may search it, in one process and shared out to several; equal ids.

Features are random unit vectors on the grid of real ones (feature_store.rows), written to a file and mapped. Each
search runs in an interpreter of its own on one core. What several processes found over their parts is merged by
(similarity, record id), as the index merges its own parts.
"""

from __future__ import annotations

import itertools
import json
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from benchmarks.machine import PeakMemory, run_alone
from feature_store.index import build_index

LIMIT_BYTES: Final = 512 * 2**20
"""What an index may take. The rest of a GiB is for the interpreter, its libraries and the tables of ids."""

_WRITTEN_AT_ONCE = 1 << 14


@dataclass(frozen=True)
class Stored:
    """A file of features and how it is searched.

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
        seconds, cpu_s: of building and searching; the second is less moved by what else the machine does.
        peak_bytes: most anonymous memory of the process.
        found: file of record ids and similarities, shape (queries, k).
    """

    seconds: float
    cpu_s: float
    peak_bytes: int
    found: str


def write_features(path: Path, *, records: int, dimension: int, seed: int = 0) -> None:
    """Random unit vectors times 2048, rounded, one block after the other: as features of images are stored."""
    into = np.lib.format.open_memmap(path, mode="w+", dtype=np.int16, shape=(records, dimension))
    rng = np.random.default_rng(seed)
    for start in range(0, records, _WRITTEN_AT_ONCE):
        block = rng.standard_normal((min(_WRITTEN_AT_ONCE, records - start), dimension), dtype=np.float32)
        block *= np.float32(2048) / np.linalg.norm(block, axis=1, keepdims=True)
        into[start : start + len(block)] = np.rint(block)
    into.flush()


def search_together(stored: Stored, *, processes: int, folder: Path, records: int | None = None) -> list[Searched]:
    """Search the first `records` rows (all if None), each process an equal part, all at the same time.

    Raises:
        LabelerError: a process failed; its last line is in the message.
    """
    count = stored.records if records is None else records
    edges = np.linspace(0, count, processes + 1).astype(int).tolist()
    orders = [
        asdict(stored) | {"first": first, "last": last, "found": str(folder / f"found-{processes}-{count}-{first}.npz")}
        for first, last in itertools.pairwise(edges)
    ]
    return [Searched(**found) for found in run_alone("benchmarks.scale.searching", *orders)]


def merged_ids(parts: list[Searched]) -> NDArray[np.int64]:
    """The first k record ids of all parts by (similarity descending, id ascending), shape (queries, k)."""
    found = []
    for part in parts:
        with np.load(part.found) as file:
            found.append((file["record_ids"], file["similarities"]))
    ids, similarities = (np.concatenate(columns, axis=1) for columns in zip(*found, strict=True))
    order = np.lexsort((ids, -similarities), axis=1)[:, : found[0][0].shape[1]]
    return np.take_along_axis(ids, order, axis=1)


def ids_by_definition(stored: Stored, *, queries: int) -> NDArray[np.int64]:
    """The first k record ids of the first few queries, by 64-bit integers and sorting alone."""
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
    """Random ids in ascending order, as a shard keeps them."""
    steps = np.random.default_rng(1).integers(1, 2**20, count, dtype=np.int64)
    return np.cumsum(steps)


def _search(order: Mapping[str, Any]) -> Searched:
    """Runs in the fresh interpreter."""
    whole = np.load(order["path"], mmap_mode="r")
    part = slice(order["first"], order["last"])
    ids = record_ids(order["records"])[part].copy()
    asked = np.array(whole[: order["queries"]])  # of the first records, whatever part of the file is searched
    # The library and its workspace are there before the clock runs.
    build_index(whole[:600], ids[:600].copy()).search(asked[:8], 1)
    with PeakMemory() as peak:
        began, cpu = time.perf_counter(), time.process_time()
        found = build_index(whole[part], ids, memory_limit_bytes=LIMIT_BYTES).search(asked, order["k"])
        seconds, cpu_s = time.perf_counter() - began, time.process_time() - cpu
    np.savez(order["found"], record_ids=found.record_ids, similarities=found.similarities)
    return Searched(seconds, cpu_s, peak.bytes, order["found"])


if __name__ == "__main__":
    sys.stdout.write(json.dumps(asdict(_search(json.loads(sys.argv[1])))))
