"""FAISS as an engine, on the processor and on CUDA devices. Only this module and `bare` import faiss.

On the processor this is `faiss.knn`, the very routine behind `IndexFlatIP.search`, called on our own
matrix: no second copy of the features, and a deletion needs no help from FAISS.

On a device it is `GpuIndexFlatIP`, for whoever wants it: it returns at most 2048 neighbours, keeps float32, settles
no tie, and aborts the process where CUDA fails, so "auto" takes torch there (`engine_torch`). Larger k, ties and
deletions are solved above the engine (`stored`, `ties`). Resources, with their pinned and working memory, are made
once per process and device, however many indexes there are, and used by one thread at a time, as FAISS demands.
"""

from __future__ import annotations

import threading
from typing import Final

import faiss
import numpy as np
from numpy.typing import NDArray

from feature_store.index.engine import Block, DeviceFault, KeyedBlock
from feature_store.index.engine_numpy import NumpyBlock
from feature_store.index.gathered import GatheredRows
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


_LOCK = threading.RLock()
_RESOURCES: Final[dict[int, faiss.StandardGpuResources]] = {}
"""One per device of this process; under _LOCK."""

_TEMPORARY_BYTES: Final = 256 << 20
_PINNED_BYTES: Final = 16 << 20
_SPARED_BYTES: Final = 1 << 30


def resources_of(device: int) -> faiss.StandardGpuResources:
    """The resources of a device: 256 MiB of working memory there and 16 MiB pinned here, instead of 1.5 GiB and 256
    MiB.

    Used under `_LOCK` alone.
    """
    if device not in _RESOURCES:
        resources = faiss.StandardGpuResources()
        resources.setTempMemory(_TEMPORARY_BYTES)
        resources.setPinnedMemory(_PINNED_BYTES)
        _RESOURCES[device] = resources
    return _RESOURCES[device]


class FaissDeviceBlock(NumpyBlock):
    """Records on a CUDA device. The host keeps its matrix: the few queries with a tie at the last place are
    settled there."""

    def __init__(self, rows: NDArray[np.float32], device: int) -> None:
        super().__init__(rows)
        config = faiss.GpuIndexFlatConfig()
        config.device = device
        config.useFloat16 = False
        config.use_cuvs = False  # another library, with selections of its own, where a wheel brings it along
        with _LOCK:
            self._index = faiss.GpuIndexFlatIP(resources_of(device), rows.shape[1], config)
            self._index.add(rows)

    def best(self, queries: NDArray[np.float32], count: int) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        with _LOCK:
            similarities, positions = self._index.search(queries, count)
        return similarities, positions

    def close(self) -> None:
        with _LOCK:
            self._index.reset()
            del self._index


class FaissDeviceEngine:
    """See engine.DeviceEngine.

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

    def room_rows(self, dimension: int) -> int:
        # FAISS tells what it has taken of a device, and not what is left.
        import torch

        try:
            free, _ = torch.cuda.mem_get_info(self._device)
        except RuntimeError as error:
            raise DeviceFault(type(error).__name__) from None
        # float32, and as much again for a moment: what is added is copied before it is appended.
        return max(1, (free - _SPARED_BYTES) // (8 * dimension))

    def load_gathered(self, rows: GatheredRows, ranks: NDArray[np.int64]) -> FaissDeviceBlock:  # noqa: ARG002  # see ties
        floats = np.empty((len(rows), rows.dimension), dtype=np.float32)
        rows.fill(floats)
        try:
            return FaissDeviceBlock(floats, self._device)
        except RuntimeError as error:  # no room: the one failure that FAISS raises
            raise DeviceFault(type(error).__name__) from None

    def free(self, block: KeyedBlock | Block) -> None:
        if isinstance(block, FaissDeviceBlock):
            block.close()

    def bytes_per_query(self, block_rows: int) -> int:
        return 4 * min(block_rows, _TILE_COLUMNS)
