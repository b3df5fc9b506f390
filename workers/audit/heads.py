"""The soft labels of one agent, read back into the two noisy heads that they were made with.

aux-distill protects an agent by noise in its two heads and by nothing else: whoever knows what all others answered, or
colludes with them, has the agent's own soft labels. They are certainty times probability of each class, so a row's sum
gives the certainty head's score, and its logarithms the head's scores, up to what they have in common and to rounding
down. Both are linear in the heads, whose noise is Gaussian: the observations are a Gaussian vector of known covariance
around one of two known means, and the likelihood ratio is the projection on their whitened difference. It is exact up
to the rounding, whose variance is added.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from feature_store.quantize import FEATURE_SCALE
from labeler.methods.aux_distill import head_terms
from labeler.methods.sensitivity import most_trained
from labeler.records import Records
from labeler.tally import QueryBatch
from labeler.task import NEGATIVES_EVERY, Task
from workers.audit.pipeline import Seen
from workers.learning.learner import HEAD_SHARPNESS, SCORE_SHARPNESS
from workers.learning.private_heads import FittedHeads, PrivateHeads, fit_rows, public_maps

Floats = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class HeardHeads:
    """See the module; made by `heard_heads`.

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

    def score(self, seen: Seen) -> float:
        """Logarithm of the likelihood ratio."""
        votes = seen.releases[0].noisy_votes
        if votes is None:
            return 0.0
        return float((_observed(votes - seen.known_noise[0], self.scale) * self.directions).sum()) - self.middle


def heard_heads(task: Task, batch: QueryBatch, without: Records, with_it: Records) -> HeardHeads:
    """An observer of the first agent.

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
    """What `_observed` would be without noise and rounding, shape (queries, classes + 1)."""
    named = HEAD_SHARPNESS * head_rows @ heads.head.T
    certain = np.zeros(len(head_rows)) if heads.scores is None else SCORE_SHARPNESS * score_rows @ heads.scores
    return np.column_stack([named - named.mean(axis=1, keepdims=True), certain])


def _votes(heads: FittedHeads, head_rows: Floats, score_rows: Floats) -> Floats:
    public = PrivateHeads(heads.head, heads.scores, heads.head_map, heads.score_map, is_seeded=True)
    return public.votes_of_rows(head_rows, score_rows, head_sharpness=HEAD_SHARPNESS, score_sharpness=SCORE_SHARPNESS)


def _observed(votes: Floats, scale: int) -> Floats:
    """Logarithms of each row without their mean, and the logit of its sum; half a unit is what rounding down took."""
    half = 0.5 / scale
    logs = np.log(np.maximum(votes, 0.0) + half)
    whole = np.clip(votes.sum(axis=1) + votes.shape[1] * half, half, 1 - half)
    return np.column_stack([logs - logs.mean(axis=1, keepdims=True), np.log(whole) - np.log1p(-whole)])


def _rounding(votes: Floats, scale: int) -> Floats:
    """Variance that rounding down adds to each observation, to first order."""
    unit = 1 / (12 * scale**2)
    whole = np.clip(votes.sum(axis=1), 1 / scale, 1 - 1 / scale)
    each = unit / np.maximum(votes, 0.5 / scale) ** 2
    return np.column_stack(
        [each + each.mean(axis=1, keepdims=True), votes.shape[1] * unit / (whole * (1 - whole)) ** 2]
    )
