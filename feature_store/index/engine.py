"""An engine loads records, and a block of them finds first keys; the plain engine needs nothing but numpy.

A block compares similarity and place in the order of ids as one number (`definition`, "Keys"), so no engine ever
chooses among tied records, and a tie takes no work of its own. Which operations a search runs follows from public
numbers: the dimension, the number of queries, the count asked for. The number of records decides how many tiles there
are, and nothing else.
"""

from __future__ import annotations

from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

from feature_store.index.definition import NO_KEY, pack
from feature_store.index.rows import GatheredRows

_TILE_ROWS: Final = 2048
_TILE_QUERIES: Final = 256
"""A tile's similarities and keys stay in a core's cache."""


class DeviceFault(Exception):
    """A device failed or has too little memory. Caught by the index, which goes on without the device: an answer that
    is charged is given, and whether a device had room may depend on the number of records."""


class Block(Protocol):
    """Some records, loaded. The rank of a record in its keys is its place among them, from 0."""

    def __len__(self) -> int: ...

    def first_keys(self, queries: NDArray[np.int16], count: int) -> NDArray[np.int64]:
        """Keys of the exact first records, int64 (nq, count), ascending; NO_KEY where there are fewer records.

        Args:
            queries: int16 (nq, d), nq at least 1.
            count: at least 1; may exceed len(self).

        Raises:
            DeviceFault: the device failed; the records can be searched on the processor instead.
        """


class Engine:
    """A library behind the index; on the processor unless it says how much room its device has."""

    def bytes_per_query(self, block_rows: int) -> int:
        """Working memory of a search for each query, beside its result."""
        raise NotImplementedError

    def room_rows(self, dimension: int) -> int | None:  # noqa: ARG002  # of a device
        """Most records of one block there is room for now; None where the process's memory is all there is.

        Raises:
            DeviceFault: the device does not answer.
        """
        return None

    def load(self, rows: GatheredRows, most_rows: int) -> Block:
        """A block of at least one row; `rows` are in the order of record ids.

        Args:
            most_rows: a public number of rows that sizes of tiles and numbers of threads may follow from; `rows`
                may be fewer or more.

        Raises:
            DeviceFault: there was no room after all, or the device failed.
        """
        raise NotImplementedError

    def free(self, block: Block) -> None:  # of a device
        """Give back what a block holds on a device. Called before the next one is loaded; never raises."""


class NumpyBlock:
    """Records as a float32 matrix; see Block."""

    def __init__(self, rows: NDArray[np.float32]) -> None:
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def first_keys(self, queries: NDArray[np.int16], count: int) -> NDArray[np.int64]:
        floats = queries.astype(np.float32, order="C")
        found = np.full((len(floats), count), NO_KEY, dtype=np.int64)
        kept = np.empty((min(len(floats), _TILE_QUERIES), count + min(_TILE_ROWS, len(self))), dtype=np.int64)
        for first in range(0, len(floats), _TILE_QUERIES):
            some = floats[first : first + _TILE_QUERIES]
            best = kept[: len(some)]
            best[:, :count] = NO_KEY
            for start in range(0, len(self), _TILE_ROWS):
                scores = self.scores(some, slice(start, start + _TILE_ROWS))
                width = count + scores.shape[1]
                best[:, count:width] = pack(scores, np.arange(start, start + scores.shape[1]))
                best[:, :width].partition(count - 1, axis=1)
            found[first : first + _TILE_QUERIES] = best[:, :count]
        found.sort(axis=1)
        return found

    def scores(self, queries: NDArray[np.float32], tile: slice) -> NDArray[np.float32]:
        """Similarities to a tile of the records, float32 (nq, rows of the tile)."""
        scores: NDArray[np.float32] = queries @ self._rows[tile].T
        return scores


class NumpyEngine(Engine):
    """A matrix product, keys, and a partition, tile by tile."""

    def bytes_per_query(self, block_rows: int) -> int:
        # For at most _TILE_QUERIES at once: similarities, keys, and the keys beside what is kept.
        return 20 * min(block_rows, _TILE_ROWS)

    def load(self, rows: GatheredRows, most_rows: int) -> NumpyBlock:  # noqa: ARG002
        floats = np.empty((len(rows), rows.dimension), dtype=np.float32)
        for where, chunk in rows.chunks():
            floats[where] = chunk
        return NumpyBlock(floats)
