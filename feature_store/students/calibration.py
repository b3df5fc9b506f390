"""How sure a student may say it is: its confidence is made to agree with the released votes, at no price.

Everything here is a function of public features, of the release and of the noise that the task states. By
post-processing (Dwork and Roth 2014, Prop. 2.1) whatever holds for the release holds for what is computed from it, so
nothing is charged.

**A temperature for what follows from other answers.** A student says p(c | x) of each public image x, and its
probabilities are as sharp as its form makes them: too sure or not sure enough. Let

    p_T(c | x) proportional to p(c | x)^(1 / T),      a_q(T) = (1 - SMEAR) sum_c rho_q(c) s_q(c; T) + SMEAR / C,

where rho_q(c) is the share of class c among the labels that the student gives to the images of question q and s_q(c; T)
the mean of p_T there: the impurity of the group as public geometry has it. If p_T were calibrated, a_q is the share of
votes at q that agree with the student. With M_q votes at q the released counts give

    A_q = sum_c rho_q(c) n_qc        ~ N(M_q a_q,       sigma^2 |rho_q|^2     + M a_q),
    D_q = sum_c (1 - rho_q(c)) n_qc  ~ N(M_q (1 - a_q), sigma^2 |1 - rho_q|^2 + M (1 - a_q)),      M_q ~ N(M, M^2),

sigma the **known** noise of one coordinate, M the mean number of votes (from the sum of all counts, in which noise
cancels). M_q is integrated out, and T maximises the product over q, times a log-normal prior around 1. Noise that
drowns the votes so leaves the prior; votes far above the noise decide. Winners alone carry no counts, and soft labels
are no votes: then the prior stands.

**A posterior for what was asked itself.** The noisy counts n of one question are votes v plus normal noise. Let the
class with most votes be each class alike beforehand, its count exponential with mean m and every other count
exponential with mean b (`asked_posterior`). Then, with f(n; m) the density of an exponential plus normal noise,

    P(class c has most votes | n) = r_c / sum_c' r_c',      r_c = f(n_c; m) / f(n_c; b).

That speaks of the noiseless votes. To speak of the label it goes through how often the majority is right, for which
stands the share of votes that agree with the student or, if that is larger, the share that the leading class gets of
the votes about such an image (`majority_share`): voters who agree with each other about an image are believed more
than a student who was told of other images.

SMEAR and the priors were chosen on Office-Caltech10, CIFAR-10 and USPS (`labeler bench calibration` measures them with
other seeds): votes cast by another domain's images land beside their class more often than this domain's labels are
wrong.

References:
    Guo et al. 2017, "On calibration of modern neural networks" (temperature); Efron 2016 (empirical Bayes with known
    noise).
"""

from __future__ import annotations

import math
from typing import Final

import numpy as np
from numpy.typing import NDArray
from scipy.special import log_ndtr

from feature_store.students.answers import NoisyAnswers
from labeler.methods import METHODS

SMEAR: Final = 0.035
"""Share of votes that land anywhere, because the voters' images are of another domain; see the module."""

SPREAD: Final = 0.25
"""Standard deviation of the prior of log T."""

_TEMPERATURES: Final = np.exp(np.linspace(math.log(0.25), math.log(8.0), 57))
_LEAST: Final = 1e-12
_LEAST_SHARE, _MOST_SHARE = 0.01, 0.999


def sharpened(probabilities: NDArray[np.floating], temperature: float) -> NDArray[np.float64]:
    """p^(1 / T), rows normalised. The order of classes stays, and what was impossible stays so.

    Args:
        probabilities: shape (n, num_classes), rows sum to one.
        temperature: above 1 makes less sure, below 1 surer.
    """
    scores = np.log(np.maximum(probabilities, _LEAST)) / temperature
    shifted = np.where(probabilities > 0, np.exp(scores - scores.max(axis=1, keepdims=True)), 0.0)
    rows: NDArray[np.float64] = shifted / shifted.sum(axis=1, keepdims=True)
    return rows


def fit_temperature(
    probabilities: NDArray[np.floating], answers: NoisyAnswers, assignment: NDArray[np.integer]
) -> float:
    """The temperature at which a student agrees with the released votes as often as it says; see the module.

    Args:
        probabilities: shape (num_images, num_classes), what it says of the public images.
        answers: the release.
        assignment: shape (num_images,), the answer that stands for each image.
    """
    if answers.noisy_votes is None or not METHODS[answers.method].counts:
        return 1.0
    groups = _Groups(probabilities, answers, assignment)
    logs = np.log(_TEMPERATURES) / SPREAD
    likelihood = np.array([groups.log_likelihood(float(one)) for one in _TEMPERATURES])
    return float(_TEMPERATURES[int(np.argmax(likelihood - 0.5 * logs**2))])


class _Groups:
    """What is released and predicted of each question that was answered and stands for images."""

    def __init__(
        self, probabilities: NDArray[np.floating], answers: NoisyAnswers, assignment: NDArray[np.integer]
    ) -> None:
        assert answers.noisy_votes is not None  # noqa: S101  # the caller looks
        queries, classes = answers.noisy_votes.shape
        sizes = np.bincount(assignment, minlength=queries)
        self._kept = answers.answered & (sizes > 0)
        self._assignment, self._sizes = assignment, np.maximum(sizes, 1)
        self._probabilities = probabilities
        self._classes = classes
        labels = probabilities.argmax(axis=1)
        counts = np.zeros((queries, classes))
        np.add.at(counts, (assignment, labels), 1.0)
        self._shares = counts / self._sizes[:, None]
        votes = np.where(answers.answered[:, None], answers.noisy_votes, 0.0)
        self._agree = (votes * self._shares).sum(axis=1)
        self._differ = (votes * (1.0 - self._shares)).sum(axis=1)
        sigma = answers.total_sigma_votes
        self._agree_noise = sigma**2 * (self._shares**2).sum(axis=1)
        self._differ_noise = sigma**2 * ((1.0 - self._shares) ** 2).sum(axis=1)
        self._mean_votes = mean_votes(answers)

    def log_likelihood(self, temperature: float) -> float:
        """Of the counts that agree and differ, up to a constant; M_q integrated out."""
        said = np.zeros_like(self._shares)
        np.add.at(said, self._assignment, sharpened(self._probabilities, temperature))
        agreed = (said / self._sizes[:, None] * self._shares).sum(axis=1)
        share = np.clip((1 - SMEAR) * agreed + SMEAR / self._classes, _LEAST_SHARE, _MOST_SHARE)[self._kept]
        mean = self._mean_votes
        var_agree = self._agree_noise[self._kept] + mean * share
        var_differ = self._differ_noise[self._kept] + mean * (1 - share)
        agree, differ = self._agree[self._kept] - mean * share, self._differ[self._kept] - mean * (1 - share)
        # The covariance is diagonal plus M^2 g g^T with g = (a, 1 - a): inverted by Sherman and Morrison.
        along = share * agree / var_agree + (1 - share) * differ / var_differ
        length = mean**2 * (share**2 / var_agree + (1 - share) ** 2 / var_differ)
        square = agree**2 / var_agree + differ**2 / var_differ - mean**2 * along**2 / (1 + length)
        return float(-0.5 * (square + np.log(var_agree) + np.log(var_differ) + np.log1p(length)).sum())


def mean_votes(answers: NoisyAnswers) -> float:
    """Votes of one question, mean over the answered ones, no smaller than noise lets one tell; at least one vote."""
    assert answers.noisy_votes is not None  # noqa: S101  # the caller looks
    votes = answers.noisy_votes[answers.answered]
    told = max(float(votes.sum()), answers.total_sigma_votes * math.sqrt(votes.size))
    return max(told / len(votes), 1.0)


def vote_agreement(labels: NDArray[np.integer], answers: NoisyAnswers, assignment: NDArray[np.integer]) -> float:
    """The share of released votes that agree with a student's labels, between guessing and certainty.

    Args:
        labels: shape (num_images,), the student's.
        answers: with noisy votes.
        assignment: shape (num_images,), the answer that stands for each image.
    """
    assert answers.noisy_votes is not None  # noqa: S101  # the caller looks
    votes = np.where(answers.answered[:, None], answers.noisy_votes, 0.0)
    counts = np.zeros(votes.shape)
    np.add.at(counts, (assignment, labels), 1.0)
    shares = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1.0)
    total = mean_votes(answers) * int(answers.answered.sum())
    guessing = 1.0 / answers.num_classes
    return float(np.clip((votes * shares).sum() / total, guessing, 1 - SMEAR))


def majority_share(noisy_votes: NDArray[np.floating], sigma: float) -> float:
    """What share of a question's votes its leading class gets, over all of these questions; 0 where noise hides it.

    With votes v_qc of M_q = sum_c v_qc in question q and noise of known variance, sum_c n_qc^2 - C sigma^2 and
    (sum_c n_qc)^2 - C sigma^2 are unbiased for sum_c v_qc^2 and M_q^2. Their sums over q have the ratio
    s = a^2 + (1 - a)^2 / (C - 1) where a share a of the votes is for one class and the rest for all others alike.
    It is the larger root a. Nothing is said where the sum of M_q^2 is below four of its standard errors, at most
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
    scores = log_density(noisy_votes, most, sigma) - log_density(noisy_votes, others, sigma)
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    posterior: NDArray[np.float64] = weights / weights.sum(axis=1, keepdims=True)
    return posterior


def asked_posterior(
    probabilities: NDArray[np.floating], noisy_votes: NDArray[np.floating], answers: NoisyAnswers, agreement: float
) -> NDArray[np.float64]:
    """What a student says of images that were questions themselves, together with what was answered about each.

    P(c | x, n) is proportional to p(c | x) sum_c' P(c' has most votes | n) K(c | c'): the majority is right with
    probability K(c | c) = agreement and else each other class alike.

    Args:
        probabilities: shape (num_asked, num_classes), calibrated.
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
