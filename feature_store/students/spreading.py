"""Label spreading: answers flow along the nearest-neighbour graph of the public images.

Makes no assumption about the shape of a class, so it wins when a class lies in many places and
enough questions were answered to reach them all.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_matrix, diags

from feature_store.students.projection import Projection, fit_projection

NEIGHBORS = 10
"""Edges per image in the graph, and public images a new image asks."""

FLOW = 0.5
"""Share of an image's label that its neighbours decide (alpha)."""

SHARPNESS = 10.0
"""Edge weight exp(sharpness * (cosine - 1))."""

_ROUNDS = 30
_LEAST_MASS = 1e-12
_BLOCK_ROWS = 1024


@dataclass(frozen=True, eq=False)
class Spreading:
    """A new image takes the weighted mean of the spread labels of its nearest public images.

    Attributes:
        projection: fitted on public features.
        references: float32, shape (num_images, reduced), unit rows: the public images.
        labels: float64, shape (num_images, num_classes), spread labels, rows sum to one.
    """

    projection: Projection
    references: NDArray[np.float32]
    labels: NDArray[np.float64]

    def predict_proba(self, features: NDArray[np.generic]) -> NDArray[np.float64]:
        """Class probabilities, shape (n, num_classes)."""
        rows = self.projection(features).astype(np.float32)
        nearest, similarity = _nearest(rows, self.references, min(NEIGHBORS, len(self.references)))
        weight = np.exp(SHARPNESS * (similarity - 1.0))
        votes = np.einsum("nk,nkc->nc", weight, self.labels[nearest])
        probabilities: NDArray[np.float64] = votes / votes.sum(axis=1, keepdims=True)
        return probabilities


class SpreadingLearner:
    """Iterate F <- alpha * S F + (1 - alpha) * Y, S the symmetrically normalised graph.

    Args:
        public_features: shape (num_images, dimension).
        num_classes: C.
        seed: for the projection.

    References:
        Zhou et al. 2004, "Learning with local and global consistency".
    """

    def __init__(self, public_features: NDArray[np.generic], *, num_classes: int, seed: int) -> None:
        self._projection = fit_projection(public_features, dimensions=min(max(40, 4 * num_classes), 256), seed=seed)
        self._rows = self._projection(public_features).astype(np.float32)
        self._graph = _normalised_graph(self._rows)

    def fit(self, evidence: NDArray[np.float64], weights: NDArray[np.float64]) -> Spreading:
        """Fit to what the release says about each image.

        Args:
            evidence: shape (num_images, num_classes), rows sum to one.
            weights: shape (num_images,), 0 for images about which it says nothing; they only receive.
        """
        start = evidence * weights[:, None]
        spread = start
        for _ in range(_ROUNDS):
            spread = FLOW * (self._graph @ spread) + (1.0 - FLOW) * start
        totals = spread.sum(axis=1, keepdims=True)
        reached = totals > _LEAST_MASS
        labels = np.where(reached, spread / np.where(reached, totals, 1.0), 1.0 / evidence.shape[1])
        return Spreading(self._projection, self._rows, labels)


def _normalised_graph(rows: NDArray[np.float32]) -> csr_matrix:
    """D^-1/2 W D^-1/2 of the symmetric nearest-neighbour graph, without loops."""
    num_images = len(rows)
    # One neighbour more, because an image is its own nearest; duplicates may hide it, hence the mask.
    nearest, similarity = _nearest(rows, rows, min(NEIGHBORS + 1, num_images))
    sources = np.repeat(np.arange(num_images), nearest.shape[1])
    edges = np.exp(SHARPNESS * (similarity.ravel() - 1.0)) * (nearest.ravel() != sources)
    graph = csr_matrix((edges, (sources, nearest.ravel())), shape=(num_images, num_images))
    graph = graph.maximum(graph.T)
    degree = np.asarray(graph.sum(axis=1)).ravel()
    scale = diags(1.0 / np.sqrt(np.where(degree > 0, degree, 1.0)))
    return csr_matrix(scale @ graph @ scale)


def _nearest(
    rows: NDArray[np.float32], references: NDArray[np.float32], count: int
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """The most similar references of each row, in blocks so that memory does not grow with rows times references."""
    parts = []
    for start in range(0, len(rows), _BLOCK_ROWS):
        similarity = rows[start : start + _BLOCK_ROWS] @ references.T
        best = np.argpartition(-similarity, count - 1, axis=1)[:, :count]
        parts.append((best, np.take_along_axis(similarity, best, axis=1)))
    nearest = np.concatenate([part[0] for part in parts]).astype(np.int64)
    return nearest, np.concatenate([part[1] for part in parts]).astype(np.float64)
