"""Which records an index holds: their ids, their order, and which have been removed."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from feature_store.index.protocol import NO_RECORD
from labeler.errors import InvalidSetting

BYTES_PER_RECORD = 48
"""Memory of the tables for each record, with what building and removing need for a moment."""


class Records:
    """Ids, ranks and tombstones.

    A rank is a record's place in the ascending order of ids at the time the index was built. Ranks never
    change: a removal leaves a gap, so the order of those that stay is untouched.

    Attributes:
        ids: int64 (n + 1,), by rank, ascending; then NO_RECORD, for a neighbour that there is none of.
        row_of_rank: int64 (n + 1,), likewise.
        rank_of_row: int64 (n,).
        alive: bool (n,), by rank.
    """

    def __init__(self, record_ids: NDArray[np.int64]) -> None:
        order = np.argsort(record_ids).astype(np.int64, copy=False)
        self.row_of_rank: NDArray[np.int64] = np.append(order, NO_RECORD)
        self.ids: NDArray[np.int64] = np.append(record_ids[order], NO_RECORD)
        self.rank_of_row: NDArray[np.int64] = np.empty_like(order)
        self.rank_of_row[order] = np.arange(len(record_ids), dtype=np.int64)
        self.alive: NDArray[np.bool_] = np.ones(len(record_ids), dtype=np.bool_)
        self.num_alive = len(record_ids)

    def living_rows(self) -> NDArray[np.int64]:
        """Rows of the records not removed, ascending."""
        return np.flatnonzero(self.alive[self.rank_of_row])

    def bury(self, record_ids: NDArray[np.int64], *, missing_ok: bool) -> NDArray[np.int64]:
        """Mark records as removed; see NeighborIndex.remove.

        Returns:
            The ranks that were alive until now.
        """
        if not isinstance(record_ids, np.ndarray) or record_ids.dtype != np.int64 or record_ids.ndim != 1:
            raise InvalidSetting("the record ids to remove must be an int64 array of shape (m,)")
        wanted = np.unique(record_ids)
        ranks = np.searchsorted(self.ids[:-1], wanted)
        known = ranks < len(self.alive)
        known[known] = (self.ids[ranks[known]] == wanted[known]) & self.alive[ranks[known]]
        missing = len(wanted) - int(known.sum())
        if missing and not missing_ok:
            raise InvalidSetting(
                f"{missing} of {len(wanted)} record ids to remove are not in the index (never added, or removed "
                "before); nothing was removed. Pass missing_ok=True to remove the others."
            )
        found: NDArray[np.int64] = ranks[known].astype(np.int64, copy=False)
        self.alive[found] = False
        self.num_alive -= len(found)
        return found
