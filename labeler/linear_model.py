"""The model that a blind-average or federated task releases, and the labels it gives.

    released rows (units of the sensitivity s, summed)  --x s / contributors-->  mean weights  --scores-->  labels

Of the learner "means" the sum of each class is brought to length one, so that its scores are cosines.

Everything here follows from the release and public features, at no further price.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from labeler.class_means import MeanTerms
from labeler.convex import LinearTerms
from labeler.errors import BadData, InvalidSetting
from labeler.federated import StepTerms
from labeler.methods.blind_average import model_terms
from labeler.methods.federated import step_terms
from labeler.public_axes import FEATURE_ONE, PublicAxes
from labeler.public_model import final_model
from labeler.release import Release
from labeler.task import Task

_BLOCK_ROWS = 4096


@dataclass(frozen=True, eq=False)
class LinearModel:
    """A released linear classifier.

    Attributes:
        weights: float64, shape (dimension + 1, num_classes); the last row belongs to the constant feature. With axes
            one row per axis.
        terms: how its rows are prepared, and what it may have learnt of one record.
        axes: the public map in front of it; None where it reads features as they are.
    """

    weights: NDArray[np.float64]
    terms: LinearTerms | MeanTerms | StepTerms
    axes: PublicAxes | None = None

    def __post_init__(self) -> None:
        if self.weights.ndim != 2 or self.weights.shape[1] != self.terms.num_classes or len(self.weights) < 2:
            raise InvalidSetting(
                f"weights of a linear model have shape (dimension + 1, {self.terms.num_classes}), "
                f"found {self.weights.shape}"
            )
        if self.axes is not None and self.axes.count != len(self.weights) - 1:
            raise InvalidSetting(f"{self.axes.count} axes do not belong to weights of shape {self.weights.shape}")

    @property
    def dimension(self) -> int:
        """Numbers of a feature that it reads."""
        return len(self.weights) - 1 if self.axes is None else self.axes.dimension

    @property
    def arrays(self) -> dict[str, NDArray[np.generic]]:
        """What it consists of, by name; `LinearModel.of` reads it back."""
        return {"weights": self.weights} | ({} if self.axes is None else {"axes": self.axes.rows})

    @classmethod
    def of(cls, arrays: Mapping[str, NDArray[Any]], terms: LinearTerms | MeanTerms | StepTerms) -> LinearModel:
        """A model of its arrays."""
        axes = arrays.get("axes")
        return cls(arrays["weights"], terms, None if axes is None else PublicAxes(axes))

    def scores(self, features: NDArray[np.int16]) -> NDArray[np.float64]:
        """One number per class, shape (n, num_classes).

        Args:
            features: int16, shape (n, dimension), quantised as in shards; cut to the learner's norm as in training.

        Raises:
            BadData: features of another dimension.
        """
        if features.ndim != 2 or features.shape[1] != self.dimension:
            raise BadData(f"the model is about features of dimension {self.dimension}, found shape {features.shape}")
        blocks = [self._scores(features[at : at + _BLOCK_ROWS]) for at in range(0, len(features), _BLOCK_ROWS)]
        return np.concatenate(blocks) if blocks else np.empty((0, self.terms.num_classes))

    def predict(self, features: NDArray[np.int16]) -> NDArray[np.int16]:
        """The class with the largest score, shape (n,); the lowest among equals."""
        return np.asarray(self.scores(features).argmax(axis=1), dtype=np.int16)

    def _scores(self, features: NDArray[np.int16]) -> NDArray[np.float64]:
        rows = features.astype(np.float64) / FEATURE_ONE
        if self.axes is not None:
            rows = self.axes(rows)
        norms = np.linalg.norm(rows, axis=1, keepdims=True)
        rows *= self.terms.feature_norm / np.maximum(norms, self.terms.feature_norm)
        scores: NDArray[np.float64] = rows @ self.weights[:-1] + self.terms.bias_feature * self.weights[-1]
        return scores


def axes_of(task: Task, asked: NDArray[np.int16] | None) -> PublicAxes | None:
    """The public map of a task whose rows were asked about; None where it has none.

    Raises:
        BadData: it has one, and the rows are not there.
    """
    if task.training is None or task.training.axes is None:
        return None
    if asked is None or len(asked) != task.rows:
        raise BadData(f"the model looks along {task.training.axes} public axes, and the rows of them are missing")
    return PublicAxes(asked)


def released_model(task: Task, releases: Sequence[Release], asked: NDArray[np.int16] | None = None) -> LinearModel:
    """The mean model of a round, or the one that all steps of training have made.

    Args:
        task: of a method that asks for a model.
        releases: of its rounds, in order.
        asked: the rows that were asked about, int16, shape (max_queries, dimension); needed where the task has axes.

    Raises:
        InvalidSetting: the task or the release is of another kind.
    """
    if not task.traits.asks_for_a_model or len(releases) != task.steps or (noisy := releases[0].noisy_votes) is None:
        raise InvalidSetting(f"a task of method {task.method} releases no model, or not all its rounds are opened")
    if task.traits.is_sampled:
        return LinearModel(final_model(task, releases), step_terms(task), axes_of(task, asked))
    terms = model_terms(task)
    weights = noisy * (terms.sensitivity / len(releases[0].contributors))
    if isinstance(terms, MeanTerms):
        # Cosines: agents hold more records of one class than of another, and a mean has no intercept.
        weights[-1] = 0
        weights /= np.maximum(np.linalg.norm(weights, axis=0), np.finfo(float).tiny)
    return LinearModel(weights, terms, axes_of(task, asked))
