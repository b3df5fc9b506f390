"""The posterior of a matching: equal to brute force over every bijection, and as often right as it says.

Calibration: 4,000 simulated releases at a fixed seed; a share off by more than four standard errors fails a right
posterior with probability below 1e-3 over all bands together.
"""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from feature_store.students.members import BALANCED_CLASSES, _free, _permanents, _scaled, match


def _brute(odds: NDArray[np.float64]) -> tuple[NDArray[np.float64], float]:
    size = len(odds)
    chances, total = np.zeros((size, size)), 0.0
    for order in itertools.permutations(range(size)):
        weight = math.exp(sum(odds[component, one] for component, one in enumerate(order)))
        total += weight
        for component, one in enumerate(order):
            chances[component, one] += weight
    return chances / total, math.log(total)


@given(st.integers(1, 6), st.integers(0, 2**32 - 1), st.floats(0.0, 8.0))
@settings(max_examples=60, deadline=None)
def test_chances_and_permanent_are_those_of_every_bijection_added_up(size: int, seed: int, scale: float) -> None:
    odds = scale * np.random.default_rng(seed).standard_normal((size, size))
    expected, log_permanent = _brute(odds)
    found, log_found = _permanents(odds)
    np.testing.assert_allclose(found, expected, atol=1e-9)
    assert log_found == pytest.approx(log_permanent, abs=1e-9)


@given(st.integers(2, 7), st.integers(0, 2**32 - 1), st.floats(0.0, 1e4), st.booleans())
@settings(max_examples=60, deadline=None)
def test_whatever_the_odds_chances_are_distributions(size: int, seed: int, scale: float, all_speak: bool) -> None:
    rng = np.random.default_rng(seed)
    supported = np.ones(size, dtype=np.bool_)
    supported[0] = all_speak
    found = match(scale * rng.standard_normal((size, size)), supported)
    assert math.isfinite(found.log_evidence)
    np.testing.assert_allclose(found.chances.sum(axis=1), 1.0)
    assert found.chances.min() >= 0
    assert all_speak or not found.chances[:, 0].any()


@given(st.integers(2, 6), st.integers(0, 2**32 - 1), st.floats(0.0, 3.0))
@settings(max_examples=40, deadline=None)
def test_the_scaled_matrix_is_doubly_stochastic_and_its_permanent_no_overestimate(
    size: int, seed: int, scale: float
) -> None:
    odds = scale * np.random.default_rng(seed).standard_normal((size, size))
    chances, log_least = _scaled(odds)
    np.testing.assert_allclose(chances.sum(axis=0), 1.0, atol=1e-6)
    assert log_least <= _brute(odds)[1] + 1e-6


def test_many_classes_are_matched_by_scaling() -> None:
    rng = np.random.default_rng(0)
    odds = 12.0 * np.eye(40)[rng.permutation(40)] + rng.standard_normal((40, 40))
    found = match(odds, np.ones(40, dtype=np.bool_))
    assert sorted(found.chances.argmax(axis=1)) == list(range(40))


def test_what_all_counts_of_a_class_have_in_common_cancels_under_the_balanced_prior() -> None:
    odds = np.random.default_rng(4).standard_normal((5, 5))
    common = np.array([3.0, -2.0, 0.0, 40.0, 1.0])
    np.testing.assert_allclose(_permanents(odds + common)[0], _permanents(odds)[0], atol=1e-9)
    assert np.abs(_free(odds + common).chances - _free(odds).chances).max() > 0.5


@pytest.mark.parametrize("is_balanced", [True, False])
def test_of_simulated_releases_as_many_are_matched_right_as_the_posterior_says(is_balanced: bool) -> None:
    size, votes, sigma, draws = 5, 100.0, 70.0, 4000
    rng = np.random.default_rng(7)
    stated, right = [], []
    for _ in range(draws):
        truth = rng.permutation(size) if is_balanced else rng.integers(0, size, size)
        # Without a bijection the posterior is exact where no question stands for two components.
        shares = rng.dirichlet(np.full(size, 0.2), size).T if is_balanced else np.eye(size)
        counts = votes * shares @ np.eye(size)[truth] + rng.normal(0.0, sigma, (size, size))
        odds = (votes * shares.T @ counts - 0.5 * votes**2 * (shares**2).sum(axis=0)[:, None]) / sigma**2
        chances = _permanents(odds)[0] if is_balanced else _free(odds).chances
        stated.append(chances.max(axis=1))
        right.append(chances.argmax(axis=1) == truth)
    said, hits = np.concatenate(stated), np.concatenate(right)
    for low, high in itertools.pairwise((0.2, 0.4, 0.6, 0.8, 0.9, 1.0)):
        band = (said >= low) & (said < high)
        # Components of one release hang together: errors are as of a fifth of them.
        error = math.sqrt(0.25 * size / max(int(band.sum()), 1))
        assert abs(float(hits[band].mean()) - float(said[band].mean())) < 4 * error


def test_of_a_thousand_classes_each_component_is_read_by_itself() -> None:
    """To scale that matrix takes a minute, and a student does so dozens of times."""
    odds = np.random.default_rng(4).standard_normal((1000, 1000))
    found = match(odds, np.ones(1000, dtype=np.bool_))
    np.testing.assert_array_equal(found.chances, _free(odds).chances)
    at_most = odds[:BALANCED_CLASSES, :BALANCED_CLASSES]
    assert not np.array_equal(match(at_most, np.ones(BALANCED_CLASSES, dtype=np.bool_)).chances, _free(at_most).chances)
