"""A mark for every record of an index whose tables are not kept: whether it is still there."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from labeler.errors import InvalidSetting


class Alive:
    """Which records were not removed.

    Args:
        record_ids: int64 (n,), unique; in memory or memory-mapped, kept by reference.
        step: ids looked at together.

    Attributes:
        marks: bool (n,), by row.
    """

    def __init__(self, record_ids: NDArray[np.int64], step: int) -> None:
        self.marks = np.ones(len(record_ids), dtype=np.bool_)
        self._ids = record_ids
        self._step = step

    def __len__(self) -> int:
        return int(np.count_nonzero(self.marks))

    def remove(self, record_ids: NDArray[np.int64], *, missing_ok: bool) -> int:
        """See NeighborIndex.remove."""
        if not isinstance(record_ids, np.ndarray) or record_ids.dtype != np.int64 or record_ids.ndim != 1:
            raise InvalidSetting("the record ids to remove must be an int64 array of shape (m,)")
        wanted = np.unique(record_ids)
        gone = 0
        found = np.zeros(len(wanted), dtype=np.bool_)
        hits = []
        for start in range(0, len(self._ids), self._step):
            part = slice(start, start + self._step)
            hit = self.marks[part] & np.isin(self._ids[part], wanted)
            found |= np.isin(wanted, self._ids[part][hit])
            hits.append((part, hit))
        if not missing_ok and not found.all():
            raise InvalidSetting("a record to remove is not in the index; nothing was removed")
        for part, hit in hits:
            self.marks[part] &= ~hit
            gone += int(np.count_nonzero(hit))
        return gone
