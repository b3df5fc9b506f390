"""Reading a memory-mapped shard without keeping its pages resident."""

from __future__ import annotations

import mmap
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from feature_store.joined_rows import JoinedFiles


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
