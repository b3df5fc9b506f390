"""The four models that students are made of: prototypes, matched components, spreading and linear discriminants.

Every learner prepares the public images once and then learns from any number of releases about them. `learn` takes the
release and, of each public image, the answer that stands for it. It returns the model together with what this says of
the public images, which are projected and searched once and not for every release. Learners are made of the public
features, of shape (num_images, dimension), the number C of classes, and a seed for the projection. All of it is
post-processing of public features and of what was released: nothing is charged. More than 600 lines: the four have one
shape and share their searches, and nearly a third are docstrings.

**Matching.** The class of each component of the public images has an exact posterior, given noisy counts and their
known noise. Public images fall into components k = 1..C. S_qk is the share of component k's images that
question q stands for. If c is the class of component k, records of class c cast M S_qk votes at question q. Let pi(k)
be the class of component k. The released counts are

    n_qc = M sum_k S_qk [pi(k) = c] + noise of known variance sigma^2 + misfit.

Up to what is the same for every pi, that gives

    log P(n | pi) = sum_k L[k, pi(k)],     L[k, c] = (M <S_k, n_c> - M^2 |S_k|^2 / 2) / s^2,     s^2 = sigma^2 + misfit.

Two public priors, each half beforehand.

* **balanced**: every class is one component, all C! bijections alike. What all counts of a class have in common then
  cancels. P(pi(k) = c | n) is a ratio of permanents of exp(L), computed exactly by sums over sets of classes, in
  2^C C^2 steps, up to EXACT_CLASSES classes. Beyond, exp(L) is scaled to the doubly stochastic matrix, the least
  assuming one with these odds, and its permanent taken as small as it can be (C! / C^C). Of more classes than
  BALANCED_CLASSES this prior is left out;
* **free**: each component is each class alike, whatever the others are: a class may have several or none. Then
  P(pi(k) = c | n) is the softmax of row k. That is exact where no question stands for images of two components. Where
  one does, two components of one class explain its counts together, which is left out: they are trusted a little too
  much.

Their evidences log P(n) weigh them against each other. All of it is a function of what was released, of public images
and of the stated noise: post-processing. It speaks of the noiseless votes, and of labels as far as the components are
classes.

References:
    Ryser 1963 and Bellman 1962 (sums over subsets); Sinkhorn 1964; Egorychev 1981, Falikman 1981 (least permanent of a
    doubly stochastic matrix).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Final, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_matrix, diags
from scipy.special import gammaln, log_ndtr, logsumexp

from feature_store.students.answers import (
    Forms,
    NoisyAnswers,
    Projection,
    fit_projection,
    half_whitened,
    most_axes,
    noise_of_counts,
    released_counts,
    soft_labels,
    softmax,
    unit_rows,
)
from labeler.steady import IMPOSSIBLE, MOST, largest, powers, shares

CONCENTRATION: Final = 10.0
"""How sharply similarity to a prototype turns into probability (kappa of a von Mises-Fisher distribution)."""

EVIDENCE_KEPT: Final = 0.5
"""Power of the released answer in each refinement of prototypes: 0 forgets it after the start, 1 trusts it fully."""

PUBLIC_STARTS: Final = 3
"""Divisions of the public images that do not depend on the release."""

MISFIT: Final = 0.15
"""Standard deviation of what votes differ from the model of matched components by, as a share of a class's votes."""

NEIGHBORS: Final = 10
"""Edges per image in the graph of spreading, and public images that a new image asks."""

FLOW: Final = 0.5
"""Share of an image's label that its neighbors decide (alpha)."""

SHARPNESS: Final = 10.0
"""Edge weight exp(sharpness * (cosine - 1))."""

AXES: Final = 128
"""Principal axes that the discriminant reads, at least."""

RIDGE: Final = 0.1
"""Added to the discriminant's covariance, as a share of its mean eigenvalue."""

_REFINEMENTS: Final = 5
_SPREADINGS: Final = 30
_MOST_CLUSTERED: Final = 20_000
_BLOCK_ROWS: Final = 4096
_LEAST_EVIDENCE: Final = 1e-3
_LEAST: Final = 1e-12

Model = TypeVar("Model", covariant=True)


@dataclass(frozen=True, eq=False)
class Fit(Generic[Model]):
    """A model fitted to a release, and what it says of the public images, shape (num_images, num_classes)."""

    model: Model
    public: NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Prototypes:
    """P(c | x) proportional to exp(kappa * <project(x), prototype_c>); 0 for a class without any support.

    Attributes:
        projection: fitted on public features.
        prototypes: float64, shape (num_classes, reduced), unit rows.
        supported: bool, shape (num_classes,): classes some answer spoke for.
    """

    FORMS: ClassVar[Forms] = {"prototypes": (np.float64, ("classes", "reduced")), "supported": (np.bool_, ("classes",))}

    projection: Projection
    prototypes: NDArray[np.float64]
    supported: NDArray[np.bool_]

    def predict_proba(self, features: NDArray[np.generic]) -> NDArray[np.float64]:
        """Class probabilities, shape (n, num_classes)."""
        return self.of_rows(self.projection(features))

    def of_rows(self, rows: NDArray[np.float64]) -> NDArray[np.float64]:
        """Class probabilities of projected features."""
        return softmax(_similarities(rows, self.prototypes, self.supported))


class PrototypeLearner:
    """Learns `Prototypes`: one direction for each class, refined over the public images nobody was asked about.

    The strongest model where a backbone puts each class in one place, and the least sensitive to noise.
    Expectation-maximisation of a mixture with one von Mises-Fisher component per class: start from the mean direction
    of each class under the released answers; then five times each public image takes the posterior under the
    prototypes times evidence^0.5, and prototypes become the mean directions under these.

    References:
        Banerjee et al. 2005, "Clustering on the unit hypersphere using von Mises-Fisher distributions".
    """

    def __init__(self, public_features: NDArray[np.generic], *, num_classes: int, seed: int) -> None:
        self._projection = fit_projection(public_features, dimensions=min(max(20, 2 * num_classes), 256), seed=seed)
        self._rows = self._projection(public_features)

    def learn(self, answers: NoisyAnswers, assignment: NDArray[np.integer]) -> Fit[Prototypes]:
        """Fit to a release."""
        return self.fit(soft_labels(answers)[assignment], answers.answered[assignment].astype(np.float64))

    def fit(self, evidence: NDArray[np.float64], weights: NDArray[np.float64]) -> Fit[Prototypes]:
        """Fit to what is known about each image.

        Args:
            evidence: shape (num_images, num_classes), rows sum to one.
            weights: shape (num_images,), 0 for images about which nothing is known; they join after the start.
        """
        start = evidence * weights[:, None]
        supported = start.sum(axis=0) > 0
        prototypes = unit_rows(start.T @ self._rows)
        kept = np.maximum(evidence, _LEAST_EVIDENCE) ** EVIDENCE_KEPT
        for _ in range(_REFINEMENTS):
            posterior = softmax(_similarities(self._rows, prototypes, supported)) * kept
            posterior /= posterior.sum(axis=1, keepdims=True)
            prototypes = unit_rows(posterior.T @ self._rows)
        model = Prototypes(self._projection, prototypes, supported)
        return Fit(model, model.of_rows(self._rows))


def _similarities(
    rows: NDArray[np.float64], prototypes: NDArray[np.float64], supported: NDArray[np.bool_] | bool = True
) -> NDArray[np.float64]:
    return np.where(supported, CONCENTRATION * rows @ prototypes.T, IMPOSSIBLE)


@dataclass(frozen=True, eq=False)
class Matched:
    """P(c | x) = sum_s w_s sum_k r_sk(x) P(component k of division s is class c | release).

    Attributes:
        projection: fitted on public features.
        prototypes: float64, shape (divisions, C, reduced), unit rows.
        chances: float64, shape (divisions, C, C): the weight of a division times its components' chances to be each
            class.
    """

    FORMS: ClassVar[Forms] = {
        "prototypes": (np.float64, ("divisions", "components", "reduced")),
        "chances": (np.float64, ("divisions", "components", "classes")),
    }

    projection: Projection
    prototypes: NDArray[np.float64]
    chances: NDArray[np.float64]

    def predict_proba(self, features: NDArray[np.generic]) -> NDArray[np.float64]:
        """Class probabilities, shape (n, num_classes)."""
        return self.of_rows(self.projection(features))

    def of_rows(self, rows: NDArray[np.float64]) -> NDArray[np.float64]:
        """Class probabilities of projected features."""
        found = np.zeros((len(rows), self.chances.shape[2]))
        for prototypes, chances in zip(self.prototypes, self.chances, strict=True):
            found += softmax(_similarities(rows, prototypes)) @ chances
        return shares(found)


class MatchedLearner:
    """Learns `Matched`: components of the public images, matched to classes by the counts.

    Where noise is as large as the votes, the place of a class is better read off the public images, whose number noise
    does not touch. The counts only have to say which class it is. The model holds several ways to divide the public
    images into as many components as there are classes. One starts from prototypes read off the counts, others from
    the public images alone (k-means, fixed seeds). Each is refined by expectation-maximization, matched to classes
    (`feature_store.students.members`) and weighed by how well it explains the release.

    **Prototypes read off the counts.** P_c = sum_q n_qc z_q. Here n are the released counts, unbiased for the votes,
    and z_q is the mean of the centered public images that question q stands for. Every released number counts, none is
    rounded to a winner first. The z_q of all images sum to zero, so what every count of a class has in common (how many
    records of that class there are) cancels.

    The probabilities take the counts at their known noise. They do not know that a component may hold several classes:
    what people read goes through `feature_store.students.answers`.
    """

    def __init__(self, public_features: NDArray[np.generic], *, num_classes: int, seed: int) -> None:
        self._projection = half_whitened(public_features, dimensions=most_axes(num_classes), seed=seed)
        self._rows = self._projection(public_features)
        self._public = [self._refined(start) for start in _divisions(self._rows, num_classes, seed)]

    def learn(self, answers: NoisyAnswers, assignment: NDArray[np.integer]) -> Fit[Matched]:
        """Fit to a release; of winners each counts as one vote."""
        counts = released_counts(answers)
        read = counts.T @ group_means(self._rows, assignment, len(counts))
        divisions = [self._refined(unit_rows(read), np.abs(read).sum(axis=1) > 0), *self._public]
        supported = (counts != 0).any(axis=0)
        found = [match(self._log_odds(one, counts, answers, assignment), supported) for one in divisions]
        evidence = np.array([one.log_evidence for one in found])
        weights = np.exp(evidence - logsumexp(evidence))
        chances = np.stack([weight * one.chances for weight, one in zip(weights, found, strict=True)])
        model = Matched(self._projection, np.stack(divisions), chances)
        return Fit(model, model.of_rows(self._rows))

    def _refined(
        self, prototypes: NDArray[np.float64], supported: NDArray[np.bool_] | bool = True
    ) -> NDArray[np.float64]:
        for _ in range(_REFINEMENTS):
            prototypes = unit_rows(softmax(_similarities(self._rows, prototypes, supported)).T @ self._rows)
        return prototypes

    def _log_odds(
        self,
        prototypes: NDArray[np.float64],
        counts: NDArray[np.float64],
        answers: NoisyAnswers,
        assignment: NDArray[np.integer],
    ) -> NDArray[np.float64]:
        """L of `feature_store.students.members`."""
        members = softmax(_similarities(self._rows, prototypes))
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


def _divisions(rows: NDArray[np.float64], classes: int, seed: int) -> list[NDArray[np.float64]]:
    """Centers of as many clusters as there are classes; none where there are fewer images than that."""
    if len(np.unique(rows, axis=0)) < classes:
        return []
    from sklearn.cluster import KMeans

    rng = np.random.default_rng(seed)
    sample = rows if len(rows) <= _MOST_CLUSTERED else rows[rng.choice(len(rows), _MOST_CLUSTERED, replace=False)]
    return [
        unit_rows(KMeans(classes, n_init=2, random_state=seed + number).fit(sample).cluster_centers_)
        for number in range(PUBLIC_STARTS)
    ]


def group_means(rows: NDArray[np.float64], assignment: NDArray[np.integer], groups: int) -> NDArray[np.float64]:
    """Return the mean row of the images of each question, shape (groups, reduced); zeros without images."""
    sums = np.zeros((groups, rows.shape[1]))
    np.add.at(sums, assignment, rows)
    means: NDArray[np.float64] = sums / np.maximum(np.bincount(assignment, minlength=groups), 1)[:, None]
    return means


@dataclass(frozen=True, eq=False)
class Spreading:
    """A new image takes the weighted mean of the spread labels of its nearest public images.

    Attributes:
        projection: fitted on public features.
        references: float32, shape (num_images, reduced), unit rows: the public images.
        labels: float64, shape (num_images, num_classes), spread labels, rows sum to one.
    """

    FORMS: ClassVar[Forms] = {
        "references": (np.float32, ("images", "reduced")),
        "labels": (np.float64, ("images", "classes")),
    }

    projection: Projection
    references: NDArray[np.float32]
    labels: NDArray[np.float64]

    def predict_proba(self, features: NDArray[np.generic]) -> NDArray[np.float64]:
        """Class probabilities, shape (n, num_classes)."""
        places = self.places
        return self.of_neighbors(*_nearest(self.projection(features), places, min(NEIGHBORS, len(places))))

    @cached_property
    def places(self) -> NDArray[np.float64]:
        """The references in double precision, in which no product of a steady model is subnormal."""
        return self.references.astype(np.float64)

    def of_neighbors(self, nearest: NDArray[np.int64], similarity: NDArray[np.float64]) -> NDArray[np.float64]:
        """Class probabilities of images with these nearest references."""
        return shares(np.einsum("nk,nkc->nc", powers(SHARPNESS * similarity), self.labels[nearest]))


class SpreadingLearner:
    """Learns `Spreading`: answers flow along the nearest-neighbor graph of the public images.

    It assumes nothing about the shape of a class, so it wins when a class lies in many places and enough questions were
    answered to reach them all. It iterates F <- alpha * S F + (1 - alpha) * Y, S the symmetrically normalized graph.

    References:
        Zhou et al. 2004, "Learning with local and global consistency".
    """

    def __init__(self, public_features: NDArray[np.generic], *, num_classes: int, seed: int) -> None:
        self._projection = fit_projection(public_features, dimensions=most_axes(num_classes), seed=seed)
        self._rows = self._projection(public_features).astype(np.float32)
        # One neighbor more, because an image is its own nearest; among copies it may not be the first.
        nearest, similarity = _nearest_of_public(self._rows, min(NEIGHBORS + 1, len(self._rows)))
        self._graph = _normalized_graph(nearest, similarity)
        self._neighbors = nearest[:, :NEIGHBORS], similarity[:, :NEIGHBORS]

    def learn(self, answers: NoisyAnswers, assignment: NDArray[np.integer]) -> Fit[Spreading]:
        """Fit to a release."""
        return self.fit(soft_labels(answers)[assignment], answers.answered[assignment].astype(np.float64))

    def fit(self, evidence: NDArray[np.float64], weights: NDArray[np.float64]) -> Fit[Spreading]:
        """Fit to what is known about each image.

        Args:
            evidence: shape (num_images, num_classes), rows sum to one.
            weights: shape (num_images,), 0 for images about which nothing is known; they only receive.
        """
        start = evidence * weights[:, None]
        spread = start
        for _ in range(_SPREADINGS):
            spread = FLOW * (self._graph @ spread) + (1.0 - FLOW) * start
        totals = spread.sum(axis=1, keepdims=True)
        reached = totals > _LEAST
        labels = np.where(reached, spread / np.where(reached, totals, 1.0), 1.0 / evidence.shape[1])
        model = Spreading(self._projection, self._rows, labels)
        return Fit(model, model.of_neighbors(*self._neighbors))


def _normalized_graph(nearest: NDArray[np.int64], similarity: NDArray[np.float64]) -> csr_matrix:
    """Return D^-1/2 W D^-1/2 of the symmetric nearest-neighbor graph."""
    num_images = len(nearest)
    sources = np.repeat(np.arange(num_images), nearest.shape[1])
    edges = np.exp(SHARPNESS * (similarity.ravel() - 1.0)) * (nearest.ravel() != sources)
    graph = csr_matrix((edges, (sources, nearest.ravel())), shape=(num_images, num_images))
    graph = graph.maximum(graph.T)
    degree = np.asarray(graph.sum(axis=1)).ravel()
    scale = diags(1.0 / np.sqrt(np.where(degree > 0, degree, 1.0)))
    return csr_matrix(scale @ graph @ scale)


def _nearest(rows: NDArray[Any], references: NDArray[Any], count: int) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """The most similar references of each row, in blocks so that memory does not grow with rows times references.

    The rows may be private, and somebody else may have chosen the references: see `labeler.steady.largest`.
    """
    parts = [
        largest(rows[start : start + _BLOCK_ROWS] @ references.T, count) for start in range(0, len(rows), _BLOCK_ROWS)
    ]
    return np.concatenate([part[0] for part in parts]), np.concatenate([part[1] for part in parts])


def _nearest_of_public(rows: NDArray[np.float32], count: int) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """The most similar public images of each public image, the nearest first; all are of unit length."""
    from sklearn.neighbors import NearestNeighbors

    distance, nearest = NearestNeighbors(n_neighbors=count, algorithm="brute").fit(rows).kneighbors(rows)
    return nearest.astype(np.int64), 1.0 - distance.astype(np.float64) ** 2 / 2


@dataclass(frozen=True, eq=False)
class Discriminant:
    """P(c | x) proportional to exp(<project(x), weight_c> + bias_c).

    Attributes:
        projection: fitted on public features.
        weights: float64, shape (num_classes, reduced).
        biases: float64, shape (num_classes,); -MOST for a class without any support.
    """

    FORMS: ClassVar[Forms] = {
        "weights": (np.float64, ("classes", "reduced")),
        "biases": (np.float64, ("classes",)),
    }

    projection: Projection
    weights: NDArray[np.float64]
    biases: NDArray[np.float64]

    def predict_proba(self, features: NDArray[np.generic]) -> NDArray[np.float64]:
        """Class probabilities, shape (n, num_classes)."""
        return self.of_rows(self.projection(features))

    def of_rows(self, rows: NDArray[np.float64]) -> NDArray[np.float64]:
        """Class probabilities of projected features."""
        return softmax(rows @ self.weights.T + self.biases)


class DiscriminantLearner:
    """Learns `Discriminant`: linear discriminants with the covariance of the public images, shrunk as noise asks for.

    Where there are many records, or classes overlap so that no grouping of the public images tells them apart, the
    class means hold more than components do. Let j be the leading principal axes of the public images (rows z of unit
    length, centered again). Let z_q be the mean of the images that question q stands for, and M_c the votes of class c.
    The sum

        u_cj = sum_q n_qc z_qj

    is M_c m_cj, with m_c the mean of class c, and noise of the exactly known variance

        v_j = sigma^2 sum_q z_qj^2.

    Variation between classes on axis j beyond that is signal. The mean square of m_cj is

        t_j = max(0, sum_c (u_cj^2 - v_j)) / sum_c M_c^2.

    The best linear guess of m_cj (Wiener) is u_cj / M_c times t_j M_c^2 / (t_j M_c^2 + v_j). Axes that are noise only
    drop out, and all of them stay where there is none. A class of few votes falls back to the mean of all images,
    alone: it takes no axis from the others. With S the covariance of the public images with a ridge, and classes alike
    beforehand,

        weight_c = S^-1 m_c,      bias_c = -<m_c, weight_c> / 2.

    So a class that noise has drowned gets what the others do not claim. S is public, so it is exact and free.

    References:
        Wiener 1949; Fisher 1936; Mehta et al. 2023, "Large scale transfer learning for differentially private image
        classification" (least squares whose covariance is private).
    """

    def __init__(self, public_features: NDArray[np.generic], *, num_classes: int, seed: int) -> None:
        self._projection = fit_projection(public_features, dimensions=max(AXES, min(4 * num_classes, 512)), seed=seed)
        self._rows = self._projection(public_features)
        self._mean = self._rows.mean(axis=0)
        self._centered = self._rows - self._mean
        covariance = self._centered.T @ self._centered / len(self._rows)
        self._covariance = covariance + (RIDGE * np.trace(covariance) / len(covariance) + _LEAST) * np.eye(
            len(covariance)
        )

    def learn(self, answers: NoisyAnswers, assignment: NDArray[np.integer]) -> Fit[Discriminant]:
        """Fit to a release; of winners each counts as one vote."""
        counts = released_counts(answers)
        supported = (counts != 0).any(axis=0)
        supported |= not supported.any()  # where nothing speaks for any, nothing speaks against any either
        centers = group_means(self._centered, assignment, len(counts))
        variance = noise_of_counts(answers) ** 2
        votes = np.ones(answers.num_classes)
        votes[supported] = votes_of_classes(counts[:, supported], variance * int(answers.answered.sum()))
        sums = counts.T @ centers
        noise = variance * (centers[answers.answered] ** 2).sum(axis=0)
        between = np.maximum((sums[supported] ** 2 - noise).sum(axis=0), 0.0) / (votes[supported] ** 2).sum()
        signal = between * votes[:, None] ** 2
        means = sums / votes[:, None] * signal / np.maximum(signal + noise, _LEAST)
        weights = np.linalg.solve(self._covariance, means.T).T
        biases = -0.5 * np.einsum("cd,cd->c", weights, means) - weights @ self._mean
        model = Discriminant(self._projection, weights, np.where(supported, biases, -MOST))
        return Fit(model, model.of_rows(self._rows))


def votes_of_classes(counts: NDArray[np.float64], noise: float) -> NDArray[np.float64]:
    """Return the votes of each class, more than zero, as far as noise lets them differ.

    Beforehand the classes' votes vary as much as the released sums do beyond their noise. The result is the mean
    afterwards, of a normal law cut off at zero. It is equal for all classes where sums differ by no more than noise,
    and the sum itself where noise is small; it is never zero or less.

    Args:
        counts: shape (num_queries, classes).
        noise: variance of the noise in one column's sum.
    """
    sums = counts.sum(axis=0)
    mean = max(float(sums.mean()), float(np.sqrt(noise)), _LEAST)
    between = max(float(((sums - mean) ** 2).mean()) - noise, 0.0)
    kept = between / max(between + noise, _LEAST)
    expected = mean + kept * (sums - mean)
    spread = float(np.sqrt(kept * noise))
    if spread > _LEAST:
        apart = expected / spread
        # The mean of a normal law above zero: phi / Phi, in logarithms since both vanish far below.
        expected = expected + spread * np.exp(-0.5 * apart**2 - 0.5 * np.log(2 * np.pi) - log_ndtr(apart))
    votes: NDArray[np.float64] = np.maximum(expected, _LEAST)
    return votes


EXACT_CLASSES: Final = 12
BALANCED_CLASSES: Final = 256
"""Of more classes only the second prior is left: to scale a matrix of 1,000 classes takes a minute each time."""
_SCALINGS: Final = 200
_NEWTON_STEPS: Final = 8


@dataclass(frozen=True, eq=False)
class Matching:
    """The posterior classes of components, given a release.

    Attributes:
        chances: shape (components, classes), P(component k is class c | release); rows sum to one.
        log_evidence: of the release under both priors, up to what is the same for every choice of components.
    """

    chances: NDArray[np.float64]
    log_evidence: float


def match(log_likelihood: NDArray[np.float64], supported: NDArray[np.bool_]) -> Matching:
    """The posterior under both priors together; see the module.

    Args:
        log_likelihood: shape (C, C), L, finite.
        supported: shape (C,), classes that something released speaks for; where some are not, no component is one of
            them, and only the second prior is left.
    """
    if not supported.all():
        # Where nothing speaks for any, nothing speaks against any either.
        possible = supported | (not supported.any())
        return _free(np.where(possible, log_likelihood, -np.inf))
    if len(log_likelihood) > BALANCED_CLASSES:
        return _free(log_likelihood)
    exact = len(log_likelihood) <= EXACT_CLASSES
    balanced, log_permanent = (_permanents if exact else _scaled)(log_likelihood)
    log_balanced, free = log_permanent - float(gammaln(len(log_likelihood) + 1)), _free(log_likelihood)
    evidence = float(np.logaddexp(log_balanced, free.log_evidence))
    weight = math.exp(log_balanced - evidence)
    return Matching(weight * balanced + (1 - weight) * free.chances, evidence - math.log(2))


def _free(log_likelihood: NDArray[np.float64]) -> Matching:
    totals = logsumexp(log_likelihood, axis=1)
    evidence = float(totals.sum()) - len(log_likelihood) * math.log(log_likelihood.shape[1])
    return Matching(np.exp(log_likelihood - totals[:, None]), evidence)


def _permanents(log_likelihood: NDArray[np.float64]) -> tuple[NDArray[np.float64], float]:
    """Marginals of P(pi) ~ exp(sum_k L[k, pi(k)]) over bijections, and the log of the permanent of exp(L).

    before[set] sums over the ways in which the first |set| components take just these classes, after[set] over those
    in which the others take the rest; sets are bit masks.
    """
    size = len(log_likelihood)
    sets = np.arange(1 << size)
    members = np.array([mask.bit_count() for mask in range(1 << size)])
    steps = []
    for component in range(size):
        here = sets[members == component]
        steps.append([(here[here >> one & 1 == 0], one) for one in range(size)])
    before, after = np.full((2, 1 << size), -np.inf)
    before[0] = after[-1] = 0.0
    for component, step in enumerate(steps):
        for start, one in step:
            end = start | 1 << one
            before[end] = np.logaddexp(before[end], before[start] + log_likelihood[component, one])
    for component in reversed(range(size)):
        for start, one in steps[component]:
            after[start] = np.logaddexp(after[start], after[start | 1 << one] + log_likelihood[component, one])
    log_permanent = float(before[-1])
    chances = np.empty((size, size))
    for component, step in enumerate(steps):
        for start, one in step:
            ways = before[start] + after[start | 1 << one]
            chances[component, one] = math.exp(
                np.logaddexp.reduce(ways) + log_likelihood[component, one] - log_permanent
            )
    return chances / chances.sum(axis=1, keepdims=True), log_permanent


def _scaled(log_likelihood: NDArray[np.float64]) -> tuple[NDArray[np.float64], float]:
    """exp(L) scaled to row and column sums of one, and the least that the log of its permanent can then be."""
    size = len(log_likelihood)
    rows, columns = np.zeros((2, size))
    for _ in range(_SCALINGS):
        rows = -np.logaddexp.reduce(log_likelihood + columns, axis=1)
        columns = -np.logaddexp.reduce(log_likelihood + rows[:, None], axis=0)
    for _ in range(_NEWTON_STEPS):  # turns are slow where a matrix nearly falls apart; from here Newton's are few
        found = np.exp(log_likelihood + rows[:, None] + columns)
        over_rows, over_columns = found.sum(axis=1), found.sum(axis=0)
        slope = np.block([[np.diag(over_rows), found], [found.T, np.diag(over_columns)]])
        # Adding to rows what columns lose changes nothing, so the shortest of all solutions is as good as any.
        step = np.linalg.lstsq(slope, 1.0 - np.concatenate([over_rows, over_columns]), rcond=None)[0]
        step /= max(1.0, float(np.abs(step).max()))
        rows, columns = rows + step[:size], columns + step[size:]
    chances = np.exp(log_likelihood + rows[:, None] + columns)
    least = float(gammaln(size + 1)) - size * math.log(size)
    return chances / chances.sum(axis=1, keepdims=True), least - float(rows.sum() + columns.sum())
