"""A party's records in parts, each searched by an actor of a Ray cluster; the answer is that of one process.

The first k records of the whole are the first k of what the parts found, since the order of two records depends on no
third one. So the cluster decides how long a search takes, and nothing else.

* `ready`, before anything is charged. If a part is lost, all parts restart, once. It is refused unless every part
  answers.
* `search`, after the charge, always answers. Lost parts restart once, and then this process searches alone.

Workers map the files of the shard, so they need them under the same path. Queries and neighbors travel between the
processes of one party, and lie in no file. No log and no error says what was found.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from feature_store.cluster.driver import Driver, cluster_here, ray_module, shared_driver
from feature_store.index.build import build_index, is_cluster, load_engine
from feature_store.index.definition import NeighborIndex, Neighbors, check_count, check_features, check_record_ids
from feature_store.index.exact_index import NO_IDS, remove_records
from labeler.errors import LabelerError, Unavailable

_ALONE_BYTES: Final = 1 << 30
"""Memory of records that one process searches alone, where no limit is set: the shard may be larger than that."""

_START_S: Final = 600.0
"""Patience until every part is loaded, before a charge."""

_FOUND_AT_ONCE: Final = 1 << 20
"""Neighbors of each part that are on the way together: some 20 MiB a part."""

log = logging.getLogger("labeler.cluster")


def file_of(array: NDArray[Any]) -> Path | NDArray[Any]:
    """Return the .npy file that an array maps as a whole; any other array itself."""
    if isinstance(array, np.memmap) and isinstance(array.base, mmap.mmap) and array.mode == "r":
        file = Path(str(array.filename)).resolve()
        if file.suffix == ".npy":
            return file
    return array


def mapped(rows: Path | NDArray[Any]) -> NDArray[Any]:
    """Return the array of `file_of` in another process, memory-mapped and read-only if it has one.

    Raises:
        OSError, ValueError: this machine does not have the file, or a damaged one.
    """
    return np.load(rows, mmap_mode="r", allow_pickle=False) if isinstance(rows, Path) else rows


@dataclass(frozen=True, eq=False)
class _Records:
    """The content of an index, as it travels. Private; does not print.

    Attributes:
        key: of these records without those removed; another whenever one is.
        features, record_ids: of all records, see `file_of`.
        gone: ids of removed records.
        limit_bytes: memory of each part.
    """

    key: str
    features: Path | NDArray[np.int16] = field(repr=False)
    record_ids: Path | NDArray[np.int64] = field(repr=False)
    gone: NDArray[np.int64] = field(repr=False)
    limit_bytes: int | None

    @property
    def place(self) -> str:
        """An index of the same place replaces the other: of one shard there is one at a time, whatever its files."""
        return str(self.features.parent) if isinstance(self.features, Path) else self.key


def _index(
    features: NDArray[np.int16], ids: NDArray[np.int64], gone: NDArray[np.int64], limit: int | None
) -> NeighborIndex:
    """The index over some records, in this process: the fastest engine, on the GPU that Ray gives if it gives one."""
    gone = np.asarray(ids)[np.isin(ids, gone)]
    return build_index(features, np.ascontiguousarray(ids), memory_limit_bytes=limit, removed=gone)


def build_index_of(
    engine: str,
    features: NDArray[np.int16],
    record_ids: NDArray[np.int64],
    *,
    memory_limit_bytes: int | None = None,
    max_records: int | None = None,
    removed: NDArray[np.int64] = NO_IDS,
) -> NeighborIndex:
    """Build the index of any engine: of a cluster that this process starts ("ray"), of the party's cluster there
    ("ray:HOST:PORT"), or of this process (see `feature_store.index.build_index`, also for arguments and errors).
    """
    limit = memory_limit_bytes
    if not is_cluster(engine):
        return build_index(
            features, record_ids, engine=engine, memory_limit_bytes=limit, max_records=max_records, removed=removed
        )
    load_engine(engine)
    address = engine.partition(":")[2] or None
    return ClusterIndex(features, record_ids, address=address, memory_limit_bytes=limit, removed=removed)


class ClusterIndex:
    """A NeighborIndex whose parts lie in the processes of a cluster; see the module.

    Args:
        features: int16 (n, d). Kept by reference: must not change.
        record_ids: int64 (n,), unique, 0 or more.
        address: of the party's cluster; this process's own where absent.
        memory_limit_bytes: of each part; see `feature_store.index.exact_index`.
        removed: ids of records that are not there.
        driver: of the cluster; the one that all indexes of this process share where absent.
    """

    def __init__(
        self,
        features: NDArray[np.int16],
        record_ids: NDArray[np.int64],
        *,
        address: str | None = None,
        memory_limit_bytes: int | None = None,
        removed: NDArray[np.int64] = NO_IDS,
        driver: Driver | None = None,
    ) -> None:
        check_features(features[:1])  # its kind; every part checks its own rows
        check_record_ids(record_ids, len(features))
        self._features = features
        self._ids = record_ids
        self._limit = memory_limit_bytes
        self._alive = np.ones(len(record_ids), dtype=np.bool_)
        self.remove(removed)
        file = self._records.features
        beside = file.parent if isinstance(file, Path) else None
        self._driver = driver or shared_driver(beside=beside, address=address)

    @property
    def dimension(self) -> int:
        return int(self._features.shape[1])

    def __len__(self) -> int:
        return int(np.count_nonzero(self._alive))

    def ready(self) -> tuple[int, ...]:
        """Have every part loaded.

        Returns:
            The numbers of the parts' processes, in the order of rows.

        Raises:
            InvalidSetting: Ray is not installed.
            Unavailable: there is no cluster, or not every part answers in time.
        """
        try:
            processes: tuple[int, ...] = self._ask_twice(_loaded)
        except Unavailable:
            self._driver.end()
            raise Unavailable(
                "not every part of the records can be searched now; look at the cluster, and ask again"
            ) from None
        return processes

    def search(self, queries: NDArray[np.int16], k: int) -> Neighbors:
        """See NeighborIndex.search."""
        check_features(queries, what="queries", dimension=self.dimension)
        k = check_count(k, "k")
        best = Neighbors.none(len(queries), k)
        step = max(1, _FOUND_AT_ONCE // k)
        try:
            for start in range(0, len(queries), step):
                some = slice(start, start + step)
                best.merge(some, self._ask_twice(_searched, np.ascontiguousarray(queries[some]), k))
        except LabelerError as error:
            log.warning("the cluster is lost; this process searches alone", extra={"sentence": str(error)})
            # Of the rows that this process has mapped: their files may have been erased since.
            alone = _index(self._features, self._ids, self._records.gone, self._limit or _ALONE_BYTES)
            return alone.search(queries, k)
        return best

    def _ask_twice(self, call: Callable[..., Any], *arguments: Any) -> Any:
        """Ask the cluster, and once more where something was lost: then all parts restart."""
        try:
            return self._driver.ask(call, self._records, *arguments)
        except Unavailable as error:
            log.warning("not every part of the records can be searched", extra={"sentence": str(error)})
        return self._driver.ask(call, self._records, *arguments)

    def remove(self, record_ids: NDArray[np.int64], *, missing_ok: bool = False) -> int:
        """See NeighborIndex.remove. Loaded parts are loaded again without them."""
        count = remove_records(self._alive, self._ids, record_ids, missing_ok=missing_ok)
        gone = np.asarray(self._ids[~self._alive])
        self._records = _Records(secrets.token_hex(8), file_of(self._features), file_of(self._ids), gone, self._limit)
        return count


# The side of the process that drives Ray.


class _Worker:
    """An actor with one part of the records."""

    def __init__(self, records: _Records, start: int, stop: int) -> None:
        features, ids = mapped(records.features)[start:stop], mapped(records.record_ids)[start:stop]
        self._index = _index(features, ids, records.gone, records.limit_bytes)

    def process(self) -> int:
        """The number of this process, which only answers once the part is loaded."""
        return os.getpid()

    def search(self, queries: NDArray[np.int16], k: int) -> Neighbors:
        return self._index.search(queries, k)


_held: dict[str, tuple[str, list[tuple[int, Any]]]] = {}
"""By their place, the key of the records that are searched, and of each part its first row and its actor."""


def _parts(records: _Records) -> list[tuple[int, Any]]:
    """The parts of an index: as many as there are GPUs, or else processors."""
    key, parts = _held.get(records.place, ("", []))
    if key != records.key:
        _drop(records)
        count, ray = len(mapped(records.record_ids)), ray_module()
        most = min(count, cluster_here().gpus or cluster_here().cpus)
        edges = [count * number // most for number in range(most + 1)] if most else []
        worker = ray.remote(_Worker).options(
            max_restarts=0,  # what was removed must not come back: parts restart here
            scheduling_strategy="SPREAD",
            num_gpus=1 if cluster_here().gpus else 0,
            # All are asked at once and none in between, so none reserves a processor; each has one thread.
            num_cpus=0,
        )
        shared = ray.put(records)
        parts = [(start, worker.remote(shared, start, stop)) for start, stop in pairwise(edges)]
        _held[records.place] = records.key, parts
    return parts


def _drop(records: _Records) -> None:
    """Forget the parts of an index, and end their actors."""
    for _, actor in _held.pop(records.place, ("", []))[1]:
        with contextlib.suppress(ray_module().exceptions.RayError):
            ray_module().kill(actor)


def _answers(records: _Records, call: str, *arguments: Any, patience_s: float | None = None) -> list[tuple[int, Any]]:
    """Return each part's first row, and what its actor answers.

    Raises:
        Unavailable: a part was lost; the next question restarts all of them.
    """
    try:
        parts = _parts(records)
        asked = [getattr(actor, call).remote(*arguments) for _, actor in parts]
        return list(zip([start for start, _ in parts], ray_module().get(asked, timeout=patience_s), strict=True))
    except ray_module().exceptions.RayError:
        _drop(records)
        raise Unavailable("a part of the records was lost") from None


def _loaded(records: _Records) -> tuple[int, ...]:
    """Return the number of each part's process, once all are loaded."""
    return tuple(number for _, number in _answers(records, "process", patience_s=_START_S))


def _searched(records: _Records, queries: NDArray[np.int16], k: int) -> Neighbors:
    best = Neighbors.none(len(queries), k)
    for start, found in _answers(records, "search", ray_module().put(queries), k):
        best.merge(slice(None), found, first_row=start)
    return best
