"""Ours beside them: reverse-knn over public clusters, its histogram read by the student that the product fits.

Every record votes for its class at the nearest of `clusters` public centres: one vote in one cell, a vector of
`world` of norm 1, sensitivity 1 (`labeler.methods.reverse_knn` is the product's definition and price; a test
compares the ballots). Questions are chosen and answers read by the product's own code.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from benchmarks.accuracy.rivals.world import Predict, World, noisy_sum, total_sigma, unit
from benchmarks.data import Split
from feature_store.query_selection import QuerySet, select_queries
from feature_store.rows import FEATURE_SCALE, quantize
from feature_store.students import Learners, NoisyAnswers, fit_student
from labeler.rounds.effects import StudentKind


@dataclass(frozen=True, eq=False)
class Answers:
    """What both ways of reading below are made of.

    Attributes:
        questions: the public centres.
        ballots: every agent's votes.
    """

    questions: QuerySet
    ballots: list[NDArray[np.float64]]


def ask(world: World, clusters: int) -> Answers:
    """Cluster the public images, count every agent's votes; once for a world."""
    key = ("ask", clusters)
    if key not in world.memory:
        public = quantize(world.public)
        questions = select_queries(public, strategy="clustered", count=min(clusters, len(public) - 1), seed=0)
        ballots = [votes(holding, questions.features, world.num_classes) for holding in world.holdings]
        world.memory[key] = Answers(questions, ballots)
    found: Answers = world.memory[key]
    return found


@dataclass(frozen=True)
class ProductVotes:
    """reverse-knn as a job reads it: the student `kind` of the product, fitted to the noisy histogram.

    Attributes:
        clusters: questions asked.
        kind: of student.
    """

    clusters: int = 10
    kind: StudentKind = "planned"

    @property
    def name(self) -> str:
        return "reverse-knn, the product's student"

    def fit(self, world: World) -> Predict:
        """Ask; the student depends on the noise."""
        asked = ask(world, self.clusters)
        public = quantize(world.public)
        key = "learners of the public images"
        if key not in world.memory:
            world.memory[key] = Learners(public, num_classes=world.num_classes)
        learners: Learners = world.memory[key]

        def predict(epsilon: float | None, draw: int) -> NDArray[np.int64]:
            counts = noisy_sum(world, asked.ballots, epsilon, draw=draw)
            answers = NoisyAnswers(
                features=asked.questions.features,
                labels=counts.argmax(axis=1),
                total_sigma_votes=total_sigma(world, epsilon, dimension=counts.size),
                num_classes=world.num_classes,
                noisy_votes=counts,
                agents=len(world.holdings),
                assignment=asked.questions.assignment,
            )
            student = fit_student(
                self.kind, answers, public, num_classes=world.num_classes, seed=draw, learners=learners
            )
            return np.asarray(student.predict(world.asked), dtype=np.int64)

        return predict


@dataclass(frozen=True)
class CentredVotes:
    """reverse-knn; prototypes are noisy votes times centred centres.

    Attributes:
        clusters: questions asked.
    """

    clusters: int = 10

    @property
    def name(self) -> str:
        return "reverse-knn, votes x centred centres"

    def fit(self, world: World) -> Predict:
        """Ask; a matrix product reads."""
        asked = ask(world, self.clusters)
        mean = unit(world.public).mean(axis=0)
        centres = unit(asked.questions.features) - mean
        seen = unit(world.asked) - mean

        def predict(epsilon: float | None, draw: int) -> NDArray[np.int64]:
            counts = noisy_sum(world, asked.ballots, epsilon, draw=draw)
            prototypes = unit(counts.T @ centres)
            return np.asarray((seen @ prototypes.T).argmax(axis=1), dtype=np.int64)

        return predict


def votes(holding: Split, centres: NDArray[np.int16], num_classes: int) -> NDArray[np.float64]:
    """Votes of one agent, shape (centres, classes): products of integers, the lowest centre among equals."""
    rows = np.rint(holding.inputs.astype(np.float64) * FEATURE_SCALE)
    nearest = (rows @ centres.astype(np.float64).T).argmax(axis=1)
    counts = np.zeros((len(centres), num_classes))
    np.add.at(counts, (nearest, holding.labels), 1.0)
    return counts
