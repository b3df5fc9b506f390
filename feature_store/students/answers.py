"""What a student learns from: the released answers, and how much of them is noise.

Everything in this package happens after the release. It reads public features and released answers
only, so it costs no privacy and may be repeated with other settings at will.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from labeler.errors import BadData, InvalidSetting, NotReady
from labeler.methods import METHODS, Method
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
        k: neighbours that voted.
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
    k: int = 1
    agents: int = 1
    method: Method = "reverse-knn"
    assignment: NDArray[np.integer] | None = None

    def __post_init__(self) -> None:
        num_queries = len(self.features)
        if self.num_classes < 2 or self.k < 1 or self.agents < 1:
            raise InvalidSetting("answers need at least two classes, one neighbour and one agent")
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
        if self.assignment is not None and (
            self.assignment.ndim != 1 or self.assignment.size == 0 or not _within(self.assignment, num_queries)
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
            total_sigma_votes=0.0 if task.traits.has_local_noise else noise,
            num_classes=task.num_classes,
            k=task.k,
            agents=task.agents,
            method=task.method,
            assignment=assignment,
        )

    @property
    def answered(self) -> NDArray[np.bool_]:
        """Which queries have an answer, shape (num_queries,)."""
        return self.labels >= 0


def uncentred(noisy_votes: NDArray[np.float64], sigma: float) -> NDArray[np.float64]:
    """Votes of ballots on a ball (`labeler.ball`) with their mean put back, as far as the release tells it.

    A question whose M votes are all for one class has, centred, squares that sum to M^2 (1 - 1/C). Noise adds
    C sigma^2, which is taken off; the mean over questions gives one M, and M/C is added to every sum, so that classes
    without votes lie around zero again. Votes for other classes make M a little too small.

    Args:
        noisy_votes: shape (num_queries, num_classes), centred, in votes; NaN where nothing was opened.
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

    From a histogram, by empirical Bayes with the known noise. Every released coordinate is modelled as
    n = v + sigma * z with z standard normal and v drawn from a prior g on a grid of vote counts
    (0, then 40 geometric steps up to the largest count). g maximises the likelihood of all released
    coordinates together (expectation-maximisation), and each v is estimated by its posterior mean

        E[v | n] = sum_j g_j v_j phi((n - v_j) / sigma) / sum_j g_j phi((n - v_j) / sigma).

    So a coordinate that noise alone explains shrinks to nothing, and one far above the noise stays. Then
    columns are divided by their sums, because agents hold more records of one class than of another
    (never by less than a quarter of the mean sum: a class with hardly any votes is not blown up), and rows
    by theirs. Without noise this is the share of votes.

    From winners: the winner, surely. Unanswered queries get the uniform distribution.

    References:
        Efron 2016, "Empirical Bayes deconvolution estimates" (g-modelling).
    """
    num_classes, answered = answers.num_classes, answers.answered
    soft = np.full((len(answered), num_classes), 1.0 / num_classes)
    if answers.noisy_votes is None:
        soft[answered] = np.eye(num_classes)[answers.labels[answered]]
        return soft
    most = answers.k * answers.agents if not METHODS[answers.method].records_choose else math.inf
    votes = denoise(answers.noisy_votes[answered], answers.total_sigma_votes, most_votes=most)
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


def _within(numbers: NDArray[np.integer], bound: int) -> bool:
    return bool(numbers.min() >= 0 and numbers.max() < bound)
