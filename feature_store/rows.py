"""Features as rows of integers: quantized, mapped from one file or several, and read in pieces.

Integers make similarity exact, so one record moves at most one vote (feature_store.index.definition).

A shard's features (`feature_store.shard`) are one array, whether they lie in one file or a thousand: no copy, and
nothing in memory but the pages that are being read. It is what `numpy.memmap` does for one file. A map can continue
another only at a page's edge, so every file but the last is a multiple of `EDGE_BYTES` long.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import os
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from labeler.errors import BadData, DamagedShard

FEATURE_SCALE = 2048
"""A normalised feature times this, rounded, is stored. Inner products then stay below 2^24 and are exact in float32."""


def quantize(features: NDArray[np.floating]) -> NDArray[np.int16]:
    """Normalise each row to Euclidean length 1 in float64, and round 2048 times it to int16.

    Rows are treated one by one: no statistic of the data enters, so a record's feature depends on its image alone.

    Args:
        features: floats, shape (n, d), any length but zero.

    Returns:
        int16, shape (n, d), `rint(2048 * x / ||x||)`; halves round to even.

    Raises:
        BadData: not two-dimensional floats, or a row that is zero or not finite.
    """
    if features.ndim != 2 or not np.issubdtype(features.dtype, np.floating):
        raise BadData(
            f"features must be floats of shape (n, dimension), found {features.dtype} of shape {features.shape}"
        )
    usable = usable_rows(features)
    if not usable.all():
        raise BadData(
            f"{int((~usable).sum())} of {len(usable)} features are zero or not finite, so they have no direction; "
            "the images may be blank, or the backbone's weights damaged"
        )
    exact = features.astype(np.float64)
    # Dividing by the largest entry first keeps the squares of very large and very small rows in range.
    exact /= np.abs(exact).max(axis=1, keepdims=True, initial=0.0)
    exact /= np.linalg.norm(exact, axis=1, keepdims=True)
    exact *= FEATURE_SCALE
    return np.rint(exact, out=exact).astype(np.int16)


def on_grid(features: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Which rows may have been made by `quantize`: whole numbers whose length rounding explains.

    Args:
        features: float64, shape (n, d).
    """
    slack = features.shape[1] ** 0.5 / 2
    # Comparisons with NaN are False; without an upper bound here the squares could overflow.
    whole = (np.abs(features) <= FEATURE_SCALE + slack).all(axis=1)
    whole &= (np.rint(np.where(whole[:, None], features, 0.5)) == features).all(axis=1)
    lengths = np.linalg.norm(np.where(whole[:, None], features, 0.0), axis=1)
    ready: NDArray[np.bool_] = whole & (np.abs(lengths - FEATURE_SCALE) <= slack)
    return ready


def usable_rows(features: NDArray[np.floating]) -> NDArray[np.bool_]:
    """Which rows have a direction: finite, and not all zero."""
    usable: NDArray[np.bool_] = np.isfinite(features).all(axis=1) & features.any(axis=1)
    return usable


def largest_square_length(dimension: int) -> int:
    """Bound on the squared length of a quantised row: rounding moves each of d entries by at most 1/2."""
    return int((FEATURE_SCALE + dimension**0.5 / 2) ** 2) + 1


EDGE_BYTES: Final = 1 << 16
"""The largest page of the machines that this runs on."""

_ROW_ITEM: Final = np.dtype("<i2")
# Not in the module mmap; the same numbers on Linux and macOS.
_PROT_NONE: Final = 0
_MAP_FIXED: Final = 0x10
_FAILED: Final = ctypes.c_void_p(-1).value


def rows_to_an_edge(rows: int, dimension: int) -> int:
    """The least number of rows, not below `rows`, whose bytes end at an edge."""
    step = EDGE_BYTES // math.gcd(_ROW_ITEM.itemsize * dimension, EDGE_BYTES)
    return -(-rows // step) * step


class JoinedFiles:
    """The map itself; the arrays over it keep it alive, and it goes with the last of them.

    Args:
        files: each read-only from its first byte to its last, in this order.

    Attributes:
        starts: the byte of the whole at which each begins, and last the length of the whole.

    Raises:
        DamagedShard: one of them cannot be mapped, or does not end at an edge.
    """

    def __init__(self, files: Sequence[Path]) -> None:
        self.files = tuple(files)
        sizes = [file.stat().st_size for file in self.files]
        if any(size % EDGE_BYTES or not size for size in sizes[:-1]) or not sizes[-1]:
            raise DamagedShard("a part of a shard has another length than its manifest states; embed the images again")
        self.starts = tuple(int(start) for start in np.concatenate([[0], np.cumsum(sizes)]))
        self._libc = _libc()
        length = self.starts[-1]
        reserved = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
        self._address = self._map(None, length, _PROT_NONE, reserved, -1)
        weakref.finalize(self, self._libc.munmap, self._address, length)
        for file, start, size in zip(self.files, self.starts[:-1], sizes, strict=True):
            handle = os.open(file, os.O_RDONLY)
            try:
                self._map(self._address + start, size, mmap.PROT_READ, mmap.MAP_SHARED | _MAP_FIXED, handle)
            finally:
                os.close(handle)

    @property
    def __array_interface__(self) -> dict[str, Any]:
        return {
            "version": 3,
            "typestr": _ROW_ITEM.str,
            "shape": (self.starts[-1] // _ROW_ITEM.itemsize,),
            "data": (self._address, True),
        }

    def unmap_pages(self) -> None:
        """Tell the system that no page is needed for now; each is read again where it is."""
        self._libc.madvise(self._address, self.starts[-1], mmap.MADV_DONTNEED)

    def _map(self, address: int | None, length: int, protection: int, flags: int, handle: int) -> int:
        found = self._libc.mmap(address, length, protection, flags, handle, 0)
        if found == _FAILED:
            reason = os.strerror(ctypes.get_errno())
            raise DamagedShard(f"the parts of a shard cannot be mapped ({reason}); look at the files' permissions")
        return int(found)


def joined_rows(files: Sequence[Path], dimension: int) -> NDArray[np.int16]:
    """The rows of all files, int16, shape (n, dimension), read-only.

    Args:
        files: of rows, little-endian, without a header; in this order.
        dimension: numbers in a row.

    Raises:
        DamagedShard: see JoinedFiles.
    """
    rows: NDArray[np.int16] = np.asarray(JoinedFiles(files))
    if rows.size % dimension:
        raise DamagedShard(f"the parts of a shard hold no whole number of rows of dimension {dimension}")
    return rows.reshape(-1, dimension)


def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    region = (ctypes.c_void_p, ctypes.c_size_t)
    libc.mmap.argtypes = (*region, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_ssize_t)
    libc.munmap.argtypes = region
    libc.madvise.argtypes = (*region, ctypes.c_int)
    return libc


class GatheredRows:
    """Some rows of the features, in a given order.

    An index always reads through it, also where the rows lie in order: the first deletion must not change how they are
    read.

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
            yield slice(start, start + len(some)), np.ascontiguousarray(self._features[some])
        unmap_pages(self._features)


def row_chunks(features: NDArray[np.int16], bytes_per_row: int, chunk_bytes: int) -> Iterator[slice]:
    """Slices that cover the rows, in order; the pages behind one are given back before the next.

    Args:
        features: (n, d), n may be 0.
        bytes_per_row: memory the caller needs for each row.
        chunk_bytes: memory the caller has; one row is always taken.
    """
    step = max(1, chunk_bytes // bytes_per_row)
    for start in range(0, len(features), step):
        yield slice(start, start + step)
        unmap_pages(features)


def unmap_pages(features: NDArray[np.int16]) -> None:
    """Tell the system that the pages of a read-only memory map are not needed for now.

    Nothing is lost: they are read again from the page cache or the file. Arrays that are not maps, and
    numpy maps that may hold changes of their own (modes "c" and "r+"), are left alone.
    """
    owner: object = features
    while isinstance(owner, np.ndarray):
        if isinstance(owner, np.memmap) and owner.mode != "r":
            return
        owner = owner.base
    if isinstance(owner, JoinedFiles):
        owner.unmap_pages()
    if isinstance(owner, mmap.mmap) and not features.flags.writeable and hasattr(mmap, "MADV_DONTNEED"):
        owner.madvise(mmap.MADV_DONTNEED)
