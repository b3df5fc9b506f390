"""What a nearest-neighbour index is, whatever library is behind it.

The definition every engine must meet, bit for bit:

    similarity(q, x) = sum_j q_j * x_j              over integers
    neighbours(q)    = the first k records by (similarity descending, record id ascending)

Integers make this a function of the set of records alone: no order of summation, block size, thread
count or library can change it. That is what the privacy proof needs (DESIGN.md, "Exact geometry").

Why one record moves at most one vote of one query. Let T(D) be the first k of the records D in a
fixed total order. Adding x to D leaves T(D) as it is, or puts x in and at most the last member out; removing
is the same read backwards. So with at least k records, one vote leaves one class and enters another (L1 at
most 2, L2 at most sqrt 2); with fewer, one vote appears or disappears (L2 at most 1).
Replacing x by y changes T in at most one member too: T(D - x) is T(D), or T(D) without x and with the next
record z. Then y stays out, or pushes out the last one: that is z where z came in, else it is y for one member.
One vote moves, L2 at most sqrt 2, although replacing is removing and adding. All of this is instance level,
per query, and holds only because the order of two records depends on no third one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

NO_RECORD: Final = -1
"""Fills `record_ids` and `rows` where fewer than k records exist."""

NO_SIMILARITY: Final = -(2**24)
"""Fills `similarities` there: one below the least similarity two records can have."""


@dataclass(frozen=True, eq=False, repr=False)
class Neighbors:
    """The k nearest records of each query, nearest first.

    Private: it stays with the agent. Its repr shows the shape and nothing else.

    Attributes:
        record_ids: int64 (nq, k); NO_RECORD where there are fewer than k records.
        similarities: int32 (nq, k), exact inner products; NO_SIMILARITY there.
        rows: int64 (nq, k), row of each neighbour in the features the index was built from (so labels
            are `labels[rows]`, also after deletions); NO_RECORD there.
    """

    record_ids: NDArray[np.int64]
    similarities: NDArray[np.int32]
    rows: NDArray[np.int64]

    def __repr__(self) -> str:
        queries, k = self.record_ids.shape
        return f"Neighbors({queries} queries, k={k}, contents private)"


class NeighborIndex(Protocol):
    """Finds the nearest private records of public queries.

    A search never changes the index, and two searches of one index give equal results.
    """

    @property
    def dimension(self) -> int:
        """Length of a feature vector."""

    def __len__(self) -> int:
        """How many records can be found: those added less those removed."""

    def search(self, queries: NDArray[np.int16], k: int) -> Neighbors:
        """The first k records by (similarity descending, record id ascending), for each query.

        Args:
            queries: int16 (nq, dimension), quantised as the records are; nq may be 0.
            k: at least 1; may exceed the number of records.

        Raises:
            BadData: queries of another dtype or dimension, or outside the exact range.
            InvalidSetting: k is no integer of at least 1, or too large for the memory limit.
            UnsafeIndex: the machine's matrix product turned out not to be exact.
        """

    def remove(self, record_ids: NDArray[np.int64], *, missing_ok: bool = False) -> int:
        """Forget records, all or none; as if they had never been added.

        Args:
            record_ids: int64 (m,); repeated ids count once.
            missing_ok: ignore ids that are not (or no longer) in the index.

        Returns:
            How many records were removed.

        Raises:
            InvalidSetting: some ids are not in the index and missing_ok is False; nothing was removed.
        """
