"""The closed form against 50 digits, against its own inverses, and against a numerical accountant.

Mills' ratio and its falls are checked against 60 digits and both ends of the continued fraction. Brent's method takes
the steps of scipy's, to the last bit.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import mpmath
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import brentq

from labeler.accounting import gaussian
from labeler.accounting.events import GaussianSum
from labeler.accounting.gaussian import (
    TERMS,
    crossing,
    delta_of_epsilon,
    deltas_of_epsilons,
    epsilon_of_delta,
    fallen,
    mills,
    mu_of_epsilon,
)
from labeler.errors import InvalidSetting
from tests.oracles.pld import epsilon_by_pld

MU = st.floats(-6, 4).map(lambda exponent: 10.0**exponent)
DELTA = st.floats(-12, -0.1).map(lambda exponent: 10.0**exponent)


def _delta_in_fifty_digits(epsilon: float, mu: float) -> mpmath.mpf:
    with mpmath.workdps(60):
        epsilon, mu = mpmath.mpf(epsilon), mpmath.mpf(mu)
        at = epsilon / mu - mu / 2
        return (mpmath.erfc(at / mpmath.sqrt(2)) - mpmath.exp(epsilon) * mpmath.erfc((at + mu) / mpmath.sqrt(2))) / 2


@settings(max_examples=150)
@given(mu=MU, place=st.floats(0, 1))
def test_delta_agrees_with_fifty_digits_from_tiny_to_huge_mu(mu: float, place: float) -> None:
    x = -mu / 2 + place * (mu / 2 + 36) if place < 0.5 else -min(mu / 2, 8) + place * (min(mu / 2, 8) + 36)
    epsilon = max(0.0, mu * (x + mu / 2))
    expected = _delta_in_fifty_digits(epsilon, mu)
    if expected > 1e-290:
        assert delta_of_epsilon(epsilon, mu) == pytest.approx(float(expected), rel=1e-11, abs=0)


@settings(max_examples=150)
@given(mu=MU, delta=DELTA)
def test_epsilon_of_delta_is_an_upper_bound_and_tight(mu: float, delta: float) -> None:
    epsilon = epsilon_of_delta(delta, mu)
    reached = float(_delta_in_fifty_digits(epsilon, mu))
    assert reached <= delta * (1 + 1e-10)
    if epsilon > 0:
        assert reached >= delta * (1 - 1e-10)


@settings(max_examples=100)
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


def test_queries_that_it_composes_one_by_one_are_worth_the_whole() -> None:
    one_by_one = epsilon_by_pld([GaussianSum(2, 25.0)] * 40, 1e-4)
    assert one_by_one == pytest.approx(epsilon_of_delta(1e-4, math.sqrt(80) / 25), rel=1e-4)


# Mills' ratio, of which the tail is made.

PLACE = st.one_of(st.floats(-0.25, 4), st.floats(4, 5), st.floats(4, 40))


def _in_sixty_digits(t: float, by: float = 0.0) -> mpmath.mpf:
    """R(t + by)."""
    with mpmath.workdps(60):
        at = mpmath.mpf(t) + mpmath.mpf(by)
        return mpmath.sqrt(mpmath.pi / 2) * mpmath.exp(at * at / 2) * mpmath.erfc(at / mpmath.sqrt(2))


@settings(max_examples=150)
@given(t=PLACE)
def test_the_ratio_agrees_with_sixty_digits(t: float) -> None:
    assert mills(t) == pytest.approx(float(_in_sixty_digits(t)), rel=1e-14, abs=0)


@settings(max_examples=150)
@given(t=PLACE, exponent=st.floats(-18, 4))
def test_what_it_falls_by_agrees_with_sixty_digits_however_little_that_is(t: float, exponent: float) -> None:
    by = math.exp(exponent)
    if by >= 0.5:
        t = abs(t)
    with mpmath.workdps(60):
        expected = float(_in_sixty_digits(t) - _in_sixty_digits(t, by))
    assert fallen(t, by) == pytest.approx(expected, rel=1e-12, abs=0)


@pytest.mark.parametrize("t", [4.0, 4.5, 6.0, 12.0, 40.0, 1e4])
def test_the_two_ends_of_the_continued_fraction_enclose_what_is_returned(t: float) -> None:
    """The proof of the module: ends 0 and N/t lie on both sides of K_N, and every step keeps it between."""
    ends = []
    for term in (0.0, TERMS / t):
        for n in range(TERMS - 1, 0, -1):
            term = n / (t + term)
        ends.append(term)
    low, high = sorted(ends)
    assert high - low <= 1e-14 * low
    assert low * (1 - 4e-16) <= gaussian._terms(t, 1)[0] <= high * (1 + 4e-16)
    assert 1 / (t + high) * (1 - 4e-16) <= mills(t) <= 1 / (t + low) * (1 + 4e-16)


def test_far_out_the_ratio_is_one_over_its_place_and_ends_at_nothing() -> None:
    assert mills(1e200) == 1e-200
    assert mills(math.inf) == 0.0
    assert fallen(1e10, 0.25) == pytest.approx(0.25e-20, rel=1e-9)
    assert math.isnan(mills(math.nan))


def test_the_rule_is_that_of_gauss_and_legendre() -> None:
    nodes, _ = np.polynomial.legendre.leggauss(8)
    with mpmath.workdps(40):
        for start, (node, weight) in zip(nodes[4:].tolist(), gaussian._RULE, strict=True):
            zero = mpmath.findroot(lambda x: mpmath.legendre(8, x), start)
            slope = mpmath.diff(lambda x: mpmath.legendre(8, x), zero)
            assert node == pytest.approx(float(zero), rel=1e-15, abs=0)
            assert weight == pytest.approx(float(2 / ((1 - zero**2) * slope**2)), rel=1e-15, abs=0)


# Where the closed form crosses: Brent's method.

SHAPES: dict[str, Callable[[float, float], float]] = {
    "straight": lambda x, zero: x - zero,
    "cubic": lambda x, zero: (x - zero) ** 3 + 0.01 * (x - zero),
    "flat at its zero": lambda x, zero: (x - zero) ** 9,
    "saturating": lambda x, zero: math.tanh(40 * (x - zero)),
    "exponential": lambda x, zero: math.exp(min(x - zero, 50.0)) - 1,
    "a step": lambda x, zero: 1.0 if x > zero else -1.0,
}


def scipys(function: Callable[[float], float], low: float, high: float) -> float:
    return float(brentq(function, low, high, xtol=1e-15, rtol=1e-15, maxiter=500))


@pytest.mark.parametrize("shape", SHAPES)
@settings(max_examples=40)
@given(zero=st.floats(-30, 30), below=st.floats(1e-6, 50), above=st.floats(1e-6, 50), falls=st.booleans())
def test_it_returns_what_scipy_returns_bit_for_bit(
    shape: str, zero: float, below: float, above: float, falls: bool
) -> None:
    sign = -1 if falls else 1

    def function(x: float) -> float:
        return sign * SHAPES[shape](x, zero)

    low, high = zero - below, zero + above
    assert crossing(function, low, high) == scipys(function, low, high)


@given(mu=st.floats(1e-4, 1e3), delta=st.floats(1e-15, 0.5))
def test_prices_are_those_that_scipy_finds(mu: float, delta: float) -> None:
    epsilon = epsilon_of_delta(delta, mu)
    bought = mu_of_epsilon(epsilon, delta)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gaussian, "crossing", scipys)
        assert epsilon_of_delta(delta, mu) == epsilon
        assert mu_of_epsilon(epsilon, delta) == bought
