"""A sampled contributor whose vector is replaced: the pair is above the exact divergence, found without it."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
from scipy.stats import norm

from labeler.accounting.events import SPILL
from labeler.accounting.gaussian import delta_of_epsilon
from labeler.accounting.sampled import IntegerReplaced, IntegerSampled, sampled_pair


def event(kind: type[IntegerSampled], mu: float, rate: Fraction, rounds: int) -> IntegerSampled:
    """A sum of one share whose step moves by mu of its noise, as nearly as whole numbers do."""
    return kind(
        squared_sensitivity=round((mu * 1600) ** 2),
        largest_change=round(mu * 1600) + 1,
        grid_scale=1,
        share_sigma_grid=1600.0,
        noise_contributors=1,
        coordinates=rounds,
        sampling_rate=rate,
        rounds=rounds,
    )


def divergence(mu: float, rate: float, rounds: int, epsilons: np.ndarray) -> np.ndarray:
    """Hockey-stick divergence of T rounds with u = mu against u' = -mu, by convolving losses on a fine grid.

    Atoms keep their mass and round their loss down, so what is found is at most the divergence (but for 1e-9 of mass).
    """
    width = 2e-3
    x = np.linspace(-12, 12, 400_001)
    p = (1 - rate) * norm.pdf(x) + rate * norm.pdf(x - mu)
    q = (1 - rate) * norm.pdf(x) + rate * norm.pdf(x + mu)
    loss = np.floor(np.log(p / q) / width).astype(int)
    first = loss.min()
    one = np.bincount(loss - first, weights=p * (x[1] - x[0]))
    law = np.array([1.0])
    for _ in range(rounds):
        law = np.maximum(np.real(np.fft.irfft(np.fft.rfft(law, 2**17) * np.fft.rfft(one, 2**17), 2**17)), 0)
    losses = (np.arange(2**17) + rounds * first) * width
    return np.array([law @ np.maximum(0, -np.expm1(np.minimum(0, at - losses))) for at in epsilons])


@pytest.mark.parametrize(
    ("mu", "rate", "rounds"), [(0.3, Fraction(1, 5), 20), (0.5, Fraction(1, 4), 8), (0.2, Fraction(1, 10), 40)]
)
def test_the_pair_of_a_replacement_is_above_the_exact_divergence(mu: float, rate: Fraction, rounds: int) -> None:
    replaced = event(IntegerReplaced, mu, rate, rounds)
    epsilons = np.linspace(0, 1.5, 16)
    exact = divergence(mu, float(rate), rounds, epsilons)
    stated = math.sqrt(replaced.mu_squared)
    claimed = np.array([delta_of_epsilon(at, stated) for at in epsilons])
    assert (exact <= claimed + 1e-8).all()
    # And it says something: not half of it would do at zero, and sampling saves most of what all rounds would cost.
    assert exact[0] > 0.5 * claimed[0]
    assert replaced.mu_squared < 0.8 * 4 * rounds * Fraction(replaced.mu) ** 2


def test_it_is_four_times_a_removal_with_a_rest_that_a_ledger_may_leave_over() -> None:
    replaced, removed = (
        event(IntegerReplaced, 0.4, Fraction(1, 10), 50),
        event(IntegerSampled, 0.4, Fraction(1, 10), 50),
    )
    assert 4 * removed.mu_squared <= replaced.mu_squared < Fraction(44, 10) * removed.mu_squared
    pair = sampled_pair(replaced.mu, Fraction(1, 10), 50, delta_0=1e-35)
    rest = norm.cdf(norm.ppf(1e-35) + math.sqrt(pair.mu_squared)) + 1e-35
    assert rest < SPILL * replaced.mu_squared


@pytest.mark.parametrize(("mu", "rounds"), [(1.5, 40), (3.0, 12)])
def test_where_the_rest_is_too_large_two_vectors_of_a_ball_are_charged_without_sampling(mu: float, rounds: int) -> None:
    replaced = event(IntegerReplaced, mu, Fraction(1, 2), rounds)
    whole = 4 * rounds * Fraction(replaced.mu) ** 2
    assert whole <= replaced.mu_squared < whole + Fraction(1, 10**8)
