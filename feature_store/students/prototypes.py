"""One prototype per class, refined over the public images nobody was asked about.

The strongest student when a backbone puts each class in one place, and the least sensitive to noise:
it has one direction per class to learn, and averages every answer into it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from feature_store.students.projection import Projection, fit_projection, softmax, unit_rows

CONCENTRATION = 10.0
"""How sharply similarity to a prototype turns into probability (kappa of a von Mises-Fisher distribution)."""

EVIDENCE_KEPT = 0.5
"""Power of the released answer in each refinement: 0 forgets it after the start, 1 trusts it fully."""

_ROUNDS = 5
_LEAST_EVIDENCE = 1e-3


@dataclass(frozen=True, eq=False)
class Prototypes:
    """P(c | x) proportional to exp(kappa * <project(x), prototype_c>); 0 for a class without any support.

    Attributes:
        projection: fitted on public features.
        prototypes: float64, shape (num_classes, reduced), unit rows.
        supported: bool, shape (num_classes,): classes some answer spoke for.
    """

    projection: Projection
    prototypes: NDArray[np.float64]
    supported: NDArray[np.bool_]

    def predict_proba(self, features: NDArray[np.generic]) -> NDArray[np.float64]:
        """Class probabilities, shape (n, num_classes)."""
        return softmax(_scores(self.projection(features), self.prototypes, self.supported))


class PrototypeLearner:
    """Expectation-maximisation of a mixture with one von Mises-Fisher component per class.

    Starts from the mean direction of each class under the released answers; then five times: each public
    image takes the posterior under the prototypes times evidence^0.5, and prototypes become the mean
    directions under these.

    Args:
        public_features: shape (num_images, dimension).
        num_classes: C.
        seed: for the projection.

    References:
        Banerjee et al. 2005, "Clustering on the unit hypersphere using von Mises-Fisher distributions".
    """

    def __init__(self, public_features: NDArray[np.generic], *, num_classes: int, seed: int) -> None:
        self._projection = fit_projection(public_features, dimensions=min(max(20, 2 * num_classes), 256), seed=seed)
        self._rows = self._projection(public_features)

    def fit(self, evidence: NDArray[np.float64], weights: NDArray[np.float64]) -> Prototypes:
        """Fit to what the release says about each image.

        Args:
            evidence: shape (num_images, num_classes), rows sum to one.
            weights: shape (num_images,), 0 for images about which it says nothing; they join after the start.
        """
        start = evidence * weights[:, None]
        supported = start.sum(axis=0) > 0
        prototypes = unit_rows(start.T @ self._rows)
        kept = np.maximum(evidence, _LEAST_EVIDENCE) ** EVIDENCE_KEPT
        for _ in range(_ROUNDS):
            posterior = softmax(_scores(self._rows, prototypes, supported)) * kept
            posterior /= posterior.sum(axis=1, keepdims=True)
            prototypes = unit_rows(posterior.T @ self._rows)
        return Prototypes(self._projection, prototypes, supported)


def _scores(
    rows: NDArray[np.float64], prototypes: NDArray[np.float64], supported: NDArray[np.bool_]
) -> NDArray[np.float64]:
    return np.where(supported, CONCENTRATION * rows @ prototypes.T, -np.inf)
