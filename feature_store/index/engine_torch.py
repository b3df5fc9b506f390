"""CUDA devices by torch: the definition, tile by tile. The opt-in engine `torch-gpu`, and step 3 of `faiss-gpu`.

Records lie on each device as float16, with their ranks. A tile of them is multiplied with the queries, similarity and
rank become one int64 (`definition`, "Keys"), and the smallest keys are kept. Keys are unique, so it does not matter how
a library chooses among equals: there are none. Ties take no operation more. Every device holds one part, and parts are
merged by key. Working memory is bounded by `_WORKING_BYTES` a device.

No device has measured this engine as it is now. It is there for whoever measures it to be faster than FAISS for a whole
job (`labeler bench device`).

**Inputs.** An admitted row (see definition) holds integers of at most 2048 in absolute value, its squared norm is below
2^24. float16 has 11 significant bits, so it holds every integer up to 2048 = 2^11 exactly (2^11 itself is a power of
two); so does TF32. bfloat16 has 8 bits and would not do.

**Products and sums.** Two such numbers multiply to an integer of at most 2^22, which the multipliers of tensor cores
and of float32 hold exactly. By Cauchy and Schwarz the sum over *any* subset of coordinates stays below 2^24 in
absolute value. So every partial sum, in whatever order and grouping, is an integer that float32's 24 bits hold. An
accumulator that aligns its summands to the largest and cuts off what lies below 24 bits cuts nothing off an integer.
So

    torch.mm(queries float16, records float16.T, out_dtype=torch.float32)

is exact for every dimension and every admitted grid, provided the sum is *kept in float32*. It is not exact where
partial sums are rounded to half precision, or kept in fewer than 24 bits. Switches that allow the first are off for the
time of a product and set back to what they were. The second is found by the probe (`build.probe`) before anybody pays,
and by four random queries in full at every load (`exact_index`).

On a processor the same code multiplies in float32: the twin by which the path of a device is tested.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from feature_store.index.definition import NO_KEY, RANK_BITS
from feature_store.index.exact_index import Block, Engine, EngineFault
from feature_store.rows import GatheredRows
from labeler.errors import InvalidSetting

TILE_ROWS: Final = 1 << 15
"""Records multiplied at a time."""

_BYTES_PER_CELL: Final = 28
"""Of one query and one record of a tile: similarity, key, and what a selection of int64 keeps beside it."""

_WORKING_BYTES: Final = 1 << 30
"""Of a device, for one tile of a search."""

_SPARED_BYTES: Final = 2 << 30
"""Of a device's free memory, for the working memory of a search, the library's own and whoever else computes there."""

_SPARED_SHARE: Final = 0.1

Product = Callable[[Tensor, Tensor], Tensor]
"""(queries float16 (nq, d), records float16 (n, d)) -> similarities float32 (nq, n)."""

_LOCK = threading.RLock()


class DevicePart(Protocol):
    """Records on one device."""

    def begin(self, queries: NDArray[np.int16], count: int) -> Callable[[], Tensor]:
        """Give the device its work. The returned function waits for keys of the first `count`, ascending; NO_KEY where
        there are fewer."""


class DeviceBlock:
    """Records in one part per device, ranks in a row from part to part; see Block."""

    def __init__(self, parts: Sequence[DevicePart]) -> None:
        self.parts = list(parts)

    def first_keys(self, queries: NDArray[np.int16], count: int) -> NDArray[np.int64]:
        with device_faults(), exact_sums():
            # All devices get their work before any is waited for.
            begun = [part.begin(np.array(queries, dtype=np.int16, order="C"), count) for part in self.parts]
            found: NDArray[np.int64] = np.concatenate([finish().cpu().numpy() for finish in begun], axis=1)
        found.sort(axis=1)
        return np.ascontiguousarray(found[:, :count])


class DeviceEngine(Engine):
    """An engine with one part of the records for each device.

    Args:
        devices: "cuda:0", "cuda:1" and so on; "cpu" in tests.

    Raises:
        InvalidSetting: torch sees no such device.
    """

    def __init__(self, *, devices: Sequence[str]) -> None:
        self._devices = [checked_device(name) for name in devices]

    def __repr__(self) -> str:
        return f"{type(self).__name__}(devices={[str(device) for device in self._devices]})"

    def bytes_per_row(self, dimension: int) -> int:
        """Return the device's memory for one record, while it is loaded."""
        raise NotImplementedError

    def part(self, rows: GatheredRows, device: torch.device) -> DevicePart:
        """Return some records on a device."""
        raise NotImplementedError

    def room_rows(self, dimension: int) -> int | None:
        with device_faults():
            rooms = [room for device in self._devices if (room := _room_bytes(device)) is not None]
        # Parts are equally long, so the fullest device decides.
        return max(1, len(rooms) * min(rooms) // self.bytes_per_row(dimension)) if rooms else None

    def load(self, rows: GatheredRows) -> DeviceBlock:
        step = -(-len(rows) // len(self._devices))
        parts = []
        with device_faults():
            for number, device in enumerate(self._devices):
                start, stop = number * step, min(len(rows), (number + 1) * step)
                if start < stop:
                    parts.append(self.part(rows.part(start, stop), device))
        return DeviceBlock(parts)

    def free(self, block: Block) -> None:
        if isinstance(block, DeviceBlock):
            block.parts.clear()
            if self._devices[0].type == "cuda":
                torch.cuda.empty_cache()  # of other sizes than the next block's, it would lie there unused


class TorchPart:
    """Records on one device as float16; see DevicePart."""

    def __init__(self, rows: GatheredRows, device: torch.device, product: Product, tile_rows: int) -> None:
        self._product, self._tile_rows = product, tile_rows
        self._rows = torch.empty((len(rows), rows.dimension), dtype=torch.float16, device=device)
        for where, chunk in rows.chunks():
            self._rows[where] = torch.from_numpy(chunk).to(device)
        self._ranks = torch.from_numpy(rows.ranks).to(device)

    def begin(self, queries: NDArray[np.int16], count: int) -> Callable[[], Tensor]:
        asked = torch.from_numpy(queries).to(self._rows.device).to(torch.float16)
        keys = first_of_tiles(asked, self._tiles, count, self._product, self._tile_rows)
        return lambda: keys

    def _tiles(self) -> Iterator[tuple[Tensor, Tensor]]:
        return zip(torch.split(self._rows, self._tile_rows), torch.split(self._ranks, self._tile_rows), strict=True)


class TorchEngine(DeviceEngine):
    """See the module.

    Args:
        devices: see DeviceEngine.
        product: what multiplies; chosen by the device where absent.
        tile_rows: records multiplied at a time.
    """

    name = "torch-gpu"

    def __init__(self, *, devices: Sequence[str], product: Product | None = None, tile_rows: int = TILE_ROWS) -> None:
        super().__init__(devices=devices)
        self._product, self._tile_rows = product, tile_rows

    def bytes_per_row(self, dimension: int) -> int:
        return 2 * dimension + 8

    def part(self, rows: GatheredRows, device: torch.device) -> TorchPart:
        return TorchPart(rows, device, self._product or product_of(device), self._tile_rows)


def first_of_tiles(
    asked: Tensor,
    tiles: Callable[[], Iterable[tuple[Tensor, Tensor]]],
    count: int,
    product: Product,
    tile_rows: int = TILE_ROWS,
) -> Tensor:
    """Return the keys of each query's first records among all tiles, ascending.

    Args:
        asked: float16 (nq, d).
        tiles: yields records (n, d) and their ranks (n,), tile by tile; the same at every call.
        count: at least 1.
        product: what multiplies.
        tile_rows: most records of a tile.

    Returns:
        int64 (nq, count); NO_KEY where there are fewer records.
    """
    at_once = max(1, _WORKING_BYTES // (_BYTES_PER_CELL * (tile_rows + count)))
    found = []
    for some in torch.split(asked, at_once):
        best = torch.full((len(some), count), NO_KEY, dtype=torch.int64, device=some.device)
        for rows, ranks in tiles():
            keys = torch.cat([best, pack_keys(product(some, rows), ranks)], dim=1)
            best = torch.topk(keys, count, dim=1, largest=False, sorted=False).values
        found.append(torch.sort(best, dim=1).values)
    return torch.cat(found)


def pack_keys(similarities: Tensor, ranks: Tensor) -> Tensor:
    """Return `definition.pack` on the device: (2^24 << RANK_BITS) + rank - (similarity << RANK_BITS)."""
    return torch.add(ranks + (1 << 24 + RANK_BITS), similarities.to(torch.int64), alpha=-(1 << RANK_BITS))


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


def half_product(queries: Tensor, records: Tensor) -> Tensor:
    """Multiply on tensor cores: float16 in, float32 sums out."""
    return torch.mm(queries, records.half().T, out_dtype=torch.float32)


def single_product(queries: Tensor, records: Tensor) -> Tensor:
    """Multiply in float32; `records` is a tile, so that no whole set is converted."""
    return torch.mm(queries.float(), records.float().T)


def product_of(device: torch.device) -> Product:
    """Return the product that is exact on this kind of device, and fastest."""
    return half_product if device.type == "cuda" else single_product


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
