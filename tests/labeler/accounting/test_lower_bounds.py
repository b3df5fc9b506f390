"""Lower bounds against independent oracles: exact binomials, a linear program, and mechanisms whose mu is known."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.optimize import linprog
from scipy.stats import binom, norm

from labeler.auditing import (
    Errors,
    largest_advantage,
    largest_rate,
    many_runs_advantage,
    many_runs_epsilon,
    many_runs_mu,
    one_run_mu,
)
from labeler.errors import InvalidSetting


@pytest.mark.parametrize(("errors", "trials"), [(0, 10), (3, 10), (9, 10), (10, 10), (340, 1000)])
def test_the_largest_rate_is_where_so_few_errors_become_unlikely(errors: int, trials: int) -> None:
    rate = largest_rate(errors, trials, 0.975)
    if errors == trials:
        assert rate == 1
    else:
        assert binom.cdf(errors, trials, rate) == pytest.approx(0.025, rel=1e-9)


def test_many_runs_of_a_gaussian_come_close_to_its_mu_and_hold_as_often_as_stated() -> None:
    mu, runs, holds = 1.0, 400, 0
    rng = np.random.default_rng(1)
    found = []
    for _ in range(300):
        errors = Errors(
            int((rng.normal(size=runs) > mu / 2).sum()), runs, int((rng.normal(size=runs) + mu <= mu / 2).sum()), runs
        )
        found.append(many_runs_mu(errors, 0.95))
        holds += found[-1] <= mu
    # At most 5 % may fail: 300 tries, so more than 30 failures have a chance below 1e-3. Seeded.
    assert holds >= 270
    assert 0.7 < np.mean(found) < mu


def test_epsilon_of_any_mechanism_is_below_what_randomised_response_has() -> None:
    epsilon = 1.5
    wrong = 1 / (1 + math.exp(epsilon))
    errors = Errors(int(10_000 * wrong), 10_000, int(10_000 * wrong), 10_000)
    assert 0.95 * epsilon < many_runs_epsilon(errors, 1e-9, 0.95) < epsilon


def test_a_coin_proves_nothing() -> None:
    errors = Errors(500, 1000, 500, 1000)
    assert many_runs_mu(errors, 0.95) == many_runs_epsilon(errors, 1e-5, 0.95) == many_runs_advantage(errors, 0.95) == 0
    assert one_run_mu(50, 100, 100, 0.95) == 0


def most_likely(mu: float, canaries: int, guesses: int, correct: int) -> float:
    """The largest probability of so many right guesses under the module's inequalities: a linear program.

    F is the least of its tangents, epsilon-delta by epsilon-delta, so each inequality is many linear ones.
    """
    tangents = [
        (math.exp(e), norm.cdf(mu / 2 - e / mu) - math.exp(e) * norm.cdf(-mu / 2 - e / mu))
        for e in np.linspace(-12, 12, 241)
    ]
    count = np.arange(guesses + 1)
    rows, limits = [], []
    for i in range(1, guesses + 1):
        right = np.where(count >= i, count, 0) / canaries
        wrong = np.where(count >= i - 1, guesses - count, 0) / canaries
        for slope, offset in tangents:
            rows.append(right - slope * wrong)
            limits.append(offset)
    found = linprog(
        -(count >= correct).astype(float), A_ub=np.array(rows), b_ub=limits, A_eq=np.ones((1, guesses + 1)), b_eq=[1]
    )
    return -float(found.fun)


@pytest.mark.parametrize(("canaries", "guesses", "correct"), [(12, 12, 11), (20, 8, 8), (20, 10, 9)])
def test_the_one_run_bound_is_that_of_a_linear_program_over_all_distributions(
    canaries: int, guesses: int, correct: int
) -> None:
    mu = one_run_mu(correct, guesses, canaries, 0.95)
    assert mu > 0.05
    # With slightly more mu so many right guesses are possible 5 times in 100, with slightly less they are not.
    assert (
        most_likely(mu * 0.98, canaries, guesses, correct) < 0.05 < most_likely(mu * 1.02, canaries, guesses, correct)
    )


def test_one_run_of_independent_gaussians_does_not_refute_what_they_are() -> None:
    mu, canaries, guesses = 1.5, 150, 50
    rng, found = np.random.default_rng(3), []
    for _ in range(60):
        coins = rng.integers(0, 2, canaries)
        scores = (coins - 0.5) * mu + rng.normal(size=canaries)
        clearest = np.argsort(-np.abs(scores))[:guesses]
        found.append(one_run_mu(int(((scores[clearest] > 0) == coins[clearest]).sum()), guesses, canaries, 0.95))
    assert max(found) <= mu
    assert np.mean(found) > 0.3 * mu


def test_the_largest_advantage_is_that_of_the_test_in_the_middle() -> None:
    assert largest_advantage(0.0) == 0
    # The test that guesses "present" above the middle has exactly this advantage.
    assert largest_advantage(1.0) == pytest.approx(norm.cdf(0.5) - norm.cdf(-0.5))


def test_numbers_that_no_run_can_have_are_refused() -> None:
    for bad in ((11, 10, 10), (5, 10, 9), (0, 0, 5)):
        with pytest.raises(InvalidSetting):
            one_run_mu(*bad, 0.95)
    with pytest.raises(InvalidSetting):
        Errors(3, 2, 0, 1)
    with pytest.raises(InvalidSetting, match="confidence"):
        many_runs_mu(Errors(0, 1, 0, 1), 1.0)
