"""Definitions of the rivals and of our method; `world` holds what all of them are given alike.

DPPL (Wahdany, Jagielski, Dziedzic, Boenisch, AAAI 2025): one private prototype for each class.

**DPPL-Mean.** Features are shortened by averaging runs of `pool` neighboring numbers, and normalized. Their sum over
each class is released with Gaussian noise. An image belongs to the class whose sum it has the largest cosine with. A
record enters the sum of its class with norm at most 1 and no other: a vector of `world`, sensitivity 1. (The authors
release a mean under pure or zero-concentrated privacy. A cosine needs no count, so this rival pays for none, and the
analytic price of the Gaussian is lower than theirs.)

**DPPL-Public.** For each class y the exponential mechanism draws one public image z with probability proportional to
exp(eta u_y(z)). Here u_y(z) = sum over the records of class y of s(x, z), with s the cosine cut to [low, high] and
scaled to [0, 1].

*Price.* Let D' be D with a record x of class y. Only u_y changes, and u'_y(z) - u_y(z) = s(x, z) is in [0, 1] for every
z. With Z, Z' the two normalizers the log-ratio of the probabilities of z is eta s(x, z) - log(Z'/Z). The first term is
in [0, eta] and the second is one number of [0, eta]. So ratios lie in an interval of length eta that holds 0 (bounded
range), which is eta-DP without the factor 2 of scores that may fall. Draws for the C classes are independent and a
record touches one, so all of them cost what one does. With delta: where ratios lie in [t - eta, t], the hockey-stick
divergence is largest for two outcomes at the ends. The upper one has the probability p = (1 - e^(t - eta)) / (1 -
e^-eta). So delta(epsilon) = max over t of p (1 - e^(epsilon - t)) (Dong, Durfee, Rogers 2020, Lemma 3.2, in both
directions by symmetry of the interval). eta is the largest whose delta(epsilon) is at most delta. Given to this rival:
one curator holds all scores and draws in double precision. Federated, it would need exponentials inside secure
computation.

**Private Evolution** (Lin et al., ICLR 2024), with a pool of public images in place of its generator. Each class keeps
a population of candidates. In a round, every private record votes for the most similar candidate of its class. The
votes are added up and released with noise, and counts below a threshold become zero. The population is redrawn in
proportion to what is left, and a share of the drawn ones are varied. The generator's variation (a new image like an old
one) is here a public image among the `NEAREST` nearest of the candidate. The first population is drawn from the public
images at random. After the last round class prototypes are the means of the candidates, weighted with their released
counts, less the public mean.

*Price.* In one round a record casts one vote, in one cell of the class's histogram: a vector of `world` of norm 1
whatever the candidates are. Candidates of a round follow from public images and released counts. So T rounds are T
adaptive sums: T times the squared sensitivity of one. Its core idea is a nearest-neighbour histogram of votes over
public candidates. With one round, the same candidates for every class and centers of clusters as candidates, it is
reverse-knn.

**Least squares with public covariance** (Mehta et al., TMLR 2023, DP-LS; here the covariance costs nothing). The
classifier W minimizes sum |y - W phi(x)|^2 + lambda |W|^2: W = B (A + lambda)^-1 with A = sum phi phi^T and B = sum e_y
phi^T. The largest entry of W phi(x) scores. Mehta et al. release A and B. Here A is estimated on public images, whose
covariance differs by the domain but costs no privacy, so all of the price buys B.

phi(x) is the feature less the public mean, along the first `axes` principal axes of the public images, each divided by
its standard deviation to the power `whiten`, scaled to norm 1. Everything in phi is public. So |phi| <= 1, and B moves
by at most 1 when a record comes or goes: e_y phi^T has the norm of phi. The price is that of one sum of `world`.
Dividing by A + lambda is post-processing. `whiten = 0, ridge = inf` is a nearest class mean on public axes: DPPL-Mean
with the map that our linear learners use.

Rows of W are scaled to one norm before scoring. Agents hold more records of one class than of another, and with noise
a class of few records would otherwise never be named.

**Ours**: reverse-knn over public clusters; the student that the product fits reads its histogram. Every record votes
for its class at the nearest of `clusters` public centers: one vote in one cell, a vector of `world` of norm 1,
sensitivity 1 (`labeler.methods.reverse_knn` is the product's definition and price; a test compares the ballots). The
product's own code chooses questions and reads answers.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from benchmarks.accuracy.rivals.world import Predict, World, class_sums, noisy_sum, total_sigma, unit
from benchmarks.data import Split
from feature_store.query_selection import WHITENING, QuerySet, select_queries
from feature_store.rows import FEATURE_SCALE, quantize
from feature_store.students import Learners, NoisyAnswers, fit_student
from labeler.linear_model import read_means
from labeler.methods.blind_average import ALONG, COUNTED

_STEPS = 2_000


@dataclass(frozen=True)
class ClassMeans:
    """DPPL-Mean; see the module.

    Attributes:
        pool: how many neighboring numbers of a feature are averaged into one.
    """

    pool: int = 1

    @property
    def name(self) -> str:
        return "DPPL-Mean"

    def fit(self, world: World) -> Predict:
        """Compute each agent's sums."""
        sums = self.vectors(world)
        seen = unit(self._pooled(world.asked))

        def predict(epsilon: float | None, draw: int) -> NDArray[np.float64]:
            prototypes = unit(noisy_sum(world, sums, epsilon, draw=draw))
            return np.asarray(seen @ prototypes.T)

        return predict

    def vectors(self, world: World) -> list[NDArray[np.float64]]:
        """Return what agents send, before noise."""
        return [class_sums(one, unit(self._pooled(one.inputs)), world.num_classes) for one in world.holdings]

    def _pooled(self, features: NDArray[np.floating]) -> NDArray[np.floating]:
        return np.asarray(features.reshape(len(features), features.shape[1] // self.pool, self.pool).mean(axis=2))


@dataclass(frozen=True)
class PublicPrototypes:
    """DPPL-Public; see the module.

    Attributes:
        low, high: to which cosines are cut.
        are_quantiles: the two are quantiles of the cosines between public images, for images that are all alike.
    """

    low: float = 0.0
    high: float = 1.0
    are_quantiles: bool = False

    @property
    def name(self) -> str:
        return "DPPL-Public"

    def fit(self, world: World) -> Predict:
        """Return the scores of all public images for each class, summed over agents: what a curator would hold."""
        candidates = unit(world.public)
        cut = self
        if self.are_quantiles:
            cosines = (candidates @ candidates.T)[~np.eye(len(candidates), dtype=np.bool_)]
            cut = PublicPrototypes(*np.quantile(cosines, [self.low, self.high]).tolist())
        scores = np.sum(
            [
                class_sums(one, cut.scores(near), world.num_classes)
                for one, near in zip(world.holdings, world.similarities, strict=True)
            ],
            axis=0,
        )
        seen = unit(world.asked)

        def predict(epsilon: float | None, draw: int) -> NDArray[np.float64]:
            chosen = scores
            if epsilon is not None:
                random = np.random.default_rng([draw, 7])
                chosen = range_at(epsilon, world.delta) * scores + random.gumbel(size=np.shape(scores))
            prototypes = candidates[np.argmax(chosen, axis=1)]
            return np.asarray(seen @ prototypes.T)

        return predict

    def scores(self, cosines: NDArray[np.floating]) -> NDArray[np.float64]:
        """Return s(x, z) in [0, 1], shape (records, candidates)."""
        cut = np.clip(cosines.astype(np.float64), self.low, self.high)
        return np.asarray((cut - self.low) / (self.high - self.low))


def delta_of_range(epsilon: float, eta: float) -> float:
    """Return delta(epsilon) of one mechanism of range eta; see the module."""
    if eta <= epsilon:
        return 0.0
    t = np.linspace(epsilon, eta, _STEPS)
    # Between two points of the grid the first factor is at most its left end's, the second at most its right end's.
    upper = -np.expm1(t[:-1] - eta) / -math.expm1(-eta)
    return float(np.max(upper * -np.expm1(epsilon - t[1:])))


def range_at(epsilon: float, delta: float) -> float:
    """Return the largest eta (to a millionth) whose mechanism is (epsilon, delta)-DP."""
    low, high = epsilon, 2 * epsilon + 1
    while high - low > 1e-6 * epsilon:
        middle = (low + high) / 2
        low, high = (middle, high) if delta_of_range(epsilon, middle) <= delta else (low, middle)
    return low


NEAREST = 10
"""A variation is one of this many nearest public images."""


@dataclass(frozen=True)
class Evolution:
    """Iterated candidates; see the module.

    Attributes:
        rounds: T.
        population: candidates of each class.
        threshold: in standard deviations of the noise; counts below it are dropped.
        varied: share of a new population that is replaced by variations.
    """

    rounds: int = 3
    population: int = 10
    threshold: float = 2.0
    varied: float = 0.5

    @property
    def name(self) -> str:
        return "Private Evolution, public pool"

    def fit(self, world: World) -> Predict:
        """Compute similarities, once; rounds depend on the noise."""
        pool = unit(world.public)
        similar = world.similarities
        around = np.argsort(-(pool @ pool.T), axis=1)[:, : min(NEAREST, len(pool))]
        mean = pool.mean(axis=0)
        seen = unit(world.asked) - mean

        def predict(epsilon: float | None, draw: int) -> NDArray[np.float64]:
            random = np.random.default_rng([draw, 11])
            population = np.stack(
                [random.choice(len(pool), self.population, replace=False) for _ in range(world.num_classes)]
            )
            counts = np.zeros(population.shape)
            sigma = total_sigma(world, epsilon, dimension=counts.size, releases=self.rounds)
            for turn in range(self.rounds):
                if turn:
                    population = self._next(population, counts, around, random)
                votes = [
                    votes_for(holding, near, population) for holding, near in zip(world.holdings, similar, strict=True)
                ]
                counts = noisy_sum(world, votes, epsilon, draw=draw, releases=self.rounds, opening=turn)
                counts = np.where(counts < self.threshold * sigma, 0.0, counts)
            weights = counts + 1e-9
            prototypes = unit(np.einsum("cp,cpd->cd", weights, pool[population]) / weights.sum(1)[:, None] - mean)
            return np.asarray(seen @ prototypes.T)

        return predict

    def _next(
        self, population: NDArray[np.int64], counts: NDArray[np.float64], around: NDArray[np.int64],
        random: np.random.Generator,
    ) -> NDArray[np.int64]:  # fmt: skip
        drawn = []
        for candidates, count in zip(population, counts, strict=True):
            share = count / count.sum() if count.sum() > 0 else None
            kept = random.choice(candidates, self.population, p=share)
            varied = random.random(self.population) < self.varied
            near = around[kept, random.integers(0, around.shape[1], self.population)]
            drawn.append(np.where(varied, near, kept))
        return np.stack(drawn)


def votes_for(holding: Split, similar: NDArray[np.float32], population: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return one vote of each record, for the most similar candidate of its class; shape (C, population)."""
    votes = np.zeros(population.shape)
    for label in range(len(population)):
        rows = similar[holding.labels == label]
        np.add.at(votes[label], rows[:, population[label]].argmax(axis=1), 1.0)
    return votes


@dataclass(frozen=True)
class LeastSquares:
    """Private class sums, divided by a public covariance; see the module.

    Attributes:
        axes: public principal axes.
        ridge: lambda, as a share of the mean variance of phi along an axis; infinite for class means.
        whiten: power of the standard deviations that phi is divided by.
    """

    axes: int = 32
    ridge: float = 0.1
    whiten: float = 0.5

    @property
    def name(self) -> str:
        return "class means on public axes" if math.isinf(self.ridge) else "least squares, public covariance"

    def vectors(self, world: World) -> list[NDArray[np.float64]]:
        """Return what agents send, before noise: B of each."""
        map_ = public_axes(world, axes=self.axes, whiten=self.whiten)
        return [class_sums(one, map_(one.inputs), world.num_classes) for one in world.holdings]

    def fit(self, world: World) -> Predict:
        """Compute phi of everything, each agent's B, the public A."""
        map_ = public_axes(world, axes=self.axes, whiten=self.whiten)
        sums = self.vectors(world)
        public, seen = map_(world.public), map_(world.asked)
        solve = np.eye(public.shape[1])
        if not math.isinf(self.ridge):
            covariance = public.T @ public / len(public)
            least = self.ridge * np.trace(covariance) / len(covariance)
            solve = np.linalg.inv(covariance + least * np.eye(len(covariance)))

        def predict(epsilon: float | None, draw: int) -> NDArray[np.float64]:
            weights = unit(noisy_sum(world, sums, epsilon, draw=draw) @ solve)
            return np.asarray(seen @ weights.T)

        return predict


def public_axes(
    world: World, *, axes: int, whiten: float = 0.0
) -> Callable[[NDArray[np.floating]], NDArray[np.float64]]:
    """Return phi of the module, a map fitted on the public images."""
    mean, deviations, components = world.principal_axes
    kept = min(axes, len(world.public) - 1)
    matrix = components[:kept].T / np.maximum(deviations[:kept], 1e-6) ** whiten
    return lambda features: unit((unit(features) - mean) @ matrix)


@dataclass(frozen=True, eq=False)
class Answers:
    """The common input of both ways of reading below.

    Attributes:
        questions: the public centers.
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
    """reverse-knn as a job reads it: the student of the product, fitted to the noisy histogram.

    Attributes:
        clusters: questions asked.
    """

    clusters: int = 10

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

        def predict(epsilon: float | None, draw: int) -> NDArray[np.float64]:
            counts = noisy_sum(world, asked.ballots, epsilon, draw=draw)
            answers = NoisyAnswers(
                features=asked.questions.features,
                labels=counts.argmax(axis=1),
                total_sigma_votes=total_sigma(world, epsilon, dimension=counts.size),
                num_classes=world.num_classes,
                noisy_votes=counts,
                assignment=asked.questions.assignment,
            )
            student = fit_student(
                "planned", answers, public, num_classes=world.num_classes, seed=draw, learners=learners
            )
            return student.predict_proba(world.asked)

        return predict


@dataclass(frozen=True)
class ProductMeans:
    """Class means as a job reads them: sums of rows and a count, by discriminant analysis.

    Attributes:
        axes: public axes, divided by their standard deviations to the power WHITENING.
    """

    axes: int = 16

    @property
    def name(self) -> str:
        return "class means, as the product reads them"

    def vectors(self, world: World) -> list[NDArray[np.float64]]:
        """Return what agents send, before noise: sums of rows and counts of each."""
        map_ = public_axes(world, axes=self.axes, whiten=WHITENING)
        counted = [
            np.pad(ALONG * map_(one.inputs), ((0, 0), (0, 1)), constant_values=COUNTED) for one in world.holdings
        ]
        return [class_sums(one, rows, world.num_classes) for one, rows in zip(world.holdings, counted, strict=True)]

    def fit(self, world: World) -> Predict:
        """Compute each agent's sums, and the rows of all images; the reading depends on the noise."""
        sums, seen = self.vectors(world), public_axes(world, axes=self.axes, whiten=WHITENING)(world.asked)

        def predict(epsilon: float | None, draw: int) -> NDArray[np.float64]:
            noisy = noisy_sum(world, sums, epsilon, draw=draw).T
            weights = read_means(noisy, total_sigma(world, epsilon, dimension=noisy.size))
            return np.asarray(seen @ weights[:-1] + weights[-1])

        return predict


def votes(holding: Split, centres: NDArray[np.int16], num_classes: int) -> NDArray[np.float64]:
    """Return votes of one agent, shape (centers, classes): products of integers, the lowest center among equals."""
    rows = np.rint(holding.inputs.astype(np.float64) * FEATURE_SCALE)
    nearest = (rows @ centres.astype(np.float64).T).argmax(axis=1)
    counts = np.zeros((len(centres), num_classes))
    np.add.at(counts, (nearest, holding.labels), 1.0)
    return counts
