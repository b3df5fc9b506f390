"""Brent's method takes the steps of scipy's, to the last bit, and the prices that rest on it are scipy's."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import brentq

from labeler.accounting import gaussian
from labeler.accounting.gaussian import crossing

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
    epsilon = gaussian.epsilon_of_delta(delta, mu)
    bought = gaussian.mu_of_epsilon(epsilon, delta)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gaussian, "crossing", scipys)
        assert gaussian.epsilon_of_delta(delta, mu) == epsilon
        assert gaussian.mu_of_epsilon(epsilon, delta) == bought
