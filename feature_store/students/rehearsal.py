"""A rehearsal of labelling, so that noise that drowned the votes is not taken for certainty.

A student that learnt from a noisy count, and a posterior that reads the same count again, agree with its noise: where
the noise is larger than the votes, both are sure of what the noise said. How often labels made in this way are right
can be tried out, because everything but the votes is public. Let the labels that were found be the truth of a second
world. There the same questions get as many votes as were counted here, noise of the stated size is added, and the same
student labels the same images. The share r of them that gets its truth back, and the mean confidence s that was stated
there, are compared. Where s > r the confidences were too sure, here as there, and

    p_T(c | x) proportional to p(c | x)^(1 / T),      T >= 1 the least with mean over images of max_c p_T <= r,

is what is said instead (`sharpened`). T is never below 1: a rehearsal takes certainty away and adds none. The order of
classes stays, so labels stay.

It is a parametric bootstrap (Efron and Tibshirani 1993, chapter 6). The second world's truth is as hard to learn as the
labels found are: where those are scattered by noise, it says less than is so. Votes of a question are the mean released
count, one at least; below the noise of that mean it may come out small, and confidences with it. Public features, the
release and stated noise are all that enters: post-processing, nothing is charged.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Final

import numpy as np
from numpy.typing import NDArray

from feature_store.students.answers import NoisyAnswers
from feature_store.students.calibration import SMEAR, sharpened
from labeler.expectation import winning_chance

Label = Callable[[NoisyAnswers], NDArray[np.float64]]
"""Labels the public images from a release: probabilities, shape (num_images, num_classes)."""

STANDS_OUT: Final = 0.999
"""Chance that a class stands out of the noise from which on nothing is rehearsed: noise misleads nobody then."""

REHEARSALS: Final = 3
_HOTTEST: Final = 1e6
_HALVINGS: Final = 60


def temperatures(
    label: Label,
    answers: NoisyAnswers,
    probabilities: NDArray[np.float64],
    assignment: NDArray[np.integer],
    parts: tuple[NDArray[np.bool_], ...],
    *,
    seed: int,
) -> tuple[float, ...]:
    """By how much each part of the labels is too sure; see the module.

    Args:
        label: the whole way from a release to probabilities.
        answers: the release, with noisy votes.
        probabilities: shape (num_images, num_classes), what `label` gave for it.
        assignment: shape (num_images,), the answer that stands for each image.
        parts: masks of shape (num_images,); each gets a temperature of its own, 1 where it is empty.
        seed: of the second world.
    """
    if not _is_needed(answers):
        return (1.0,) * len(parts)
    truth = probabilities.argmax(axis=1)
    votes = _votes(answers, truth, assignment)
    rng = np.random.default_rng(seed)
    said: list[NDArray[np.float64]] = []
    for _ in range(REHEARSALS):
        noisy = rng.poisson(votes) + rng.normal(0.0, answers.total_sigma_votes, votes.shape)
        heard = np.where(answers.answered, noisy.argmax(axis=1), -1)
        said.append(label(dataclasses.replace(answers, noisy_votes=noisy, labels=heard)))
    return tuple(
        _least(np.concatenate([one[part] for one in said]), np.tile(truth[part], REHEARSALS)) for part in parts
    )


def _is_needed(answers: NoisyAnswers) -> bool:
    """Whether noise may hide which class leads in single answers; without noise, or far above it, nothing misleads."""
    if answers.total_sigma_votes == 0:
        return False
    lead = _mean_votes(answers) * (1 - SMEAR)
    return winning_chance(min(lead / answers.total_sigma_votes, 15.0), answers.num_classes) < STANDS_OUT


def _mean_votes(answers: NoisyAnswers) -> float:
    assert answers.noisy_votes is not None  # noqa: S101  # the caller looks
    return max(float(answers.noisy_votes[answers.answered].sum()) / max(int(answers.answered.sum()), 1), 1.0)


def _votes(answers: NoisyAnswers, truth: NDArray[np.integer], assignment: NDArray[np.integer]) -> NDArray[np.float64]:
    """Votes of the second world, before noise, shape (num_questions, num_classes)."""
    shares = np.zeros((len(answers.labels), answers.num_classes))
    np.add.at(shares, (assignment, truth), 1.0)
    sizes = shares.sum(axis=1, keepdims=True)
    alike = np.divide(shares, sizes, out=np.full_like(shares, 1 / answers.num_classes), where=sizes > 0)
    votes: NDArray[np.float64] = _mean_votes(answers) * ((1 - SMEAR) * alike + SMEAR / answers.num_classes)
    return votes


def _least(probabilities: NDArray[np.float64], truth: NDArray[np.integer]) -> float:
    """The least temperature from 1 on at which the mean confidence is at most the share that is right."""
    if not len(truth):
        return 1.0
    right = max(float((probabilities.argmax(axis=1) == truth).mean()), 1 / probabilities.shape[1])

    def is_too_sure(temperature: float) -> bool:
        return bool(sharpened(probabilities, temperature).max(axis=1).mean() > right)

    if not is_too_sure(1.0):
        return 1.0
    low, high = 0.0, math.log(_HOTTEST)
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if is_too_sure(math.exp(middle)) else (low, middle)
    return math.exp(high)
