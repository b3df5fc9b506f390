"""The index: records in blocks, searched by an engine, exact under deletions and memory limits.

One class serves three situations, because in each of them the neighbours are the smallest keys (`keys`)
over some blocks of records, and smallest keys can be merged:

* everything in memory: one block, loaded when the index is built;
* a memory limit below the shard's size: blocks are loaded from the features during the search, in the
  order of the file, and dropped again;
* k above what the engine returns at once (2048 for FAISS on a device): blocks of at most that size, each of
  which can be ranked completely.

Removed records are tombstones at first: with t of them, the k + t first records contain the k first living
ones. When they become many, the blocks are loaded anew without them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from feature_store.index.engine import Block, Engine
from feature_store.index.geometry import check_count, check_features, check_record_ids
from feature_store.index.keys import NO_KEY, merge, ranks_of, similarities_of
from feature_store.index.mapped import unmap_pages
from feature_store.index.memory import GATHER_BYTES, BlockPlan, MemoryBudget
from feature_store.index.protocol import NO_RECORD, NO_SIMILARITY, Neighbors
from feature_store.index.records import Records
from feature_store.index.ties import first_keys
from labeler.errors import UnsafeIndex

_MANY_TOMBSTONES = 64
_DECODED_AT_ONCE = 1 << 16
_CHECKED_QUERIES = 16


@dataclass(frozen=True, eq=False)
class _Piece:
    """A loaded block, and its records' ranks, ascending."""

    block: Block
    ranks: NDArray[np.int64]


class StoredIndex:
    """A NeighborIndex over features that stay where they are.

    Args:
        features: int16 (n, d), n may be 0; in memory or memory-mapped. Kept by reference and read again
            later, so it must not change.
        record_ids: int64 (n,), unique, 0 or more.
        engine: what scores a block.
        memory_limit_bytes: see `memory`; None for no limit.

    Raises:
        BadData: see geometry.check_features and check_record_ids.
        InvalidSetting: a limit out of bounds.
    """

    def __init__(
        self,
        features: NDArray[np.int16],
        record_ids: NDArray[np.int64],
        engine: Engine,
        *,
        memory_limit_bytes: int | None = None,
    ) -> None:
        check_features(features)
        check_record_ids(record_ids, len(features))
        self._features = features
        self._records = Records(record_ids)
        self._engine = engine
        if memory_limit_bytes is not None:
            check_count(memory_limit_bytes, "memory_limit_bytes")
        self._budget = MemoryBudget(memory_limit_bytes, len(features), self.dimension)
        self._tombstones = 0
        self._resident: list[_Piece] | None = None
        if self._budget.keeps_records(engine):
            self._load_all()
        elif len(features):
            self._budget.plan(engine, found=1, resident=False)  # refuses a hopeless limit now, not at the first search

    @property
    def dimension(self) -> int:
        return int(self._features.shape[1])

    def __len__(self) -> int:
        return self._records.num_alive

    def search(self, queries: NDArray[np.int16], k: int) -> Neighbors:
        """See NeighborIndex.search."""
        check_features(queries, what="queries", dimension=self.dimension)
        k = check_count(k, "k")
        keys = np.full((len(queries), k), NO_KEY, dtype=np.int64)
        if len(queries) and len(self):
            plan, tombstones, pieces = self._pieces(k)
            for number, piece in enumerate(pieces):
                self._search_piece(piece, queries, keys, plan, tombstones=tombstones, nothing_yet=number == 0)
            self._check_exact(queries, keys)
        return self._decode(keys)

    def remove(self, record_ids: NDArray[np.int64], *, missing_ok: bool = False) -> int:
        """See NeighborIndex.remove."""
        removed = len(self._records.bury(record_ids, missing_ok=missing_ok))
        if self._resident is not None:
            self._tombstones += removed
            if self._tombstones > max(_MANY_TOMBSTONES, len(self) // _MANY_TOMBSTONES):
                self._load_all()
        return removed

    def _pieces(self, k: int) -> tuple[BlockPlan, int, Iterator[_Piece]]:
        """The blocks of a search, and how many removed records they may still hold.

        Those in memory if the engine can answer for them, else living records loaded one block after another.
        """
        found, limit = k + self._tombstones, self._engine.max_count
        if self._resident is not None:
            longest = max((len(piece.block) for piece in self._resident), default=0)
            if limit is None or min(found + 1, longest) <= limit:
                plan = self._budget.plan(self._engine, found=found, resident=True)
                return plan, self._tombstones, iter(self._resident)
        # Blocks no longer than the limit can be ranked completely, so k + 1 is never asked of the engine.
        most_rows = limit if limit is not None and k + 1 > limit else None
        plan = self._budget.plan(self._engine, found=k, resident=False, most_rows=most_rows)
        return plan, 0, self._load_blocks(plan)

    def _search_piece(
        self,
        piece: _Piece,
        queries: NDArray[np.int16],
        keys: NDArray[np.int64],
        plan: BlockPlan,
        *,
        tombstones: int,
        nothing_yet: bool,
    ) -> None:
        """Merge the best of one piece into `keys` (nq, k)."""
        k = keys.shape[1]
        count = min(k + tombstones, len(piece.block))
        for start in range(0, len(queries), plan.query_rows):
            some = slice(start, start + plan.query_rows)
            floats = queries[some].astype(np.float32, order="C")
            found = first_keys(piece.block, piece.ranks, floats, count, scratch_bytes=plan.scratch_bytes)
            if tombstones:
                found[~self._records.alive[ranks_of(found)]] = NO_KEY
                found.sort(axis=1)
            if nothing_yet:
                width = min(k, count)
                keys[some, :width] = found[:, :width]
            else:
                keys[some] = merge(keys[some], found, k)

    def _load_all(self) -> None:
        """Load every living record, and forget the tombstones."""
        self._resident = []  # the old blocks go first: two copies might not fit
        self._tombstones = 0
        rows = self._records.living_rows()
        if len(rows):
            self._resident = [self._load(rows, np.empty((len(rows), self.dimension), dtype=np.float32))]

    def _load_blocks(self, plan: BlockPlan) -> Iterator[_Piece]:
        """Load living records block by block into one buffer; a block is gone when the next one comes."""
        size = plan.block_rows or 1
        buffer = np.empty((size, self.dimension), dtype=np.float32)
        rows = self._records.living_rows()
        for start in range(0, len(rows), size):
            part = rows[start : start + size]
            yield self._load(part, buffer[: len(part)])

    def _load(self, rows: NDArray[np.int64], into: NDArray[np.float32]) -> _Piece:
        """Read records into a float32 matrix, in ascending order of rank, and hand it to the engine."""
        ranks = self._records.rank_of_row[rows]
        order = np.argsort(ranks)
        ranks, rows = ranks[order], rows[order]
        step = max(1, GATHER_BYTES // (4 * self.dimension))
        # Shards keep their rows in this order, and a slice is converted without a copy in between.
        in_order = len(rows) > 0 and int(rows[-1] - rows[0]) + 1 == len(rows) and bool((np.diff(rows) == 1).all())
        for start in range(0, len(rows), step):
            some = rows[start : start + step]
            into[start : start + step] = self._features[some[0] : some[-1] + 1] if in_order else self._features[some]
        unmap_pages(self._features)
        return _Piece(self._engine.load(into), ranks)

    def _check_exact(self, queries: NDArray[np.int16], keys: NDArray[np.int64]) -> None:
        """Recompute a few similarities in integers.

        Catches what no check at the door can see: a library told elsewhere in the process to multiply with
        less precision. Its neighbours would be plausible, and the guarantee void.
        """
        some = np.linspace(0, len(keys) - 1, min(len(keys), _CHECKED_QUERIES)).astype(np.int64)
        last = np.maximum((keys[some] != NO_KEY).sum(axis=1) - 1, 0)
        for column in (np.zeros_like(last), last):
            found = keys[some, column]
            present = found != NO_KEY
            rows = self._records.row_of_rank[ranks_of(found[present])]
            exact = np.vecdot(queries[some[present]].astype(np.int64), self._features[rows].astype(np.int64))
            unmap_pages(self._features)
            if not np.array_equal(exact, similarities_of(found[present])):
                raise UnsafeIndex(
                    f"similarities of engine {type(self._engine).__name__} are not exact integers; matrix products are "
                    "being rounded, which voids the privacy proof. Look for a reduced precision set in this process "
                    "(torch.set_float32_matmul_precision must be 'highest'), or for features changed since the index "
                    "was built; engine numpy does not depend on torch's settings"
                )

    def _decode(self, keys: NDArray[np.int64]) -> Neighbors:
        """Neighbours from keys; the array of keys becomes the array of record ids."""
        queries, k = keys.shape
        similarities = np.empty((queries, k), dtype=np.int32)
        rows = np.empty((queries, k), dtype=np.int64)
        step = max(1, _DECODED_AT_ONCE // k)
        for start in range(0, queries, step):
            part = keys[start : start + step]
            absent = part == NO_KEY if (part[:, -1] == NO_KEY).any() else None
            if absent is not None and not len(self._records.ids):
                part[:], similarities[start : start + step], rows[start : start + step] = (
                    NO_RECORD,
                    NO_SIMILARITY,
                    NO_RECORD,
                )
                continue
            ranks = ranks_of(part)
            if absent is not None:
                ranks[absent] = 0
            similarities[start : start + step] = similarities_of(part)
            rows[start : start + step] = self._records.row_of_rank[ranks]
            part[:] = self._records.ids[ranks]
            if absent is not None:
                part[absent] = NO_RECORD
                similarities[start : start + step][absent] = NO_SIMILARITY
                rows[start : start + step][absent] = NO_RECORD
        return Neighbors(record_ids=keys, similarities=similarities, rows=rows)
