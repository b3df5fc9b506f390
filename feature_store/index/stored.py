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

Every record is checked once to be found: four random queries, in full, when it is first loaded (`load_check`). A
device that fails, is full or does not compute exactly is left for the processor, at whatever time: an answer that is
charged is given.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from feature_store.index.engine import Block, DeviceEngine, DeviceFault, Engine, KeyedBlock
from feature_store.index.engine_numpy import NumpyEngine
from feature_store.index.gathered import GatheredRows
from feature_store.index.geometry import check_count, check_features, check_record_ids
from feature_store.index.keys import NO_KEY, merge, ranks_of, similarities_of
from feature_store.index.load_check import check_queries, reference_keys
from feature_store.index.mapped import unmap_pages
from feature_store.index.memory import GATHER_BYTES, BlockPlan, MemoryBudget
from feature_store.index.protocol import NO_RECORD, NO_SIMILARITY, Neighbors
from feature_store.index.records import BYTES_PER_RECORD, Records
from feature_store.index.ties import first_keys
from labeler.errors import UnsafeIndex

_MANY_TOMBSTONES = 64
_DECODED_AT_ONCE = 1 << 16
_CHECKED_QUERIES = 16
_GATHER_FREELY_BYTES = 1 << 23
_PROCESSOR_BYTES = 2 << 30
"""What a shard that a device was left with may add to memory, beside its tables, where nobody set a limit."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class _Piece:
    """A loaded block, and its records' ranks, ascending."""

    block: Block | KeyedBlock
    ranks: NDArray[np.int64]

    def first_keys(self, queries: NDArray[np.int16], count: int, *, scratch_bytes: int) -> NDArray[np.int64]:
        """Keys of the exact first records, int64 (nq, count), ascending."""
        if isinstance(self.block, KeyedBlock):
            return self.block.first_keys(queries, count)
        floats = queries.astype(np.float32, order="C")
        return first_keys(self.block, self.ranks, floats, count, scratch_bytes=scratch_bytes)


class StoredIndex:
    """A NeighborIndex over features that stay where they are.

    Args:
        features: int16 (n, d), n may be 0; in memory or memory-mapped. Kept by reference and read again
            later, so it must not change.
        record_ids: int64 (n,), unique, 0 or more.
        engine: what scores a block.
        memory_limit_bytes: see `memory`; None for no limit.
        is_checked: these records were searched by this engine before, so the check at the first load is left out.

    Attributes:
        fault: why a device was left for the processor; None where none was. For who judges engines: neighbours are
        equal.

    Raises:
        BadData: see geometry.check_features and check_record_ids.
        InvalidSetting: a limit out of bounds.
        UnsafeIndex: a processor's matrix product is not exact.
    """

    def __init__(
        self,
        features: NDArray[np.int16],
        record_ids: NDArray[np.int64],
        engine: Engine | DeviceEngine,
        *,
        memory_limit_bytes: int | None = None,
        is_checked: bool = False,
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
        self._is_checked = is_checked
        self.fault: str | None = None
        try:
            self._settle_in()
        except DeviceFault as fault:
            self._leave_device(fault)

    def _settle_in(self) -> None:
        if self._budget.keeps_records(self._engine):
            self._load_all()
        elif len(self._features):
            # Refuses a hopeless limit now, not at the first search.
            self._budget.plan(self._engine, found=1, resident=False)

    def _leave_device(self, fault: DeviceFault) -> None:
        """Go on without the device, for as long as this index lives."""
        log.error("a device failed; neighbours are found by the processor from now on", extra={"cause": str(fault)})
        self.fault = str(fault)
        self._unload()
        # The plain engine: whatever else is installed, it is there, and has no switch of its own.
        self._engine, self._is_checked = NumpyEngine(), False
        if self._budget.limit_bytes is None:
            limit = _PROCESSOR_BYTES + 4 * BYTES_PER_RECORD * len(self._features)
            self._budget = MemoryBudget(limit, len(self._features), self.dimension)
        self._settle_in()

    @property
    def dimension(self) -> int:
        return int(self._features.shape[1])

    def __len__(self) -> int:
        return self._records.num_alive

    @property
    def engine(self) -> Engine | DeviceEngine:
        """What searches now: another one than at the beginning where a device failed."""
        return self._engine

    def search(self, queries: NDArray[np.int16], k: int) -> Neighbors:
        """See NeighborIndex.search."""
        check_features(queries, what="queries", dimension=self.dimension)
        k = check_count(k, "k")
        if not len(queries) or not len(self):
            return self._decode(np.full((len(queries), k), NO_KEY, dtype=np.int64))
        try:
            keys = self._search(queries, k)
        except DeviceFault as fault:
            self._leave_device(fault)
            keys = self._search(queries, k)
        return self._decode(keys)

    def _search(self, queries: NDArray[np.int16], k: int) -> NDArray[np.int64]:
        keys = np.full((len(queries), k), NO_KEY, dtype=np.int64)
        plan, tombstones, pieces = self._pieces(k)
        for number, piece in enumerate(pieces):
            self._search_piece(piece, queries, keys, plan, tombstones=tombstones, nothing_yet=number == 0)
        self._check_exact(queries, keys)
        return keys

    def remove(self, record_ids: NDArray[np.int64], *, missing_ok: bool = False) -> int:
        """See NeighborIndex.remove."""
        removed = len(self._records.bury(record_ids, missing_ok=missing_ok))
        if self._resident is not None:
            self._tombstones += removed
            if self._tombstones > max(_MANY_TOMBSTONES, len(self) // _MANY_TOMBSTONES):
                self._is_checked = False
                try:
                    self._load_all()
                except DeviceFault as fault:
                    self._leave_device(fault)
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
            found = piece.first_keys(queries[some], count, scratch_bytes=plan.scratch_bytes)
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
        self._unload()  # the old blocks go first: two copies might not fit
        self._resident, self._tombstones = [], 0
        rows = self._records.living_rows()
        if len(rows):
            self._resident = [self._load(rows, None)]
            self._is_checked = True

    def _unload(self) -> None:
        for piece in self._resident or []:
            self._free(piece)
        self._resident = None

    def _load_blocks(self, plan: BlockPlan) -> Iterator[_Piece]:
        """Load living records block by block, one at a time; a block is gone before the next one is made."""
        size = plan.block_rows or 1
        on_device = isinstance(self._engine, DeviceEngine)
        buffer = None if on_device else np.empty((size, self.dimension), dtype=np.float32)
        rows = self._records.living_rows()
        for start in range(0, len(rows), size):
            part = rows[start : start + size]
            piece = self._load(part, None if buffer is None else buffer[: len(part)])
            try:
                yield piece
            finally:
                self._free(piece)
        self._is_checked = True

    def _load(self, rows: NDArray[np.int64], into: NDArray[np.float32] | None) -> _Piece:
        """Hand records to the engine, in ascending order of rank: as float32, `into` an array, or as they are."""
        ranks = self._records.rank_of_row[rows]
        order = np.argsort(ranks)
        ranks = ranks[order]
        chunk_bytes = _GATHER_FREELY_BYTES if self._budget.limit_bytes is None else GATHER_BYTES
        gathered = GatheredRows(self._features, rows[order], chunk_bytes)
        if isinstance(self._engine, DeviceEngine):
            piece = _Piece(self._engine.load_gathered(gathered, ranks), ranks)
        else:
            into = np.empty((len(rows), self.dimension), dtype=np.float32) if into is None else into
            gathered.fill(into)
            piece = _Piece(self._engine.load(into), ranks)
        if not self._is_checked:
            self._check_found(piece, gathered)
        return piece

    def _free(self, piece: _Piece) -> None:
        if isinstance(self._engine, DeviceEngine):
            self._engine.free(piece.block)

    def _check_found(self, piece: _Piece, rows: GatheredRows) -> None:
        """See `load_check`."""
        queries = check_queries(rows, np.random.default_rng())
        expected = reference_keys(rows, piece.ranks, queries)
        most = self._engine.max_count
        count = min(expected.shape[1], len(piece.block) if most is None else max(1, most - 1))
        found = piece.first_keys(queries, count, scratch_bytes=0)
        if not np.array_equal(found, expected[:, :count]):
            self._free(piece)
            if isinstance(self._engine, DeviceEngine):
                raise DeviceFault("neighbours of four random queries are not those of the definition")
            raise self._inexact()

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
                if isinstance(self._engine, DeviceEngine):
                    raise DeviceFault("similarities are not exact integers")
                raise self._inexact()

    def _inexact(self) -> UnsafeIndex:
        return UnsafeIndex(
            f"neighbours that engine {type(self._engine).__name__} found are not exact: matrix products are being "
            "rounded, or records are missed, which voids the privacy proof. Look for a reduced precision set in this "
            "process (similarities are not exact integers), or for features changed since the index was built; "
            "engine numpy depends on no such setting"
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
