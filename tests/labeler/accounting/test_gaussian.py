"""The closed form against 50 digits, against its own inverses, and against a numerical accountant."""

from __future__ import annotations

import math

import mpmath
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from labeler.accounting.events import GaussianSum
from labeler.accounting.gaussian import delta_of_epsilon, deltas_of_epsilons, epsilon_of_delta, mu_of_epsilon
from labeler.errors import InvalidSetting
from tests.oracles.pld import epsilon_by_pld

MU = st.floats(-6, 4).map(lambda exponent: 10.0**exponent)
DELTA = st.floats(-12, -0.1).map(lambda exponent: 10.0**exponent)


def _delta_in_fifty_digits(epsilon: float, mu: float) -> mpmath.mpf:
    with mpmath.workdps(60):
        epsilon, mu = mpmath.mpf(epsilon), mpmath.mpf(mu)
        at = epsilon / mu - mu / 2
        return (mpmath.erfc(at / mpmath.sqrt(2)) - mpmath.exp(epsilon) * mpmath.erfc((at + mu) / mpmath.sqrt(2))) / 2


@settings(max_examples=150, deadline=None)
@given(mu=MU, place=st.floats(0, 1))
def test_delta_agrees_with_fifty_digits_from_tiny_to_huge_mu(mu: float, place: float) -> None:
    x = -mu / 2 + place * (mu / 2 + 36) if place < 0.5 else -min(mu / 2, 8) + place * (min(mu / 2, 8) + 36)
    epsilon = max(0.0, mu * (x + mu / 2))
    expected = _delta_in_fifty_digits(epsilon, mu)
    if expected > 1e-290:
        assert delta_of_epsilon(epsilon, mu) == pytest.approx(float(expected), rel=1e-11, abs=0)


@settings(max_examples=150, deadline=None)
@given(mu=MU, delta=DELTA)
def test_epsilon_of_delta_is_an_upper_bound_and_tight(mu: float, delta: float) -> None:
    epsilon = epsilon_of_delta(delta, mu)
    reached = float(_delta_in_fifty_digits(epsilon, mu))
    assert reached <= delta * (1 + 1e-10)
    if epsilon > 0:
        assert reached >= delta * (1 - 1e-10)


@settings(max_examples=100, deadline=None)
@given(mu=MU, delta=DELTA)
def test_mu_of_epsilon_inverts_epsilon_of_delta(mu: float, delta: float) -> None:
    epsilon = epsilon_of_delta(delta, mu)
    largest = mu_of_epsilon(epsilon, delta)
    assert delta_of_epsilon(epsilon, largest) <= delta
    if epsilon > 1e-9:
        assert largest == pytest.approx(mu, rel=1e-8, abs=0)
    else:
        assert largest >= mu * (1 - 1e-8)


def test_known_points_of_the_curve() -> None:
    # At epsilon 0, delta is the total variation between N(0, 1) and N(mu, 1): 2 Phi(mu/2) - 1.
    assert delta_of_epsilon(0, 1.0) == pytest.approx(math.erf(0.5 / math.sqrt(2)), rel=1e-14)
    assert delta_of_epsilon(0, 1e-7) == pytest.approx(math.erf(0.5e-7 / math.sqrt(2)), rel=1e-13)  # nothing cancels
    assert delta_of_epsilon(1.0, 0) == 0.0
    assert epsilon_of_delta(1e-9, 0) == 0.0
    assert delta_of_epsilon(1e6, 1e-6) == 0.0
    assert delta_of_epsilon(0, 1e4) == 1.0


@pytest.mark.parametrize("mu", [1e-3, 0.1, 0.49, 1.0, 3.0])
def test_epsilon_is_nothing_exactly_where_delta_covers_the_whole_distance(mu: float) -> None:
    """Epsilon is 0 from the total variation 2 Phi(mu/2) - 1 on, and more than 0 just below it, where it begins."""
    distance = math.erf(mu / 2 / math.sqrt(2))
    assert epsilon_of_delta(distance * (1 + 1e-9), mu) == 0.0
    for below in (1e-9, 1e-3, 0.1):
        delta = distance * (1 - below)
        epsilon = epsilon_of_delta(delta, mu)
        assert epsilon > 0
        assert float(_delta_in_fifty_digits(epsilon, mu)) == pytest.approx(delta, rel=1e-10, abs=0)


@pytest.mark.parametrize("bad", [0, 1, -1e-9, 1.5, math.nan, math.inf])
def test_a_delta_outside_the_open_interval_is_refused(bad: float) -> None:
    with pytest.raises(InvalidSetting, match="delta must be strictly between 0 and 1"):
        epsilon_of_delta(bad, 1.0)
    with pytest.raises(InvalidSetting, match="delta must be"):
        mu_of_epsilon(1.0, bad)


@pytest.mark.parametrize("bad", [-1.0, math.nan, math.inf, -math.inf])
def test_a_malformed_epsilon_or_mu_is_refused(bad: float) -> None:
    with pytest.raises(InvalidSetting, match="epsilon must be"):
        delta_of_epsilon(bad, 1.0)
    with pytest.raises(InvalidSetting, match="mu must be"):
        delta_of_epsilon(1.0, bad)
    with pytest.raises(InvalidSetting, match="epsilon must be"):
        mu_of_epsilon(bad, 1e-4)


@pytest.mark.parametrize("mu", [0.01, 0.3, 0.5, 1.0, 3.0, 9.0])
def test_many_deltas_at_once_are_those_of_one_after_another(mu: float) -> None:
    epsilons = np.linspace(0, mu * mu / 2 + 12 * mu, 200)
    one_by_one = [delta_of_epsilon(epsilon, mu) for epsilon in epsilons.tolist()]
    np.testing.assert_allclose(deltas_of_epsilons(epsilons, mu), one_by_one, rtol=1e-10)


@pytest.mark.parametrize(("squared", "sigma", "delta"), [(412, 25.0, 1e-4), (2, 30.0, 1e-6), (100, 2.5, 1e-5)])
def test_an_accountant_of_other_origin_is_just_above_the_closed_form(squared: int, sigma: float, delta: float) -> None:
    exact = epsilon_of_delta(delta, math.sqrt(squared) / sigma)
    assert exact - 1e-9 <= epsilon_by_pld([GaussianSum(squared, sigma)], delta) <= exact * 1.0001 + 1e-6


def test_queries_that_it_composes_one_by_one_are_worth_the_whole() -> None:
    one_by_one = epsilon_by_pld([GaussianSum(2, 25.0)] * 40, 1e-4)
    assert one_by_one == pytest.approx(epsilon_of_delta(1e-4, math.sqrt(80) / 25), rel=1e-4)
