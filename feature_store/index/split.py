"""An index of more records than a memory limit has tables for: part after part, each searched and forgotten.

The first k records of the whole are the first k of what the parts found, since the order of two records depends on no
third one. So a limit decides how often the shard is read, and never whether it can be answered from.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from feature_store.index.alive import Alive
from feature_store.index.engine import Engine
from feature_store.index.geometry import check_count, check_features
from feature_store.index.memory import rows_at_once
from feature_store.index.protocol import NO_RECORD, NO_SIMILARITY, Neighbors
from feature_store.index.stored import NO_IDS, StoredIndex

_BYTES_PER_MERGED = 96
"""Similarity, id and row of each neighbour, twice, with the order of them."""


class SplitIndex:
    """A NeighborIndex that keeps a mark for every record and builds everything else anew for each search.

    Args:
        features: int16 (n, d); in memory or memory-mapped. Kept by reference: must not change.
        record_ids: int64 (n,), unique, 0 or more.
        engine: what scores a block.
        memory_limit_bytes: see `memory`.
        removed: ids of records that are not there, as if they were removed later.
    """

    def __init__(
        self,
        features: NDArray[np.int16],
        record_ids: NDArray[np.int64],
        engine: Engine,
        *,
        memory_limit_bytes: int,
        removed: NDArray[np.int64] = NO_IDS,
    ) -> None:
        self._features = features
        self._ids = record_ids
        self._engine = engine
        self._limit = memory_limit_bytes
        self._step = rows_at_once(memory_limit_bytes)
        self._alive = Alive(record_ids, self._step)
        self._alive.remove(removed, missing_ok=False)
        self._check()

    @property
    def dimension(self) -> int:
        return int(self._features.shape[1])

    def __len__(self) -> int:
        return len(self._alive)

    def search(self, queries: NDArray[np.int16], k: int) -> Neighbors:
        """See NeighborIndex.search."""
        check_features(queries, what="queries", dimension=self.dimension)
        k = check_count(k, "k")
        best = no_neighbors(len(queries), k)
        at_once = max(1, self._limit // (8 * _BYTES_PER_MERGED * k))
        for part, index in self._parts():
            # A part is loaded once for all queries, and asked for no more records than it has.
            for start in range(0, len(queries), at_once):
                some = slice(start, start + at_once)
                merge_neighbors(best, some, index.search(queries[some], min(k, self._step)), part.start)
        return best

    def remove(self, record_ids: NDArray[np.int64], *, missing_ok: bool = False) -> int:
        """See NeighborIndex.remove."""
        removed = self._alive.remove(record_ids, missing_ok=missing_ok)
        self._check()
        return removed

    def _check(self) -> None:
        """Check every part now, so that no search has to."""
        for _ in self._parts(is_checked=False):
            pass

    def _parts(self, *, is_checked: bool = True) -> Iterator[tuple[slice, StoredIndex]]:
        for start in range(0, len(self._ids), self._step):
            part = slice(start, start + self._step)
            ids = np.asarray(self._ids[part])
            index = StoredIndex(
                self._features[part],
                ids,
                self._engine,
                memory_limit_bytes=self._limit,
                max_records=self._step,
                removed=ids[~self._alive.marks[part]],
                is_checked=is_checked,
            )
            yield part, index


def no_neighbors(queries: int, k: int) -> Neighbors:
    """What was found before anything was searched."""
    return Neighbors(
        record_ids=np.full((queries, k), NO_RECORD, dtype=np.int64),
        similarities=np.full((queries, k), NO_SIMILARITY, dtype=np.int32),
        rows=np.full((queries, k), NO_RECORD, dtype=np.int64),
    )


def merge_neighbors(best: Neighbors, some: slice, found: Neighbors, first_row: int) -> None:
    """Keep the first k of both, by (similarity descending, record id ascending); NO_SIMILARITY comes last.

    Args:
        best: of the parts so far; what is kept takes its place.
        some: the queries that `found` is about.
        found: of another part of the records.
        first_row: row of the whole at which that part begins.
    """
    k = best.record_ids.shape[1]
    rows = np.where(found.rows == NO_RECORD, NO_RECORD, found.rows + first_row)
    ids = np.concatenate([best.record_ids[some], found.record_ids], axis=1)
    similarities = np.concatenate([best.similarities[some], found.similarities], axis=1)
    order = np.lexsort((ids, -similarities), axis=1)[:, :k]
    best.record_ids[some] = np.take_along_axis(ids, order, axis=1)
    best.similarities[some] = np.take_along_axis(similarities, order, axis=1)
    best.rows[some] = np.take_along_axis(np.concatenate([best.rows[some], rows], axis=1), order, axis=1)
