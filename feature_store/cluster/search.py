"""A party's records in parts, each searched by an actor of a Ray cluster; the answer is that of one process.

The first k records of the whole are the first k of what the parts found, since the order of two records depends on no
third one. So the cluster decides how long a search takes, and nothing else:

* `ready`, before anything is charged: lost parts are begun anew, and it is refused unless every part answers;
* `search`, after the charge, always answers: lost workers are restarted once, and what is lost again is searched in
  the process that drives Ray; where that is lost too, in this one.

Workers map the files of the shard, so they need them under the same path. Queries and neighbours travel between the
processes of one party, and lie in no file. No log and no error says what was found.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from feature_store.cluster.driver import Driver, cluster_here, ray_module, shared_driver
from feature_store.index.build import build_index
from feature_store.index.definition import NeighborIndex, Neighbors, check_count, check_features, check_record_ids
from feature_store.index.exact_index import NO_IDS, Alive
from feature_store.rows import JoinedFiles
from labeler.errors import LabelerError, Unavailable

_ALONE_BYTES: Final = 1 << 30
"""Memory of records that one process searches alone, where no limit is set: the shard may be larger than that."""

_START_S: Final = 600.0
"""Patience until every part is loaded, before a charge."""

_FOUND_AT_ONCE: Final = 1 << 20
"""Neighbours of each part that are on the way together: some 20 MiB a part."""

log = logging.getLogger("labeler.cluster")


@dataclass(frozen=True, eq=False)
class Rows:
    """Rows of a shard as another process of the same party gets them: mapped, where they lie in files. Private.

    Attributes:
        files: that hold them, one behind the other; empty where they lie in no file.
        offset: byte of the files at which they begin.
        shape, dtype: of the array.
        array: the rows themselves, where they lie in no file.
    """

    files: tuple[Path, ...] = field(repr=False)
    offset: int = field(repr=False)
    shape: tuple[int, ...] = field(repr=False)
    dtype: np.dtype[Any]
    array: NDArray[Any] | None = field(default=None, repr=False)

    def open(self) -> NDArray[Any]:
        """The rows, memory-mapped and read-only where they lie in files.

        Raises:
            OSError: a file is not there on this machine.
            ValueError: it is shorter than it was.
        """
        if self.array is not None:
            return self.array
        if len(self.files) == 1:
            return np.memmap(self.files[0], mode="r", dtype=self.dtype, offset=self.offset, shape=self.shape)
        first = self.offset // self.dtype.itemsize
        numbers: NDArray[Any] = np.asarray(JoinedFiles(self.files)).view(self.dtype)
        return numbers[first : first + int(np.prod(self.shape))].reshape(self.shape)


def rows_of(array: NDArray[Any]) -> Rows:
    """Where an array lies: in files, if it is a map of them or a slice of one in one piece; else in memory."""
    owner: object = array
    while isinstance(owner, np.ndarray) and owner.base is not None and not isinstance(owner.base, mmap.mmap):
        owner = owner.base
    if array.flags.c_contiguous and array.size:
        address = array.__array_interface__["data"][0]
        if isinstance(owner, np.memmap) and owner.filename is not None and owner.mode == "r":
            offset = address - owner.__array_interface__["data"][0] + owner.offset
            return Rows((Path(str(owner.filename)).resolve(),), offset, array.shape, array.dtype)
        if isinstance(owner, JoinedFiles):
            start = address - owner.__array_interface__["data"][0]
            first = int(np.searchsorted(owner.starts, start, side="right")) - 1
            last = int(np.searchsorted(owner.starts, start + array.nbytes, side="left"))
            files = tuple(file.resolve() for file in owner.files[first:last])
            return Rows(files, start - owner.starts[first], array.shape, array.dtype)
    return Rows((), 0, array.shape, array.dtype, np.asarray(array))


@dataclass(frozen=True, eq=False)
class _Records:
    """What an index is made of, as it travels. Private; does not print.

    Attributes:
        key: of these records without those removed; another whenever one is.
        features, record_ids: of all records.
        gone: ids of removed records.
        limit_bytes: memory of each part.
    """

    key: str
    features: Rows = field(repr=False)
    record_ids: Rows = field(repr=False)
    gone: NDArray[np.int64] = field(repr=False)
    limit_bytes: int | None

    @property
    def place(self) -> str:
        """An index of the same place takes the other's: of one shard there is one at a time."""
        return str(self.features.files[0]) if self.features.files else self.key

    def part(self, start: int, stop: int) -> _Records:
        ids = self.record_ids.open()[start:stop]
        gone = np.asarray(ids)[np.isin(ids, self.gone)]
        return _Records(self.key, rows_of(self.features.open()[start:stop]), rows_of(ids), gone, self.limit_bytes)

    def index(self) -> NeighborIndex:
        """The index over them, in this process: the fastest engine, on the GPU that Ray gives where it gives one."""
        ids = np.ascontiguousarray(self.record_ids.open())
        return build_index(self.features.open(), ids, memory_limit_bytes=self.limit_bytes, removed=self.gone)


class ClusterIndex:
    """A NeighborIndex whose parts lie in the processes of a cluster; see the module.

    Args:
        features: int16 (n, d). Kept by reference: must not change.
        record_ids: int64 (n,), unique, 0 or more.
        address: of the party's cluster; one of this process's own where absent.
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
        self._alive = Alive(record_ids)
        self._alive.remove(removed, missing_ok=False)
        self._records = self._as_they_are()
        files = self._records.features.files
        self._driver = driver or shared_driver(beside=files[0].parent if files else None, address=address)

    @property
    def dimension(self) -> int:
        return int(self._features.shape[1])

    def __len__(self) -> int:
        return len(self._alive)

    def ready(self) -> tuple[int, ...]:
        """Have every part loaded, and those begun anew that were lost.

        Returns:
            The numbers of the parts' processes, in the order of rows.

        Raises:
            InvalidSetting: Ray is not installed.
            Unavailable: there is no cluster, or not every part answers in time.
        """
        for is_last in (False, True):
            try:
                processes: tuple[int, ...] = self._driver.ask(_loaded, self._records)
                return processes
            except Unavailable as error:
                log.warning("not every part of the records can be searched", extra={"sentence": str(error)})
                if not is_last:
                    self._driver.end()
        raise Unavailable("not every part of the records can be searched now; look at the cluster, and ask again")

    def search(self, queries: NDArray[np.int16], k: int) -> Neighbors:
        """See NeighborIndex.search."""
        check_features(queries, what="queries", dimension=self.dimension)
        k = check_count(k, "k")
        best = Neighbors.none(len(queries), k)
        step = max(1, _FOUND_AT_ONCE // k)
        try:
            for start in range(0, len(queries), step):
                some = slice(start, start + step)
                best.merge(some, self._driver.ask(_searched, self._records, np.ascontiguousarray(queries[some]), k))
        except LabelerError as error:
            log.warning("the cluster is lost; this process searches alone", extra={"sentence": str(error)})
            return _alone(self._records).search(queries, k)
        return best

    def remove(self, record_ids: NDArray[np.int64], *, missing_ok: bool = False) -> int:
        """See NeighborIndex.remove. Parts that were loaded are loaded anew without them."""
        count = self._alive.remove(record_ids, missing_ok=missing_ok)
        self._records = self._as_they_are()
        return count

    def _as_they_are(self) -> _Records:
        key = secrets.token_hex(8)
        return _Records(key, rows_of(self._features), rows_of(self._ids), self._alive.gone, self._limit)


def _alone(records: _Records) -> NeighborIndex:
    limit = records.limit_bytes or _ALONE_BYTES
    return _Records(records.key, records.features, records.record_ids, records.gone, limit).index()


# The side of the process that drives Ray.


class _Part:
    """Some rows, and the actor that has them loaded; None while there is none."""

    def __init__(self, records: _Records, start: int, stop: int) -> None:
        self._all, self.start, self._stop = records, start, stop
        self._actor: Any = None

    def ask(self, call: str, *arguments: Any) -> Any:
        """A question on its way to the actor, which is begun where there is none; None where nobody takes it."""
        with contextlib.suppress(ray_module().exceptions.RayError):
            if self._actor is None:
                options = {
                    "max_restarts": 0,  # what was removed must not come back: a part is begun anew here
                    "scheduling_strategy": "SPREAD",
                    "num_gpus": 1 if cluster_here().gpus else 0,
                    # All are asked at once and none in between, so none reserves a processor; each has one thread.
                    "num_cpus": 0,
                }
                self._actor = ray_module().remote(_Worker).options(**options).remote(self.records)
            return getattr(self._actor, call).remote(*arguments)
        return None

    @property
    def records(self) -> _Records:
        return self._all.part(self.start, self._stop)

    def drop(self) -> None:
        """Forget the actor, and end it where it still runs."""
        gone, self._actor = self._actor, None
        if gone is not None:
            with contextlib.suppress(ray_module().exceptions.RayError):
                ray_module().kill(gone)


class _Worker:
    """An actor with one part of the records."""

    def __init__(self, records: _Records) -> None:
        self._index = records.index()

    def process(self) -> int:
        """The number of this process: whoever gets it knows that the part is loaded."""
        return os.getpid()

    def search(self, queries: NDArray[np.int16], k: int) -> Neighbors:
        return self._index.search(queries, k)


_held: dict[str, tuple[str, list[_Part]]] = {}
"""By their place, the key and the parts of the records that are searched."""


def _parts(records: _Records) -> list[_Part]:
    """The parts of an index: as many as there are GPUs, or else processors."""
    key, parts = _held.get(records.place, ("", []))
    if key != records.key:
        for part in parts:
            part.drop()
        count = records.features.shape[0]
        most = min(count, cluster_here().gpus or cluster_here().cpus)
        edges = [count * number // most for number in range(most + 1)] if most else []
        parts = [_Part(records, start, stop) for start, stop in pairwise(edges)]
        _held[records.place] = records.key, parts
    return parts


def _loaded(records: _Records) -> tuple[int, ...]:
    """The number of each part's process, once all are loaded; lost ones are begun anew, once.

    Raises:
        Unavailable: not every part is there.
    """
    until = time.monotonic() + _START_S

    def answer(asked: Any) -> int:
        return int(ray_module().get(asked, timeout=max(0.0, until - time.monotonic())))

    def refuse(_: _Part) -> int:
        raise Unavailable("a part of the records was lost")

    found = _each_asked(_parts(records), answer, refuse, "process")
    return tuple(number for _, number in found)


def _searched(records: _Records, queries: NDArray[np.int16], k: int) -> Neighbors:
    best = Neighbors.none(len(queries), k)
    found = _each_asked(
        _parts(records),
        ray_module().get,
        lambda part: _alone(part.records).search(queries, k),
        "search",
        ray_module().put(queries),
        k,
    )
    for part, neighbors in found:
        best.merge(slice(None), neighbors, first_row=part.start)
    return best


def _each_asked(
    parts: list[_Part], answer: Callable[[Any], Any], otherwise: Callable[[_Part], Any], call: str, *arguments: Any
) -> list[tuple[_Part, Any]]:
    """What each part answers: its actor, another one in its place, or else what `otherwise` says."""
    found = []
    for part, asked in [(part, part.ask(call, *arguments)) for part in parts]:
        for is_last in (False, True):
            with contextlib.suppress(ray_module().exceptions.RayError):
                if asked is not None:
                    found.append((part, answer(asked)))
                    break
            part.drop()
            if is_last:
                found.append((part, otherwise(part)))
            else:
                asked = part.ask(call, *arguments)
    return found
