"""Finding the nearest private records of a public query: exact, tied to nothing but the records themselves.

Start with `build_index`; what it promises is in `definition`.

    >>> import numpy as np
    >>> from feature_store.index import build_index
    >>> features = np.array([[2048, 0], [0, 2048], [2048, 0]], dtype=np.int16)
    >>> index = build_index(features, np.array([30, 20, 10]), engine="numpy")
    >>> index.search(np.array([[2048, 0]], dtype=np.int16), 2).record_ids
    array([[10, 30]])
"""

from __future__ import annotations

from feature_store.index.build import ENGINES, build_index, load_engine, refuse_unsafe
from feature_store.index.definition import NO_RECORD, NO_SIMILARITY, NeighborIndex, Neighbors, nearest_by_definition

__all__ = [
    "ENGINES",
    "NO_RECORD",
    "NO_SIMILARITY",
    "NeighborIndex",
    "Neighbors",
    "build_index",
    "load_engine",
    "nearest_by_definition",
    "refuse_unsafe",
]
