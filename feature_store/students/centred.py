"""Prototypes read off noisy counts directly: every released number counts, none is rounded to a winner first.

A cluster's most-voted class throws away most of a noisy histogram: where noise is as large as the votes it is right
little more often than by chance, although the counts of all clusters together still tell the classes apart. Here

    P_c = sum_q n_qc z_q,        z_q the mean of the **centred** public images that question q stands for,

n the released counts, unbiased for the votes. Centring makes it work twice. The z_q of all images sum to zero, so what
every count of a class has in common (how many records of that class there are) cancels; and what all images have in
common, most of a backbone's feature, no longer carries noise into every score. A new image belongs to the class with
the largest <z(x), P_c / |P_c|>: all classes alike beforehand, however many records each has.

Axes are the leading principal axes of the public features, each divided by the square root of its deviation: halfway
between the features as they are and whitened ones. Then the public images refine the prototypes, as in
`feature_store.students.prototypes`, but no count is read again: what is left of the noise is where refining starts.

Everything but n is public and n is released, so all of it is post-processing and costs nothing.

References:
    Banerjee et al. 2005, "Clustering on the unit hypersphere using von Mises-Fisher distributions" (refinement).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from feature_store.students.answers import NoisyAnswers
from feature_store.students.projection import Projection, fit_projection, softmax, unit_rows
from feature_store.students.prototypes import CONCENTRATION, Prototypes

_ROUNDS = 5
_LEAST_DEVIATION = 1e-9


class CentredLearner:
    """Learns `Prototypes` from a release; see the module.

    Args:
        projection: see `half_whitened`.
        rows: shape (num_images, reduced), the public images on these axes.
    """

    def __init__(self, projection: Projection, rows: NDArray[np.float64]) -> None:
        self._projection, self._rows = projection, rows

    @classmethod
    def of(cls, public_features: NDArray[np.generic], *, num_classes: int, seed: int) -> CentredLearner:
        """Fit the axes on public features, shape (num_images, dimension); `seed` is the decomposition's."""
        axes = half_whitened(public_features, dimensions=most_axes(num_classes), seed=seed)
        return cls(axes, axes(public_features))

    def learn(self, answers: NoisyAnswers, assignment: NDArray[np.integer]) -> Prototypes:
        """Fit to a release.

        Args:
            answers: the release; of winners each counts as one vote.
            assignment: shape (num_images,), the answer that stands for each public image.
        """
        counts = released_counts(answers)
        prototypes = counts.T @ group_means(self._rows, assignment, len(counts))
        supported = np.abs(prototypes).sum(axis=1) > 0
        prototypes = unit_rows(prototypes)
        for _ in range(_ROUNDS):
            scores = np.where(supported, CONCENTRATION * self._rows @ prototypes.T, -np.inf)
            prototypes = unit_rows(softmax(scores).T @ self._rows)
        return Prototypes(self._projection, prototypes, supported)


def released_counts(answers: NoisyAnswers) -> NDArray[np.float64]:
    """What was released, in votes, shape (num_queries, num_classes); zeros where nothing was answered."""
    answered = answers.answered
    if answers.noisy_votes is not None:
        return np.where(answered[:, None], answers.noisy_votes, 0.0)
    counts = np.zeros((len(answered), answers.num_classes))
    counts[answered] = np.eye(answers.num_classes)[answers.labels[answered]]
    return counts


def noise_of_counts(answers: NoisyAnswers) -> float:
    """Standard deviation of the noise in `released_counts`, in votes: none is known in winners."""
    return 0.0 if answers.noisy_votes is None else answers.total_sigma_votes


def group_means(rows: NDArray[np.float64], assignment: NDArray[np.integer], groups: int) -> NDArray[np.float64]:
    """Mean row of the images of each question, shape (groups, reduced); zeros for a question without images."""
    sums = np.zeros((groups, rows.shape[1]))
    np.add.at(sums, assignment, rows)
    means: NDArray[np.float64] = sums / np.maximum(np.bincount(assignment, minlength=groups), 1)[:, None]
    return means


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
