"""The definition of nearest neighbours, as short as it can be said: the judge of every engine.

Slow on purpose: 64-bit integers, every similarity, a full sort, nothing shared with the engines.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from feature_store.index.protocol import NO_RECORD, NO_SIMILARITY, Neighbors


def nearest_by_definition(
    features: NDArray[np.int16], record_ids: NDArray[np.int64], queries: NDArray[np.int16], k: int
) -> Neighbors:
    """The first k records by (similarity descending, record id ascending).

    Args:
        features: int16 (n, d).
        record_ids: int64 (n,), unique.
        queries: int16 (nq, d).
        k: at least 1.
    """
    similarities = queries.astype(np.int64) @ features.astype(np.int64).T
    ids = np.broadcast_to(record_ids, similarities.shape)
    rows = np.lexsort((ids, -similarities), axis=1)[:, :k]
    padding = ((0, 0), (0, k - rows.shape[1]))
    return Neighbors(
        record_ids=np.pad(record_ids[rows], padding, constant_values=NO_RECORD),
        similarities=np.pad(
            np.take_along_axis(similarities, rows, axis=1), padding, constant_values=NO_SIMILARITY
        ).astype(np.int32),
        rows=np.pad(rows, padding, constant_values=NO_RECORD),
    )
