"""The index: records in blocks, searched by an engine, exact under deletions and memory limits.

One class serves two situations, because in each of them the neighbours are the smallest keys (`keys`)
over some blocks of records, and smallest keys can be merged:

* everything in memory: one block, loaded when the index is built;
* a memory limit below the shard's size: blocks are loaded from the features during the search, in the
  order of ids, and dropped again.

Removed records are gone at once: the blocks are loaded anew without them when they are removed, so that a search does
not know of them. What a search does follows from public numbers (`memory`), but for the number of blocks and their
lengths.

Every record is checked once to be found when the index is built: four random queries, in full (`load_check`). A
device that fails, is full or does not compute exactly is left for the processor, at whatever time: an answer that is
charged is given.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from feature_store.index.engine import Block, DeviceFault, Engine
from feature_store.index.engine_numpy import NumpyEngine
from feature_store.index.gathered import GatheredRows
from feature_store.index.geometry import check_count, check_features, check_record_ids
from feature_store.index.keys import NO_KEY, merge, ranks_of, similarities_of
from feature_store.index.load_check import check_queries, reference_keys
from feature_store.index.mapped import unmap_pages
from feature_store.index.memory import GATHER_BYTES, UNDECLARED_RECORDS, BlockPlan, MemoryBudget
from feature_store.index.protocol import NO_RECORD, NO_SIMILARITY, Neighbors
from feature_store.index.records import BYTES_PER_RECORD, Records
from labeler.errors import UnsafeIndex

_DECODED_AT_ONCE = 1 << 16
_CHECKED_QUERIES = 16
_GATHER_FREELY_BYTES = 1 << 23
_PROCESSOR_BYTES = 2 << 30
"""What a shard that a device was left with may add to memory, beside its tables, where nobody set a limit."""

NO_IDS: NDArray[np.int64] = np.empty(0, dtype=np.int64)

log = logging.getLogger(__name__)


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
        max_records: a public bound on n, from which sizes follow; None where there is none. Under a limit the number of
            records stands in for one that is missing: `build_index` splits what declares nothing.
        removed: ids of records that are not there, as if they were removed later.
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
        engine: Engine,
        *,
        memory_limit_bytes: int | None = None,
        max_records: int | None = None,
        removed: NDArray[np.int64] = NO_IDS,
        is_checked: bool = False,
    ) -> None:
        check_features(features)
        check_record_ids(record_ids, len(features))
        self._features = features
        self._records = Records(record_ids)
        self._records.bury(removed, missing_ok=False)
        self._engine = engine
        if memory_limit_bytes is not None:
            check_count(memory_limit_bytes, "memory_limit_bytes")
        undeclared = UNDECLARED_RECORDS if memory_limit_bytes is None else len(features)
        rows = undeclared if max_records is None else max_records
        self._max_records = max_records if memory_limit_bytes is None else rows
        self._budget = MemoryBudget(memory_limit_bytes, rows, self.dimension)
        self._resident: list[_Piece] | None = None
        self._is_checked = is_checked
        self.fault: str | None = None
        try:
            self._settle_in()
        except DeviceFault as fault:
            self._leave_device(fault)

    def _settle_in(self) -> None:
        if self._budget.keeps_records(self._engine, len(self._features)):
            self._load_all()
        else:
            # Refuses a hopeless limit now, not at the first search; and checks every record now, for the same reason.
            plan = self._budget.plan(self._engine, found=1, resident=False)
            for _ in () if self._is_checked else self._load_blocks(plan):
                pass
            self._is_checked = True

    def _leave_device(self, fault: DeviceFault) -> None:
        """Go on without the device, for as long as this index lives."""
        log.error("a device failed; neighbours are found by the processor from now on", extra={"cause": str(fault)})
        self.fault = str(fault)
        self._unload()
        # The plain engine: whatever else is installed, it is there, and has no switch of its own.
        self._engine, self._is_checked = NumpyEngine(), False
        if self._budget.limit_bytes is None:
            rows = max(self._budget.rows, len(self._features))
            limit = _PROCESSOR_BYTES + 4 * BYTES_PER_RECORD * rows
            self._budget = MemoryBudget(limit, rows, self.dimension)
        self._settle_in()

    @property
    def dimension(self) -> int:
        return int(self._features.shape[1])

    def __len__(self) -> int:
        return self._records.num_alive

    @property
    def engine(self) -> Engine:
        """What searches now: another one than at the beginning where a device failed."""
        return self._engine

    def search(self, queries: NDArray[np.int16], k: int) -> Neighbors:
        """See NeighborIndex.search."""
        check_features(queries, what="queries", dimension=self.dimension)
        k = check_count(k, "k")
        if not len(queries):
            return self._decode(np.full((0, k), NO_KEY, dtype=np.int64))
        try:
            keys = self._search(queries, k)
        except DeviceFault as fault:
            self._leave_device(fault)
            keys = self._search(queries, k)
        return self._decode(keys)

    def _search(self, queries: NDArray[np.int16], k: int) -> NDArray[np.int64]:
        keys = np.full((len(queries), k), NO_KEY, dtype=np.int64)
        is_resident = self._resident is not None
        plan = self._budget.plan(self._engine, found=k, resident=is_resident)
        most = self._max_records if plan.block_rows is None else plan.block_rows
        for number, piece in enumerate(self._resident or [] if is_resident else self._load_blocks(plan)):
            for start in range(0, len(queries), plan.query_rows):
                some = slice(start, start + plan.query_rows)
                found = piece.block.first_keys(queries[some], k if most is None else min(k, most))
                if number == 0:
                    keys[some, : found.shape[1]] = found
                else:
                    keys[some] = merge(keys[some], found, k)
        self._check_exact(queries, keys)
        return keys

    def remove(self, record_ids: NDArray[np.int64], *, missing_ok: bool = False) -> int:
        """See NeighborIndex.remove. The blocks are loaded anew: a search must not know how many were removed."""
        removed = len(self._records.bury(record_ids, missing_ok=missing_ok))
        self._is_checked = False
        try:
            self._settle_in()
        except DeviceFault as fault:
            self._leave_device(fault)
        return removed

    def _load_all(self) -> None:
        """Load every living record."""
        self._unload()  # the old blocks go first: two copies might not fit
        self._resident = []
        rows = self._records.living_rows()
        if len(rows):
            self._resident = [self._load(rows, self._budget.rows)]
            self._is_checked = True

    def _unload(self) -> None:
        for piece in self._resident or []:
            self._engine.free(piece.block)
        self._resident = None

    def _load_blocks(self, plan: BlockPlan) -> Iterator[_Piece]:
        """Load living records block by block, one at a time; a block is gone before the next one is made."""
        size = plan.block_rows or 1
        rows = self._records.living_rows()
        for start in range(0, len(rows), size):
            piece = self._load(rows[start : start + size], size)
            try:
                yield piece
            finally:
                self._engine.free(piece.block)
                del piece

    def _load(self, rows: NDArray[np.int64], most_rows: int) -> _Piece:
        """Hand records to the engine, in ascending order of rank."""
        ranks = self._records.rank_of_row[rows]
        order = np.argsort(ranks)
        ranks = ranks[order]
        chunk_bytes = _GATHER_FREELY_BYTES if self._budget.limit_bytes is None else GATHER_BYTES
        gathered = GatheredRows(self._features, rows[order], chunk_bytes)
        piece = _Piece(self._engine.load(gathered, ranks, most_rows), ranks)
        if not self._is_checked:
            self._check_found(piece, gathered)
        return piece

    def _check_found(self, piece: _Piece, rows: GatheredRows) -> None:
        """See `load_check`."""
        queries = check_queries(rows, np.random.default_rng())
        expected = reference_keys(rows, piece.ranks, queries)
        if not np.array_equal(piece.block.first_keys(queries, expected.shape[1]), expected):
            self._engine.free(piece.block)
            raise self._inexact("neighbours of four random queries are not those of the definition")

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
                raise self._inexact("similarities are not exact integers")

    def _inexact(self, what: str) -> DeviceFault | UnsafeIndex:
        if not isinstance(self._engine, NumpyEngine):
            return DeviceFault(what)
        return UnsafeIndex(
            "neighbours that engine numpy found are not exact: matrix products are being rounded, or records are "
            "missed, which voids the privacy proof. Look for a reduced precision set in this process (similarities are "
            "not exact integers), or for features changed since the index was built"
        )

    def _decode(self, keys: NDArray[np.int64]) -> Neighbors:
        """Neighbours from keys; the array of keys becomes the array of record ids."""
        queries, k = keys.shape
        similarities = np.empty((queries, k), dtype=np.int32)
        rows = np.empty((queries, k), dtype=np.int64)
        step = max(1, _DECODED_AT_ONCE // k)
        for start in range(0, queries, step):
            some = slice(start, start + step)
            part = keys[some]
            # NO_KEY's rank is the largest there can be: it becomes the place behind all records.
            ranks = np.minimum(ranks_of(part), len(self._records.alive))
            rows[some] = self._records.row_of_rank[ranks]
            similarities[some] = np.where(rows[some] == NO_RECORD, NO_SIMILARITY, similarities_of(part))
            part[:] = self._records.ids[ranks]
        return Neighbors(record_ids=keys, similarities=similarities, rows=rows)
