"""What a learner sees of records: rows in blocks, read as often as wanted, and the truth about them.

A block is read, adds to what is learned, and is forgotten; the first KEPT_NUMBERS are kept between steps. So memory
does not follow the number of records, and what is done with a block follows from its place alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from labeler.descent import BLOCK_ROWS, LEAST_BLOCK_ROWS

Array = NDArray[np.float64]

BLOCK_NUMBERS = 2**22
"""Of one block, at most, but for LEAST_BLOCK_ROWS rows: 32 MiB."""

KEPT_NUMBERS = 2**25
"""Prepared rows that are kept between steps, 256 MiB; those behind them are prepared anew at every step."""

Block = tuple[Array, Any]
"""Rows as the learner sees them, shape (..., r, d), and the truth about them, as its slopes want it."""

Blocks = Callable[[], Iterable[Block]]
"""Reads all rows once, block by block; the same at every call."""


class Slopes(Protocol):
    """A loss, as the steps see it."""

    def __call__(self, scores: Any, truth: Any, xp: Any = np, /) -> Any:
        """The loss's derivative by each score, shape (..., r, columns); `xp` is numpy, or torch for its tensors."""


@dataclass(frozen=True, eq=False)
class Rows:
    """Records' features and labels, read as often as wanted. Private where the records are; does not print.

    Attributes:
        count: how many.
        dimension: numbers of a feature.
        read: all of them in one order, given at most how many at once and how many blocks to skip: features
            (r, dimension), any scale, and labels (r,).
        public_count: a public number that stands for how many, by which devices are chosen.
    """

    count: int
    dimension: int
    read: Callable[[int, int], Iterator[tuple[NDArray[np.floating], NDArray[np.integer]]]]
    public_count: int

    @classmethod
    def of(cls, features: NDArray[np.floating], labels: NDArray[np.integer]) -> Rows:
        """Rows of arrays in memory."""

        def read(most: int, skip: int) -> Iterator[tuple[NDArray[np.floating], NDArray[np.integer]]]:
            for start in range(skip * most, len(labels), most):
                yield features[start : start + most], labels[start : start + most]

        return cls(len(labels), features.shape[1], read, len(labels))

    def __repr__(self) -> str:
        return "Rows(<private>)"


def block_rows(numbers: int) -> int:
    """How many rows of so many numbers are read at once."""
    return max(LEAST_BLOCK_ROWS, min(BLOCK_ROWS, BLOCK_NUMBERS // max(1, numbers)))


def kept(read: Callable[[int], Iterator[Block]]) -> Blocks:
    """The blocks that `read` prepares, the first KEPT_NUMBERS of them once.

    Args:
        read: prepares all blocks in one order, given how many to skip.
    """
    first: list[Block] = []
    room = KEPT_NUMBERS
    for rows, truth in read(0):
        first.append((rows, truth))
        room -= rows.size + sum(np.size(part) for part in (truth if isinstance(truth, tuple) else (truth,)))
        if room < 0:
            break

    def blocks() -> Iterator[Block]:
        yield from first
        yield from read(len(first))

    return blocks
