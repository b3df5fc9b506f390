"""FAISS as an engine, on the processor and on CUDA devices. Only this module and `bare` import faiss.

On the processor this is `faiss.knn`, the very routine behind `IndexFlatIP.search`, called on our own
matrix: no second copy of the features, and a deletion needs no help from FAISS. On a device it is
`GpuIndexFlatIP`, which returns at most 2048 neighbours and forgets nothing; larger k and deletions are
solved above the engine (`stored`).
"""

from __future__ import annotations

import faiss
import numpy as np
from numpy.typing import NDArray

from feature_store.index.engine_numpy import NumpyBlock
from labeler.errors import InvalidSetting

_TILE_COLUMNS = 1024
"""FAISS multiplies this many records at a time (faiss.cvar.distance_compute_blas_database_bs)."""


def num_devices() -> int:
    """CUDA devices FAISS can use; 0 on a machine without one or with a build for processors only."""
    count = getattr(faiss, "get_num_gpus", None)
    return int(count()) if count is not None and hasattr(faiss, "GpuIndexFlatIP") else 0


class FaissBlock(NumpyBlock):
    """Records as a float32 matrix, searched by FAISS's blocked product and heaps; see engine.Block."""

    def best(self, queries: NDArray[np.float32], count: int) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        similarities, positions = faiss.knn(queries, self._rows, count, metric=faiss.METRIC_INNER_PRODUCT)
        return similarities, positions


class FaissEngine:
    """See engine.Engine."""

    max_count: int | None = None

    def load(self, rows: NDArray[np.float32]) -> FaissBlock:
        return FaissBlock(rows)

    def bytes_per_query(self, block_rows: int) -> int:
        return 4 * min(block_rows, _TILE_COLUMNS)


class FaissDeviceBlock(NumpyBlock):
    """Records on a CUDA device. The host keeps its matrix: the few queries with a tie at the last place are
    settled there."""

    def __init__(self, rows: NDArray[np.float32], resources: faiss.StandardGpuResources, device: int) -> None:
        super().__init__(rows)
        config = faiss.GpuIndexFlatConfig()
        config.device = device
        config.useFloat16 = False
        self._index = faiss.GpuIndexFlatIP(resources, rows.shape[1], config)
        self._index.add(rows)

    def best(self, queries: NDArray[np.float32], count: int) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        similarities, positions = self._index.search(queries, count)
        return similarities, positions


class FaissDeviceEngine:
    """See engine.Engine.

    Raises:
        InvalidSetting: FAISS sees no such device.
    """

    max_count: int | None = 2048

    def __init__(self, *, device: int = 0) -> None:
        if device >= num_devices():
            raise InvalidSetting(
                f"engine faiss-gpu needs CUDA device {device}, FAISS sees {num_devices()}; use engine faiss or auto"
            )
        self._device = device
        self._resources = faiss.StandardGpuResources()

    def load(self, rows: NDArray[np.float32]) -> FaissDeviceBlock:
        return FaissDeviceBlock(rows, self._resources, self._device)

    def bytes_per_query(self, block_rows: int) -> int:
        return 4 * min(block_rows, _TILE_COLUMNS)
