"""Measures what a search under a memory limit really adds to a process.

The measurement runs in a fresh interpreter, over a shard it maps from a file. A thread reads the anonymous
resident memory (RssAnon in Linux's /proc/self/status) every half millisecond while the index is built and searched;
the engines leave it free to run. Mapped pages of the shard are page cache, which the system takes back when it
needs to, and are not counted. A small search comes first: it loads the matrix library and its fixed workspace.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import subprocess
import sys
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

import numpy as np

from feature_store.index.build import build_index, engine_of_processor, products_of
from labeler.errors import InvalidSetting, LabelerError

_STATUS = Path("/proc/self/status")


@dataclass(frozen=True)
class MemoryUse:
    """What one search used.

    Attributes:
        shard_bytes: the features on disk (int16).
        limit_bytes: the limit that was set.
        added_bytes: most anonymous memory added while building and searching, less what was returned.
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
    if not _STATUS.exists():
        raise InvalidSetting(f"measuring memory needs Linux's {_STATUS}")
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
            [sys.executable, "-m", "benchmarks.search_memory", json.dumps(order)],
            capture_output=True,
            text=True,
            check=False,
            env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])},
        )
    finally:
        path.unlink()
    if done.returncode:
        raise LabelerError(f"the measuring process failed: {done.stderr.strip().splitlines()[-1:]}")
    return MemoryUse(**json.loads(done.stdout))


def _measure(path: str, queries: int, k: int, limit_bytes: int, engine: str) -> MemoryUse:
    """Runs in the fresh interpreter."""
    features = np.load(path, mmap_mode="r")
    if engine == "auto":
        engine = engine_of_processor(products_of(features.shape[1], max_records=None, searches=queries))
    record_ids = np.random.default_rng(1).permutation(len(features)).astype(np.int64)
    asked = np.array(features[:: max(1, len(features) // queries)][:queries])
    few = np.array(features[:600])
    few_at_a_time = 40 * 600 + (1 << 20) + 24 * few.shape[1] * 150
    for limit in (None, few_at_a_time):
        build_index(few, record_ids[:600], engine=engine, memory_limit_bytes=limit).search(asked[:100], k)
    # Heap that the warm-up freed but the allocator kept would be used again unseen.
    ctypes.CDLL(None).malloc_trim(0)
    with _PeakMemory() as peak:
        began = time.perf_counter()
        found = build_index(features, record_ids, engine=engine, memory_limit_bytes=limit_bytes).search(asked, k)
        seconds = time.perf_counter() - began
    returned = found.record_ids.nbytes + found.similarities.nbytes + found.rows.nbytes
    added = peak.bytes - peak.before_bytes - returned
    return MemoryUse(int(features.nbytes), limit_bytes, added, returned, seconds)


class _Watch:
    """Looks at memory in a thread for as long as the context lasts.

    Attributes:
        bytes: most anonymous memory that was seen.
    """

    def __init__(self) -> None:
        self.bytes = 0
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    def _watch(self) -> None:
        raise NotImplementedError


class _PeakMemory(_Watch):
    """Watches this process, which had `before_bytes` when the watch began."""

    def __init__(self) -> None:
        super().__init__()
        self.before_bytes = self.bytes = _anonymous_bytes()

    def _watch(self) -> None:
        while not self._done.wait(0.0005):
            self.bytes = max(self.bytes, _anonymous_bytes())


class MemoryOfATree(_Watch):
    """Watches this process and all that it starts, each by itself: `bytes` is the most that any one of them had."""

    def _watch(self) -> None:
        tree = [os.getpid()]
        looked = 0
        while True:
            # Who was started is looked up seldom, what they use often.
            if looked % 50 == 0:
                tree = _with_descendants(os.getpid())
            looked += 1
            self.bytes = max(self.bytes, *(_anonymous_bytes_of(pid) for pid in tree))
            if self._done.wait(0.005):
                return


def _with_descendants(root: int) -> list[int]:
    parents = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with contextlib.suppress(OSError):
                # The name stands in parentheses and may hold anything.
                parents[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
    tree = [root]
    for pid in tree:
        tree += [child for child, parent in parents.items() if parent == pid]
    return tree


def _anonymous_bytes_of(pid: int) -> int:
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("RssAnon:"):
                return int(line.split()[1]) * 1024
    return 0


def _anonymous_bytes() -> int:
    for line in _STATUS.read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise InvalidSetting(f"{_STATUS} does not tell anonymous memory; Linux 4.5 or later does")


if __name__ == "__main__":
    sys.stdout.write(json.dumps(asdict(_measure(**json.loads(sys.argv[1])))))
