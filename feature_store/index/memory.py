"""How large a block of records and of queries may be under a memory limit.

`memory_limit_bytes` bounds the anonymous memory that building and searching an index add at any moment
beyond: the arrays passed in, the Neighbors returned, and the fixed
workspace a matrix library keeps per thread (a few MiB, whatever the size of the shard). Pages of a memory-mapped shard
are page cache, which the system can take back at any time; they are given back block by block all the same (`mapped`).
On a CUDA device the same blocks bound what lies there; and what it has free bounds them, limit or not: the library
that knows the device says how many records there is room for beside its working memory (engine.Engine), and the rest is
read block by block.

**Sizes follow from public numbers**: the limit, the dimension, the count asked for, and a public number of rows in
place of how many there are: what the shard's site declared (`max_records`), else UNDECLARED_RECORDS. Under a limit a
shard that declared nothing is always searched part by part.

**No limit refuses a number of records**, which would tell that number. Tables of records take at most a quarter of the
limit; a shard with more is searched part by part (`split`). At least half of the limit is left for blocks, so whether
it suffices follows from the dimension alone: `check_memory_limit` says so before there is anything to answer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from feature_store.index.engine import DeviceFault, Engine
from feature_store.index.engine_numpy import NumpyEngine
from feature_store.index.records import BYTES_PER_RECORD
from labeler.errors import InvalidSetting
from labeler.records import UNDECLARED_RECORDS as UNDECLARED_RECORDS

DEFAULT_SCRATCH_BYTES: Final = 512 << 20
"""Working memory of one search when no limit is set."""

GATHER_BYTES: Final = 1 << 18
"""Records are converted to float32 this many bytes at a time."""

_USABLE: Final = 0.75
"""Share of the limit that is planned with; the rest is for the allocator's slack."""

_TABLES: Final = 0.25
"""Share of the limit that tables of records may take."""

_BYTES_PER_ROW_COORDINATE: Final = 6
"""float32 beside the int16 it is read from."""

_BYTES_PER_FOUND: Final = 72
"""Similarity, position, and keys while they are sorted and merged, for each query and neighbour."""


@dataclass(frozen=True)
class BlockPlan:
    """Sizes of one search.

    Attributes:
        block_rows: records loaded at a time; None if they are all loaded already.
        query_rows: queries searched at a time.
    """

    block_rows: int | None
    query_rows: int


@dataclass(frozen=True)
class MemoryBudget:
    """A memory limit, for an index of given size.

    Attributes:
        limit_bytes: see the module; None for no limit.
        rows: a public number that stands for the number of records; under a limit at least that number.
        dimension: d.
    """

    limit_bytes: int | None
    rows: int
    dimension: int

    def keeps_records(self, engine: Engine, num_records: int = 0) -> bool:
        """Whether all records may stay in memory as float32, with room for searching all of them at once.

        Args:
            num_records: how many there are. What a device has no room for it cannot keep, declared or not.
        """
        fits = engine.room_rows(self.dimension)
        if fits is not None and max(self.rows, num_records) > fits:
            return False
        if self.limit_bytes is None:
            return True
        room = self._usable_bytes - self._resident_bytes
        return self._resident_bytes <= room and self._query_bytes(engine, self.rows, self.rows) <= room

    def plan(self, engine: Engine, *, found: int, resident: bool) -> BlockPlan:
        """Sizes for a search.

        Args:
            found: neighbours asked of each block.
            resident: the records are loaded already.

        Raises:
            InvalidSetting: the limit has no room for a block of one record and one query; see `check_memory_limit`.
        """
        if self.limit_bytes is None:
            room = DEFAULT_SCRATCH_BYTES
        elif resident:
            room = self._usable_bytes - self._resident_bytes
        else:
            room = (self._usable_bytes - GATHER_BYTES) // 2
        block_rows = self.rows
        if not resident:
            fits = engine.room_rows(self.dimension)
            if fits is not None:
                block_rows = min(block_rows, fits)
            if fits is None or self.limit_bytes is not None:
                block_rows = min(block_rows, room // (_BYTES_PER_ROW_COORDINATE * self.dimension))
            # A large block finds many neighbours, which take room themselves: halve until one query's fit.
            while block_rows > 1 and self._query_bytes(engine, block_rows, found) > room:
                block_rows //= 2
        query_rows = room // self._query_bytes(engine, max(1, block_rows), found)
        if self.limit_bytes is None:
            block_rows, query_rows = max(1, block_rows), max(1, query_rows)
        if block_rows < 1 or query_rows < 1:
            raise _too_small(self.limit_bytes or 0, self.dimension)
        return BlockPlan(None if resident else block_rows, query_rows)

    def _query_bytes(self, engine: Engine, block_rows: int, found: int) -> int:
        kept = found if self.limit_bytes is None else min(found, block_rows)
        return 4 * self.dimension + engine.bytes_per_query(block_rows) + _BYTES_PER_FOUND * (kept + 1)

    @property
    def _resident_bytes(self) -> int:
        return 4 * self.rows * self.dimension

    @property
    def _usable_bytes(self) -> int:
        if self.limit_bytes is None:
            return 0
        return int(_USABLE * self.limit_bytes) - BYTES_PER_RECORD * self.rows


def rows_at_once(limit_bytes: int) -> int:
    """Most records whose tables a limit has room for; those of a larger shard are made part by part."""
    return max(1, int(_TABLES * limit_bytes) // BYTES_PER_RECORD)


def check_memory_limit(limit_bytes: int | None, dimension: int, engine: Engine) -> None:
    """Refuse a limit under which some shard could not be searched; what passes serves every number of records.

    Raises:
        InvalidSetting: there is no room for one record and one query beside the tables.
    """
    if limit_bytes is None:
        return
    part = rows_at_once(limit_bytes)
    if part * BYTES_PER_RECORD > int(_TABLES * limit_bytes):
        raise _too_small(limit_bytes, dimension)
    budget = MemoryBudget(limit_bytes, part, dimension)
    try:
        _ = budget.plan(engine, found=1, resident=False)
    except DeviceFault:
        # An index would leave such a device for the processor, so what the processor needs decides.
        _ = budget.plan(NumpyEngine(), found=1, resident=False)


def _too_small(limit_bytes: int, dimension: int) -> InvalidSetting:
    return InvalidSetting(
        f"memory_limit_bytes {limit_bytes} is too small for records of dimension {dimension}: not even one record and "
        "one query fit; raise it"
    )
