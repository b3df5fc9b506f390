"""The plain engine: a matrix product, keys, and a partition, tile by tile. Needs nothing but numpy."""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from feature_store.index.engine import Block
from feature_store.index.gathered import GatheredRows
from feature_store.index.keys import NO_KEY, pack

_TILE_ROWS: Final = 2048
_TILE_QUERIES: Final = 256
"""A tile's similarities and keys stay in a core's cache."""


class NumpyBlock:
    """Records as a float32 matrix; see engine.Block."""

    def __init__(self, rows: NDArray[np.float32], ranks: NDArray[np.int64]) -> None:
        self._rows, self._ranks = rows, ranks

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
                tile = slice(start, start + _TILE_ROWS)
                keys = pack(self.scores(some, tile), self._ranks[tile])
                width = count + keys.shape[1]
                best[:, count:width] = keys
                best[:, :width].partition(count - 1, axis=1)
            found[first : first + _TILE_QUERIES] = best[:, :count]
        found.sort(axis=1)
        return found

    def scores(self, queries: NDArray[np.float32], tile: slice) -> NDArray[np.float32]:
        """Similarities to a tile of the records, float32 (nq, rows of the tile)."""
        scores: NDArray[np.float32] = queries @ self._rows[tile].T
        return scores


class NumpyEngine:
    """See engine.Engine."""

    def bytes_per_query(self, block_rows: int) -> int:
        # For at most _TILE_QUERIES at once: similarities, keys, and the keys beside what is kept.
        return 20 * min(block_rows, _TILE_ROWS)

    def room_rows(self, dimension: int) -> int | None:  # noqa: ARG002, of the protocol
        return None

    def load(self, rows: GatheredRows, ranks: NDArray[np.int64], most_rows: int) -> NumpyBlock:  # noqa: ARG002, of the protocol
        floats = np.empty((len(rows), rows.dimension), dtype=np.float32)
        rows.fill(floats)
        return NumpyBlock(floats, ranks)

    def free(self, block: Block) -> None:
        """Nothing is held."""
