"""The parts of a shard's records in the actors of a cluster, as the process that drives Ray holds them.

What is lost on the way is begun anew and asked again; what is lost again is searched in this process, from the same
files. Private; no log and no error of it says what was found.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from feature_store.cluster.door import Cluster, ray_module
from feature_store.cluster.rows import Rows, part_edges, rows_of
from feature_store.index.build import build_index
from feature_store.index.protocol import Neighbors
from feature_store.index.split import merge_neighbors, no_neighbors
from labeler.errors import Unavailable

IN_EACH_WORKER: Final = "auto"
"""The engine of each part: the fastest where it runs, on the GPU that Ray gives to the actor if it gives one."""

ALONE_BYTES: Final = 1 << 30
"""Memory of a part that one process searches alone, where no limit is set: the shard may be larger than that."""

_START_S: Final = 600.0
"""Patience until every part is loaded, before a charge."""


class PartSearch:
    """One part of the records, in a process of its own: what runs in the cluster."""

    def __init__(self, features: Rows, record_ids: Rows, gone: NDArray[np.int64], limit_bytes: int | None) -> None:
        ids = np.ascontiguousarray(record_ids.open())
        self._index = build_index(
            features.open(), ids, engine=IN_EACH_WORKER, memory_limit_bytes=limit_bytes, removed=gone
        )

    def process(self) -> int:
        """The number of this process: whoever gets it knows that the part is loaded."""
        return os.getpid()

    def search(self, queries: NDArray[np.int16], k: int) -> tuple[NDArray[Any], ...]:
        """See NeighborIndex.search; rows are counted within the part."""
        found = self._index.search(queries, k)
        return found.record_ids, found.similarities, found.rows


@dataclass(eq=False)
class _Part:
    """A part, and the actor that has it loaded; None while there is none."""

    start: int
    stop: int
    actor: Any = field(default=None, repr=False)


class HeldIndex:
    """One index, in parts.

    Args:
        features, record_ids: see NeighborIndex.
        gone: ids of removed records.
        limit_bytes: memory of each part.
        found: the cluster; as many parts as it has GPUs, or else processors.
    """

    def __init__(
        self, features: Rows, record_ids: Rows, gone: NDArray[np.int64], limit_bytes: int | None, found: Cluster
    ) -> None:
        self._features = features.open()
        self._ids = record_ids.open()
        self._gone = gone
        self._limit = limit_bytes
        self._options = {
            "max_restarts": 0,  # what was removed must not come back: a part is begun anew here
            "scheduling_strategy": "SPREAD",
            "num_gpus": 1 if found.gpus else 0,
            # All are asked at once and none in between, so none reserves a processor; each has one thread.
            "num_cpus": 0,
        }
        edges = part_edges(self._features, found.gpus or found.cpus) if len(self._features) else [0]
        self._parts = [_Part(start, stop) for start, stop in pairwise(edges)]

    def loaded(self) -> tuple[int, ...]:
        """The number of each part's process, once all are loaded; lost ones are begun anew.

        Raises:
            Unavailable: not every part is there after a second attempt, or in time.
        """
        ray, until = ray_module(), time.monotonic() + _START_S
        for is_last in (False, True):
            processes = []
            for part, asked in [(part, self._actor(part).process.remote()) for part in self._parts]:
                try:
                    processes.append(int(ray.get(asked, timeout=max(0.0, until - time.monotonic()))))
                except ray.exceptions.RayError as error:
                    self._drop(part)
                    if is_last:
                        raise Unavailable(f"a part of the records was lost ({type(error).__name__})") from None
            if len(processes) == len(self._parts):
                break
        return tuple(processes)

    def search(self, queries: NDArray[np.int16], k: int) -> Neighbors:
        """See NeighborIndex.search."""
        best = no_neighbors(len(queries), k)
        shared = ray_module().put(queries)
        for part, asked in [(part, self._asked(part, shared, k)) for part in self._parts]:
            merge_neighbors(best, slice(None), Neighbors(*self._answer(part, asked, queries, k)), part.start)
        return best

    def end(self) -> None:
        """End every actor."""
        for part in self._parts:
            self._drop(part)

    def _answer(self, part: _Part, asked: Any, queries: NDArray[np.int16], k: int) -> tuple[NDArray[Any], ...]:
        """What a part finds: from its actor, from another one in its place, or else from this process."""
        ray = ray_module()
        for is_last in (False, True):
            with contextlib.suppress(ray.exceptions.RayError):
                if asked is not None:
                    answer: tuple[NDArray[Any], ...] = ray.get(asked)
                    return answer
            self._drop(part)
            asked = None if is_last else self._asked(part, queries, k)
        features, ids, gone = self._of(part)
        return PartSearch(features, ids, gone, self._limit or ALONE_BYTES).search(queries, k)

    def _asked(self, part: _Part, queries: Any, k: int) -> Any:
        """A question on its way; None where nobody takes it."""
        with contextlib.suppress(ray_module().exceptions.RayError):
            return self._actor(part).search.remote(queries, k)
        return None

    def _actor(self, part: _Part) -> Any:
        """Who has a part, begun where nobody has."""
        if part.actor is None:
            part.actor = ray_module().remote(PartSearch).options(**self._options).remote(*self._of(part), self._limit)
        return part.actor

    def _of(self, part: _Part) -> tuple[Rows, Rows, NDArray[np.int64]]:
        """What a part is begun with: its rows, their ids, and which of them were removed."""
        rows = slice(part.start, part.stop)
        ids = np.asarray(self._ids[rows])
        return rows_of(self._features[rows]), rows_of(self._ids[rows]), ids[np.isin(ids, self._gone)]

    def _drop(self, part: _Part) -> None:
        """Forget the actor of a part, and end it where it still runs."""
        gone, part.actor = part.actor, None
        if gone is not None:
            with contextlib.suppress(ray_module().exceptions.RayError):
                ray_module().kill(gone)


_held: dict[str, HeldIndex] = {}


def begin(key: str, *arguments: Any) -> None:
    """Hold an index under a key; see HeldIndex."""
    _held[key] = HeldIndex(*arguments)


def forget(key: str) -> None:
    """Let an index go, with its actors."""
    held = _held.pop(key, None)
    if held is not None:
        held.end()


def asked_of(key: str, call: Callable[..., Any], *arguments: Any) -> Any:
    """What a method of HeldIndex answers for the index of a key."""
    return call(_held[key], *arguments)
