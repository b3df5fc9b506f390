"""Components of the public images, matched to classes by the counts: what is left to learn from noise is small.

Where noise is as large as the votes, where a class lies is better read off the public images, whose number noise does
not touch; the counts only have to say which class it is. A student of this kind holds several ways to divide the public
images into as many components as there are classes: one that starts from the centred prototypes of the release
(feature_store.students.centred), others from the public images alone (k-means, fixed seeds). Each is refined by
expectation-maximisation, matched to classes (feature_store.students.matching), and weighed by how well it explains the
release:

    P(c | x) = sum_s w_s sum_k r_sk(x) P(component k of s is class c | release),     w_s ~ evidence of s.

Everything is public or released: post-processing, nothing is charged. The probabilities take the counts at their known
noise; that a component may hold several classes, or another domain's votes mislead, they do not know: what is stated
to people goes through `feature_store.students.calibration` and `rehearsal` as every student's does.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray
from scipy.special import logsumexp

from feature_store.students.answers import NoisyAnswers
from feature_store.students.centred import CentredLearner, half_whitened, most_axes, noise_of_counts, released_counts
from feature_store.students.matching import match
from feature_store.students.projection import Projection, softmax, unit_rows
from feature_store.students.prototypes import CONCENTRATION

MISFIT: Final = 0.15
"""Standard deviation of what votes differ from the model by, as a share of one class's votes."""

PUBLIC_STARTS: Final = 3
_ROUNDS = 5
_MOST_CLUSTERED = 20_000


@dataclass(frozen=True, eq=False)
class Matched:
    """See the module.

    Attributes:
        projection: fitted on public features.
        prototypes: float64, shape (starts, C, reduced), unit rows.
        chances: float64, shape (starts, C, C): the weight of a start times its components' chances to be each class.
    """

    projection: Projection
    prototypes: NDArray[np.float64]
    chances: NDArray[np.float64]

    def predict_proba(self, features: NDArray[np.generic]) -> NDArray[np.float64]:
        """Class probabilities, shape (n, num_classes)."""
        rows = self.projection(features)
        found = np.zeros((len(rows), self.chances.shape[2]))
        for prototypes, chances in zip(self.prototypes, self.chances, strict=True):
            found += softmax(CONCENTRATION * rows @ prototypes.T) @ chances
        probabilities: NDArray[np.float64] = found / found.sum(axis=1, keepdims=True)
        return probabilities


class MatchedLearner:
    """Learns `Matched` from a release.

    Args:
        public_features: shape (num_images, dimension).
        num_classes: C.
        seed: for the projection and the public components.
    """

    def __init__(self, public_features: NDArray[np.generic], *, num_classes: int, seed: int) -> None:
        self._projection = half_whitened(public_features, dimensions=most_axes(num_classes), seed=seed)
        self._rows = self._projection(public_features)
        self._from_counts = CentredLearner(self._projection, self._rows)
        self._public = [
            refined(self._rows, start) for start in _public_starts(self._rows, num_classes, seed, PUBLIC_STARTS)
        ]

    def learn(self, answers: NoisyAnswers, assignment: NDArray[np.integer]) -> Matched:
        """Fit to a release.

        Args:
            answers: the release; of winners each counts as one vote.
            assignment: shape (num_images,), the answer that stands for each public image.
        """
        counts = released_counts(answers)
        starts = [self._from_counts.learn(answers, assignment).prototypes, *self._public]
        supported = (counts != 0).any(axis=0)
        found = [match(self._log_likelihood(one, counts, answers, assignment), supported) for one in starts]
        evidence = np.array([one.log_evidence for one in found])
        weights = np.exp(evidence - logsumexp(evidence))
        chances = np.stack([weight * one.chances for weight, one in zip(weights, found, strict=True)])
        return Matched(self._projection, np.stack(starts), chances)

    def _log_likelihood(
        self,
        prototypes: NDArray[np.float64],
        counts: NDArray[np.float64],
        answers: NoisyAnswers,
        assignment: NDArray[np.integer],
    ) -> NDArray[np.float64]:
        """L of `feature_store.students.matching`."""
        members = softmax(CONCENTRATION * self._rows @ prototypes.T)
        shares = np.zeros(counts.shape)
        np.add.at(shares, assignment, members)
        shares = np.where(answers.answered[:, None], shares, 0.0) / np.maximum(shares.sum(axis=0), 1e-9)
        sigma = noise_of_counts(answers)
        # Votes of one class: below the noise of a sum over all coordinates the total is unknown.
        each = max(float(counts.sum()), sigma * np.sqrt(counts.size), 1.0) / answers.num_classes
        variance = sigma**2 + (MISFIT * each) ** 2
        lost = 0.5 * each**2 * (shares**2).sum(axis=0)
        odds: NDArray[np.float64] = (each * shares.T @ counts - lost[:, None]) / variance
        return odds


def refined(rows: NDArray[np.float64], prototypes: NDArray[np.float64]) -> NDArray[np.float64]:
    """Prototypes after some rounds of expectation-maximisation over the public images, shape (C, reduced)."""
    for _ in range(_ROUNDS):
        prototypes = unit_rows(softmax(CONCENTRATION * rows @ prototypes.T).T @ rows)
    return prototypes


def _public_starts(rows: NDArray[np.float64], classes: int, seed: int, count: int) -> list[NDArray[np.float64]]:
    """Centres of as many clusters as there are classes; none where there are fewer images than that."""
    distinct = np.unique(rows, axis=0)
    if len(distinct) < classes:
        return []
    from sklearn.cluster import KMeans

    rng = np.random.default_rng(seed)
    sample = rows if len(rows) <= _MOST_CLUSTERED else rows[rng.choice(len(rows), _MOST_CLUSTERED, replace=False)]
    return [
        unit_rows(KMeans(classes, n_init=2, random_state=seed + number).fit(sample).cluster_centers_)
        for number in range(count)
    ]
