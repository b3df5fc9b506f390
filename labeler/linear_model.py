"""The model that a blind-average or federated task releases, and the labels it gives.

    released rows (units of the sensitivity s, summed)  --x s / contributors-->  mean weights  --scores-->  labels.

With the learner "means" scores are log posteriors, read off the noisy sums of each class and their stated noise
(`read_means`).

Everything here follows from the release and public features, at no further price.

`model_before` returns the public model between steps of training (`labeler.methods.federated`), from the releases of
earlier steps. All of it is post-processing: theta_t follows from releases by public constants. It is the same to the
last bit on every machine, since the computation only adds and multiplies number by number.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from labeler.errors import BadData, InvalidSetting
from labeler.methods.blind_average import ALONG, COUNTED, LinearTerms, MeanTerms, model_terms
from labeler.methods.federated import StepTerms, on_grid, step_terms
from labeler.methods.sensitivity import training_of
from labeler.records import FEATURE_ONE, PublicAxes, axes_of
from labeler.release import Release
from labeler.steady import steady
from labeler.task import Task

_BLOCK_ROWS = 4096

_RAREST, _CLOSEST, _SHORTEST, _SHORT, _FAR_ABOVE = 0.02, 0.1, 1e-6, 0.05, 10.0
"""Of `read_means`: the least share of a class, in usual ones; the least variance within classes, and the least squared
length, of 1; the least squared length of a class, in usual ones; variances of noise that a spread must exceed."""


@dataclass(frozen=True, eq=False)
class LinearModel:
    """A released linear classifier.

    Attributes:
        weights: float64, shape (dimension + 1, num_classes); the last row belongs to the constant feature. With axes
            one row per axis.
        terms: how its rows are prepared, and how much it may have learned of one record.
        axes: the public map before it; None if it reads features as they are.
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
        """Return the number of values of a feature that it reads."""
        return len(self.weights) - 1 if self.axes is None else self.axes.dimension

    @property
    def arrays(self) -> dict[str, NDArray[np.generic]]:
        """Return its arrays, by name; `LinearModel.of` reads them back."""
        return {"weights": self.weights} | ({} if self.axes is None else {"axes": self.axes.rows})

    @classmethod
    def of(cls, arrays: Mapping[str, NDArray[Any]], terms: LinearTerms | MeanTerms | StepTerms) -> LinearModel:
        """Return a model of its arrays."""
        axes = arrays.get("axes")
        return cls(arrays["weights"], terms, None if axes is None else PublicAxes(axes))

    def scores(self, features: NDArray[np.int16]) -> NDArray[np.float64]:
        """Return one number per class, shape (n, num_classes).

        Args:
            features: int16, shape (n, dimension), quantized as in shards; cut to the learner's norm as in training.

        Raises:
            BadData: features of another dimension.
        """
        if features.ndim != 2 or features.shape[1] != self.dimension:
            raise BadData(f"the model is about features of dimension {self.dimension}, found shape {features.shape}")
        blocks = [self._scores(features[at : at + _BLOCK_ROWS]) for at in range(0, len(features), _BLOCK_ROWS)]
        return np.concatenate(blocks) if blocks else np.empty((0, self.terms.num_classes))

    def predict(self, features: NDArray[np.int16]) -> NDArray[np.int16]:
        """Return the class with the largest score, shape (n,); the lowest among equals."""
        return np.asarray(self.scores(features).argmax(axis=1), dtype=np.int16)

    def _scores(self, features: NDArray[np.int16]) -> NDArray[np.float64]:
        rows = features.astype(np.float64) / FEATURE_ONE
        if self.axes is not None:
            rows = self.axes(rows)
        norms = np.linalg.norm(rows, axis=1, keepdims=True)
        rows *= self.terms.feature_norm / np.maximum(norms, self.terms.feature_norm)
        scores: NDArray[np.float64] = rows @ self.weights[:-1] + self.terms.bias_feature * self.weights[-1]
        return scores


def is_averaged(step: int, steps: int) -> bool:
    """Return whether the model after so many of all steps is one of those that the released model is the mean of."""
    return 2 * step > steps


def released_model(
    task: Task, releases: Sequence[Release], asked: NDArray[np.int16] | None = None
) -> LinearModel | None:
    """Return the mean model of a round, or the result of all steps of training; None if a task asks for no model.

    Args:
        releases: of the task's rounds, in order.
        asked: the rows that were asked about, int16, shape (max_queries, dimension); needed if the task has axes.

    Raises:
        InvalidSetting: not all its rounds are opened.
    """
    if task.traits.model_rows(task) is None:
        return None
    if len(releases) != task.steps or (noisy := releases[0].noisy_votes) is None:
        raise InvalidSetting(f"not all rounds of a task of method {task.method} are opened, so it has no model")
    if task.sampled is not None:
        # The mean of the models after the last half of the steps: their noise averages out, at no price.
        return LinearModel(_trajectory(task, releases)[1], step_terms(task), axes_of(task, asked))
    terms = model_terms(task)
    weights = noisy * (terms.sensitivity / len(releases[0].contributors))
    if isinstance(terms, MeanTerms):
        sigma = task.sum_sigma_votes(len(releases[0].contributors))
        weights = read_means(noisy * terms.sensitivity, sigma * terms.sensitivity)
    return LinearModel(steady(weights), terms, axes_of(task, asked))


def read_means(sums: NDArray[np.float64], sigma: float) -> NDArray[np.float64]:
    """Return the linear model that noisy sums of records by class tell, along axes; post-processing.

    Rows of class c, of length one, lie around m_c with variance w along each axis, alike in all directions. So
    log p(c | z) = (z m_c - |m_c|^2 / 2) / w + log p_c, up to a constant of z. p_c is its share of the records.

    * What noise adds to squared lengths on average is subtracted. Then lengths and counts are drawn towards the mean of
      all classes, by the part of their spread that is noise (empirical Bayes: Efron and Morris 1973). Lengths keep only
      a spread that is far above their noise, since a class whose mean looks short is hardly ever named.
    * What all means share sets private images apart from public ones, whatever they show, and is subtracted.

    Args:
        sums: shape (axes + 1, num_classes), records; the last row counts, COUNTED for each.
        sigma: standard deviation of the noise of each number, records.

    Returns:
        Weights, then intercepts, of the same shape.
    """
    axes, classes, tiny = len(sums) - 1, sums.shape[1], np.finfo(float).tiny
    counts, error = sums[-1] / COUNTED, sigma / COUNTED
    usual = max(float(counts.mean()), error, 1.0)
    spread = max(float(np.square(counts - usual).mean()) - error**2, 0.0)
    counts = usual + spread / max(spread + error**2, tiny) * (counts - usual)
    counts = np.maximum(counts, max(_RAREST * usual, 1.0))
    shares = counts / counts.sum()

    means, noise = sums[:-1] / ALONG / counts, np.square(sigma / ALONG / counts)
    within = 1 - float(shares @ np.maximum(np.square(means).sum(axis=0) - axes * noise, 0.0))
    within = max(within, _CLOSEST) / axes
    everybody = max(float(sums[-1].sum()) / COUNTED, 2 * error * np.sqrt(classes), 1.0)
    apart = means - sums[:-1].sum(axis=1, keepdims=True) / ALONG / everybody
    squares = np.square(apart).sum(axis=0) - axes * noise
    usual = max(float(shares @ np.maximum(squares, 0.0)), _SHORTEST)
    errors = 2 * axes * noise**2 + 4 * noise * np.maximum(squares, 0.0)
    spread = max(float(shares @ (np.square(squares - usual) - _FAR_ABOVE * errors)), 0.0)
    squares = np.maximum(usual + spread / np.maximum(spread + errors, tiny) * (squares - usual), _SHORT * usual)
    directions = apart / np.maximum(np.linalg.norm(apart, axis=0), tiny)
    return np.vstack([directions * np.sqrt(squares) / within, np.log(shares) - squares / (2 * within)])


def model_before(task: Task, releases: Sequence[Release]) -> NDArray[np.float64]:
    """Return the public model after the given steps, as the next is asked about it: whole THETA_UNIT-ths.

    Args:
        task: of a sampled method.
        releases: of its first rounds, in order.

    Returns:
        float64, shape (rows, num_classes).
    """
    return _trajectory(task, releases)[0]


def _trajectory(task: Task, releases: Sequence[Release]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    training, terms = training_of(task), step_terms(task)
    sampled = task.sampled
    if sampled is None:
        raise InvalidSetting(f"a task of method {task.method} is not trained in steps")
    theta = np.zeros((task.rows, task.num_classes))
    speed, total, counted = np.zeros_like(theta), np.zeros_like(theta), 0
    for step, release in enumerate(releases):
        if release.noisy_votes is None or release.noisy_votes.shape != theta.shape:
            raise BadData("a step of training has opened something else than numbers of the model's shape")
        of_one = terms.clip * terms.sensitivity / (float(terms.rate) * len(release.contributors))
        if sampled.unit == "record":
            mean = release.noisy_votes * (of_one / training.min_records) + training.regularisation * theta
            speed = sampled.momentum * speed - sampled.learning_rate * mean
        else:
            speed = sampled.momentum * speed + release.noisy_votes * of_one
        theta = on_grid(theta + speed)
        if is_averaged(step + 1, len(releases)):
            total, counted = total + theta, counted + 1
    return theta, total / max(1, counted)
