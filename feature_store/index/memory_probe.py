"""Measures what a search under a memory limit really adds to a process.

The measurement runs in a fresh interpreter, over a shard it maps from a file. The kernel's own high-water mark
of resident memory is reset before the index is built (Linux: 5 written to /proc/self/clear_refs, then VmHWM) and
read after the search. It counts everything resident, mapped pages of the shard too, so it is an upper
bound of what `memory` promises. A small search comes first: it loads the matrix library and its fixed workspace.
"""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from feature_store.index.build import build_index
from feature_store.index.mapped import unmap_pages
from labeler.errors import InvalidSetting, LabelerError


@dataclass(frozen=True)
class MemoryUse:
    """What one search used.

    Attributes:
        shard_bytes: the features on disk (int16).
        limit_bytes: the limit that was set.
        added_bytes: most resident memory added while building and searching, less what was returned.
        returned_bytes: size of the Neighbors returned.
        seconds: building and searching.
    """

    shard_bytes: int
    limit_bytes: int
    added_bytes: int
    returned_bytes: int
    seconds: float


def measure_search_memory(
    folder: Path,
    *,
    records: int = 20_000,
    dimension: int = 1280,
    queries: int = 500,
    k: int = 50,
    limit_bytes: int | None = None,
    engine: str = "auto",
) -> MemoryUse:
    """Search a shard of synthetic features that is larger than the memory limit, in a process of its own.

    Args:
        folder: where the features are written (records * dimension * 2 bytes) and removed again.
        limit_bytes: a quarter of the shard if None.

    Raises:
        InvalidSetting: not on Linux.
        LabelerError: the process failed; its last line is in the message.
    """
    if not Path("/proc/self/clear_refs").exists():
        raise InvalidSetting("measuring resident memory needs Linux's /proc/self/clear_refs")
    path = folder / "memory_probe_features.npy"
    generator = np.random.default_rng(0)
    shard = np.lib.format.open_memmap(path, mode="w+", dtype=np.int16, shape=(records, dimension))
    bound = int(2048 / np.sqrt(dimension))
    for start in range(0, records, 1000):
        shard[start : start + 1000] = generator.integers(-bound, bound + 1, shard[start : start + 1000].shape)
    shard.flush()
    shard_bytes = int(shard.nbytes)
    del shard
    order = {
        "path": str(path),
        "queries": queries,
        "k": k,
        "limit_bytes": limit_bytes or shard_bytes // 4,
        "engine": engine,
    }
    try:
        done = subprocess.run(
            [sys.executable, "-m", "feature_store.index.memory_probe", json.dumps(order)],
            capture_output=True,
            text=True,
            check=False,
            env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])},
        )
    finally:
        path.unlink()
    if done.returncode:
        raise LabelerError(f"the measuring process failed: {done.stderr.strip().splitlines()[-1:]}")
    return MemoryUse(**json.loads(done.stdout))


def _measure(path: str, queries: int, k: int, limit_bytes: int, engine: str) -> MemoryUse:
    """Runs in the fresh interpreter."""
    features = np.load(path, mmap_mode="r")
    record_ids = np.random.default_rng(1).permutation(len(features)).astype(np.int64)
    asked = np.array(features[:: max(1, len(features) // queries)][:queries])
    build_index(np.array(features[:256]), record_ids[:256], engine=engine).search(asked[:32], k)
    # Heap that the warm-up freed but the allocator kept would be used again unseen.
    ctypes.CDLL(None).malloc_trim(0)
    unmap_pages(features)
    before = _status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    began = time.perf_counter()
    found = build_index(features, record_ids, engine=engine, memory_limit_bytes=limit_bytes).search(asked, k)
    seconds = time.perf_counter() - began
    returned = found.record_ids.nbytes + found.similarities.nbytes + found.rows.nbytes
    added = _status("VmHWM") - before - returned
    return MemoryUse(int(features.nbytes), limit_bytes, added, returned, seconds)


def _status(field: str) -> int:
    """A size from /proc/self/status, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise InvalidSetting(f"/proc/self/status has no field {field}")


if __name__ == "__main__":
    sys.stdout.write(json.dumps(asdict(_measure(**json.loads(sys.argv[1])))))
