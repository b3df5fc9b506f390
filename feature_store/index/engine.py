"""The two Protocols behind the index: an engine loads records, and a block of them finds first keys.

A block compares similarity and place in the order of ids as one number (see keys), so no engine ever chooses among tied
records, and a tie takes no work of its own. Which operations a search runs follows from public numbers: the dimension,
the number of queries, the count asked for. The number of records decides how many tiles there are, and nothing else.

Engines are one dialect whether they compute on the processor or on a device. Blocks give back what they hold before the
next one is made.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from feature_store.index.gathered import GatheredRows


class Block(Protocol):
    """Some records, loaded."""

    def __len__(self) -> int: ...

    def first_keys(self, queries: NDArray[np.int16], count: int) -> NDArray[np.int64]:
        """Keys of the exact first records, int64 (nq, count), ascending; NO_KEY where there are fewer records.

        Args:
            queries: int16 (nq, d), nq at least 1.
            count: at least 1; may exceed len(self).

        Raises:
            DeviceFault: the device failed; the records can be searched on the processor instead.
        """


class Engine(Protocol):
    """A library behind the index."""

    def bytes_per_query(self, block_rows: int) -> int:
        """Working memory of a search for each query, beside its result."""

    def room_rows(self, dimension: int) -> int | None:
        """Most records of one block there is room for now; None where the process's memory is all there is.

        Raises:
            DeviceFault: the device does not answer.
        """

    def load(self, rows: GatheredRows, ranks: NDArray[np.int64], most_rows: int) -> Block:
        """A block of at least one row, with the ranks of its rows, both ascending by rank.

        Args:
            most_rows: a public number of rows that sizes of tiles and numbers of threads may follow from; `rows`
                may be fewer or more.

        Raises:
            DeviceFault: there was no room after all, or the device failed.
        """

    def free(self, block: Block) -> None:
        """Give back what a block holds. Must be called before the next one is loaded; never raises."""


class DeviceFault(Exception):
    """A device failed or has too little memory. Caught by the index, which goes on without the device: an answer that
    is charged is given, and whether a device had room may depend on the number of records."""
