"""What an adversary makes of what it sees: a score, above zero where it says that the canary took part.

**Known votes.** It knows every record but the canary, so the sums without noise of both worlds, and the noise of agents
that collude. Of a noisy sum the likelihood ratio is a projection on the difference; of winners, a product over
questions of the winner's probabilities. No test is better (Neyman, Pearson), so what it does not find nobody finds.

Soft labels of heads that carry an agent's own noise are read back into these heads: `workers.audit.heads`.

**Learnt.** Where a student lies between, it looks at runs of its own making
first, and projects on the difference of their means, each number in units of its spread. Those runs are not counted.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray
from scipy.special import log_ndtr

from feature_store.students.answers import NoisyAnswers
from feature_store.students.student import fit_student
from labeler.release import Release
from labeler.sharing import ABSTAINED
from labeler.task import Task
from workers.audit.pipeline import Seen

_REACH: Final = 6.0
_POINTS: Final = 121
"""Of a quadrature over so many standard deviations of noise to both sides."""


class Observer(Protocol):
    """Scores what was seen of one run.

    Attributes:
        moved_mu: how far the canary moves what is seen, in deviations of the noise in it, so that no test of it proves
            more; None where that is not known.
    """

    @property
    def moved_mu(self) -> float | None: ...

    def score(self, seen: Seen) -> float:
        """Above zero: the canary took part."""
        ...


@dataclass(frozen=True, eq=False)
class KnownVotes:
    """See the module.

    Attributes:
        task: whose noise is known in distribution.
        without, with_it: the sums without noise of both worlds, votes, shape (num_queries, num_classes).
    """

    task: Task
    without: NDArray[np.float64] = field(repr=False)
    with_it: NDArray[np.float64] = field(repr=False)

    @property
    def moved_mu(self) -> float | None:
        """See Observer: of noisy sums; winners tell less of them, how much less only their probabilities say."""
        if self.task.release == "winner":
            return None
        return float(np.linalg.norm(self.with_it - self.without) / self.task.sigma_votes)

    def score(self, seen: Seen) -> float:
        """Logarithm of the likelihood ratio, over everything that was opened."""
        parts = zip(seen.releases, seen.known_noise, strict=True)
        return float(sum(self.of_each_question(release, known).sum() for release, known in parts))

    def of_each_question(self, release: Release, known: NDArray[np.float64]) -> NDArray[np.float64]:
        """The logarithm for each question that the canary moves, in their order."""
        rows = np.flatnonzero((self.without != self.with_it).any(axis=1))
        before, after, known = self.without[rows], self.with_it[rows], known[rows]
        sigma = self.task.sigma_votes
        if release.noisy_votes is not None:
            seen = release.noisy_votes[rows] - known - (before + after) / 2
            return np.asarray((seen * (after - before)).sum(axis=1) / sigma**2)
        threshold = None if self.task.abstain_below is None else float(self.task.abstain_below)
        found = release.labels[rows]
        ratio = [log_winner_probability(sums + known, found, sigma, threshold) for sums in (after, before)]
        return np.asarray(ratio[0] - ratio[1])


def log_winner_probability(
    sums: NDArray[np.float64], labels: NDArray[np.integer], sigma: float, threshold: float | None
) -> NDArray[np.float64]:
    """Logarithm of the probability that this class has the largest of the noisy sums, by quadrature; one per row.

    Args:
        sums: without the unknown noise, shape (rows, classes).
        labels: the winners, ABSTAINED where the largest is below the threshold.
        sigma: of the unknown noise on each.
        threshold: below which nothing is answered.
    """
    found = np.empty(len(sums))
    abstained = labels == ABSTAINED
    if threshold is not None:
        found[abstained] = log_ndtr((threshold - sums[abstained]) / sigma).sum(axis=1)
    rows = np.flatnonzero(~abstained)
    winning = sums[rows, labels[rows]]
    # The winner's own noise, from where it is enough for an answer.
    least = (
        np.full(len(rows), -_REACH) if threshold is None else np.clip((threshold - winning) / sigma, -_REACH, _REACH)
    )
    step = (_REACH - least) / (_POINTS - 1)
    noise = least[:, None] + step[:, None] * np.arange(_POINTS)
    weights = np.full(_POINTS, 1.0)
    weights[[0, -1]] = 0.5
    log_weights = -(noise**2) / 2 + np.log(weights * step[:, None] / math.sqrt(2 * math.pi) + 1e-300)
    own = winning[:, None] + sigma * noise
    logs = log_ndtr((own[:, :, None] - sums[rows][:, None, :]) / sigma)
    logs[np.arange(len(rows)), :, labels[rows]] = 0.0
    total = logs.sum(axis=2) + log_weights
    most = np.maximum(total.max(axis=1), -1e300)
    found[rows] = most + np.log(np.exp(total - most[:, None]).sum(axis=1))
    return found


@dataclass(frozen=True, eq=False)
class Learnt:
    """Projects numbers on what distinguished the runs that it learnt from; see `learn`."""

    numbers: Numbers
    direction: NDArray[np.float64] = field(repr=False)
    middle: float
    moved_mu: None = None

    def score(self, seen: Seen) -> float:
        """How far on the side of runs with the canary."""
        return float(self.numbers(seen) @ self.direction) - self.middle


class Numbers(Protocol):
    """What is looked at of one run, as one row of numbers."""

    def __call__(self, seen: Seen) -> NDArray[np.float64]: ...


@dataclass(frozen=True, eq=False)
class StudentNumbers:
    """What a student that learnt from the release says of the canary: the logarithms of its probabilities.

    Attributes:
        task: of the release.
        queries: that were asked.
        images: the student's other public images, shape (images, dimension).
        about: features of the canary, shape (records, dimension).
    """

    task: Task
    queries: NDArray[np.int16] = field(repr=False)
    images: NDArray[np.int16] = field(repr=False)
    about: NDArray[np.int16] = field(repr=False)

    def __call__(self, seen: Seen) -> NDArray[np.float64]:
        """One number per class."""
        release = seen.releases[0]
        if not (release.labels >= 0).any():
            return np.zeros(self.task.num_classes)
        answers = NoisyAnswers.of(
            self.task,
            features=self.queries,
            labels=release.labels,
            noisy_votes=release.noisy_votes,
            assignment=None,
            contributors=len(release.contributors),
        )
        public = np.concatenate([self.queries, self.images])
        student = fit_student("prototypes", answers, public, num_classes=self.task.num_classes)
        return np.asarray(np.log(np.maximum(student.predict_proba(self.about[:1])[0], 1e-12)))


def learn(numbers: Numbers, without: Sequence[Seen], with_it: Sequence[Seen]) -> Learnt:
    """Look at runs of one's own making."""
    before, after = (np.stack([numbers(one) for one in seen]) for seen in (without, with_it))
    spread = (before.var(axis=0) + after.var(axis=0)) / 2
    direction = (after.mean(axis=0) - before.mean(axis=0)) / np.maximum(spread, 1e-9 + 1e-6 * spread.max(initial=0.0))
    means = [float(side.mean(axis=0) @ direction) for side in (before, after)]
    return Learnt(numbers, direction, sum(means) / 2)
