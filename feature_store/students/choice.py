"""Which student suits the data, judged by released votes the student has not seen.

A noisy histogram with known noise can be split into two independent ones (data fission): with z fresh
noise of the same standard deviation, n + tau z and n - z / tau are independent. A student fitted on the
first, hardly noisier than the release, is judged on the second, unbiasedly and without leaving out any
query; the mean over a few z takes most of the added noise away again.

It is a ladder: prototypes, linear probe, spreading. A richer student is taken only if it is contradicted by
at least a quarter fewer votes, and by more than one standard error of that difference: with few
questions or much noise the simplest is also the best, and a little more agreement with the votes is
mostly agreement with the other agents' domains.

References:
    Leiner, Duan, Wasserman, Ramdas 2023, "Data fission: splitting a single data point".
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping

import numpy as np
from numpy.typing import NDArray

from feature_store.students.answers import NoisyAnswers

STANDS_OUT = 10.0
"""Votes of a class, in deviations of one count's noise, from which on more than the steadiest student is worth its
noise: that from which on more than two questions for each class are asked (labeler.expectation)."""

Spread = Callable[[str, str], float]
"""Standard error of the difference of two students' errors."""

Predict = Callable[[NoisyAnswers], NDArray[np.int64]]
"""Fits on answers and returns the predicted class of every public image."""

LEAST_GAIN = 0.25
LEAST_STANDARD_ERRORS = 1.0
TAU = 0.5
FOLDS = 5
LEAST_QUERIES_PER_CLASS = 5
_DRAWS = 6


def choose(
    ladder: Mapping[str, Predict],
    answers: NoisyAnswers,
    assignment: NDArray[np.integer],
    *,
    seed: int,
    least_gain: float = LEAST_GAIN,
    least_standard_errors: float = LEAST_STANDARD_ERRORS,
) -> tuple[str, dict[str, float]]:
    """Return the chosen rung and the estimated share of votes that contradict each.

    Args:
        ladder: from the simplest to the richest.
        answers: the whole release.
        assignment: shape (num_images,), the query that stands for each public image.
        seed: of the splits.
        least_gain: by which share of its contradicted votes a richer rung must be better.
        least_standard_errors: by how many standard errors of that difference as well.
    """
    if answers.noisy_votes is None:
        errors, spread = _errors_of_winners(ladder, answers, assignment, seed)
    else:
        errors, spread = _errors_of_votes(ladder, answers, answers.noisy_votes, assignment, seed)
    names = list(ladder)
    chosen = names[0]
    for name in names[1:]:
        gain = errors[chosen] - errors[name]
        if gain > max(least_gain * errors[chosen], least_standard_errors * spread(chosen, name)):
            chosen = name
    return chosen, errors


def votes_stand_out(answers: NoisyAnswers) -> bool:
    """Whether the mean votes of a class are at least STANDS_OUT times the noise of one count; winners do not tell."""
    if answers.noisy_votes is None:
        return False
    votes = float(answers.noisy_votes[answers.answered].sum()) / answers.num_classes
    return votes >= STANDS_OUT * answers.total_sigma_votes


def _errors_of_votes(
    ladder: Mapping[str, Predict],
    answers: NoisyAnswers,
    noisy_votes: NDArray[np.float64],
    assignment: NDArray[np.integer],
    seed: int,
) -> tuple[dict[str, float], Spread]:
    sigma = answers.total_sigma_votes
    votes = np.where(answers.answered[:, None], noisy_votes, 0.0)
    # Below the noise of a sum over all coordinates the total is unknown; a larger one only makes the choice cautious.
    total = max(float(votes.sum()), sigma * math.sqrt(votes.size), 1.0)
    rng = np.random.default_rng(seed)
    agreed = dict.fromkeys(ladder, 0.0)
    shares = {name: np.zeros(votes.shape) for name in ladder}
    for _ in range(_DRAWS):
        extra = sigma * rng.standard_normal(votes.shape)
        seen = dataclasses.replace(
            answers, noisy_votes=votes + TAU * extra, total_sigma_votes=sigma * math.hypot(1, TAU)
        )
        for name, predict in ladder.items():
            share = _cell_shares(predict(seen), assignment, votes.shape) * answers.answered[:, None]
            agreed[name] += float(((votes - extra / TAU) * share).sum()) / _DRAWS
            shares[name] += share / _DRAWS
    errors = {name: max(0.0, 1.0 - agreement / total) for name, agreement in agreed.items()}

    def spread(first: str, second: str) -> float:
        return (
            sigma * math.sqrt(1 + 1 / (TAU**2 * _DRAWS)) * float(np.linalg.norm(shares[first] - shares[second])) / total
        )

    return errors, spread


def _errors_of_winners(
    ladder: Mapping[str, Predict], answers: NoisyAnswers, assignment: NDArray[np.integer], seed: int
) -> tuple[dict[str, float], Spread]:
    """Cross-validation over queries; with few of them a fold would take a class away, so the first rung stays."""
    answered = np.flatnonzero(answers.answered)
    if len(answered) < LEAST_QUERIES_PER_CLASS * answers.num_classes:
        return dict.fromkeys(ladder, math.nan), lambda _first, _second: math.inf
    shape = (len(answers.labels), answers.num_classes)
    wrong = {name: np.zeros(shape[0]) for name in ladder}
    order = np.random.default_rng(seed).permutation(answered)
    for held_out in np.array_split(order, FOLDS):
        labels = answers.labels.copy()
        labels[held_out] = -1
        seen = dataclasses.replace(answers, labels=labels)
        for name, predict in ladder.items():
            share = _cell_shares(predict(seen), assignment, shape)
            wrong[name][held_out] = 1.0 - share[held_out, answers.labels[held_out]]
    errors = {name: float(each[answered].mean()) for name, each in wrong.items()}

    def spread(first: str, second: str) -> float:
        difference = (wrong[first] - wrong[second])[answered]
        return float(difference.std(ddof=1)) / math.sqrt(len(difference))

    return errors, spread


def _cell_shares(
    predicted: NDArray[np.int64], assignment: NDArray[np.integer], shape: tuple[int, int]
) -> NDArray[np.float64]:
    """Share of each class among the predictions for the images of each query; zero where it has none."""
    counts = np.bincount(assignment.astype(np.int64) * shape[1] + predicted, minlength=shape[0] * shape[1])
    counts = counts.reshape(shape).astype(np.float64)
    shares: NDArray[np.float64] = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1.0)
    return shares
