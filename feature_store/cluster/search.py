"""An index whose parts are searched by actors of a Ray cluster, one a part; the answer is that of one process.

The first k records of the whole are the first k of what the parts found, since the order of two records depends on no
third one (`feature_store.index.split`). So the cluster decides how long a search takes, and nothing else:

* `ready`, before anything is charged: lost parts are begun anew, and it is refused unless every part answers;
* `search`, after the charge, always answers: what is lost on the way is begun anew (`held`), and where the cluster
  itself is lost, this process reads the same files alone.

Workers map the files of the shard, so they need them under the same path. Queries and neighbours travel between the
processes of one party, and lie in no file.
"""

from __future__ import annotations

import logging
import secrets
import weakref
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from feature_store.cluster import held
from feature_store.cluster.driver import Driver, shared_driver
from feature_store.cluster.held import ALONE_BYTES, IN_EACH_WORKER, HeldIndex
from feature_store.cluster.rows import rows_of
from feature_store.index.alive import Alive
from feature_store.index.build import build_index
from feature_store.index.geometry import check_count, check_features, check_record_ids
from feature_store.index.protocol import NeighborIndex, Neighbors
from labeler.errors import LabelerError, Unavailable

log = logging.getLogger("labeler.cluster")

_FOUND_AT_ONCE: Final = 1 << 20
"""Neighbours of each part that are on the way together: some 20 MiB a part."""

_IDS_AT_ONCE: Final = 1 << 20


class ClusterIndex:
    """A NeighborIndex whose parts lie in the processes of a cluster; see the module.

    Args:
        features: int16 (n, d); those of a shard in parts make parts of whole files. Kept by reference: must not change.
        record_ids: int64 (n,), unique, 0 or more.
        address: of the party's cluster; one of this process's own where absent.
        memory_limit_bytes: of each part; see `feature_store.index.memory`.
        driver: of the cluster; the one that all indexes of this process share where absent.
    """

    def __init__(
        self,
        features: NDArray[np.int16],
        record_ids: NDArray[np.int64],
        *,
        address: str | None = None,
        memory_limit_bytes: int | None = None,
        driver: Driver | None = None,
    ) -> None:
        check_record_ids(record_ids, len(features))
        self._features = features
        self._ids = record_ids
        self._limit = memory_limit_bytes
        self._alive = Alive(record_ids, _IDS_AT_ONCE)
        self._driver = driver or shared_driver(beside=_folder_of(features), address=address)
        self._key = ""
        self._begun_in: int | None = None

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
                processes: tuple[int, ...] = self._ask(HeldIndex.loaded)
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
        step = max(1, _FOUND_AT_ONCE // k)
        blocks = [queries[start : start + step] for start in range(0, max(1, len(queries)), step)]
        try:
            found = [self._ask(HeldIndex.search, np.ascontiguousarray(block), k) for block in blocks]
        except LabelerError as error:
            log.warning("the cluster is lost; this process searches alone", extra={"sentence": str(error)})
            return self._alone().search(queries, k)
        return Neighbors(*(np.concatenate([getattr(one, name) for one in found]) for name in _FIELDS))

    def remove(self, record_ids: NDArray[np.int64], *, missing_ok: bool = False) -> int:
        """See NeighborIndex.remove. Parts that were loaded are loaded anew without them."""
        count = self._alive.remove(record_ids, missing_ok=missing_ok)
        if count and self._key:
            _over.append((self._driver, self._key))
            self._key = ""
        return count

    def _ask(self, call: Callable[..., Any], *arguments: Any) -> Any:
        """What the index in the cluster answers; it is begun where there is none."""
        found = self._driver.cluster
        for number in [number for number, (driver, _) in enumerate(_over) if driver is self._driver][::-1]:
            self._driver.ask(held.forget, _over[number][1])
            del _over[number]
        if not self._key or self._begun_in != self._driver.process:
            key = secrets.token_hex(8)
            gone = np.asarray(self._ids[~self._alive.marks])
            self._driver.ask(held.begin, key, rows_of(self._features), rows_of(self._ids), gone, self._limit, found)
            weakref.finalize(self, _over.append, (self._driver, key))
            self._key, self._begun_in = key, self._driver.process
        return self._driver.ask(held.asked_of, self._key, call, *arguments)

    def _alone(self) -> NeighborIndex:
        """The same over the same files, in this process."""
        limit = self._limit or ALONE_BYTES
        gone = np.asarray(self._ids[~self._alive.marks])
        return build_index(self._features, self._ids, engine=IN_EACH_WORKER, memory_limit_bytes=limit, removed=gone)


_FIELDS: Final = ("record_ids", "similarities", "rows")

_over: deque[tuple[Driver, str]] = deque()
"""Indexes that nobody has any more; whoever asks next lets them go."""


def _folder_of(features: NDArray[np.int16]) -> Path | None:
    rows = rows_of(features)
    return rows.files[0].parent if rows.files else None
