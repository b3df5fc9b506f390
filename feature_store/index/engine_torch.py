"""Torch as an engine: exact keys on the device, no tie left to settle, no limit of k, no second copy.

Records lie on the device as float16 (`exact_product` says why that is exact), with their places in the order of ids.
A tile of them is multiplied with the queries, similarity and place become one int64 (`keys`), and the smallest keys
are taken per tile and again over tiles. Keys are unique, so it does not matter how a library chooses among equals:
there are none. Every device holds one part, ranks in a row, and parts merge by key, that is by (similarity, full
record id).

**Groups.** A device multiplies faster than it selects, so most similarities are looked at once. A tile is cut into
groups of records, ranks in a row, and a group is known by the key made of its largest similarity and its first rank.
The `count` groups of smallest such keys hold the `count` first records: let a, with similarity s and rank r, be one of
these, in group A with largest similarity S >= s and first rank R <= r. A group B before A has either a similarity above
S, or one equal to S and, because groups are ranges of ranks, only ranks below R; in both cases a record before a. There
are fewer than `count` records before a, so fewer than `count` such groups. Only the chosen groups' similarities become
keys.

On the processor it is the same code: slower than FAISS, and the twin by which the device's path is tested.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Final, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from feature_store.index.engine import Block, DeviceFault, KeyedBlock
from feature_store.index.exact_product import Product, exact_sums, product_of, single_product
from feature_store.index.gathered import GatheredRows
from feature_store.index.keys import RANK_BITS
from labeler.errors import InvalidSetting

TILE_ROWS: Final = 1 << 15
"""Records multiplied at a time on a device with as many queries as a plan allows; more where there are fewer."""

_CPU_TILE_ROWS: Final = 1 << 12
_BYTES_PER_CELL: Final = 28
"""Of one query and one record of a tile: similarity, key, and what a selection of int64 keeps beside it."""

_GROUP: Final = 32
"""Records of a group: a selection among them reads 1/32 of a tile twice, and what it chose, 32 times `count`, again."""

_WORKING_BYTES: Final = 1 << 30
"""Of a device, for the tiles of one search."""

_SPARED_BYTES: Final = 2 << 30
"""Of a device's free memory, for the working memory of a search, the library's own and whoever else computes there."""

_SPARED_SHARE: Final = 0.1


class TorchPart:
    """Records on one device, ascending by rank; see engine.KeyedBlock."""

    def __init__(
        self, rows: GatheredRows, ranks: NDArray[np.int64], device: torch.device, product: Product, tile_rows: int
    ) -> None:
        self._device, self._product, self._tile_rows = device, product, tile_rows
        self._rows = torch.empty((len(rows), rows.dimension), dtype=torch.float16, device=device)
        for where, chunk in rows.chunks():
            self._rows[where] = torch.from_numpy(chunk).to(device)
        self._ranks = torch.from_numpy(np.array(ranks, dtype=np.int64)).to(device)

    def __len__(self) -> int:
        return len(self._ranks)

    def begin(self, queries: NDArray[np.int16], count: int) -> Tensor:
        """Keys of the first `count`, or of all where there are fewer, in no order; on a device not waited for."""
        asked = torch.from_numpy(queries).to(self._device).to(torch.float16)
        best = torch.empty((len(queries), 0), dtype=torch.int64, device=self._device)
        step = self._step(len(queries))
        for start in range(0, len(self), step):
            tile = slice(start, start + step)
            found = first_of_tile(self._product(asked, self._rows[tile]), self._ranks[tile], count)
            best = _smallest(torch.cat([best, found], dim=1), count)
        return best

    def _step(self, queries: int) -> int:
        """Records of a tile: few and large ones keep a device busy, whose memory is not the process's."""
        if self._device.type == "cpu":
            return self._tile_rows
        return max(self._tile_rows, _WORKING_BYTES // (_BYTES_PER_CELL * queries) // _GROUP * _GROUP)


class TorchBlock:
    """Records in one part per device, ranks in a row from part to part; see engine.KeyedBlock."""

    def __init__(self, parts: Sequence[TorchPart]) -> None:
        self._parts = list(parts)
        self._count = sum(len(part) for part in parts)

    def __len__(self) -> int:
        return self._count

    def first_keys(self, queries: NDArray[np.int16], count: int) -> NDArray[np.int64]:
        with _faults(), exact_sums():
            # All devices are told what to do before any is waited for.
            begun = [part.begin(np.array(queries, dtype=np.int16, order="C"), count) for part in self._parts]
            found = np.concatenate([cast("NDArray[np.int64]", keys.cpu().numpy()) for keys in begun], axis=1)
        found.sort(axis=1)
        return found[:, :count]

    def close(self) -> None:
        self._parts.clear()


class TorchEngine:
    """See engine.DeviceEngine.

    Args:
        devices: "cpu", "cuda" or "cuda:1", one part of the records for each.
        product: what multiplies; chosen by the device where absent.
        tile_rows: records multiplied at a time.

    Raises:
        InvalidSetting: torch sees no such device.
    """

    max_count: int | None = None

    def __init__(
        self, *, devices: Sequence[str] = ("cpu",), product: Product | None = None, tile_rows: int | None = None
    ) -> None:
        self._devices = [checked_device(name) for name in devices]
        self._product = product
        on_device = self._devices[0].type != "cpu"
        self._tile_rows = tile_rows or (TILE_ROWS if on_device else _CPU_TILE_ROWS)

    def __repr__(self) -> str:
        return f"TorchEngine(devices={[str(device) for device in self._devices]})"

    def bytes_per_query(self, block_rows: int) -> int:
        return _BYTES_PER_CELL * min(block_rows, self._tile_rows)

    def room_rows(self, dimension: int) -> int | None:
        with _faults():
            rooms = [room for device in self._devices if (room := _room_bytes(device)) is not None]
        if not rooms:
            return None
        # Parts are equally long, so the fullest device decides.
        return max(1, len(rooms) * min(rooms) // (2 * dimension + 8))

    def load_gathered(self, rows: GatheredRows, ranks: NDArray[np.int64]) -> TorchBlock:
        step = -(-len(rows) // len(self._devices))
        parts = []
        with _faults():
            for number, device in enumerate(self._devices):
                start, stop = number * step, min(len(rows), (number + 1) * step)
                if start < stop:
                    product = self._product or product_of(device)
                    part = TorchPart(rows.part(start, stop), ranks[start:stop], device, product, self._tile_rows)
                    parts.append(part)
        return TorchBlock(parts)

    def free(self, block: KeyedBlock | Block) -> None:
        if isinstance(block, TorchBlock):
            block.close()
            if self._devices[0].type == "cuda":
                torch.cuda.empty_cache()  # of other sizes than the next block's, it would lie there unused

    def in_single_precision(self) -> TorchEngine:
        """The same on tiles of float32: for a device whose half precision product is not exact."""
        return TorchEngine(
            devices=[str(device) for device in self._devices], product=single_product, tile_rows=self._tile_rows // 4
        )


def checked_device(name: str) -> torch.device:
    """A device of this machine.

    Raises:
        InvalidSetting: no name of one, or torch sees no such device.
    """
    try:
        device = torch.device(name)
    except RuntimeError:
        raise InvalidSetting(f"{name!r} names no device; use cpu, cuda or cuda:N") from None
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise InvalidSetting(
            f"engine torch-gpu needs device {name}, torch sees {torch.cuda.device_count()} CUDA devices; "
            "use engine faiss or auto"
        )
    return device


def _room_bytes(device: torch.device) -> int | None:
    """Free on a device for records; what torch has reserved and does not use counts as free."""
    if device.type != "cuda":
        return None
    free, _ = torch.cuda.mem_get_info(device)
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return max(0, int((free + unused) * (1 - _SPARED_SHARE)) - _SPARED_BYTES)


def first_of_tile(similarities: Tensor, ranks: Tensor, count: int) -> Tensor:
    """Keys of the first records of a tile, in no order; see **Groups** above.

    Args:
        similarities: float32 (nq, n), exact.
        ranks: int64 (n,), ascending.
        count: at least 1.

    Returns:
        int64 (nq, min(count, n)).
    """
    groups = len(ranks) // _GROUP
    if 2 * count > groups:
        return _smallest(_pack(similarities, ranks), count)
    grouped = similarities[:, : groups * _GROUP].view(-1, groups, _GROUP)
    members = ranks[: groups * _GROUP].view(groups, _GROUP)
    chosen = torch.topk(_pack(grouped.amax(dim=2), members[:, 0]), count, dim=1, largest=False, sorted=False).indices
    among = torch.gather(grouped, 1, chosen[:, :, None].expand(-1, -1, _GROUP))
    keys = [_pack(among, members[chosen]).flatten(1)]
    if groups * _GROUP < len(ranks):
        keys.append(_pack(similarities[:, groups * _GROUP :], ranks[groups * _GROUP :]))
    return _smallest(torch.cat(keys, dim=1), count)


def _pack(similarities: Tensor, ranks: Tensor) -> Tensor:
    """keys.pack on the device."""
    return similarities.to(torch.int64).neg_().add_(1 << 24).mul_(1 << RANK_BITS).add_(ranks)


def _smallest(keys: Tensor, count: int) -> Tensor:
    if keys.shape[1] <= count:
        return keys
    return torch.topk(keys, count, dim=1, largest=False, sorted=False).values


@contextlib.contextmanager
def _faults() -> Iterator[None]:
    """What torch says of a device that failed or is full, as the index understands it."""
    try:
        yield
    except RuntimeError as error:  # out of memory, a kernel that failed, a library on it that did
        raise DeviceFault(type(error).__name__) from None
