"""The bare library call that benchmarks compare with: FAISS and numpy, no exact ties, no privacy."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

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
    return _counted(labels[rows], num_classes)


def bare_device_search(
    features: NDArray[np.int16], queries: NDArray[np.int16], k: int, measured: Callable[[Callable[[], object]], float]
) -> float:
    """Searches of a flat FAISS index on a CUDA device, as `measured` measures them; the index is made before.

    Args:
        features: int16, shape (n, d).
        queries: int16, shape (nq, d).
        k: neighbours, at most n and 2048.
        measured: given the search, how long it takes.
    """
    index = _device_index(features)
    return measured(lambda: index.search(queries.astype(np.float32), k))


def bare_device_votes(
    features: NDArray[np.int16],
    labels: NDArray[np.integer],
    queries: NDArray[np.int16],
    k: int,
    num_classes: int,
) -> NDArray[np.int64]:
    """`bare_votes` with the index on a CUDA device."""
    _, rows = _device_index(features).search(queries.astype(np.float32), k)
    return _counted(labels[rows], num_classes)


def _device_index(features: NDArray[np.int16]) -> faiss.GpuIndexFlatIP:
    config = faiss.GpuIndexFlatConfig()
    config.use_cuvs = False
    index = faiss.GpuIndexFlatIP(_resources(), features.shape[1], config)
    index.add(features.astype(np.float32))
    return index


@cache
def _resources() -> faiss.StandardGpuResources:
    return faiss.StandardGpuResources()


def _counted(labels: NDArray[np.integer], num_classes: int) -> NDArray[np.int64]:
    cells = np.arange(len(labels))[:, None] * num_classes + labels
    return np.bincount(cells.ravel(), minlength=len(labels) * num_classes).reshape(len(labels), num_classes)
