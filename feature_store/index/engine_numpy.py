"""The plain engine: a matrix product and a partition. Needs nothing but numpy."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


class NumpyBlock:
    """Records as a float32 matrix; see engine.Block."""

    def __init__(self, rows: NDArray[np.float32]) -> None:
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def best(self, queries: NDArray[np.float32], count: int) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        scores = self.scores(queries)
        if count == len(self):
            return scores, np.broadcast_to(np.arange(count, dtype=np.int64), scores.shape)
        positions = np.argpartition(scores, len(self) - count, axis=1)[:, len(self) - count :]
        return np.take_along_axis(scores, positions, axis=1), positions.astype(np.int64, copy=False)

    def scores(self, queries: NDArray[np.float32]) -> NDArray[np.float32]:
        return queries @ self._rows.T


class NumpyEngine:
    """See engine.Engine."""

    max_count: int | None = None

    def load(self, rows: NDArray[np.float32]) -> NumpyBlock:
        return NumpyBlock(rows)

    def bytes_per_query(self, block_rows: int) -> int:
        return 12 * block_rows
