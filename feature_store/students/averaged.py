"""Two readings of the same counts, averaged: components matched to classes, and what each answer says of its images.

`matched` trusts the public images to say where classes lie, `prototypes` what was answered about each group of them.
They err in different places: the mean of their probabilities is right more often than either where noise is about as
large as the votes, and loses nothing where there is none (`labeler bench answers`).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from feature_store.students.answers import NoisyAnswers, soft_labels
from feature_store.students.matched import Matched, MatchedLearner
from feature_store.students.projection import Projection
from feature_store.students.prototypes import PrototypeLearner, Prototypes


@dataclass(frozen=True, eq=False)
class Averaged:
    """P(c | x), the mean of two students'.

    Attributes:
        projection, prototypes, chances: see `feature_store.students.matched.Matched`.
        components: float64, shape (dimension, reduced), the axes of the second student; it has the same mean.
        directions: float64, shape (C, reduced), its prototypes.
        supported: bool, shape (C,), see `feature_store.students.prototypes.Prototypes`.
    """

    projection: Projection
    prototypes: NDArray[np.float64]
    chances: NDArray[np.float64]
    components: NDArray[np.float64]
    directions: NDArray[np.float64]
    supported: NDArray[np.bool_]

    def predict_proba(self, features: NDArray[np.generic]) -> NDArray[np.float64]:
        """Class probabilities, shape (n, num_classes)."""
        second = Prototypes(Projection(self.projection.mean, self.components), self.directions, self.supported)
        first = Matched(self.projection, self.prototypes, self.chances)
        return (first.predict_proba(features) + second.predict_proba(features)) / 2


class AveragedLearner:
    """Learns `Averaged` from a release.

    Args:
        public_features: shape (num_images, dimension).
        num_classes: C.
        seed: for projections and public components.
    """

    def __init__(self, public_features: NDArray[np.generic], *, num_classes: int, seed: int) -> None:
        self._matched = MatchedLearner(public_features, num_classes=num_classes, seed=seed)
        self._prototypes = PrototypeLearner(public_features, num_classes=num_classes, seed=seed)

    def learn(self, answers: NoisyAnswers, assignment: NDArray[np.integer]) -> Averaged:
        """Fit to a release; `assignment` has the answer that stands for each public image, shape (num_images,)."""
        first = self._matched.learn(answers, assignment)
        weights = answers.answered[assignment].astype(np.float64)
        second = self._prototypes.fit(soft_labels(answers)[assignment], weights)
        return Averaged(
            first.projection,
            first.prototypes,
            first.chances,
            second.projection.components,
            second.prototypes,
            second.supported,
        )
