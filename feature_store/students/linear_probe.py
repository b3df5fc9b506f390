"""A linear probe in closed form: Gaussian classes with one shared, shrunken covariance, refined over public images.

Linear like logistic regression, but it needs no step size or iteration to trust, and it uses the
unlabelled public images twice: for the covariance and for refining its own labels. Better than
prototypes when classes are elongated or close to each other.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from feature_store.students.projection import Projection, fit_projection, softmax

SHRINKAGE = 0.3
"""Ridge on the covariance, as a share of its mean eigenvalue."""

_ROUNDS = 5
_LEAST_EVIDENCE = 1e-3
_LEAST_RIDGE = 1e-6


@dataclass(frozen=True, eq=False)
class LinearProbe:
    """P(c | x) proportional to exp(<project(x), weight_c> + bias_c).

    Attributes:
        projection: fitted on public features.
        weights: float64, shape (num_classes, reduced).
        biases: float64, shape (num_classes,); -inf for a class without any support.
    """

    projection: Projection
    weights: NDArray[np.float64]
    biases: NDArray[np.float64]

    def predict_proba(self, features: NDArray[np.generic]) -> NDArray[np.float64]:
        """Class probabilities, shape (n, num_classes)."""
        return softmax(self.projection(features) @ self.weights.T + self.biases)


class LinearLearner:
    """Expectation-maximisation of Gaussian classes with equal priors and a shared covariance S.

    weight_c = (S + ridge)^-1 mean_c and bias_c = -<mean_c, weight_c> / 2. Each of five rounds multiplies the
    probe's posterior with the released evidence and fits again.

    Args:
        public_features: shape (num_images, dimension).
        num_classes: C.
        seed: for the projection.

    References:
        Fisher 1936; Friedman 1989, "Regularized discriminant analysis".
    """

    def __init__(self, public_features: NDArray[np.generic], *, num_classes: int, seed: int) -> None:
        self._projection = fit_projection(public_features, dimensions=min(max(40, 4 * num_classes), 256), seed=seed)
        self._rows = self._projection(public_features)

    def fit(self, evidence: NDArray[np.float64], weights: NDArray[np.float64]) -> LinearProbe:
        """Fit to what the release says about each image.

        Args:
            evidence: shape (num_images, num_classes), rows sum to one.
            weights: shape (num_images,), 0 for images about which it says nothing; they join after the start.
        """
        kept = np.maximum(evidence, _LEAST_EVIDENCE)
        solution, biases = _discriminant(self._rows, evidence * weights[:, None])
        for _ in range(_ROUNDS):
            posterior = softmax(self._rows @ solution.T + biases) * kept
            posterior /= posterior.sum(axis=1, keepdims=True)
            solution, biases = _discriminant(self._rows, posterior)
        return LinearProbe(self._projection, solution, biases)


def _discriminant(
    rows: NDArray[np.float64], responsibilities: NDArray[np.float64]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    mass = responsibilities.sum(axis=0)
    means = (responsibilities.T @ rows) / np.where(mass > 0, mass, 1.0)[:, None]
    active = responsibilities.sum(axis=1)
    expected = (responsibilities / np.where(active > 0, active, 1.0)[:, None]) @ means
    residual = np.sqrt(active)[:, None] * (rows - expected)
    covariance = residual.T @ residual / active.sum()
    ridge = SHRINKAGE * np.trace(covariance) / len(covariance) + _LEAST_RIDGE
    solution = np.linalg.solve(covariance + ridge * np.eye(len(covariance)), means.T).T
    biases = np.where(mass > 0, -0.5 * np.einsum("cd,cd->c", solution, means), -np.inf)
    return solution, biases
