"""Sums of real vectors: rounding is charged for, the noise is what the price was told, bad input is refused."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from benchmarks.sums import private_sum
from labeler.accounting.gaussian import epsilon_of_delta
from labeler.accounting.integer import epsilon_bound
from labeler.errors import InvalidSetting, PrivacyRefusal, UnsafeGrid
from labeler.noise import DiscreteGaussian, VectorSum
from labeler.randomness import seeded_source

SPEC = VectorSum(dimension=40, largest_norm=3.0, sensitivity=0.2, sigma=0.5, agents=12, colluding_agents=3)

lengths = st.floats(0, 1, exclude_max=False)
vectors = st.integers(0, 2**32 - 1).map(lambda seed: np.random.default_rng(seed).normal(size=SPEC.dimension))


def of_norm(vector: np.ndarray, norm: float) -> np.ndarray:
    return vector * (norm / np.linalg.norm(vector))


@given(at=vectors, step=vectors, inside=lengths, moved=lengths)
@settings(max_examples=300, deadline=None)
def test_vectors_on_neighbouring_data_round_to_integers_within_the_charge(at, step, inside, moved) -> None:
    """However x lies on the grid: |rint(S x) - rint(S x')| is at most what the event was told."""
    x = of_norm(at, inside * (SPEC.largest_norm - SPEC.sensitivity))
    y = x + of_norm(step, moved * SPEC.sensitivity)
    difference = SPEC.quantize(x) - SPEC.quantize(y)
    event = SPEC.event("instance")
    assert int(difference @ difference) <= event.squared_sensitivity
    assert int(np.abs(difference).max()) <= event.largest_change


@given(at=vectors, inside=lengths)
@settings(max_examples=100, deadline=None)
def test_a_vector_that_becomes_zero_moves_the_sum_within_the_agent_level_charge(at, inside) -> None:
    integers = SPEC.quantize(of_norm(at, inside * SPEC.largest_norm))
    event = SPEC.event("agent")
    assert int(integers @ integers) <= event.squared_sensitivity
    assert int(np.abs(integers).max()) <= event.largest_change


def test_products_of_long_vectors_are_rounded_and_charged_for() -> None:
    """Found by search: at R/s = 1e7 two products are rounded apart by more than a billionth of S s."""
    x, y = np.array([9994135.7896875]), np.array([9994134.7865625])
    sensitivity = 1.003124998882413
    assert Fraction(x[0]) - Fraction(y[0]) <= Fraction(sensitivity)
    spec = VectorSum(1, largest_norm=1e7, sensitivity=sensitivity, sigma=1.0, agents=1)
    moved = int(spec.quantize(x)[0] - spec.quantize(y)[0])
    assert moved == 1606 > spec.scale * sensitivity + 1
    event = spec.event("instance")
    assert moved <= event.largest_change
    assert moved**2 <= event.squared_sensitivity


@settings(max_examples=300, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    ratio=st.floats(0, 12).map(lambda exponent: 10.0**exponent),
    dimension=st.integers(1, 5),
    unit=st.floats(1e-3, 1e3),
)
def test_the_bounds_hold_for_every_ratio_of_norm_and_sensitivity(
    seed: int, ratio: float, dimension: int, unit: float
) -> None:
    """By fractions: vectors of doubles whose exact distance is within the bound, divided by it in double precision."""
    rng = np.random.default_rng(seed)
    spec = VectorSum(dimension, largest_norm=ratio, sensitivity=1.0, sigma=1.0, agents=1)
    x = of_norm(rng.normal(size=dimension), (ratio - 1) * unit * rng.choice([0.0, 0.5, 1.0]))
    # The step is what doubles can tell apart at that length.
    y = x + of_norm(rng.normal(size=dimension) * rng.choice([0.0, 1.0], size=dimension) + 1e-9, unit * (1 - 2e-4))
    exact = sum((Fraction(float(a)) - Fraction(float(b))) ** 2 for a, b in zip(x, y, strict=True))
    assume(exact <= Fraction(unit) ** 2 and max(np.linalg.norm(x), np.linalg.norm(y)) <= ratio * unit)
    change = spec.quantize(x / unit) - spec.quantize(y / unit)
    event = spec.event("instance")
    assert sum(int(one) ** 2 for one in change) <= event.squared_sensitivity
    assert int(np.abs(change).max()) <= event.largest_change
    away, agent = spec.quantize(x / unit), spec.event("agent")
    assert sum(int(one) ** 2 for one in away) <= agent.squared_sensitivity
    assert int(np.abs(away).max()) <= agent.largest_change
    spec.check(away, "not within its own bound")


def test_the_grid_is_so_fine_that_rounding_adds_a_thousandth_to_the_sensitivity() -> None:
    for dimension in (7, 40, 1000):
        spec = VectorSum(dimension, largest_norm=3.0, sensitivity=0.2, sigma=0.5, agents=12)
        rounded = math.sqrt(spec.event().squared_sensitivity) / (spec.scale * spec.sensitivity)
        assert 1 < rounded < 1.00101
        assert 1600 <= spec.share_sigma_grid < 65_600


def test_the_certified_price_is_the_closed_form_and_a_little_above_it() -> None:
    for spec in (SPEC, VectorSum(12_810, 40.0, 1.9, 8.0, 1000, 500), VectorSum(10, 1.0, 2.0, 1.0, 2)):
        exact = epsilon_of_delta(1e-5, spec.sensitivity / spec.sigma)
        assert exact < epsilon_bound(spec.event(), 1e-5) < 1.01 * exact


def test_the_noise_that_colluders_cannot_subtract_is_the_sigma_that_was_priced() -> None:
    """40,000 numbers: a standard deviation off by more than 2 % has probability below 1e-7."""
    spec = VectorSum(dimension=40_000, largest_norm=1.0, sensitivity=1.0, sigma=0.7, agents=5, colluding_agents=2)
    zeros = [np.zeros(spec.dimension)] * spec.agents
    total = private_sum(spec, zeros, sources=[seeded_source(agent) for agent in range(5)])
    assert total.std() == pytest.approx(0.7 * math.sqrt(5 / 3), rel=0.02)
    known = sum(
        DiscreteGaussian(spec.share_sigma_grid).sample(seeded_source(agent), spec.dimension) for agent in range(2)
    )
    assert (total - known / spec.scale).std() == pytest.approx(0.7, rel=0.02)


@pytest.mark.parametrize("bad", [np.full(40, 1.0), np.full(40, np.nan), np.r_[np.inf, np.zeros(39)]])
def test_a_vector_beyond_the_bound_is_refused_without_its_norm(bad: np.ndarray) -> None:
    with pytest.raises(PrivacyRefusal, match="not finite or longer than 3") as refused:
        SPEC.quantize(bad)
    assert "6.3" not in str(refused.value)


def test_what_cannot_be_proved_is_not_made() -> None:
    with pytest.raises(InvalidSetting, match="more than twice the largest norm"):
        VectorSum(3, 1.0, 2.1, 1.0, 2)
    with pytest.raises(InvalidSetting, match="nobody whose noise"):
        VectorSum(3, 1.0, 1.0, 1.0, 2, colluding_agents=1, max_dropouts=1)
    with pytest.raises(InvalidSetting, match="sigma"):
        VectorSum(3, 1.0, 1.0, math.nan, 2)
    with pytest.raises(UnsafeGrid, match="no grid serves"):
        VectorSum(3, 1e12, 1.0, 1e-9, 2)
