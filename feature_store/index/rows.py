"""Rows of a memory-mapped shard, read in pieces: no page stays resident, and no whole set is made of another type."""

from __future__ import annotations

import mmap
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from feature_store.joined_rows import JoinedFiles


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
