"""Rows of a shard in the order of record ids, read in pieces: nothing here makes a whole set of another type.

They are always read by an index, also where they lie in a row: the first deletion must not change how they are read.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from feature_store.index.mapped import unmap_pages


class GatheredRows:
    """Some rows of the features, in a given order.

    Args:
        features: int16 (n, d); in memory or memory-mapped.
        rows: int64 (m,), which of them, in which order.
        chunk_bytes: about how much is copied at a time, counted as float32; one row is always taken.
    """

    def __init__(self, features: NDArray[np.int16], rows: NDArray[np.int64], chunk_bytes: int) -> None:
        self._features = features
        self._rows = rows
        self._chunk_bytes = chunk_bytes

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def dimension(self) -> int:
        return int(self._features.shape[1])

    def part(self, start: int, stop: int) -> GatheredRows:
        """Rows from `start` to before `stop` of these."""
        return GatheredRows(self._features, self._rows[start:stop], self._chunk_bytes)

    def source(self) -> tuple[NDArray[np.int16], NDArray[np.int64]]:
        """The features as they lie, and which rows of them these are, in order: for whoever reads them in place."""
        return self._features, self._rows

    def chunks(self) -> Iterator[tuple[slice, NDArray[np.int16]]]:
        """Where a piece belongs among these rows, and the piece: int16, C order, a copy of its own."""
        step = max(1, self._chunk_bytes // (4 * self.dimension))
        for start in range(0, len(self._rows), step):
            some = self._rows[start : start + step]
            yield slice(start, start + len(some)), np.array(self._features[some], dtype=np.int16, order="C")
        unmap_pages(self._features)

    def fill(self, into: NDArray[np.float32]) -> None:
        """All of them as float32, into an array (m, d)."""
        step = max(1, self._chunk_bytes // (4 * self.dimension))
        for start in range(0, len(self._rows), step):
            some = self._rows[start : start + step]
            into[start : start + step] = self._features[some]
        unmap_pages(self._features)
