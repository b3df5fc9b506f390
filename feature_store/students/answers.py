"""The released answers that a student learns from, the directions it learns along, and how sure it may say it is.

Everything in this package happens after the release: it is a function of public features, of the release and of the
noise that the task states. By post-processing (Dwork and Roth 2014, Prop. 2.1) whatever holds for the release holds for
what is computed from it, so nothing is charged, and it may be repeated with other settings at will.

A student's confidence is made to agree with the released votes.

**A temperature for what follows from other answers.** A student says p(c | x) of each public image x, and its
probabilities are as sharp as its form makes them: often not sure enough. A temperature T <= 1 gives

    p_T(c | x) proportional to p(c | x)^(1 / T),      a_q(T) = (1 - SMEAR) sum_c rho_q(c) s_q(c; T) + SMEAR / C.

Here rho_q(c) is the share of class c among the labels that the student gives to the images of question q. The mean of
p_T there is s_q(c; T): the impurity of the group as public geometry has it. If p_T were calibrated, a_q is
the share of votes at q that agree with the student. With M_q votes at q the released counts give

    A_q = sum_c rho_q(c) n_qc        ~ N(M_q a_q,       sigma^2 |rho_q|^2     + M a_q),
    D_q = sum_c (1 - rho_q(c)) n_qc  ~ N(M_q (1 - a_q), sigma^2 |1 - rho_q|^2 + M (1 - a_q)),      M_q ~ N(M, M^2).

Here sigma is the **known** noise of one coordinate, and M the mean number of votes (from the sum of all counts, in
which noise cancels). M_q is integrated out, and T maximizes the product over q, times a log-normal prior around 1.
Noise that drowns the votes so leaves the prior; votes far above the noise decide. Winners alone carry no counts, and
soft labels are no votes: then the prior stands. T is never above 1: votes of another domain disagree more often than
labels are wrong. Counts that a student has not seen say whether it is too sure (`feature_store.students.labeling`).

**A posterior for what was asked itself.** The noisy counts n of one question are votes v plus normal noise. Let the
class with most votes be each class alike beforehand, its count exponential with mean m and every other count
exponential with mean b (`asked_posterior`). Then, with f(n; m) the density of an exponential plus normal noise,

    P(class c has most votes | n) = r_c / sum_c' r_c',      r_c = f(n_c; m) / f(n_c; b).

That speaks of the noiseless votes. To speak of the label it goes through how often the majority is right. Two shares
stand for that, and the larger one is taken. One is the share of votes that agree with the student. The other is the
share that the leading class gets of the votes about such an image (`majority_share`). Voters who agree with each other
about an image are believed more than a student who learned of other images.

SMEAR and the priors were chosen on Office-Caltech10, CIFAR-10 and USPS; `labeler bench calibration` measures them with
other seeds. Votes cast by another domain's images land outside their class more often than this domain's labels are
wrong.

References:
    Guo et al. 2017, "On calibration of modern neural networks" (temperature); Efron 2016 (empirical Bayes with known
    noise).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray
from scipy.special import log_ndtr

from labeler.errors import BadData, InvalidSetting, NotReady
from labeler.steady import IMPOSSIBLE, powers, steady
from labeler.task import Task

NOTHING_ANSWERED = (
    "no question was answered, so there is nothing to learn from, and no image has a label: every best noisy count was "
    "below the task's abstain_below. What was released stands with the questions; ask anew with a lower abstain_below, "
    "or with less noise"
)

_GRID_STEPS = 40
_EM_ROUNDS = 60
_MAX_BINS = 4096
_LEAST_CLASS_SHARE = 0.25


@dataclass(frozen=True, eq=False)
class NoisyAnswers:
    """Released answers to a set of public queries.

    Attributes:
        features: shape (num_queries, dimension), finite, no zero rows; int16 or float. The queries, not
            the public images they stand for.
        labels: integers, shape (num_queries,), the released winner, or -1 where nobody answered.
        noisy_votes: float64, shape (num_queries, num_classes), the noisy sums in votes; None if only
            winners were released.
        total_sigma_votes: standard deviation of the noise in one coordinate of noisy_votes, in votes.
        num_classes: C.
        most_votes: the most votes that one class of a question can have; infinite where records choose.
        is_counted: noisy_votes are counts with noise around them, and not sums of what agents said under noise.
        assignment: integers, shape (num_images,), the query that stands for each public image. None
            lets every image look for the query it is most similar to.

    Raises:
        NotReady: nothing was answered.
        BadData, InvalidSetting: numbers that no release has.
    """

    features: NDArray[np.generic]
    labels: NDArray[np.integer]
    total_sigma_votes: float
    num_classes: int
    noisy_votes: NDArray[np.float64] | None = None
    most_votes: float = math.inf
    is_counted: bool = True
    assignment: NDArray[np.integer] | None = None

    def __post_init__(self) -> None:
        num_queries = len(self.features)
        if self.num_classes < 2 or self.most_votes < 1:
            raise InvalidSetting("answers need at least two classes and one vote")
        if not 0 <= self.total_sigma_votes < math.inf:
            raise InvalidSetting(f"total_sigma_votes must be finite and not negative, found {self.total_sigma_votes}")
        check_features(self.features, "query")
        if self.labels.shape != (num_queries,) or not np.issubdtype(self.labels.dtype, np.integer):
            raise BadData(f"answers need one integer label for each of {num_queries} queries")
        if self.labels.min() < -1 or self.labels.max() >= self.num_classes:
            raise BadData(f"released labels must lie between -1 (abstained) and {self.num_classes - 1}")
        if not self.answered.any():
            raise NotReady(NOTHING_ANSWERED)
        if self.noisy_votes is not None:
            if self.noisy_votes.shape != (num_queries, self.num_classes):
                raise BadData(
                    f"noisy votes must have shape {(num_queries, self.num_classes)}, found {self.noisy_votes.shape}"
                )
            if not np.isfinite(self.noisy_votes[self.answered]).all():
                raise BadData("noisy votes hold NaN or infinity; the release is damaged, export it again")
        numbers = self.assignment
        if numbers is not None and (
            numbers.ndim != 1 or numbers.size == 0 or numbers.min() < 0 or numbers.max() >= num_queries
        ):
            raise BadData(f"every public image must be assigned to one of the {num_queries} queries")

    @classmethod
    def of(
        cls,
        task: Task,
        *,
        features: NDArray[np.generic],
        labels: NDArray[np.integer],
        noisy_votes: NDArray[np.float64] | None,
        assignment: NDArray[np.integer] | None,
        contributors: int | None = None,
    ) -> NoisyAnswers:
        """The answers of a task's release; with fewer contributors than agents there is less noise in it."""
        present = task.agents if contributors is None else contributors
        noise = task.sum_sigma_votes(present)
        if noisy_votes is not None and task.ballot_radius is not None:
            noisy_votes = uncentred(noisy_votes, noise)
        return cls(
            features=features,
            labels=labels,
            noisy_votes=noisy_votes,
            # Noise of the agents' own is in what they say, not around it.
            total_sigma_votes=noise if task.noise_parties else 0.0,
            num_classes=task.num_classes,
            most_votes=task.traits.most_votes(task),
            is_counted=task.noise_parties > 0,
            assignment=assignment,
        )

    @property
    def answered(self) -> NDArray[np.bool_]:
        """Which queries have an answer, shape (num_queries,)."""
        return self.labels >= 0


def uncentred(noisy_votes: NDArray[np.float64], sigma: float) -> NDArray[np.float64]:
    """Votes of ballots on a ball (`labeler.methods.reverse_knn`) with their mean put back, as far as the release tells
    it.

    A question whose M votes are all for one class has, centered, squares that sum to M^2 (1 - 1/C). Noise adds
    C sigma^2, which is taken off; the mean over questions gives one M, and M/C is added to every sum, so that classes
    without votes lie around zero again. Votes for other classes make M a little too small.

    Args:
        noisy_votes: shape (num_queries, num_classes), centered, in votes; NaN where nothing was opened.
        sigma: of their noise.
    """
    classes = noisy_votes.shape[1]
    opened = noisy_votes[np.isfinite(noisy_votes).all(axis=1)]
    squares = float((opened**2).sum()) / max(1, len(opened)) - classes * sigma**2
    return np.asarray(noisy_votes + math.sqrt(max(squares, 0.0) / (1 - 1 / classes)) / classes)


def released_counts(answers: NoisyAnswers) -> NDArray[np.float64]:
    """Return what was released, in votes, shape (num_queries, num_classes); zeros where nothing was answered."""
    answered = answers.answered
    if answers.noisy_votes is not None:
        return np.where(answered[:, None], answers.noisy_votes, 0.0)
    counts = np.zeros((len(answered), answers.num_classes))
    counts[answered] = np.eye(answers.num_classes)[answers.labels[answered]]
    return counts


def noise_of_counts(answers: NoisyAnswers) -> float:
    """Return the standard deviation of the noise in `released_counts`, in votes: none is known in winners."""
    return 0.0 if answers.noisy_votes is None else answers.total_sigma_votes


def soft_labels(answers: NoisyAnswers) -> NDArray[np.float64]:
    """The classes of each query as far as the release tells, shape (num_queries, num_classes), rows sum to one.

    From a histogram, by empirical Bayes with the known noise. Every released coordinate is modeled as
    n = v + sigma * z, with z standard normal and v drawn from a prior g on a grid of vote counts (0, then 40 geometric
    steps up to the largest count). g maximizes the likelihood of all released coordinates together
    (expectation-maximization). Each v is estimated by its posterior mean

        E[v | n] = sum_j g_j v_j phi((n - v_j) / sigma) / sum_j g_j phi((n - v_j) / sigma).

    So a coordinate that noise alone explains shrinks to nothing, and one far above the noise stays. Then columns are
    divided by their sums, because agents hold more records of one class than of another. The divisor is never less than
    a quarter of the mean sum: a class with hardly any votes is not blown up. Rows are divided by theirs. Without noise
    this is the share of votes.

    From winners: the winner, surely. Unanswered queries get the uniform distribution.

    References:
        Efron 2016, "Empirical Bayes deconvolution estimates" (g-modelling).
    """
    num_classes, answered = answers.num_classes, answers.answered
    soft = np.full((len(answered), num_classes), 1.0 / num_classes)
    if answers.noisy_votes is None:
        soft[answered] = np.eye(num_classes)[answers.labels[answered]]
        return soft
    votes = denoise(answers.noisy_votes[answered], answers.total_sigma_votes, most_votes=answers.most_votes)
    columns = votes.sum(axis=0)
    votes = votes / np.maximum(columns, max(_LEAST_CLASS_SHARE * columns.mean(), np.finfo(float).tiny))
    totals = votes.sum(axis=1, keepdims=True)
    soft[answered] = np.where(totals > 0, votes / np.where(totals > 0, totals, 1.0), 1.0 / num_classes)
    return soft


def denoise(noisy_votes: NDArray[np.float64], sigma: float, *, most_votes: float = math.inf) -> NDArray[np.float64]:
    """Posterior mean of each count of votes given its noisy value; see `soft_labels` for the model.

    Works on a histogram of the values with bins of at most sigma / 8, so its cost does not grow with the
    number of queries.

    Args:
        noisy_votes: any shape, in votes.
        sigma: standard deviation of the Gaussian noise, in votes. 0 only cuts negative values.
        most_votes: upper bound of a true count.
    """
    low, high = float(noisy_votes.min()), float(noisy_votes.max())
    if sigma <= 0 or (high - low) / sigma > _MAX_BINS / 8:
        return np.clip(noisy_votes, 0.0, most_votes)
    bins = int(np.clip(np.ceil(8 * (high - low) / sigma), 1, _MAX_BINS))
    counts, edges = np.histogram(noisy_votes, bins=bins, range=(low, high) if high > low else (low - 0.5, low + 0.5))
    occupied = counts > 0
    counts, values = counts[occupied], ((edges[:-1] + edges[1:]) / 2)[occupied]
    least = min(max(sigma / 4, 0.25), most_votes / 2)
    top = max(min(max(high, 3 * sigma), most_votes), 2 * least)
    grid = np.concatenate([[0.0], np.geomspace(least, top, _GRID_STEPS)])
    exponent = -0.5 * ((values[:, None] - grid) / sigma) ** 2
    likelihood = np.exp(exponent - exponent.max(axis=1, keepdims=True))
    prior = np.full(len(grid), 0.5 / _GRID_STEPS)
    prior[0] = 0.5
    for _ in range(_EM_ROUNDS):
        posterior = likelihood * prior
        posterior /= posterior.sum(axis=1, keepdims=True)
        prior = 0.98 * (counts @ posterior) / counts.sum() + 0.02 / len(grid)
    posterior = likelihood * prior
    posterior /= posterior.sum(axis=1, keepdims=True)
    means: NDArray[np.float64] = np.interp(noisy_votes, values, posterior @ grid)
    return means


def check_features(features: NDArray[np.generic], what: str) -> None:
    """Refuse features no student can use.

    Raises:
        BadData: not a matrix, empty, NaN or infinite, or with a row of zeros.
    """
    if features.ndim != 2 or not features.size:
        raise BadData(f"{what} features must be a matrix with at least one row, found shape {features.shape}")
    if np.issubdtype(features.dtype, np.floating) and not np.isfinite(features).all():
        raise BadData(f"{what} features hold NaN or infinity; embed these images again")
    if not features.any(axis=1).all():
        raise BadData(f"a row of the {what} features is all zero, so it has no direction; leave this image out")


_LEAST_DEVIATION: Final = 1e-9

Forms = Mapping[str, tuple[type[np.generic], tuple[str, ...]]]
"""The type and the shape of a model's arrays, by name; sizes of one name are equal."""


@dataclass(frozen=True, eq=False)
class Projection:
    """x -> unit((unit(x) - mean) @ components). Fitted on public features only.

    Attributes:
        mean: float64, shape (dimension,).
        components: float64, shape (dimension, reduced), orthonormal columns.
    """

    mean: NDArray[np.float64]
    components: NDArray[np.float64]

    def __call__(self, features: NDArray[np.generic]) -> NDArray[np.float64]:
        """Project features of shape (n, dimension) to unit rows of shape (n, reduced).

        Raises:
            BadData: another dimension than the public features, or no valid features.
        """
        check_features(features, "student")
        if features.shape[1] != len(self.mean):
            raise BadData(
                f"this student was trained on features of dimension {len(self.mean)}, found {features.shape[1]}; "
                "embed the images with the backbone of its task"
            )
        return unit_rows(steady((unit_rows(features) - self.mean) @ self.components))


def fit_projection(public_features: NDArray[np.generic], *, dimensions: int, seed: int) -> Projection:
    """Principal components of the unit public features.

    Args:
        public_features: shape (num_images, dimension).
        dimensions: how many to keep, or as many as there are.
        seed: makes the randomized decomposition of large sets repeatable.
    """
    check_features(public_features, "public")
    unit = unit_rows(public_features)
    kept = max(1, min(dimensions, unit.shape[0] - 1, unit.shape[1]))
    if unit.shape[0] == 1:
        return Projection(np.zeros(unit.shape[1]), unit.T)
    small = min(unit.shape) <= 500
    from sklearn.decomposition import PCA

    fitted = PCA(kept, svd_solver="full" if small else "randomized", random_state=seed).fit(unit)
    return Projection(fitted.mean_.astype(np.float64), np.ascontiguousarray(fitted.components_.T, dtype=np.float64))


def most_axes(num_classes: int) -> int:
    """Return the number of public axes that are kept."""
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


def unit_rows(rows: NDArray[np.generic]) -> NDArray[np.float64]:
    """Rows scaled to length one; a row of zeros stays."""
    floats = rows.astype(np.float64)
    norms = np.linalg.norm(floats, axis=1, keepdims=True)
    unit: NDArray[np.float64] = floats / np.where(norms > 0, norms, 1.0)
    return unit


def softmax(scores: NDArray[np.float64]) -> NDArray[np.float64]:
    """Rows of probabilities proportional to exp(score); a score of -inf is impossible, and where all are, all alike."""
    found = powers(scores)
    probabilities: NDArray[np.float64] = found / found.sum(axis=1, keepdims=True)
    return probabilities


SMEAR: Final = 0.035
"""Share of votes that land anywhere, because the voters' images are of another domain; see the module."""

SPREAD: Final = 0.25
"""Standard deviation of the prior of log T."""

_TEMPERATURES: Final = np.exp(np.linspace(math.log(0.25), 0.0, 24))
_LEAST: Final = 1e-12
_LEAST_SHARE, _MOST_SHARE = 0.01, 0.999


def sharpened(probabilities: NDArray[np.floating], temperature: float) -> NDArray[np.float64]:
    """p^(1 / T), rows normalized. The order of classes stays, and what was impossible stays so.

    Args:
        probabilities: shape (n, num_classes), rows sum to one.
        temperature: above 1 makes less sure, below 1 surer.
    """
    return softmax(np.log(np.maximum(probabilities, _LEAST)) / temperature + IMPOSSIBLE * (probabilities <= 0))


def fit_temperature(
    probabilities: NDArray[np.floating], answers: NoisyAnswers, assignment: NDArray[np.integer]
) -> float:
    """The temperature, at most 1, at which a student agrees with released votes as often as it says; see the module.

    Args:
        probabilities: shape (num_images, num_classes), what it says of the public images.
        answers: the release.
        assignment: shape (num_images,), the answer that stands for each image.
    """
    if answers.noisy_votes is None or not answers.is_counted:
        return 1.0
    queries, classes = answers.noisy_votes.shape
    sizes = np.bincount(assignment, minlength=queries)
    kept = answers.answered & (sizes > 0)
    shares = cell_shares(probabilities.argmax(axis=1), assignment, (queries, classes))
    votes, rest = answers.noisy_votes[kept], 1.0 - shares[kept]
    agree, differ = (votes * shares[kept]).sum(axis=1), (votes * rest).sum(axis=1)
    noise, mean = answers.total_sigma_votes**2, mean_votes(answers)
    agree_noise, differ_noise = noise * (shares[kept] ** 2).sum(axis=1), noise * (rest**2).sum(axis=1)

    # As `sharpened` does it, whose sum over the images of a question is all that is wanted.
    logs = np.where(probabilities > 0, np.log(np.maximum(probabilities, _LEAST)), -np.inf)
    logs -= logs.max(axis=1, keepdims=True)
    own = shares[assignment]

    def log_likelihood(temperature: float) -> float:
        """The likelihood of the counts that agree and differ, up to a constant; M_q integrated out."""
        said = np.exp(logs / temperature)
        agreeing = np.einsum("nc,nc->n", said, own) / said.sum(axis=1)
        agreed = np.bincount(assignment, agreeing, minlength=queries)[kept] / sizes[kept]
        share = np.clip((1 - SMEAR) * agreed + SMEAR / classes, _LEAST_SHARE, _MOST_SHARE)
        var_agree, var_differ = agree_noise + mean * share, differ_noise + mean * (1 - share)
        over, under = agree - mean * share, differ - mean * (1 - share)
        # The covariance is diagonal plus M^2 g g^T with g = (a, 1 - a): inverted by Sherman and Morrison.
        along = share * over / var_agree + (1 - share) * under / var_differ
        length = mean**2 * (share**2 / var_agree + (1 - share) ** 2 / var_differ)
        square = over**2 / var_agree + under**2 / var_differ - mean**2 * along**2 / (1 + length)
        return float(-0.5 * (square + np.log(var_agree) + np.log(var_differ) + np.log1p(length)).sum())

    distance = np.log(_TEMPERATURES) / SPREAD
    likelihood = np.array([log_likelihood(float(one)) for one in _TEMPERATURES])
    return float(_TEMPERATURES[int(np.argmax(likelihood - 0.5 * distance**2))])


def cell_shares(
    labels: NDArray[np.integer], assignment: NDArray[np.integer], shape: tuple[int, ...]
) -> NDArray[np.float64]:
    """Share of each class among the labels of the images of each query; zero where it has none.

    Args:
        labels: shape (num_images,).
        assignment: shape (num_images,), the query that stands for each image.
        shape: (num_queries, num_classes).
    """
    counts = np.zeros(shape)
    np.add.at(counts, (assignment, labels), 1.0)
    shares: NDArray[np.float64] = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1.0)
    return shares


def mean_votes(answers: NoisyAnswers) -> float:
    """Votes of one question, mean over the answered ones, no smaller than noise lets one tell; at least one vote."""
    assert answers.noisy_votes is not None  # noqa: S101  # the caller looks
    votes = answers.noisy_votes[answers.answered]
    told = max(float(votes.sum()), answers.total_sigma_votes * math.sqrt(votes.size))
    return max(told / len(votes), 1.0)


def vote_agreement(labels: NDArray[np.integer], answers: NoisyAnswers, assignment: NDArray[np.integer]) -> float:
    """The share of released votes that agree with a student's labels, between guessing and certainty."""
    votes = released_counts(answers)
    shares = cell_shares(labels, assignment, votes.shape)
    total = mean_votes(answers) * int(answers.answered.sum())
    guessing = 1.0 / answers.num_classes
    return float(np.clip((votes * shares).sum() / total, guessing, 1 - SMEAR))


def majority_share(noisy_votes: NDArray[np.floating], sigma: float) -> float:
    """Return the share of a question's votes that its leading class gets, over all of these; 0 where noise hides it.

    Let question q have votes v_qc, M_q = sum_c v_qc of them, and noise of known variance. Then sum_c n_qc^2 - C sigma^2
    and (sum_c n_qc)^2 - C sigma^2 are unbiased for sum_c v_qc^2 and M_q^2. Let a share a of the votes be for one class
    and the rest for all others alike. Then their sums over q have the ratio s = a^2 + (1 - a)^2 / (C - 1). The result
    is the larger root a. Nothing is said where the sum of M_q^2 is below four of its standard errors. These are at most
    sqrt(2 Q) C sigma^2 where there are no votes.

    Args:
        noisy_votes: shape (num_questions, num_classes), in votes.
        sigma: of the noise in one of them, in votes.
    """
    questions, classes = noisy_votes.shape
    bias = classes * sigma**2
    squares = float(((noisy_votes**2).sum(axis=1) - bias).sum())
    totals = float((noisy_votes.sum(axis=1) ** 2 - bias).sum())
    if totals <= 4 * math.sqrt(2 * questions) * bias or totals <= 0:
        return 0.0
    others = classes - 1
    # (1 + 1 / m) a^2 - (2 / m) a + 1 / m - s = 0 with m other classes.
    share = min(max(squares / totals, 1 / classes), 1.0)
    root = math.sqrt(max(1 - (others + 1) * (1 - share * others), 0.0))
    return float(min((1 + root) / (others + 1), 1 - SMEAR))


def log_density(counts: NDArray[np.floating], mean: float, sigma: float) -> NDArray[np.float64]:
    """log f(n; mean): an exponential count of this mean plus normal noise (the exponentially modified Gaussian).

    f(n; m) = (1 / m) exp(s^2 / (2 m^2) - n / m) Phi((n - s^2 / m) / s), s the noise.
    """
    values: NDArray[np.float64] = (
        -math.log(mean) + 0.5 * (sigma / mean) ** 2 - counts / mean + log_ndtr((counts - sigma**2 / mean) / sigma)
    )
    return values


def majority_posterior(
    noisy_votes: NDArray[np.floating], sigma: float, *, most: float, others: float
) -> NDArray[np.float64]:
    """P(class c has most votes | noisy counts), row by row, under the prior of the module.

    Args:
        noisy_votes: shape (num_queries, num_classes), in votes.
        sigma: of the noise in one of them, in votes; more than 0.
        most: mean of the leading class's votes beforehand.
        others: mean of each other class's, at most `most`.

    Returns:
        Shape (num_queries, num_classes), rows sum to one.
    """
    return softmax(log_density(noisy_votes, most, sigma) - log_density(noisy_votes, others, sigma))


def asked_posterior(
    probabilities: NDArray[np.floating], noisy_votes: NDArray[np.floating], answers: NoisyAnswers, agreement: float
) -> NDArray[np.float64]:
    """A student's probabilities of images that were questions themselves, together with the answer about each.

    P(c | x, n) is proportional to p(c | x) sum_c' P(c' has most votes | n) K(c | c'). The majority is right with
    probability K(c | c) = agreement; else each other class is alike.

    Args:
        probabilities: shape (num_asked, num_classes), rows sum to one.
        noisy_votes: shape (num_asked, num_classes), their own counts.
        answers: the whole release, for the scales of votes and noise.
        agreement: see `vote_agreement`.
    """
    classes, sigma = answers.num_classes, max(answers.total_sigma_votes, 1e-3)
    mean = mean_votes(answers)
    most, others = max(agreement, 1 / classes) * mean, max((1 - agreement) * mean / max(classes - 1, 1), 1e-3)
    posterior = majority_posterior(noisy_votes, sigma, most=max(most, others), others=others)
    wrong = (1 - agreement) / max(classes - 1, 1)
    evidence = posterior * agreement + (1 - posterior) * wrong
    together = probabilities * evidence
    rows: NDArray[np.float64] = together / together.sum(axis=1, keepdims=True)
    return rows
