"""CUDA devices: FAISS (`faiss-gpu`), and the definition in torch, tile by tile (`torch-gpu`, an opt-in).

Every device holds a range of ranks, and results are merged by key: FAISS's own shards would merge ties by the number of
the shard. Keys are unique, so it does not matter how a library chooses among equals: there are none.

**faiss-gpu** is one `GpuIndexFlatIP` per device, with ties settled by record id as in `engine_faiss`. Similarities and
places stay on the device until they are keys. Step 3 scores the queries that it concerns in full: `reconstruct_n` gives
a tile of the stored rows, and one exact product its similarities. FAISS selects at most 2,048 places on a device,
so a search for more than that is step 3 for every query. Rows are stored in float16, in half the memory of float32;
FAISS sums their products in float32. Where a device is not exact so, and is in float32, first contact says so, and rows
are stored in float32 (`build`). FAISS ends its process where CUDA fails in the middle of its work. So a child process
meets the device first. An agent that is started again after such an end meets its device again: then the processor
searches.

**torch-gpu** is step 3 alone, over rows in float16. Ties take no operation more. No device has measured it as it is
now. It is there for those who measure it to be faster than FAISS for a whole job (`labeler bench device`).

**Inputs.** float16 has 11 significant bits, so it holds the integers of an admitted row (`definition`) exactly: 2^11
itself is a power of two. bfloat16 has 8 bits and would not do.

**Products and sums.** Two such numbers multiply to an integer of at most 2^22, which the multipliers of tensor cores
and of float32 hold exactly. Every partial sum, in whatever order and grouping, is an integer that float32's 24 bits
hold (`definition`, "Exact vectors"). An accumulator that aligns its summands to the largest and cuts off what lies
below 24 bits cuts nothing off an integer. So

    torch.mm(queries float16, records float16.T, out_dtype=torch.float32)

is exact for every dimension and every admitted grid, provided the sum is *kept in float32*. It is not exact where
partial sums are rounded to half precision, or kept in fewer than 24 bits. Switches that allow the first are off for the
time of a product and set back to what they were. The second is found by the probe (`build.probe`) before anybody pays,
and by four random queries in full at every load (`exact_index`).

On the device "cpu" the same code multiplies in float32, and `GpuIndexFlatIP` is `IndexFlatIP`: the twins by which the
path of a device is tested.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any, Final

import faiss
import faiss.contrib.torch_utils  # lets its indexes take tensors
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from feature_store.index.definition import NO_KEY, RANK_BITS
from feature_store.index.engine_faiss import WINDOW, may_tie
from feature_store.index.exact_index import Block, Engine, EngineFault
from feature_store.rows import GatheredRows
from labeler.errors import InvalidSetting

_ADDED_BYTES: Final = 256 << 20
"""Of float32 rows that are added at a time. Storage grows to the byte, so it exists twice while it grows."""

_TEMPORARY_BYTES: Final = 512 << 20
"""What FAISS takes of a device for its working memory, once a process; more is allocated and freed at each search."""

_BYTES_PER_CELL: Final = 28
"""Of one query and one record of a tile: similarity, key, and what a selection of int64 keeps beside it."""

_WORKING_BYTES: Final = 1 << 30
"""Of a device, for one tile of a search."""

_SPARED_BYTES: Final = 2 << 30
"""Of a device's free memory, for the working memory of a search, the library's own and whoever else computes there."""

_SPARED_SHARE: Final = 0.1

_LOCK = threading.RLock()


class DeviceBlock:
    """Records in one part per device, ranks in a row from part to part; see Block."""

    def __init__(self, parts: Sequence[TorchPart]) -> None:
        self.parts = list(parts)

    def first_keys(self, queries: NDArray[np.int16], count: int) -> NDArray[np.int64]:
        with device_faults(), exact_sums():
            # All devices get their work before any is waited for.
            begun = [part.begin(np.array(queries, dtype=np.int16, order="C"), count) for part in self.parts]
            found: NDArray[np.int64] = np.concatenate([finish().cpu().numpy() for finish in begun], axis=1)
        found.sort(axis=1)
        return np.ascontiguousarray(found[:, :count])


class TorchPart:
    """Records on one device as float16, with their ranks.

    Attributes:
        tile_rows: records multiplied at a time.
    """

    tile_rows = 1 << 15

    def __init__(self, rows: GatheredRows, device: torch.device) -> None:
        self._ranks = torch.from_numpy(rows.ranks).to(device)
        self._rows = torch.empty((len(rows), rows.dimension), dtype=torch.float16, device=device)
        for where, chunk in rows.chunks():
            self._rows[where] = torch.from_numpy(chunk).to(device)

    def begin(self, queries: NDArray[np.int16], count: int) -> Callable[[], Tensor]:
        """Give the device its work.

        Returns:
            What waits for the keys of the first `count`, int64 (nq, count), ascending; NO_KEY where there are fewer.
        """
        keys = self.settle(torch.from_numpy(queries).to(self._ranks.device), count)
        return lambda: keys

    def settle(self, queries: Tensor, count: int) -> Tensor:
        """Return the first keys of queries by the definition, tile by tile."""
        found = []
        at_once = max(1, _WORKING_BYTES // (_BYTES_PER_CELL * (self.tile_rows + count)))
        for some in torch.split(queries.half(), at_once):
            best = torch.full((len(some), count), NO_KEY, dtype=torch.int64, device=some.device)
            for start in range(0, len(self._ranks), self.tile_rows):
                ranks = self._ranks[start : start + self.tile_rows]
                scores = exact_product(some, self.tile(start, len(ranks)))
                keys = torch.cat([best, pack_keys(scores, ranks)], dim=1)
                best = torch.topk(keys, count, dim=1, largest=False, sorted=False).values
            found.append(torch.sort(best, dim=1).values)
        return torch.cat(found)

    def tile(self, start: int, count: int) -> Tensor:
        """Return some rows, float16 or float32 (count, d)."""
        return self._rows[start : start + count]


class FaissPart(TorchPart):
    """Records in the index of one device.

    Attributes:
        most_places: most places that FAISS selects on a device.
    """

    most_places = 2048

    def __init__(self, rows: GatheredRows, device: torch.device, *, is_half: bool) -> None:
        self._ranks = torch.from_numpy(rows.ranks).to(device)
        self._index = _empty_index(rows.dimension, device, is_half=is_half)
        step = max(1, _ADDED_BYTES // (4 * rows.dimension))
        for start in range(0, len(rows), step):
            part = rows.part(start, min(start + step, len(rows)))
            floats = part.copy_to(np.empty((len(part), rows.dimension), dtype=np.float32))
            with exact_sums(), self._current():  # its lock: one thread at a time uses FAISS's resources of a device
                self._index.add(floats)

    def begin(self, queries: NDArray[np.int16], count: int) -> Callable[[], Tensor]:
        with self._current():
            asked = torch.from_numpy(queries).to(self._ranks.device).float()
            found = self._index.search(asked, count + WINDOW) if count + WINDOW <= self.most_places else None

        def finish() -> Tensor:
            with self._current():
                if found is None:
                    return self.settle(asked, count)
                similarities, places = found
                keys = pack_keys(similarities, self._ranks[places.clamp(min=0)]).masked_fill(places < 0, NO_KEY)
                keys = torch.sort(keys, dim=1).values
                is_open = may_tie(keys, count)
                kept = keys[:, :count].contiguous()
                kept[is_open] = self.settle(asked[is_open], count)
                return kept

        return finish

    def tile(self, start: int, count: int) -> Tensor:
        rows = torch.empty((count, self._index.d), dtype=torch.float32, device=self._ranks.device)
        tile: Tensor = self._index.reconstruct_n(start, count, rows)
        return tile

    def _current(self) -> contextlib.AbstractContextManager[object]:
        """Make the device torch's current one: FAISS joins the stream of that one alone."""
        device = self._ranks.device
        return contextlib.nullcontext() if device.type == "cpu" else torch.cuda.device(device)


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


class TorchEngine(Engine):
    """`torch-gpu`: one part of the records for each device.

    Args:
        devices: "cuda:0", "cuda:1" and so on; "cpu" in tests.

    Raises:
        InvalidSetting: torch sees no such device.
    """

    name = "torch-gpu"

    def __init__(self, *, devices: Sequence[str]) -> None:
        self._devices = [checked_device(name) for name in devices]

    def __repr__(self) -> str:
        return f"{type(self).__name__}(devices={[str(device) for device in self._devices]})"

    def bytes_per_row(self, dimension: int) -> int:
        """Return the device's memory for one record, while it is loaded."""
        return 2 * dimension + 8

    def part(self, rows: GatheredRows, device: torch.device) -> TorchPart:
        """Return some records on a device."""
        return TorchPart(rows, device)

    def room_rows(self, dimension: int) -> int | None:
        with device_faults():
            rooms = [room for device in self._devices if (room := _room_bytes(device)) is not None]
        # Parts are equally long, so the fullest device decides.
        return max(1, len(rooms) * min(rooms) // self.bytes_per_row(dimension)) if rooms else None

    def load(self, rows: GatheredRows) -> DeviceBlock:
        step = -(-len(rows) // len(self._devices))
        starts = range(0, len(rows), step)
        with device_faults():
            return DeviceBlock(
                [
                    self.part(rows.part(start, min(len(rows), start + step)), device)
                    for start, device in zip(starts, self._devices, strict=False)  # more devices than records
                ]
            )

    def free(self, block: Block) -> None:
        if isinstance(block, DeviceBlock):
            block.parts.clear()
            if self._devices[0].type == "cuda":
                torch.cuda.empty_cache()  # of other sizes than the next block's, it would lie there unused


class FaissGpuEngine(TorchEngine):
    """`faiss-gpu`.

    Args:
        devices: see TorchEngine.
        is_half: store rows in float16.
    """

    name = "faiss-gpu"

    def __init__(self, *, devices: Sequence[str], is_half: bool = True) -> None:
        super().__init__(devices=devices)
        self._is_half = is_half

    def bytes_per_row(self, dimension: int) -> int:
        return 2 * (2 if self._is_half else 4) * dimension + 8

    def part(self, rows: GatheredRows, device: torch.device) -> FaissPart:
        return FaissPart(rows, device, is_half=self._is_half)


def pack_keys(similarities: Tensor, ranks: Tensor) -> Tensor:
    """Return `definition.pack` on the device: (2^24 << RANK_BITS) + rank - (similarity << RANK_BITS)."""
    return torch.add(ranks + (1 << 24 + RANK_BITS), similarities.to(torch.int64), alpha=-(1 << RANK_BITS))


def exact_product(queries: Tensor, records: Tensor) -> Tensor:
    """Return float32 similarities (nq, n): on tensor cores with float32 sums, or in float32 on a processor.

    Args:
        queries: float16 (nq, d).
        records: a tile of them, float16 or float32 (n, d), so that no whole set is converted.
    """
    if queries.is_cuda:
        return torch.mm(queries, records.half().T, out_dtype=torch.float32)
    return torch.mm(queries.float(), records.float().T)


def checked_device(name: str) -> torch.device:
    """Return a device of this machine.

    Raises:
        InvalidSetting: no name of one, or torch sees no such device.
    """
    try:
        device = torch.device(name)
    except RuntimeError:
        raise InvalidSetting(f"{name!r} names no device; use cpu, cuda or cuda:N") from None
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise InvalidSetting(
            f"device {name} is needed, and torch sees {torch.cuda.device_count()} CUDA devices; use engine faiss"
        )
    return device


def _room_bytes(device: torch.device) -> int | None:
    """Return what is free on a device for records; what torch has reserved and does not use counts as free."""
    if device.type != "cuda":
        return None
    free, _ = torch.cuda.mem_get_info(device)
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return max(0, int((free + unused) * (1 - _SPARED_SHARE)) - _SPARED_BYTES)


@contextlib.contextmanager
def device_faults() -> Iterator[None]:
    """Turn a library's error about a device that failed or is full into an EngineFault."""
    try:
        yield
    except RuntimeError as error:  # out of memory, a kernel that failed, a library on it that did
        raise EngineFault(type(error).__name__) from None


@contextlib.contextmanager
def exact_sums() -> Iterator[None]:
    """Sums in float32 and nothing less, whatever this process has allowed elsewhere; set back afterwards.

    The switches belong to the process, so one search at a time holds them.
    """
    matmul: Any = torch.backends.cuda.matmul
    processor: Any = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]  # torch does not type it
    wanted: list[tuple[Any, str, object]] = [
        (matmul, "allow_fp16_reduced_precision_reduction", False),
        (matmul, "allow_bf16_reduced_precision_reduction", False),
        (matmul, "allow_fp16_accumulation", False),
        (matmul, "fp32_precision", "ieee"),
        (processor, "fp32_precision", "ieee"),
    ]
    with _LOCK, torch.inference_mode(), torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
        before = [(owner, name, getattr(owner, name)) for owner, name, _ in wanted]
        try:
            for owner, name, value in wanted:
                setattr(owner, name, value)
            yield
        finally:
            for owner, name, value in before:
                setattr(owner, name, value)
