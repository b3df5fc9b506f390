"""The bare library call that benchmarks compare with: FAISS and numpy, no exact ties, no privacy."""

from __future__ import annotations

import faiss
import numpy as np
from numpy.typing import NDArray


def bare_votes(
    features: NDArray[np.int16],
    labels: NDArray[np.integer],
    queries: NDArray[np.int16],
    k: int,
    num_classes: int,
) -> NDArray[np.int64]:
    """What anybody would write: a flat FAISS index, one search, votes counted by numpy. For measuring only.

    Args:
        features: int16, shape (n, d).
        labels: integers, shape (n,).
        queries: int16, shape (nq, d).
        k: neighbours, at most n.
        num_classes: C.

    Returns:
        Votes, int64, shape (nq, C).
    """
    index = faiss.IndexFlatIP(features.shape[1])
    index.add(features.astype(np.float32))
    _, rows = index.search(queries.astype(np.float32), k)
    cells = np.arange(len(queries))[:, None] * num_classes + labels[rows]
    return np.bincount(cells.ravel(), minlength=len(queries) * num_classes).reshape(len(queries), num_classes)
