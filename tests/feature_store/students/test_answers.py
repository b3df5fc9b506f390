"""Released answers: their denoising, and what confidence they allow.

Closed forms are compared with numerical integration and simulation. Statistical bounds are far beyond chance for the
fixed seeds; each says by how many standard errors.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy import integrate

from feature_store.students import NoisyAnswers, denoise, fit_student, soft_labels
from feature_store.students.answers import (
    SMEAR,
    asked_posterior,
    fit_temperature,
    log_density,
    majority_posterior,
    majority_share,
    mean_votes,
    sharpened,
    uncentred,
    vote_agreement,
)
from feature_store.students.labeling import label_images
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
    """Squared errors of 4,000 coordinates; the improvement asked for is more than 20 standard errors away."""
    votes = np.zeros((400, 10))
    votes[np.arange(400), rng.integers(0, 10, 400)] = rng.integers(20, 80, 400)
    noisy = votes + 15 * rng.standard_normal(votes.shape)
    posterior = denoise(noisy, 15.0)
    error = ((posterior - votes) ** 2).mean()
    assert error < 0.5 * ((np.maximum(noisy, 0) - votes) ** 2).mean()
    assert error < 0.3 * ((noisy - votes) ** 2).mean()


def test_denoised_votes_grow_with_the_votes_and_stay_below_the_most_there_can_be(rng: np.random.Generator) -> None:
    noisy = rng.normal(5, 20, 500)
    assert (np.diff(denoise(noisy, 10.0)[np.argsort(noisy)]) >= -1e-9).all()
    posterior = denoise(rng.normal(10, 30, (50, 4)), 30.0, most_votes=20.0)
    assert posterior.min() >= 0
    assert posterior.max() <= 20.0


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


Matrix = NDArray[np.float64]


def released(votes: Matrix, sigma: float, assignment: NDArray[np.int64] | None = None) -> NoisyAnswers:
    return NoisyAnswers(
        features=np.ones((len(votes), 2), np.int16),
        labels=votes.argmax(axis=1),
        total_sigma_votes=sigma,
        num_classes=votes.shape[1],
        noisy_votes=votes,
        assignment=assignment,
    )


@pytest.mark.parametrize(("count", "mean", "sigma"), [(3.0, 20.0, 5.0), (-40.0, 4.0, 9.0), (250.0, 30.0, 2.0)])
def test_the_density_of_a_noisy_count_is_the_integral_over_the_count(count: float, mean: float, sigma: float) -> None:
    def density(votes: float) -> float:
        noise = math.exp(-0.5 * ((count - votes) / sigma) ** 2) / (sigma * math.sqrt(2 * math.pi))
        return math.exp(-votes / mean) / mean * noise

    peak = max(count, 0.0)
    found, _ = integrate.quad(density, 0, peak + 12 * sigma, points=[peak], limit=400, epsabs=0, epsrel=1e-9)
    assert math.exp(log_density(np.array([count]), mean, sigma)[0]) == pytest.approx(found, rel=1e-6)


@pytest.mark.parametrize("noisy", [(22.0, 9.0), (4.0, -3.0), (60.0, 55.0)])
def test_the_posterior_of_two_classes_is_that_of_brute_integration(noisy: tuple[float, float]) -> None:
    """Over both counts on a fine grid, with neither closed form nor cancellation."""
    most, others, sigma = 30.0, 6.0, 8.0
    votes = np.linspace(0, 400, 40_001)

    def weight(count: float, mean: float) -> float:
        values = np.exp(-votes / mean) / mean * np.exp(-0.5 * ((count - votes) / sigma) ** 2)
        return float(integrate.trapezoid(values, votes))

    first = weight(noisy[0], most) * weight(noisy[1], others)
    second = weight(noisy[0], others) * weight(noisy[1], most)
    found = majority_posterior(np.array([noisy]), sigma, most=most, others=others)
    assert found[0, 0] == pytest.approx(first / (first + second), rel=1e-4)


def test_of_simulated_counts_as_many_lead_as_the_posterior_says() -> None:
    """40,000 draws, 4 classes: in bins of a tenth the share that leads is the mean posterior, to 5 standard errors."""
    rng = np.random.default_rng(0)
    draws, classes, sigma = 40_000, 4, 10.0
    lead = rng.integers(0, classes, draws)
    votes = rng.exponential(5.0, (draws, classes))
    votes[np.arange(draws), lead] = rng.exponential(40.0, draws)
    noisy = votes + rng.normal(0, sigma, votes.shape)
    posterior = majority_posterior(noisy, sigma, most=40.0, others=5.0)
    said, right = posterior.max(axis=1), posterior.argmax(axis=1) == lead
    for low in np.arange(0.3, 1.0, 0.1):
        within = (said >= low) & (said < low + 0.1)
        error = math.sqrt(0.25 / within.sum())
        assert abs(said[within].mean() - right[within].mean()) < 5 * error


def world(temperature: float, sigma: float, *, seed: int = 0) -> tuple[Matrix, NoisyAnswers, NDArray[np.int64]]:
    """What a student says of 4,000 images whose truth is drawn from its sharpened probabilities, and their votes."""
    rng = np.random.default_rng(seed)
    images, groups, classes = 4000, 40, 5
    assignment = np.sort(rng.integers(0, groups, images))
    centre = rng.normal(0, 2.0, (groups, classes))[assignment]
    scores = centre + rng.normal(0, 1.5, (images, classes))
    said = np.exp(scores) / np.exp(scores).sum(axis=1, keepdims=True)
    truth = np.array([rng.choice(classes, p=row) for row in sharpened(said, temperature)])
    votes = np.zeros((groups, classes))
    np.add.at(votes, (assignment, truth), 1.0)
    noisy = votes + rng.normal(0, sigma, votes.shape)
    return said, released(noisy, sigma, assignment), truth


@pytest.mark.parametrize("temperature", [0.6, 1.0])
def test_a_student_that_is_not_sure_enough_is_found_out_by_the_votes(temperature: float) -> None:
    said, release, truth = world(temperature, sigma=8.0)
    assert release.assignment is not None
    found = fit_temperature(said, release, release.assignment)
    probabilities = sharpened(said, found)
    before = abs(said.max(axis=1).mean() - (said.argmax(axis=1) == truth).mean())
    after = abs(probabilities.max(axis=1).mean() - (probabilities.argmax(axis=1) == truth).mean())
    # SMEAR takes some impurity for the voters' own, so that the answer is a little too sure: by at most that.
    assert after < 0.06
    assert temperature == 1.0 or after < before


def test_votes_that_disagree_make_no_student_less_sure_since_those_of_another_domain_always_do() -> None:
    said, release, _ = world(1.8, sigma=8.0)
    assert release.assignment is not None
    assert fit_temperature(said, release, release.assignment) == 1.0


def test_noise_that_drowns_the_votes_and_winners_leave_what_is_usual() -> None:
    said, release, _ = world(1.8, sigma=5000.0)
    assert release.assignment is not None
    assert abs(math.log(fit_temperature(said, release, release.assignment))) < 0.25
    winners = dataclasses.replace(release, noisy_votes=None)
    assert fit_temperature(said, winners, release.assignment) == 1.0


@pytest.mark.parametrize("share", [0.3, 0.6, 0.9])
def test_how_far_voters_agree_is_found_under_known_noise(share: float) -> None:
    """3,000 questions of 40 to 120 votes, noise of 15: to 0.02, far beyond chance."""
    rng = np.random.default_rng(1)
    each = rng.integers(40, 120, 3000)
    votes = np.array([rng.multinomial(total, [share, *[(1 - share) / 4] * 4]) for total in each], dtype=np.float64)
    found = majority_share(votes + rng.normal(0, 15.0, votes.shape), 15.0)
    assert found == pytest.approx(majority_share(votes, 0.0), abs=0.02)
    assert majority_share(np.array([[7.0, 0.0, 0.0], [0.0, 0.0, 50.0]]), 0.0) == 1 - SMEAR
    assert majority_share(rng.normal(0, 15.0, votes.shape), 15.0) == 0.0


rows = st.lists(st.lists(st.floats(0.0, 1.0), min_size=3, max_size=3), min_size=1, max_size=6)


@given(st.lists(st.lists(st.floats(-1e3, 1e3), min_size=3, max_size=3), min_size=1, max_size=5), st.floats(1e-2, 1e4))
@settings(deadline=None)
def test_whatever_the_counts_are_a_posterior_is_one_and_grows_with_its_count(
    found: list[list[float]], sigma: float
) -> None:
    noisy = sigma * np.array(found)  # beyond a thousand sigma differences of logarithms lose digits
    posterior = majority_posterior(noisy, sigma, most=50.0, others=2.0)
    assert np.isfinite(posterior).all()
    assert np.allclose(posterior.sum(axis=1), 1.0)
    more = noisy + np.array([sigma, 0.0, 0.0])
    assert (majority_posterior(more, sigma, most=50.0, others=2.0)[:, 0] >= posterior[:, 0] - 1e-7).all()


def test_an_answer_about_the_image_itself_counts_as_much_as_noise_and_agreement_let_it() -> None:
    unsure = np.array([[0.5, 0.3, 0.2]])
    clear, drowned = released(np.array([[0.0, 90.0, 0.0]]), 5.0), released(np.array([[0.0, 90.0, 0.0]]), 5000.0)
    assert clear.noisy_votes is not None
    said = asked_posterior(unsure, clear.noisy_votes, clear, 0.9)
    assert said[0, 1] > 0.8
    doubted = asked_posterior(unsure, clear.noisy_votes, clear, 1 / 3)
    assert np.allclose(doubted, unsure, atol=1e-6), "where votes agree no more than by chance they say nothing"
    assert np.allclose(asked_posterior(unsure, clear.noisy_votes, drowned, 0.9), unsure, atol=0.02)


def test_agreement_and_mean_votes_are_those_without_noise_where_there_is_none() -> None:
    votes = np.array([[30.0, 10.0], [0.0, 20.0]])
    release = released(votes, 0.0, np.array([0, 0, 1]))
    assert mean_votes(release) == 30.0
    assert vote_agreement(np.array([0, 0, 1]), release, np.array([0, 0, 1])) == pytest.approx(50 / 60)


def test_every_kind_of_student_says_its_label_with_the_probability_that_its_file_keeps() -> None:
    rng = np.random.default_rng(3)
    features = rng.integers(-900, 900, (60, 12)).astype(np.int16)
    votes = rng.normal(3.0, 4.0, (60, 3))
    release = NoisyAnswers(
        features=features, labels=votes.argmax(axis=1), total_sigma_votes=2.0, num_classes=3, noisy_votes=votes
    )
    for kind in ("followed", "pooled", "blended"):
        labelled = label_images(release, features, rows=np.arange(60), kind=kind)
        assert labelled.asked.all()
        assert np.allclose(labelled.probabilities.sum(axis=1), 1.0)
        student = fit_student(kind, release, features, num_classes=3)
        again = type(student).of_arrays(student.kind, student.arrays)
        assert again.temperature == student.temperature
        assert np.allclose(again.predict_proba(features), student.predict_proba(features))
