"""What a library must be able to do to serve as an engine: very little, so that little can differ.

An engine scores one block of records that fits in memory. There are two kinds:

* of a library for the processor (`Engine`): it may return tied records in any order and any choice of those tied at the
  end of its list; `ties` puts this right, equally for all of them;
* of a device (`DeviceEngine`): it takes integers as they are stored, says how many records it has room for, and may
  fail. Its blocks give back what they hold before the next one is made, and where they can settle ties themselves
  they do (`KeyedBlock`).
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from feature_store.index.gathered import GatheredRows


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

    def scores(self, queries: NDArray[np.float32]) -> NDArray[np.float32]:
        """All similarities, float32 (nq, len(self))."""


@runtime_checkable
class KeyedBlock(Protocol):
    """Some records, loaded where similarity and place in the order of ids are compared as one number (see keys)."""

    def __len__(self) -> int: ...

    def first_keys(self, queries: NDArray[np.int16], count: int) -> NDArray[np.int64]:
        """Keys of the exact first records, int64 (nq, count), ascending; count from 1 to len(self).

        Raises:
            DeviceFault: the device failed; the records can be searched on the processor instead.
        """


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

    def bytes_per_query(self, block_rows: int) -> int:
        """Working memory of Block.best for each query, beside its result."""


@runtime_checkable
class DeviceEngine(Protocol):
    """A library behind the index that keeps records somewhere else than in the process's memory.

    Attributes:
        max_count: most neighbours one call may ask for, one of them to see a tie by; None if unlimited.
    """

    @property
    def max_count(self) -> int | None: ...

    def bytes_per_query(self, block_rows: int) -> int:
        """Working memory of a search for each query, beside its result."""

    def room_rows(self, dimension: int) -> int | None:
        """Most records of one block there is room for now; None where the process's memory is all there is.

        Raises:
            DeviceFault: the device does not answer.
        """

    def load_gathered(self, rows: GatheredRows, ranks: NDArray[np.int64]) -> KeyedBlock | Block:
        """A block of rows with their ranks, both ascending by rank.

        Raises:
            DeviceFault: there was no room after all, or the device failed.
        """

    def free(self, block: KeyedBlock | Block) -> None:
        """Give back what a block holds. Must be called before the next one is loaded; never raises."""


class DeviceFault(Exception):
    """A device failed or has too little memory. Caught by the index, which goes on without the device: an answer that
    is charged is given, and whether a device had room may depend on the number of records."""
