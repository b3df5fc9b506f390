"""The model that a blind-average task releases: the mean of the agents' noised weights, and the labels it gives.

    released rows (units of the sensitivity s, summed)  --x s / contributors-->  mean weights  --scores-->  labels

Everything here follows from the release and public features, at no further price.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from labeler.convex import LinearTerms
from labeler.errors import BadData, InvalidSetting
from labeler.methods.blind_average import linear_terms
from labeler.release import Release
from labeler.task import Task

_FEATURE_ONE = 2048.0
_BLOCK_ROWS = 4096


@dataclass(frozen=True, eq=False)
class LinearModel:
    """A released linear classifier.

    Attributes:
        weights: float64, shape (dimension + 1, num_classes); the last row belongs to the constant feature.
        terms: how its rows are prepared, and what it may have learnt of one record.
    """

    weights: NDArray[np.float64]
    terms: LinearTerms

    def __post_init__(self) -> None:
        if self.weights.ndim != 2 or self.weights.shape[1] != self.terms.num_classes or len(self.weights) < 2:
            raise InvalidSetting(
                f"weights of a linear model have shape (dimension + 1, {self.terms.num_classes}), "
                f"found {self.weights.shape}"
            )

    def scores(self, features: NDArray[np.int16]) -> NDArray[np.float64]:
        """One number per class, shape (n, num_classes).

        Args:
            features: int16, shape (n, dimension), quantised as in shards; cut to the learner's norm as in training.

        Raises:
            BadData: features of another dimension.
        """
        if features.ndim != 2 or features.shape[1] != len(self.weights) - 1:
            raise BadData(
                f"the model is about features of dimension {len(self.weights) - 1}, found shape {features.shape}"
            )
        blocks = [self._scores(features[at : at + _BLOCK_ROWS]) for at in range(0, len(features), _BLOCK_ROWS)]
        return np.concatenate(blocks) if blocks else np.empty((0, self.terms.num_classes))

    def predict(self, features: NDArray[np.int16]) -> NDArray[np.int16]:
        """The class with the largest score, shape (n,); the lowest among equals."""
        return np.asarray(self.scores(features).argmax(axis=1), dtype=np.int16)

    def _scores(self, features: NDArray[np.int16]) -> NDArray[np.float64]:
        rows = features.astype(np.float64) / _FEATURE_ONE
        norms = np.linalg.norm(rows, axis=1, keepdims=True)
        rows *= self.terms.feature_norm / np.maximum(norms, self.terms.feature_norm)
        scores: NDArray[np.float64] = rows @ self.weights[:-1] + self.terms.bias_feature * self.weights[-1]
        return scores


def released_model(task: Task, release: Release) -> LinearModel:
    """The mean model of a round.

    Args:
        task: of method blind-average.
        release: of its one round.

    Raises:
        InvalidSetting: the task or the release is of another kind.
    """
    terms = linear_terms(task)
    if not task.traits.asks_for_a_model or release.noisy_votes is None:
        raise InvalidSetting(f"a task of method {task.method} releases no model")
    return LinearModel(release.noisy_votes * (terms.sensitivity / len(release.contributors)), terms)
