"""Where rows of a shard lie, said so that another process can map them instead of being sent them."""

from __future__ import annotations

import mmap
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from feature_store.joined_rows import JoinedFiles


@dataclass(frozen=True, eq=False)
class Rows:
    """Some rows, as another process of the same party gets them. Private; does not print.

    Attributes:
        files: that hold them, one behind the other; empty where they lie in no file.
        offset: byte of the files at which they begin.
        shape: of the array.
        dtype: of its numbers.
        array: the rows themselves, where they lie in no file.
    """

    files: tuple[Path, ...] = field(repr=False)
    offset: int = field(repr=False)
    shape: tuple[int, ...] = field(repr=False)
    dtype: np.dtype[Any]
    array: NDArray[Any] | None = field(default=None, repr=False)

    def open(self) -> NDArray[Any]:
        """The rows, memory-mapped and read-only where they lie in files.

        Raises:
            OSError: a file is not there on this machine.
            ValueError: it is shorter than it was.
        """
        if self.array is not None:
            return self.array
        if len(self.files) == 1:
            return np.memmap(self.files[0], mode="r", dtype=self.dtype, offset=self.offset, shape=self.shape)
        size = int(np.prod(self.shape))
        first = self.offset // self.dtype.itemsize
        numbers: NDArray[Any] = np.asarray(JoinedFiles(self.files)).view(self.dtype)
        return numbers[first : first + size].reshape(self.shape)


def rows_of(array: NDArray[Any]) -> Rows:
    """Where an array lies: in files, if it is a map of them or a slice of one in one piece; else in memory."""
    plain = Rows((), 0, array.shape, array.dtype, np.asarray(array))
    if not array.flags.c_contiguous or not array.size:
        return plain
    address = array.__array_interface__["data"][0]
    root = _root(array)
    if isinstance(root, np.memmap) and root.filename is not None and root.mode == "r":
        offset = address - root.__array_interface__["data"][0] + root.offset
        return Rows((Path(str(root.filename)).resolve(),), offset, array.shape, array.dtype)
    if isinstance(root, JoinedFiles):
        start = address - root.__array_interface__["data"][0]
        first = int(np.searchsorted(root.starts, start, side="right")) - 1
        last = int(np.searchsorted(root.starts, start + array.nbytes, side="left"))
        files = tuple(file.resolve() for file in root.files[first:last])
        return Rows(files, start - root.starts[first], array.shape, array.dtype)
    return plain


def part_edges(features: NDArray[Any], workers: int) -> list[int]:
    """The rows at which the parts of a shard begin, and last the number of rows: at most `workers` parts.

    They are the files that the shard keeps its features in, neighbouring ones together where there are more than
    workers. Where there are fewer, the rows are cut evenly.
    """
    count = len(features)
    root = _root(features)
    if isinstance(root, JoinedFiles) and features.nbytes == root.starts[-1] and len(root.files) >= workers:
        row_bytes = features.nbytes // count
        edges = [start // row_bytes for start in root.starts]
        return [edges[len(root.files) * number // workers] for number in range(workers + 1)]
    parts = max(1, min(workers, count))
    return [count * number // parts for number in range(parts + 1)]


def _root(array: NDArray[Any]) -> object:
    """What an array is a view of: the map, where it is one."""
    owner: object = array
    while isinstance(owner, np.ndarray):
        if isinstance(owner.base, mmap.mmap) or owner.base is None:
            return owner
        owner = owner.base
    return owner
