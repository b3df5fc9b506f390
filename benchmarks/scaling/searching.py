"""A shard larger than the memory that may search it: in one process, shared out to several, and by Ray; equal ids.

Features are random unit vectors on the grid of real ones (feature_store.quantize), written to a file and mapped.
Each search runs in an interpreter of its own on one core, with a thread that watches its anonymous memory (Linux's
RssAnon): pages of the mapped file are the page cache's and not counted. What several processes found over their parts
is merged by (similarity, record id), as the index merges its own parts.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from benchmarks.search_memory import MemoryOfATree
from feature_store.index import ENGINES, build_index
from labeler.errors import LabelerError

ONE_CORE: Final = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
GIB_OF_A_PROCESS: Final = 2**30

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
        peak_bytes: most anonymous memory of the process, or of one of those that it started.
        found: file of what it found.
    """

    seconds: float
    cpu_s: float
    peak_bytes: int
    found: str

    def neighbours(self) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
        """Record ids and similarities, shape (queries, k)."""
        with np.load(self.found) as file:
            return file["record_ids"], file["similarities"]


def write_features(path: Path, *, records: int, dimension: int, seed: int = 0) -> None:
    """Random unit vectors times 2048, rounded, one block after the other: as features of images are stored."""
    into = np.lib.format.open_memmap(path, mode="w+", dtype=np.int16, shape=(records, dimension))
    rng = np.random.default_rng(seed)
    for start in range(0, records, _WRITTEN_AT_ONCE):
        block = rng.standard_normal((min(_WRITTEN_AT_ONCE, records - start), dimension), dtype=np.float32)
        block *= np.float32(2048) / np.linalg.norm(block, axis=1, keepdims=True)
        into[start : start + len(block)] = np.rint(block)
    into.flush()


def search_together(
    stored: Stored, *, processes: int, folder: Path, records: int | None = None, engine: str = "auto"
) -> list[Searched]:
    """Search the first `records` rows, each process an equal part, all at the same time.

    Args:
        stored: the file.
        processes: how many.
        folder: for what they find.
        records: all of the file if None.
        engine: of each process; "ray" shares its part out once more, to processes of a cluster of its own.

    Raises:
        LabelerError: a process failed; its last line is in the message.
    """
    count = stored.records if records is None else records
    edges = np.linspace(0, count, processes + 1).astype(int).tolist()
    orders = [
        asdict(stored)
        | {"first": first, "last": last, "engine": engine}
        | {"found": str(folder / f"found-{engine}-{processes}-{count}-{first}.npz")}
        for first, last in itertools.pairwise(edges)
    ]
    running = [
        subprocess.Popen(
            [sys.executable, "-m", "benchmarks.scaling.searching", json.dumps(order)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | ONE_CORE | {"PYTHONPATH": str(Path(__file__).parents[2])},
        )
        for order in orders
    ]
    said = [process.communicate() for process in running]
    for process, (_, errors) in zip(running, said, strict=True):
        if process.returncode:
            raise LabelerError(f"a searching process failed: {errors.strip().splitlines()[-1:]}")
    return [Searched(**json.loads(out)) for out, _ in said]


def has_ray() -> bool:
    """Whether an index can be searched by Ray here: it is an extra."""
    return "ray" in ENGINES and find_spec("ray") is not None


def merged_ids(parts: list[Searched]) -> NDArray[np.int64]:
    """The first k record ids of all parts by (similarity descending, id ascending), shape (queries, k)."""
    found = [part.neighbours() for part in parts]
    ids, similarities = (np.concatenate(columns, axis=1) for columns in zip(*found, strict=True))
    order = np.lexsort((ids, -similarities), axis=1)[:, : found[0][0].shape[1]]
    return np.take_along_axis(ids, order, axis=1)


def ids_by_definition(stored: Stored, *, queries: int, records: int | None = None) -> NDArray[np.int64]:
    """The first k record ids of the first few queries, by 64-bit integers and sorting alone."""
    features = np.load(stored.path, mmap_mode="r")[:records]
    asked = _asked(features, stored.queries)[:queries].astype(np.int64)
    similarities = np.concatenate(
        [
            asked @ features[start : start + _WRITTEN_AT_ONCE].astype(np.int64).T
            for start in range(0, len(features), _WRITTEN_AT_ONCE)
        ],
        axis=1,
    )
    ids = record_ids(stored.records)[: len(features)]
    return np.stack([ids[np.lexsort((ids, -row))[: stored.k]] for row in similarities])


def record_ids(count: int) -> NDArray[np.int64]:
    """Random ids in ascending order, as a shard keeps them."""
    steps = np.random.default_rng(1).integers(1, 2**20, count, dtype=np.int64)
    return np.cumsum(steps)


def _asked(features: NDArray[np.int16], queries: int) -> NDArray[np.int16]:
    """Of the first records, so that whatever part of the file is searched is asked the same."""
    return np.array(features[:queries])


def _search(order: Mapping[str, Any]) -> Searched:
    """Runs in the fresh interpreter."""
    whole = np.load(order["path"], mmap_mode="r")
    part = slice(order["first"], order["last"])
    ids = record_ids(order["records"])[part].copy()
    asked = _asked(whole, order["queries"])
    # The library and its workspace, or the cluster, are there before the clock runs.
    build_index(whole[:600], ids[:600].copy(), engine=order["engine"]).search(asked[:8], 1)
    with MemoryOfATree() as peak:
        began, cpu = time.perf_counter(), time.process_time()
        index = build_index(whole[part], ids, engine=order["engine"], memory_limit_bytes=LIMIT_BYTES)
        found = index.search(asked, order["k"])
        seconds, cpu_s = time.perf_counter() - began, time.process_time() - cpu
    np.savez(order["found"], record_ids=found.record_ids, similarities=found.similarities)
    return Searched(seconds, cpu_s, peak.bytes, order["found"])


if __name__ == "__main__":
    sys.stdout.write(json.dumps(asdict(_search(json.loads(sys.argv[1])))))
