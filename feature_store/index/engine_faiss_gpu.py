"""FAISS on CUDA devices: one `GpuIndexFlatIP` per device, with ties settled by record id as in `engine_faiss`.

Every device holds a range of ranks, and their results are merged by key: FAISS's own shards would merge ties by the
number of the shard. Similarities and places stay on the device until they are keys.

Step 3 scores the queries that it concerns in full: `reconstruct_n` gives a tile of the stored rows, and one exact
product its similarities (`engine_torch.first_of_tiles`). FAISS selects at most `MOST_PLACES` on a device, so a search
for more than that is step 3 for every query.

**Storage.** Rows are stored in float16, which holds our integers exactly, in half the memory of float32
(`engine_torch`, "Inputs"); FAISS sums their products in float32. Where a device is not exact so, and is in float32,
first contact says so, and rows are stored in float32 (`build`).

FAISS ends its process where CUDA fails in the middle of its work. So a child process meets the device first, and an
agent that is started again after such an end has its device met anew: then the processor searches.

`GpuIndexFlatIP` of the device "cpu" is `IndexFlatIP`: the twin by which the path of a device is tested.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from typing import Any, Final

import faiss
import faiss.contrib.torch_utils  # lets its indexes take tensors
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from feature_store.index.definition import NO_KEY, RANK_BITS
from feature_store.index.engine_faiss import WINDOW
from feature_store.index.engine_torch import (
    TILE_ROWS,
    DeviceEngine,
    exact_sums,
    first_of_tiles,
    pack_keys,
    product_of,
)
from feature_store.index.exact_index import are_all_tied
from feature_store.rows import GatheredRows

MOST_PLACES: Final = 2048
"""Most places that FAISS selects on a device."""

_ADDED_BYTES: Final = 256 << 20
"""Of float32 rows that are added at a time. Storage grows to the byte, so it exists twice while it grows."""

_TEMPORARY_BYTES: Final = 512 << 20
"""What FAISS takes of a device for its working memory, once a process; more is allocated and freed at each search."""


@cache
def _resources(number: int) -> Any:  # noqa: ARG001  # one for each device
    resources = faiss.StandardGpuResources()
    resources.setTempMemory(_TEMPORARY_BYTES)
    resources.setPinnedMemory(0)  # for queries that lie in the process: ours are on the device
    return resources


def _empty_index(dimension: int, device: torch.device, *, is_half: bool) -> Any:
    if device.type == "cpu":
        return faiss.IndexFlatIP(dimension)
    config = faiss.GpuIndexFlatConfig()
    config.device = device.index or 0
    config.useFloat16 = is_half
    config.use_cuvs = False
    return faiss.GpuIndexFlatIP(_resources(config.device), dimension, config)


class FaissPart:
    """Records in the index of one device; see DevicePart."""

    def __init__(self, rows: GatheredRows, device: torch.device, *, is_half: bool, most_places: int) -> None:
        self._device, self._most_places = device, most_places
        self._index = _empty_index(rows.dimension, device, is_half=is_half)
        self._ranks = torch.from_numpy(rows.ranks).to(device)
        step = max(1, _ADDED_BYTES // (4 * rows.dimension))
        for start in range(0, len(rows), step):
            part = rows.part(start, min(start + step, len(rows)))
            floats = np.empty((len(part), rows.dimension), dtype=np.float32)
            for where, chunk in part.chunks():
                floats[where] = chunk
            with (
                exact_sums(),
                self._current(),
            ):  # its lock: FAISS's resources of a device are used by one thread at a time
                self._index.add(floats)

    def begin(self, queries: NDArray[np.int16], count: int) -> Callable[[], Tensor]:
        with self._current():
            asked = torch.from_numpy(queries).to(self._device).to(torch.float32)
            found = None
            if count + WINDOW <= self._most_places:
                found = self._index.search(asked, count + WINDOW)
        return partial(self._finished, asked, count, found)

    def _finished(self, asked: Tensor, count: int, found: tuple[Tensor, Tensor] | None) -> Tensor:
        settle = partial(first_of_tiles, tiles=self._tiles, count=count, product=product_of(self._device))
        with self._current():
            if found is None:
                return settle(asked.half())
            similarities, places = found
            keys = pack_keys(similarities, self._ranks[places.clamp(min=0)]).masked_fill(places < 0, NO_KEY)
            keys = torch.sort(keys, dim=1).values
            is_open = (keys[:, count - 1] >> RANK_BITS == keys[:, -1] >> RANK_BITS) & (keys[:, -1] != NO_KEY)
            is_open |= are_all_tied()
            kept = keys[:, :count].contiguous()
            kept[is_open] = settle(asked[is_open].half())
            return kept

    def _current(self) -> contextlib.AbstractContextManager[object]:
        """Make the device torch's current one: FAISS joins the stream of that one alone."""
        return contextlib.nullcontext() if self._device.type == "cpu" else torch.cuda.device(self._device)

    def _tiles(self) -> Iterator[tuple[Tensor, Tensor]]:
        for start in range(0, len(self._ranks), TILE_ROWS):
            ranks = self._ranks[start : start + TILE_ROWS]
            rows = torch.empty((len(ranks), self._index.d), dtype=torch.float32, device=self._device)
            yield self._index.reconstruct_n(start, len(ranks), rows), ranks


class FaissGpuEngine(DeviceEngine):
    """See the module.

    Args:
        devices: see DeviceEngine.
        is_half: store rows in float16.
        most_places: most places that a device selects.
    """

    name = "faiss-gpu"

    def __init__(self, *, devices: Sequence[str], is_half: bool = True, most_places: int = MOST_PLACES) -> None:
        super().__init__(devices=devices)
        self._is_half, self._most_places = is_half, most_places

    def bytes_per_row(self, dimension: int) -> int:
        return 2 * (2 if self._is_half else 4) * dimension + 8

    def part(self, rows: GatheredRows, device: torch.device) -> FaissPart:
        return FaissPart(rows, device, is_half=self._is_half, most_places=self._most_places)
