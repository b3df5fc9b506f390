"""Whatever numbers come, a price is a number or a refusal: no other error, no NaN, and no delta that is none."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from labeler.accounting import losses
from labeler.accounting.events import GaussianSum, IntegerSum, nano_units
from labeler.accounting.gaussian import delta_of_epsilon, deltas_of_epsilons, epsilon_of_delta, mu_of_epsilon
from labeler.accounting.integer import epsilon_bound, improved_epsilon, papers_epsilon, sum_of_shares_error
from labeler.accounting.losses import composed, least_gaussian
from labeler.accounting.sampled import IntegerReplaced, IntegerSampled, sampled_epsilon, sampled_pair
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

EXTREMES = (math.nan, math.inf, -math.inf, -1.0, 0.0, -0.0, 5e-324, 1e-310, 1e-200, 1e-101, 1e-100, 1e-30, 1e-9, 0.3,
            0.5, 1.0, 7.0, 1e4, 1e9, 1e77, 1e99, 1.01e100, 1e154, 1e300, 1.7e308)  # fmt: skip
reals = st.sampled_from(EXTREMES) | st.floats()
counts = st.sampled_from((-1, 0, 1, 2, 10**6, 10**30, 10**100, 10**101, 10**400)) | st.integers(-2, 10**12)
exact = (
    counts
    | st.builds(Fraction, counts, st.integers(1, 10**9))
    | st.sampled_from((Fraction(1, 10**400), Fraction(10**400, 3), Fraction(1, 10**150)))
)


def number_or_refusal(step: Any, *, least: float = 0.0, most: float = math.inf) -> None:
    """Whatever it is, the price is one."""
    try:
        found = step()
    except InvalidSetting:
        return
    assert least <= found <= most


@settings(max_examples=200)
@given(reals, reals)
@example(0.5, 1e154)
@example(0.0, 5e-324)
@example(1.7e308, 5e-324)
def test_the_gaussian_answers_or_refuses(first: float, second: float) -> None:
    number_or_refusal(lambda: delta_of_epsilon(first, second), most=1.0)
    number_or_refusal(lambda: epsilon_of_delta(first, second))
    number_or_refusal(lambda: mu_of_epsilon(first, second))
    if 0 <= first < 700:
        number_or_refusal(lambda: float(deltas_of_epsilons(np.array([first]), second)[0]), least=-1e-12, most=1.0)


@settings(max_examples=150)
@given(exact, counts, counts, reals, counts, counts, reals, reals)
def test_an_event_has_a_price_or_is_none(
    squared: Any, change: int, scale: int, sigma: float, shares: int, coordinates: int, delta: float, variation: float
) -> None:
    number_or_refusal(lambda: nano_units(squared), least=1)
    number_or_refusal(lambda: sum_of_shares_error(sigma, shares))
    for step in (papers_epsilon, improved_epsilon):
        number_or_refusal(lambda step=step: step(GaussianSum(squared, sigma), delta))
    for total_variation in (variation, 2.0**-100):
        number_or_refusal(
            lambda variation=total_variation: epsilon_bound(
                IntegerSum(squared, change, scale, sigma, shares, coordinates), delta, total_variation=variation
            )
        )


@settings(max_examples=40)
@given(
    st.sampled_from(EXTREMES),
    st.sampled_from((0, 1, Fraction(1, 2), Fraction(1, 10**400), Fraction(3, 2), -1, 0.5)),
    st.sampled_from((-1, 0, 1, 1000, 10**6, 10**6 + 1, 10**400)),
    st.sampled_from(EXTREMES),
)
@example(1e300, Fraction(1, 2), 10, 1e-5)
@example(5e-324, Fraction(1, 2), 10, 1e-5)
@example(1e-100, Fraction(1, 10**400), 1, 1e-30)
def test_sampled_sums_have_a_price_or_none(mu: float, rate: Any, rounds: int, delta: float) -> None:
    number_or_refusal(lambda: float(sampled_pair(mu, rate, rounds).mu_squared), least=1e-9)
    number_or_refusal(lambda: float(sampled_pair(mu, rate, rounds, delta_0=delta).mu_squared), least=1e-9)
    number_or_refusal(lambda: sampled_epsilon(mu, rate, rounds, delta))


@pytest.mark.parametrize("kind", [IntegerSampled, IntegerReplaced])
@pytest.mark.parametrize("squared", [Fraction(1, 10**150), 1, 10**12, 10**150, 10**300])
def test_sampled_events_have_a_price_or_are_none(kind: type[IntegerSampled], squared: Any) -> None:
    number_or_refusal(
        lambda: epsilon_bound(
            kind(
                squared_sensitivity=squared, largest_change=1, grid_scale=1, share_sigma_grid=1600.0,
                noise_contributors=1, coordinates=10, sampling_rate=Fraction(1, 10), rounds=10,
            ),
            1e-5,
        )
    )  # fmt: skip


def test_where_a_profile_is_no_number_it_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = composed(0.5, 0.1, 50, "remove", 1e-9)
    power = losses._Round.power

    def damaged(self: Any, rounds: int, tilt: float, first: int, cells: int) -> Any:
        found = power(self, rounds, tilt, first, cells)
        found[-3] = math.nan
        return found

    monkeypatch.setattr(losses._Round, "power", damaged)
    found = composed(0.5, 0.1, 50, "remove", 1e-9)
    assert np.isfinite(found.deltas).all()
    assert (found.deltas >= whole.deltas * (1 - 1e-9)).all()
    assert found.deltas[0] == 1.0


def test_a_profile_with_a_hole_has_no_gaussian_above_it() -> None:
    epsilons = np.linspace(0, 5, 50)
    deltas = np.array([delta_of_epsilon(at, 0.8) for at in epsilons])
    deltas[-1] = 0.0
    assert least_gaussian(epsilons, deltas, 1e-9, 0.1, 2.0) is not None
    assert least_gaussian(epsilons, deltas, 1e-9, 0.1, 0.7) is None, "the largest is too little"
    for hole in (0, 20):
        damaged = deltas.copy()
        damaged[hole] = math.nan
        assert least_gaussian(epsilons, damaged, 1e-9, 0.1, 2.0) is None


@settings(max_examples=100)
@given(st.integers(-1, 5), st.integers(-1, 5), st.integers(-1, 5), st.integers(-1, 5), reals, reals)
def test_lower_bounds_are_numbers_or_refused(a: int, b: int, c: int, d: int, delta: float, confidence: float) -> None:
    number_or_refusal(lambda: largest_rate(a, b, confidence), most=1.0)
    number_or_refusal(lambda: many_runs_mu(Errors(a, b, c, d), confidence))
    number_or_refusal(lambda: many_runs_epsilon(Errors(a, b, c, d), delta, confidence))
    number_or_refusal(lambda: many_runs_advantage(Errors(a, b, c, d), confidence), most=1.0)
    number_or_refusal(lambda: one_run_mu(a, b, c, confidence))
    number_or_refusal(lambda: largest_advantage(delta), most=1.0)
