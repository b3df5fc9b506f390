"""A public map in front of a linear model: features less a public centre, along public axes, brought to one length.

    x -> z = A (x - m) -> z / |z|            rows of A and m travel as the questions of a blind-average task

Features of a network are positive and share a large mean, along which noise on a model's weights moves all images
together; and most of their directions say nothing about classes, but carry noise like all others. Axes are chosen by
whoever asks, from public images (`feature_store.query_selection.axis_rows`). They travel as the rows that are asked
about, so that everybody's digest of the round is of them, and the model's weights are one row per axis and one for the
constant.

**Privacy.** The map is public and fixed before any record is looked at, and it maps each record by itself; whatever it
is, a mapped record has length one, or zero. So the bounds of `labeler.convex` are those of rows of such a norm.

**No rounding depends on other records.** A, m and stored features are whole numbers, and every sum of products in
A (x - m) is below (2^11 + 2^15 sqrt(d)) 2^15 sqrt(d) < 2^53 for d <= 2^20 numbers: exact in double precision in any
order. What is left is a square root of a sum of squares and a division, off by (rows + 3) 2^-53 at most, which is
below the 2^-34 that `labeler.descent` has room for, for every number of weights that it allows.

The model that a blind-average or federated task releases, and the labels it gives.

    released rows (units of the sensitivity s, summed)  --x s / contributors-->  mean weights  --scores-->  labels

Of the learner "means" the sum of each class is brought to length one, so that its scores are cosines.

Everything here follows from the release and public features, at no further price.

The public model between steps of training (`labeler.federated`), from what the steps before have opened.

All of it is post-processing: theta_t follows from releases by public constants, the same to the last bit wherever it is
computed, since it only adds and multiplies number by number.
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
from labeler.federated import StepTerms, on_grid
from labeler.methods.blind_average import model_terms
from labeler.methods.federated import step_terms
from labeler.methods.sensitivity import training_of
from labeler.release import Release
from labeler.task import Task

FEATURE_ONE = 2048.0


@dataclass(frozen=True, eq=False)
class PublicAxes:
    """The map.

    Attributes:
        rows: int16, shape (axes + 1, dimension): the axes, then the centre; in the unit of stored features.

    Raises:
        BadData: there is no axis.
    """

    rows: NDArray[np.int16]

    def __post_init__(self) -> None:
        if self.rows.dtype != np.int16 or self.rows.ndim != 2 or len(self.rows) < 2:
            raise BadData(f"a public map is an int16 array of axes and a centre, found shape {self.rows.shape}")

    @property
    def count(self) -> int:
        """How many axes."""
        return len(self.rows) - 1

    @property
    def dimension(self) -> int:
        """Numbers of a feature that it maps."""
        return int(self.rows.shape[1])

    def along(self, features: NDArray[np.floating]) -> NDArray[np.float64]:
        """A (x - m), whole numbers and exact, shape (n, axes); features as for a call."""
        whole = np.rint(features.astype(np.float64) * FEATURE_ONE)
        along: NDArray[np.float64] = (whole - self.rows[-1].astype(np.float64)) @ self.rows[:-1].T.astype(np.float64)
        return along

    def __call__(self, features: NDArray[np.floating]) -> NDArray[np.float64]:
        """Rows of length one, or zero for a feature that is the centre; float64, shape (n, axes).

        Args:
            features: as stored, divided by 2048: shape (n, dimension).
        """
        along = self.along(features)
        lengths = np.sqrt(np.einsum("ij,ij->i", along, along))[:, None]
        # An integer row that is not zero is at least one long.
        mapped: NDArray[np.float64] = along / np.maximum(lengths, 1.0)
        return mapped


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


def model_before(task: Task, releases: Sequence[Release]) -> NDArray[np.float64]:
    """The public model after so many steps, as the next is asked about it: whole THETA_UNIT-ths.

    Args:
        task: of a sampled method.
        releases: of its first rounds, in order.

    Returns:
        float64, shape (rows, num_classes).
    """
    return _trajectory(task, releases)[0]


def final_model(task: Task, releases: Sequence[Release]) -> NDArray[np.float64]:
    """The mean of the models after the last half of the steps: their noise averages out, at no price."""
    return _trajectory(task, releases)[1]


def _trajectory(task: Task, releases: Sequence[Release]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    training, terms = training_of(task), step_terms(task)
    sampled = training.sampled
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
        if 2 * (step + 1) > len(releases):
            total, counted = total + theta, counted + 1
    return theta, total / max(1, counted)
