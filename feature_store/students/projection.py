"""The leading directions of the public features: where classes differ and most noise of a backbone does not."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray
from sklearn.decomposition import PCA

from feature_store.students.answers import check_features
from labeler.errors import BadData

_LEAST_DEVIATION: Final = 1e-9


@dataclass(frozen=True, eq=False)
class Projection:
    """x -> unit((unit(x) - mean) @ components). Fitted on public features only.

    Attributes:
        mean: float64, shape (dimension,).
        components: float64, shape (dimension, reduced), orthonormal columns.
    """

    mean: NDArray[np.float64]
    components: NDArray[np.float64]

    def __call__(self, features: NDArray[np.generic]) -> NDArray[np.float64]:
        """Project features of shape (n, dimension) to unit rows of shape (n, reduced).

        Raises:
            BadData: another dimension than the public features, or no valid features.
        """
        check_features(features, "student")
        if features.shape[1] != len(self.mean):
            raise BadData(
                f"this student was trained on features of dimension {len(self.mean)}, found {features.shape[1]}; "
                "embed the images with the backbone of its task"
            )
        return unit_rows((unit_rows(features) - self.mean) @ self.components)


def fit_projection(public_features: NDArray[np.generic], *, dimensions: int, seed: int) -> Projection:
    """Principal components of the unit public features.

    Args:
        public_features: shape (num_images, dimension).
        dimensions: how many to keep, or as many as there are.
        seed: makes the randomised decomposition of large sets repeatable.
    """
    check_features(public_features, "public")
    unit = unit_rows(public_features)
    kept = max(1, min(dimensions, unit.shape[0] - 1, unit.shape[1]))
    if unit.shape[0] == 1:
        return Projection(np.zeros(unit.shape[1]), unit.T)
    small = min(unit.shape) <= 500
    fitted = PCA(kept, svd_solver="full" if small else "randomized", random_state=seed).fit(unit)
    return Projection(fitted.mean_.astype(np.float64), np.ascontiguousarray(fitted.components_.T, dtype=np.float64))


def most_axes(num_classes: int) -> int:
    """How many public axes are kept."""
    return min(max(40, 4 * num_classes), 256)


def half_whitened(public_features: NDArray[np.generic], *, dimensions: int, seed: int) -> Projection:
    """Leading axes of the public features, each divided by the square root of its deviation."""
    axes = fit_projection(public_features, dimensions=dimensions, seed=seed)
    along = (unit_rows(public_features) - axes.mean) @ axes.components
    deviation = along.std(axis=0)
    most = float(deviation.max())
    if most <= _LEAST_DEVIATION:
        return axes
    return Projection(axes.mean, axes.components / np.sqrt(np.maximum(deviation / most, _LEAST_DEVIATION)))


def unit_rows(rows: NDArray[np.generic]) -> NDArray[np.float64]:
    """Rows scaled to length one; a row of zeros stays."""
    floats = rows.astype(np.float64)
    norms = np.linalg.norm(floats, axis=1, keepdims=True)
    unit: NDArray[np.float64] = floats / np.where(norms > 0, norms, 1.0)
    return unit


def softmax(scores: NDArray[np.float64]) -> NDArray[np.float64]:
    """Rows of probabilities proportional to exp(score); a score of -inf is impossible, and where all are, all alike."""
    largest = scores.max(axis=1, keepdims=True)
    shifted = np.exp(np.where(np.isneginf(largest), 0.0, scores - np.where(np.isneginf(largest), 0.0, largest)))
    probabilities: NDArray[np.float64] = shifted / shifted.sum(axis=1, keepdims=True)
    return probabilities
