"""Torch as an engine, on the processor and on CUDA devices.

Products are taken in float32 on purpose. Half precision inputs would be exact too, but some
reductions of partial products may then be rounded to half precision, depending on global switches.
For the same reason automatic mixed precision is switched off around the product. TF32 does no harm:
coordinates up to 2048 fit its 11 bits and sums are kept in float32.
"""

from __future__ import annotations

from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray

from labeler.errors import InvalidSetting


class TorchBlock:
    """Records as a tensor; see engine.Block."""

    def __init__(self, rows: NDArray[np.float32], device: torch.device) -> None:
        self._rows = torch.from_numpy(rows).to(device)
        self._device = device

    def __len__(self) -> int:
        return len(self._rows)

    def best(self, queries: NDArray[np.float32], count: int) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        found = torch.topk(self._product(queries), count, dim=1, sorted=False)
        return (
            cast("NDArray[np.float32]", found.values.cpu().numpy()),
            cast("NDArray[np.int64]", found.indices.cpu().numpy()),
        )

    def scores(self, queries: NDArray[np.float32]) -> NDArray[np.float32]:
        return cast("NDArray[np.float32]", self._product(queries).cpu().numpy())

    def _product(self, queries: NDArray[np.float32]) -> torch.Tensor:
        with torch.no_grad(), torch.autocast(self._device.type, enabled=False):
            return torch.from_numpy(queries).to(self._device) @ self._rows.T


class TorchEngine:
    """See engine.Engine.

    Args:
        device: "cpu", "cuda" or "cuda:1".

    Raises:
        InvalidSetting: torch sees no such device.
    """

    max_count: int | None = None

    def __init__(self, *, device: str = "cpu") -> None:
        self._device = torch.device(device)
        if self._device.type == "cuda" and (self._device.index or 0) >= torch.cuda.device_count():
            raise InvalidSetting(
                f"engine torch-gpu needs device {device}, torch sees {torch.cuda.device_count()} CUDA devices; "
                "use engine torch or auto"
            )

    def load(self, rows: NDArray[np.float32]) -> TorchBlock:
        return TorchBlock(rows, self._device)

    def bytes_per_query(self, block_rows: int) -> int:
        return 4 * block_rows
