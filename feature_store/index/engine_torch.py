"""Torch as an engine: exact keys on the device, no tie left to settle, no limit of k, no second copy.

Records lie on the device as float16, with their places in the order of ids.
A tile of them is multiplied with the queries, similarity and place become one int64 (`definition`, "Keys"), and the
smallest keys are taken per tile and again over tiles. Keys are unique, so it does not matter how a library chooses
among equals: there are none. Every device holds one part, ranks in a row, and parts merge by key.

**Groups.** A device multiplies faster than it selects, so most similarities are looked at once. A tile is cut into
groups of records, ranks in a row, and a group is known by the key made of its largest similarity and its first rank.
The `count` groups of smallest such keys hold the `count` first records. Proof: let a, with similarity s and rank r, be
one of these, in group A with largest similarity S >= s and first rank R <= r. A group B before A has a similarity above
S, or one equal to S. In the second case it has only ranks below R, because groups are ranges of ranks. In both cases it
holds a record before a. There are fewer than `count` records before a, so fewer than `count` such groups. Only the
chosen groups' similarities become keys. Where ranks are not in a row (`GatheredRows.ranks`) a group is known by the
first of its keys, so that the same holds, and all similarities become keys.

**Padding.** Every panel is whole: the last one is filled up with rows of zeros, whose keys are NO_KEY, the last there
are. So whether groups are chosen first follows from the count asked for, and never from how many records there are.

**Panels.** A device takes the largest of each group fast where neighboring similarities belong to neighboring groups
(five times as fast on an H100 as where they belong to one). So records lie in panels, and within a panel the first of
each group come before the second of each: `interleaved`. Where a record lies changes nothing else, for its rank lies in
the same place.

**Inputs.** An admitted row (see definition) holds integers of at most 2048 in absolute value, its squared norm is below
2^24. float16 has 11 significant bits, so it holds every integer up to 2048 = 2^11 exactly (2^11 itself is a power of
two); so does TF32. Rows are therefore kept as float16: as many bytes as on disk. bfloat16 has 8 bits and would not do.

**Products and sums.** Two such numbers multiply to an integer of at most 2^22, which the multipliers of tensor cores
and of float32 hold exactly. By Cauchy and Schwarz the sum over *any* subset of coordinates stays below 2^24 in
absolute value. So every partial sum, in whatever order and grouping, is an integer that float32's 24 bits hold. An
accumulator that aligns its summands to the largest and cuts off what lies below 24 bits cuts nothing off an integer.
So

    torch.mm(queries float16, records float16.T, out_dtype=torch.float32)

is exact for every dimension and every admitted grid, provided the sum is *kept in float32*: no limbs are needed. It is
not exact where partial sums are rounded to half precision, or kept in fewer than 24 bits. Switches that allow the first
are off for the time of a product and set back to what they were. The second is found by the probe (`build.probe`)
before anybody pays, and by four random queries in full at every load (`exact_index`).

On a processor a tile of records is converted to float32 first and multiplied in
float32. TF32 would do no harm there, bfloat16 would ("medium" precision on a processor): both are off.

On the processor it is the same code: slower than int16, and the twin by which the device's path is tested.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from feature_store.index.definition import NO_KEY, RANK_BITS
from feature_store.index.exact_index import Block, DeviceFault, Engine
from feature_store.rows import GatheredRows
from labeler.errors import InvalidSetting

TILE_ROWS: Final = 1 << 15
"""Records multiplied at a time on a device with as many queries as a plan allows; more where there are fewer."""

_CPU_TILE_ROWS: Final = 1 << 12
_BYTES_PER_CELL: Final = 28
"""Of one query and one record of a tile: similarity, key, and what a selection of int64 keeps beside it."""

_GROUP: Final = 32
"""Records of a group: a selection among them reads 1/32 of a tile twice, and what it chose, 32 times `count`, again."""

_WORKING_BYTES: Final = 1 << 30
"""Of a device, for one tile of a search."""

_BYTES_PER_GROUPED_CELL: Final = 6
"""Of one query and one record of a tile that is selected from by groups: similarity, and a group's share of keys."""

_WIDE_TILE_ROWS: Final = 1 << 17
"""Records of a tile on a device where there are that many: choosing among a tile's groups costs nearly as much for a
small tile as for a large one."""

_SPARED_BYTES: Final = 2 << 30
"""Of a device's free memory, for the working memory of a search, the library's own and whoever else computes there."""

_SPARED_SHARE: Final = 0.1

_NO_RANK: Final = (1 << RANK_BITS) - 1
_LEAST: Final = -(1 << 24) + 1
"""Rank and similarity of what fills a panel up: together they are NO_KEY."""


Product = Callable[[Tensor, Tensor], Tensor]
"""(queries float16 (nq, d), records float16 (n, d)) -> similarities float32 (nq, n)."""

_LOCK = threading.RLock()


class TorchPart:
    """Records on one device, panel after panel, ranks ascending from panel to panel; see Block."""

    def __init__(self, rows: GatheredRows, device: torch.device, product: Product, tile_rows: int) -> None:
        self._device, self._product, self._count = device, product, len(rows)
        self._panel_rows = min(max(_GROUP, tile_rows // _GROUP * _GROUP), TILE_ROWS)
        self._panels = max(1, -(-len(rows) // self._panel_rows))
        shape = (self._panels * self._panel_rows, rows.dimension)
        self._rows = torch.zeros(shape, dtype=torch.float16, device=device)
        for where, chunk in rows.chunks():
            self._rows[where] = torch.from_numpy(chunk).to(device)
        self._ranks = torch.full((shape[0],), _NO_RANK, dtype=torch.int64, device=device)
        self._ranks[: len(rows)] = torch.from_numpy(rows.ranks).to(device)
        self._in_a_row = bool((np.diff(rows.ranks) == 1).all())
        for start in range(0, shape[0], self._panel_rows):
            panel = slice(start, start + self._panel_rows)
            self._rows[panel], self._ranks[panel] = interleaved(self._rows[panel]), interleaved(self._ranks[panel])

    def __len__(self) -> int:
        return self._count

    def begin(self, queries: NDArray[np.int16], count: int) -> Tensor:
        """Keys of the first `count`, ascending, NO_KEY where there are fewer; on a device not waited for."""
        asked = torch.from_numpy(queries).to(self._device).to(torch.float16)
        most_queries, panels = self._tile(len(queries), count)
        found = [self._first(some, count, panels) for some in torch.split(asked, most_queries)]
        return torch.sort(torch.cat(found), dim=1).values

    def _first(self, asked: Tensor, count: int, panels: int) -> Tensor:
        best = torch.full((len(asked), count), NO_KEY, dtype=torch.int64, device=self._device)
        # The last panel is a separate tile: only there it is looked for what fills it up.
        starts = [*range(0, self._panels - 1, panels), self._panels - 1, self._panels]
        for start, stop in itertools.pairwise(panel * self._panel_rows for panel in starts):
            similarities, ranks = self._product(asked, self._rows[start:stop]), self._ranks[start:stop]
            if stop == len(self._rows):
                similarities = similarities.masked_fill(ranks == _NO_RANK, _LEAST)
            found = first_of_tile(similarities, ranks, count, self._panel_rows, in_a_row=self._in_a_row)
            best = _smallest(torch.cat([best, found], dim=1), count)
        return best

    def _tile(self, queries: int, count: int) -> tuple[int, int]:
        """Most queries and panels of one tile: on a processor the plan's, on a device, whose memory is not the
        process's, what keeps it busy."""
        if self._device.type == "cpu":
            return max(1, queries), 1
        wide = max(self._panel_rows, _WIDE_TILE_ROWS)
        each, in_a_panel = (_bytes(rows, count, in_a_row=self._in_a_row) for rows in (wide, self._panel_rows))
        most_queries = max(1, min(queries, _WORKING_BYTES // each))
        return most_queries, max(1, _WORKING_BYTES // most_queries // in_a_panel)


class TorchBlock:
    """Records in one part per device, ranks in a row from part to part; see Block."""

    def __init__(self, parts: Sequence[TorchPart]) -> None:
        self._parts = list(parts)
        self._count = sum(len(part) for part in parts)

    def __len__(self) -> int:
        return self._count

    def first_keys(self, queries: NDArray[np.int16], count: int) -> NDArray[np.int64]:
        with _faults(), exact_sums():
            # All devices get their work before any is waited for.
            begun = [part.begin(np.array(queries, dtype=np.int16, order="C"), count) for part in self._parts]
            found = [cast("NDArray[np.int64]", keys.cpu().numpy()) for keys in begun]
        if len(found) == 1:
            return found[0]
        merged = np.concatenate(found, axis=1)
        merged.sort(axis=1)
        return merged[:, :count]

    def close(self) -> None:
        self._parts.clear()


class TorchEngine(Engine):
    """See the module.

    Args:
        devices: "cpu", "cuda" or "cuda:1", one part of the records for each.
        product: what multiplies; chosen by the device where absent.
        tile_rows: records multiplied at a time.

    Raises:
        InvalidSetting: torch sees no such device.
    """

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
        if self._devices[0].type != "cpu":
            return 0  # of the process's memory; a tile's queries are counted where it is made
        return _BYTES_PER_CELL * min(block_rows, self._tile_rows)

    def room_rows(self, dimension: int) -> int | None:
        with _faults():
            rooms = [room for device in self._devices if (room := _room_bytes(device)) is not None]
        if not rooms:
            return None
        # Parts are equally long, so the fullest device decides.
        return max(1, len(rooms) * min(rooms) // (2 * dimension + 8))

    def load(self, rows: GatheredRows, most_rows: int) -> TorchBlock:
        step, tile_rows = -(-len(rows) // len(self._devices)), min(self._tile_rows, most_rows + _GROUP - 1)
        parts = []
        with _faults():
            for number, device in enumerate(self._devices):
                start, stop = number * step, min(len(rows), (number + 1) * step)
                product = self._product or product_of(device)
                parts.append(TorchPart(rows.part(start, stop), device, product, tile_rows))
        return TorchBlock(parts)

    def free(self, block: Block) -> None:
        if isinstance(block, TorchBlock):
            block.close()
            if self._devices[0].type == "cuda":
                torch.cuda.empty_cache()  # of other sizes than the next block's, it would lie there unused


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
            "use engine numpy or auto"
        )
    return device


def _room_bytes(device: torch.device) -> int | None:
    """Free on a device for records; what torch has reserved and does not use counts as free."""
    if device.type != "cuda":
        return None
    free, _ = torch.cuda.mem_get_info(device)
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return max(0, int((free + unused) * (1 - _SPARED_SHARE)) - _SPARED_BYTES)


def interleaved(rows: Tensor) -> Tensor:
    """A panel's records, or their ranks, the first of each group first, then the second of each; the rest at the end.

    Args:
        rows: (n, ...), by rank.

    Returns:
        (n, ...): what was at g * _GROUP + i is at i * (n // _GROUP) + g.
    """
    groups = len(rows) // _GROUP
    among = rows[: groups * _GROUP].reshape(groups, _GROUP, *rows.shape[1:]).transpose(0, 1).flatten(0, 1)
    return torch.cat([among, rows[groups * _GROUP :]])


def _by_groups(groups: int, count: int) -> bool:
    """Tell whether choosing groups first saves anything."""
    return 2 * count <= groups


def _bytes(rows: int, count: int, *, in_a_row: bool) -> int:
    """Memory of selecting from `rows` records, per query."""
    if _by_groups(rows // _GROUP, count):
        each = _BYTES_PER_GROUPED_CELL if in_a_row else _BYTES_PER_CELL
        return each * rows + _BYTES_PER_CELL * _GROUP * count
    return _BYTES_PER_CELL * rows


def first_of_tile(similarities: Tensor, ranks: Tensor, count: int, panel_rows: int, *, in_a_row: bool = True) -> Tensor:
    """Keys of the first records of a tile, in no order; see **Groups** and **Panels** above.

    Args:
        similarities: float32 (nq, n), exact; n a multiple of `panel_rows`.
        ranks: int64 (n,), interleaved within each panel, ascending from panel to panel if they are in a row.
        count: at least 1.
        panel_rows: records of a panel.
        in_a_row: whether the ranks of a group are in a row.

    Returns:
        int64 (nq, min(count, n)), NO_KEY among them where the tile holds fewer records.
    """
    panels, groups = len(ranks) // panel_rows, panel_rows // _GROUP
    if not _by_groups(groups, count):
        return _smallest(_pack(similarities, ranks), count)
    paneled, members = similarities.view(-1, panels, panel_rows), ranks.view(panels, panel_rows)
    among = (slice(None), slice(None), slice(groups * _GROUP))
    if in_a_row:
        first_keys = _pack(paneled[among].view(-1, panels, _GROUP, groups).amax(dim=2), members[:, :groups])
    else:
        first_keys = _pack(paneled, members)[among].view(-1, panels, _GROUP, groups).amin(dim=2)
    chosen = torch.topk(first_keys.flatten(1), count, dim=1, largest=False, sorted=False).indices
    first = chosen // groups * panel_rows + chosen % groups
    where = (first[:, :, None] + torch.arange(0, groups * _GROUP, groups, device=first.device)).flatten(1)
    keys = [_pack(torch.gather(similarities, 1, where), ranks[where])]
    if groups * _GROUP < panel_rows:
        rest = slice(groups * _GROUP, None)
        keys.append(_pack(paneled[:, :, rest], members[:, rest]).flatten(1))
    return _smallest(torch.cat(keys, dim=1), count)


def _pack(similarities: Tensor, ranks: Tensor) -> Tensor:
    """keys.pack on the device: (2^24 << RANK_BITS) + rank - (similarity << RANK_BITS), below 2^63 as there."""
    return torch.add(ranks + (1 << 24 + RANK_BITS), similarities.to(torch.int64), alpha=-(1 << RANK_BITS))


def _smallest(keys: Tensor, count: int) -> Tensor:
    if keys.shape[1] <= count:
        return keys
    return torch.topk(keys, count, dim=1, largest=False, sorted=False).values


@contextlib.contextmanager
def _faults() -> Iterator[None]:
    """Turn torch's word about a device that failed or is full into a DeviceFault."""
    try:
        yield
    except RuntimeError as error:  # out of memory, a kernel that failed, a library on it that did
        raise DeviceFault(type(error).__name__) from None


def half_product(queries: Tensor, records: Tensor) -> Tensor:
    """On tensor cores: float16 in, float32 sums out."""
    return torch.mm(queries, records.T, out_dtype=torch.float32)


def single_product(queries: Tensor, records: Tensor) -> Tensor:
    """Multiply in float32; `records` is a tile, so that no whole set is converted."""
    return torch.mm(queries.float(), records.float().T)


def product_of(device: torch.device) -> Product:
    """The product that is exact on this kind of device, and fastest."""
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
