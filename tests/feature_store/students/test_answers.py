"""Released answers and their denoising.

The statistical test compares squared errors over 4,000 coordinates with a fixed seed; the improvement it
asks for is more than 20 standard errors away, so a false alarm under another seed is below 1e-9.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from feature_store.students import NoisyAnswers, denoise, soft_labels
from feature_store.students.answers import uncentred
from labeler.errors import BadData, NotReady


def answers(**changes: Any) -> NoisyAnswers:
    fields: dict[str, Any] = {
        "features": np.eye(3),
        "labels": np.array([0, 1, 2]),
        "total_sigma_votes": 1.0,
        "num_classes": 3,
        "noisy_votes": np.eye(3) * 50,
    }
    return NoisyAnswers(**(fields | changes))


def test_denoising_beats_the_raw_votes_and_plain_clipping(rng: np.random.Generator) -> None:
    votes = np.zeros((400, 10))
    votes[np.arange(400), rng.integers(0, 10, 400)] = rng.integers(20, 80, 400)
    noisy = votes + 15 * rng.standard_normal(votes.shape)
    posterior = denoise(noisy, 15.0)
    error = ((posterior - votes) ** 2).mean()
    assert error < 0.5 * ((np.maximum(noisy, 0) - votes) ** 2).mean()
    assert error < 0.3 * ((noisy - votes) ** 2).mean()


def test_denoised_votes_stay_between_zero_and_the_most_there_can_be(rng: np.random.Generator) -> None:
    posterior = denoise(rng.normal(10, 30, (50, 4)), 30.0, most_votes=20.0)
    assert posterior.min() >= 0
    assert posterior.max() <= 20.0


def test_denoising_is_monotone_in_the_votes(rng: np.random.Generator) -> None:
    noisy = rng.normal(5, 20, 500)
    posterior = denoise(noisy, 10.0)
    assert (np.diff(posterior[np.argsort(noisy)]) >= -1e-9).all()


def test_classes_with_many_records_do_not_swallow_the_others() -> None:
    votes = np.array([[900.0, 300.0, 0.0], [0.0, 100.0, 0.0], [0.0, 0.0, 100.0]])
    soft = soft_labels(answers(noisy_votes=votes, total_sigma_votes=0.0))
    assert soft.argmax(axis=1).tolist() == [0, 1, 2]
    assert soft[0, 1] > 300 / 1200


def test_votes_of_unanswered_queries_are_not_read() -> None:
    votes = np.eye(3) * 50
    votes[1] = np.nan
    soft = soft_labels(answers(noisy_votes=votes, labels=np.array([0, -1, 2])))
    np.testing.assert_allclose(soft[1], 1 / 3)
    assert np.isfinite(soft).all()


def test_soft_labels_are_distributions(rng: np.random.Generator) -> None:
    soft = soft_labels(answers(noisy_votes=rng.normal(0, 100, (3, 3)), total_sigma_votes=100.0))
    np.testing.assert_allclose(soft.sum(axis=1), 1.0)
    assert soft.min() >= 0


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"labels": np.array([0, 1, 3])}, "between -1"),
        ({"labels": np.array([0, 1])}, "one integer label"),
        ({"labels": np.array([0.0, 1.0, 2.0])}, "one integer label"),
        ({"noisy_votes": np.full((3, 3), np.nan)}, "NaN"),
        ({"noisy_votes": np.full((3, 3), np.inf)}, "NaN or infinity"),
        ({"noisy_votes": np.eye(4)}, "shape"),
        ({"features": np.zeros((3, 3))}, "all zero"),
        ({"features": np.full((3, 3), np.nan)}, "NaN"),
        ({"features": np.zeros((0, 3)), "labels": np.zeros(0, dtype=int)}, "at least one row"),
        ({"assignment": np.array([0, 3])}, "one of the 3 queries"),
        ({"assignment": np.array([0, -1])}, "one of the 3 queries"),
    ],
)
def test_damaged_releases_are_refused(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(BadData, match=sentence):
        answers(**changes)


def test_of_no_answer_there_is_nothing_to_learn() -> None:
    with pytest.raises(NotReady, match="no question was answered"):
        answers(labels=np.array([-1, -1, -1]))


def test_the_mean_that_ballots_on_a_ball_leave_out_is_put_back_as_far_as_the_release_tells() -> None:
    """50 questions of 200 votes for one class: centered they lie around zero, afterwards other classes do again."""
    rng = np.random.default_rng(0)
    votes = np.zeros((50, 4))
    votes[np.arange(50), rng.integers(0, 4, 50)] = 200.0
    noisy = votes - votes.mean(axis=1, keepdims=True) + rng.normal(0, 20, votes.shape)
    assert np.abs(uncentred(noisy, 20.0) - votes).mean() < 20
    assert abs(float((uncentred(noisy, 20.0) - votes).mean())) < 3
    noise = rng.normal(0, 20, (50, 4))
    assert np.abs(uncentred(noise, 25.0) - noise).max() == 0, "of noise alone nothing is put back"
    gone = np.full((3, 4), np.nan)
    assert np.isnan(uncentred(gone, 5.0)).all()
