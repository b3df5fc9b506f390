"""Where noise drowns the votes confidences say so; where it does not they stay as they were."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from sklearn.datasets import load_digits

from feature_store.students import NoisyAnswers
from feature_store.students.answers import sharpened
from feature_store.students.labeling import label_images, temperatures

DIGITS = load_digits()


def asked_about_each(images: int, votes: float, sigma: float, seed: int) -> tuple[NoisyAnswers, NDArray[np.int64]]:
    """A release about every one of some real digits, with so many votes for the right one, and the truth."""
    rng = np.random.default_rng(seed)
    chosen = rng.choice(len(DIGITS.data), images, replace=False)
    truth = DIGITS.target[chosen].astype(np.int64)
    counts = np.zeros((images, 10))
    counts[np.arange(images), truth] = votes
    noisy = counts + rng.normal(0, sigma, counts.shape)
    features = np.round(DIGITS.data[chosen] * 50).astype(np.int16)
    return NoisyAnswers(features, noisy.argmax(axis=1), sigma, 10, noisy_votes=noisy), truth


@pytest.mark.parametrize("images", [30, 200])
def test_labels_that_noise_has_made_are_not_stated_as_sure(images: int) -> None:
    """15 votes under noise of 50, ten worlds: most labels are wrong, and the mean confidence says about that."""
    right, said, sure = [], [], 0
    for seed in range(10):
        answers, truth = asked_about_each(images, 15.0, 50.0, seed)
        labelled = label_images(answers, answers.features, rows=np.arange(images), kind="prototypes")
        right.append((labelled.probabilities.argmax(axis=1) == truth).mean())
        said.append(labelled.probabilities.max(axis=1).mean())
        sure += int((labelled.probabilities.max(axis=1) >= 0.95).sum())
    assert np.mean(right) < 0.75
    assert np.mean(said) < np.mean(right) + 0.15
    assert sure <= 0.02 * images * 10


def test_votes_far_above_the_noise_are_not_rehearsed_and_change_nothing() -> None:
    answers, truth = asked_about_each(100, 500.0, 20.0, 0)

    def label(release: NoisyAnswers) -> NDArray[np.float64]:
        raise AssertionError("nothing is rehearsed here")

    said = np.full((100, 10), 0.1)
    parts = (np.ones(100, dtype=np.bool_), np.zeros(100, dtype=np.bool_))
    assert temperatures(label, answers, said, np.arange(100), parts, seed=0) == (1.0, 1.0)
    labelled = label_images(answers, answers.features, rows=np.arange(100), kind="prototypes")
    assert (labelled.probabilities.argmax(axis=1) == truth).mean() > 0.97
    assert labelled.probabilities.max(axis=1).mean() > 0.9


@pytest.mark.parametrize("right", [0.25, 0.5, 0.9])
def test_labels_that_no_vote_supports_are_stated_as_seldom_right_as_the_votes_say(right: float) -> None:
    """A student that always says the same repeats itself in rehearsal; counts that it has not seen contradict it."""
    rng, images = np.random.default_rng(5), 4000
    truth = rng.integers(0, 10, images)
    labels = np.where(rng.random(images) < right, truth, (truth + 1) % 10)
    noisy = np.eye(10)[truth] * 30 + rng.normal(0, 15, (images, 10))
    answers = NoisyAnswers(rng.normal(size=(images, 3)), noisy.argmax(axis=1), 15.0, 10, noisy_votes=noisy)
    sure = np.full((images, 10), 0.002)
    sure[np.arange(images), labels] = 0.982

    everything = (np.ones(images, dtype=np.bool_),)
    (found,) = temperatures(lambda _: sure, answers, sure, np.arange(images), everything, seed=0)
    said = float(sharpened(sure, found).max(axis=1).mean())
    # Six standard errors of the count in a division of the noise: sqrt(2 images) 15 / (30 images), over three draws.
    assert abs(said - right) < 6 * 15 * np.sqrt(2 / images) / 30


@given(st.floats(1.0, 400.0), st.integers(0, 1000))
@settings(deadline=None, max_examples=15)
def test_a_rehearsal_takes_certainty_away_and_moves_no_label(sigma: float, seed: int) -> None:
    answers, _ = asked_about_each(40, 20.0, sigma, seed)
    calm = dataclasses.replace(answers, total_sigma_votes=0.0)
    rehearsed = label_images(answers, answers.features, rows=np.arange(40), kind="prototypes", seed=seed)
    assert np.allclose(rehearsed.probabilities.sum(axis=1), 1.0)
    assert rehearsed.student.temperature > 0

    def label(release: NoisyAnswers) -> NDArray[np.float64]:
        rows = np.full((40, 10), 1e-3)
        rows[np.arange(40), release.labels] = 1 - 9e-3
        return rows

    parts = (np.ones(40, dtype=np.bool_),)
    (found,) = temperatures(label, answers, label(answers), np.arange(40), parts, seed=seed)
    assert found >= 1.0
    assert temperatures(label, calm, label(calm), np.arange(40), parts, seed=seed) == (1.0,)
