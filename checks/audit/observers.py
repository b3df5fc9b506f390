"""Observers: each turns what an adversary sees into a score, above zero where it says that the canary took part.

**Known votes.** The adversary knows every record but the canary. So it knows the sums without noise of both worlds, and
the noise of agents that collude. For a noisy sum, the likelihood ratio is a projection on the difference. For winners,
it is a product over questions of the winner's probabilities. No test is better (Neyman, Pearson), so no test finds what
this one misses.

Soft labels of heads that carry an agent's own noise are read back into these heads (`HeardHeads`).

**Learned.** Where a student lies between, the observer first looks at runs that it made itself. It projects on the
difference of their means, each number in units of its spread. Those runs are not counted.

**Heads.** The soft labels of one agent are read back into the two noisy heads that made them.

aux-distill protects an agent by noise in its two heads and by nothing else. An adversary that knows what all others
answered, or colludes with them, has the agent's own soft labels. They are certainty times probability of each class. A
row's sum gives the certainty head's score. Its logarithms give the head's scores, up to their common term and to
rounding down. Both are linear in the heads, whose noise is Gaussian. So the observations are a Gaussian vector of known
covariance around one of two known means, and the likelihood ratio is the projection on their whitened difference. It is
exact up to the rounding, whose variance is added.

**Steps.** Training in steps over secret samples, attacked by one clipped gradient.

The adversary knows the public model before each step, so it knows the canary's clipped gradient d there. It does not
know whether the canary was drawn. Along d, a step opens noise alone, or with chance q noise around d. Where the others'
gradients are orthogonal to d (`checks.audit.poison`), the likelihood ratio of the step is 1 - q + q exp(<v, d>/sigma^2
- |d|^2/(2 sigma^2)), whichever others were drawn. Steps follow from what was opened before, so their ratios multiply:
no test of all steps is better.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray
from scipy.special import log_ndtr

from checks.audit.pipeline import LabeledRecords, Observation
from feature_store.rows import FEATURE_SCALE
from feature_store.students.answers import NoisyAnswers
from feature_store.students.student import fit_student
from labeler.linear_model import model_before
from labeler.methods.aux_distill import NEGATIVES_EVERY, head_terms
from labeler.methods.federated import step_terms
from labeler.methods.sensitivity import most_trained
from labeler.randomness import seeded_source
from labeler.records import Records as VotingRecords
from labeler.records import Rows, axes_of
from labeler.release import Release
from labeler.sharing import ABSTAINED
from labeler.tally import QueryBatch
from labeler.task import Task
from workers.learning.learner import HEAD_SHARPNESS, SCORE_SHARPNESS
from workers.learning.linear import rows_on_grid, sampled_gradients
from workers.learning.private_heads import FittedHeads, PrivateHeads, fit_rows, public_maps

_REACH: Final = 6.0
_POINTS: Final = 121
"""Points of a quadrature over this many standard deviations of noise to both sides."""


class Observer(Protocol):
    """An observer that scores what was seen of one run.

    Attributes:
        moved_mu: how far the canary moves what is seen, in deviations of the noise in it, so that no test of it proves
            more; None where that is not known.
    """

    @property
    def moved_mu(self) -> float | None: ...

    def score(self, seen: Observation) -> float:
        """Return the score: above zero, the canary took part."""
        ...


@dataclass(frozen=True, eq=False)
class KnownVotes:
    """The likelihood-ratio test of known votes; see the module.

    Attributes:
        task: whose noise is known in distribution.
        without, with_it: the sums without noise of both worlds, votes, shape (num_queries, num_classes).
    """

    task: Task
    without: NDArray[np.float64] = field(repr=False)
    with_it: NDArray[np.float64] = field(repr=False)

    @property
    def moved_mu(self) -> float | None:
        """See Observer. This is for noisy sums; winners tell less, and only their probabilities say how much less."""
        if self.task.release == "winner":
            return None
        return float(np.linalg.norm(self.with_it - self.without) / self.task.sigma_votes)

    def score(self, seen: Observation) -> float:
        """Return the log-likelihood ratio over everything that was opened."""
        parts = zip(seen.releases, seen.known_noise, strict=True)
        return float(sum(self.of_each_question(release, known).sum() for release, known in parts))

    def of_each_question(self, release: Release, known: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the log-likelihood ratio of each question that the canary moves, in their order."""
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
    """Return, per row, the log probability that this class has the largest of the noisy sums, by quadrature.

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
    # The winner's own noise, from the point where it is enough for an answer.
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
    """A projection of numbers on what distinguished the runs that it learned from; see `learn`."""

    numbers: Numbers
    direction: NDArray[np.float64] = field(repr=False)
    middle: float
    moved_mu: None = None

    def score(self, seen: Observation) -> float:
        """Return how far a run lies on the side of runs with the canary."""
        return float(self.numbers(seen) @ self.direction) - self.middle


class Numbers(Protocol):
    """A function that reduces one run to one row of numbers."""

    def __call__(self, seen: Observation) -> NDArray[np.float64]: ...


@dataclass(frozen=True, eq=False)
class StudentNumbers:
    """Logarithms of the probabilities that a student trained on the release gives the canary.

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

    def __call__(self, seen: Observation) -> NDArray[np.float64]:
        """Return one number per class."""
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


def learn(numbers: Numbers, without: Sequence[Observation], with_it: Sequence[Observation]) -> Learnt:
    """Learn a projection from the adversary's own runs."""
    before, after = (np.stack([numbers(one) for one in seen]) for seen in (without, with_it))
    spread = (before.var(axis=0) + after.var(axis=0)) / 2
    direction = (after.mean(axis=0) - before.mean(axis=0)) / np.maximum(spread, 1e-9 + 1e-6 * spread.max(initial=0.0))
    means = [float(side.mean(axis=0) @ direction) for side in (before, after)]
    return Learnt(numbers, direction, sum(means) / 2)


Floats = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class HeardHeads:
    """The test of one agent's heads; see the module. `heard_heads` makes it.

    Attributes:
        scale: grid units of a soft vote of one.
        directions: by which each observation is weighed: rows of head scores by class, then one of certainty scores.
        middle: of both worlds' scores, weighed.
        moved_mu: how far apart they are, in deviations of what is observed: no test of these soft labels proves more.
    """

    scale: int
    directions: Floats = field(repr=False)
    middle: float
    moved_mu: float

    def score(self, seen: Observation) -> float:
        """Return the log-likelihood ratio."""
        votes = seen.releases[0].noisy_votes
        if votes is None:
            return 0.0
        return float((_observed(votes - seen.known_noise[0], self.scale) * self.directions).sum()) - self.middle


def heard_heads(task: Task, batch: QueryBatch, without: VotingRecords, with_it: VotingRecords) -> HeardHeads:
    """Return an observer of the first agent.

    Args:
        without, with_it: the agent's records in both worlds.
    """
    terms = head_terms(task)
    queries = batch.features.astype(np.float32) / FEATURE_SCALE
    negatives = queries[::NEGATIVES_EVERY]
    maps = public_maps(negatives, terms=terms)
    rows = [one(queries) for one in maps]
    fitted = [
        fit_rows(records.trainable(most_trained(task)), negatives, terms=terms, maps=maps)
        for records in (without, with_it)
    ]
    means = [_scores(one, rows[0], rows[1]) for one in fitted]
    votes = np.mean([_votes(one, rows[0], rows[1]) for one in fitted], axis=0)
    rounding = _rounding(votes, task.scale)
    noises = [HEAD_SHARPNESS * terms.head_noise] * task.num_classes + [SCORE_SHARPNESS * terms.score_noise]
    difference, directions = means[1] - means[0], np.zeros_like(means[0])
    for column, noise in enumerate(noises):
        seen_through = rows[0] if column < task.num_classes else rows[1]
        covariance = noise**2 * seen_through @ seen_through.T + np.diag(rounding[:, column])
        directions[:, column] = np.linalg.solve(covariance, difference[:, column])
    middle = float(((means[0] + means[1]) / 2 * directions).sum())
    return HeardHeads(task.scale, directions, middle, math.sqrt(float((difference * directions).sum())))


def _scores(heads: FittedHeads, head_rows: Floats, score_rows: Floats) -> Floats:
    """Return `_observed` without noise and rounding, shape (queries, classes + 1)."""
    named = HEAD_SHARPNESS * head_rows @ heads.head.T
    certain = np.zeros(len(head_rows)) if heads.scores is None else SCORE_SHARPNESS * score_rows @ heads.scores
    return np.column_stack([named - named.mean(axis=1, keepdims=True), certain])


def _votes(heads: FittedHeads, head_rows: Floats, score_rows: Floats) -> Floats:
    public = PrivateHeads(heads.head, heads.scores, heads.head_map, heads.score_map, is_seeded=True)
    return public.votes_of_rows(head_rows, score_rows, head_sharpness=HEAD_SHARPNESS, score_sharpness=SCORE_SHARPNESS)


def _observed(votes: Floats, scale: int) -> Floats:
    """Return logarithms of each row without their mean, and the logit of its sum; half a unit undoes rounding down."""
    half = 0.5 / scale
    logs = np.log(np.maximum(votes, 0.0) + half)
    whole = np.clip(votes.sum(axis=1) + votes.shape[1] * half, half, 1 - half)
    return np.column_stack([logs - logs.mean(axis=1, keepdims=True), np.log(whole) - np.log1p(-whole)])


def _rounding(votes: Floats, scale: int) -> Floats:
    """Return the variance that rounding down adds to each observation, to first order."""
    unit = 1 / (12 * scale**2)
    whole = np.clip(votes.sum(axis=1), 1 / scale, 1 - 1 / scale)
    each = unit / np.maximum(votes, 0.5 / scale) ** 2
    return np.column_stack(
        [each + each.mean(axis=1, keepdims=True), votes.shape[1] * unit / (whole * (1 - whole)) ** 2]
    )


@dataclass(frozen=True, eq=False)
class StepVotes:
    """The test of steps; see the module.

    Attributes:
        task: of method federated, with records as the unit.
        batch: the rows of each step.
    """

    task: Task
    canary: LabeledRecords = field(repr=False)
    batch: QueryBatch
    moved_mu: None = None

    def score(self, seen: Observation) -> float:
        """Return the log-likelihood ratio of all steps."""
        terms, total = step_terms(self.task), 0.0
        rows = Rows.of(self.canary.features.astype(np.float32) / np.float32(FEATURE_SCALE), self.canary.labels)
        axes, certain = axes_of(self.task, self.batch.features), replace(terms, rate=Fraction(1))
        nobody = seeded_source(b"no coin is tossed where everybody takes part")
        for step, (release, known) in enumerate(zip(seen.releases, seen.known_noise, strict=True)):
            if release.noisy_votes is None:
                continue
            model = model_before(self.task, seen.releases[:step])
            gradient = (
                sampled_gradients(
                    rows_on_grid(rows, axes, num_classes=terms.num_classes),
                    rows.count,
                    model,
                    terms=certain,
                    source=nobody,
                )
                / terms.sensitivity
            )
            ratio = float(((release.noisy_votes - known - gradient / 2) * gradient).sum()) / self.task.sigma_votes**2
            rate = float(terms.rate)
            total += ratio if rate == 1 else float(np.logaddexp(math.log1p(-rate), math.log(rate) + ratio))
        return total
