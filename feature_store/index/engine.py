"""What a library must be able to do to serve as an engine: very little, so that little can differ.

An engine scores one block of records that fits in memory. It may return tied records in any order
and any choice of those tied at the end of its list; `ties` puts this right, equally for all engines.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray


class Block(Protocol):
    """Some records, loaded."""

    def __len__(self) -> int: ...

    def best(self, queries: NDArray[np.float32], count: int) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        """`count` records of largest similarity for each query, in any order.

        Args:
            queries: float32 (nq, d) holding integers, nq at least 1.
            count: at least 1, at most len(self) and the engine's max_count.

        Returns:
            Similarities float32 (nq, count) and positions in the block int64 (nq, count). Among records
            tied at the last place any choice will do.
        """
        ...

    def scores(self, queries: NDArray[np.float32]) -> NDArray[np.float32]:
        """All similarities, float32 (nq, len(self))."""
        ...


class Engine(Protocol):
    """A library behind the index.

    Attributes:
        max_count: most neighbours one call of Block.best may ask for, None if unlimited.
    """

    @property
    def max_count(self) -> int | None: ...

    def load(self, rows: NDArray[np.float32]) -> Block:
        """A block of float32 rows (n, d), n at least 1. May keep the array; the caller reuses it only once the
        block is no longer needed."""
        ...

    def bytes_per_query(self, block_rows: int) -> int:
        """Working memory of Block.best for each query, beside its result."""
        ...
