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
        # Not isin, which goes another way where few are removed. No record has the id behind the last one.
        wanted = np.append(np.unique(record_ids), -1)
        hits = np.empty_like(self.marks)
        for start in range(0, len(self._ids), self._step):
            part = slice(start, start + self._step)
            ids = np.asarray(self._ids[part])
            hits[part] = self.marks[part] & (wanted[np.searchsorted(wanted[:-1], ids)] == ids)
        gone = int(np.count_nonzero(hits))
        if not missing_ok and gone < len(wanted) - 1:
            raise InvalidSetting("a record to remove is not in the index; nothing was removed")
        self.marks &= ~hits
        return gone
