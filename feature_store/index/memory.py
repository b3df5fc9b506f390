"""How large a block of records and of queries may be under a memory limit.

`memory_limit_bytes` bounds the anonymous memory that building and searching an index add at any moment
beyond: the arrays passed in, the Neighbors returned, with a quantizer the lists each query probes, and the fixed
workspace a matrix library keeps per thread (a few MiB, whatever the size of the shard). Pages of a memory-mapped shard
are page cache, which the system can take back at any time; they are given back block by block all the same (`mapped`).
On a CUDA device the same blocks bound the device's memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from feature_store.index.engine import Engine
from feature_store.index.records import BYTES_PER_RECORD
from labeler.errors import InvalidSetting

DEFAULT_SCRATCH_BYTES: Final = 512 << 20
"""Working memory of one search when no limit is set."""

GATHER_BYTES: Final = 1 << 18
"""Records are converted to float32 this many bytes at a time."""

_USABLE: Final = 0.75
"""Share of the limit that is planned with; the rest is for the allocator's slack."""

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
        scratch_bytes: what settling ties may use.
    """

    block_rows: int | None
    query_rows: int
    scratch_bytes: int


@dataclass(frozen=True)
class MemoryBudget:
    """A memory limit, for an index of given size.

    Attributes:
        limit_bytes: see the module; None for no limit.
        num_records: n.
        dimension: d.
        fixed_bytes: memory beside the tables of records, such as a quantizer's centroids.
    """

    limit_bytes: int | None
    num_records: int
    dimension: int
    fixed_bytes: int = 0

    @property
    def keeps_records(self) -> bool:
        """Whether all records may stay in memory as float32, with as much again for searching."""
        return self.limit_bytes is None or 2 * self._resident_bytes <= self._usable_bytes

    def plan(self, engine: Engine, *, found: int, resident: bool, most_rows: int | None = None) -> BlockPlan:
        """Sizes for a search.

        Args:
            found: neighbours asked of each block.
            resident: the records are loaded already.
            most_rows: largest block the engine can answer for.

        Raises:
            InvalidSetting: the limit has no room for a block of one record and one query.
        """
        if self.limit_bytes is None:
            room_for_rows = room_for_queries = DEFAULT_SCRATCH_BYTES
        elif resident:
            room_for_rows, room_for_queries = 0, self._usable_bytes - self._resident_bytes
        else:
            room_for_rows = room_for_queries = (self._usable_bytes - GATHER_BYTES) // 2
        block_rows = self.num_records
        if not resident:
            block_rows = min(block_rows, room_for_rows // (_BYTES_PER_ROW_COORDINATE * self.dimension))
            block_rows = min(block_rows, most_rows or block_rows)
        found = min(found, max(1, block_rows))
        per_query = 4 * self.dimension + engine.bytes_per_query(block_rows) + _BYTES_PER_FOUND * (found + 1)
        query_rows = room_for_queries // per_query
        if block_rows < 1 or query_rows < 1:
            if self.limit_bytes is None:
                query_rows, block_rows = 1, max(1, block_rows)
            else:
                raise InvalidSetting(
                    f"memory_limit_bytes {self.limit_bytes} is too small for records of dimension "
                    f"{self.dimension} and {found} neighbours: not even one record and one query fit; raise it"
                )
        return BlockPlan(None if resident else block_rows, query_rows, room_for_queries)

    @property
    def _resident_bytes(self) -> int:
        return 4 * self.num_records * self.dimension

    @property
    def _usable_bytes(self) -> int:
        if self.limit_bytes is None:
            return 0
        return int(_USABLE * self.limit_bytes) - BYTES_PER_RECORD * self.num_records - self.fixed_bytes
