"""Rows that lie in several files, as one array: the files are mapped behind each other in this process's address space.

Who reads a shard (`feature_store.shard`) gets an array, whether its features are one file or a thousand: no copy, and
nothing in memory but the pages that are being read. It is what `numpy.memmap` does for one file; a map can continue
another only at a page's edge, so every file but the last is a multiple of `EDGE_BYTES` long.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import os
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from labeler.errors import DamagedShard

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
