"""The two Renyi conversions against a direct search, against opendp, and against the exact value they must exceed."""

from __future__ import annotations

import math

import opendp.prelude as dp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from labeler.accounting.events import GaussianSum
from labeler.accounting.gaussian import epsilon_of_delta
from labeler.accounting.integer import improved_epsilon, papers_epsilon
from labeler.errors import InvalidSetting

DELTA = st.floats(-12, -1).map(lambda exponent: 10.0**exponent)
SIGMA = st.floats(-1, 3).map(lambda exponent: 10.0**exponent)


@settings(max_examples=60, deadline=None)
@given(sigma=SIGMA, delta=DELTA)
def test_each_conversion_is_looser_than_the_next_and_all_exceed_the_exact_value(sigma: float, delta: float) -> None:
    event = GaussianSum(2, sigma)
    exact = epsilon_of_delta(delta, math.sqrt(event.mu_squared))
    improved = improved_epsilon(event, delta)
    assert exact <= improved * (1 + 1e-9) + 1e-12
    assert improved <= papers_epsilon(event, delta)


@pytest.mark.parametrize(("queries", "sigma", "delta"), [(206, 25.0, 1e-4), (109, 15.0, 1e-4), (500, 30.0, 1e-3)])
def test_opendp_converts_the_same_noise_to_the_same_improved_epsilon(queries: int, sigma: float, delta: float) -> None:
    dp.enable_features("contrib")
    space = dp.vector_domain(dp.atom_domain(T=dp.i64)), dp.l2_distance(T=dp.i64)
    measurement = dp.c.make_zCDP_to_approxDP(dp.m.make_gaussian(*space, scale=sigma))
    # One change of L2 norm sqrt(queries) is the same zCDP as `queries` changes of norm 1; 14 and 10 keep it an integer.
    norm = math.isqrt(queries)
    theirs = measurement.map(norm).epsilon(delta)
    ours = improved_epsilon(GaussianSum(norm**2, sigma), delta)
    assert ours == pytest.approx(theirs, rel=1e-6)
    assert epsilon_of_delta(delta, norm / sigma) < theirs


def test_a_delta_outside_the_open_interval_is_refused() -> None:
    for bad in (0.0, 1.0, math.nan):
        with pytest.raises(InvalidSetting, match="delta"):
            papers_epsilon(GaussianSum(1, 1.0), bad)
        with pytest.raises(InvalidSetting, match="delta"):
            improved_epsilon(GaussianSum(1, 1.0), bad)
