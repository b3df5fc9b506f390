"""Events: exact sums, order-free composition, and refusal of what nobody knows."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from labeler.accounting.events import NANO, GaussianSum, IntegerSum, nano_units
from labeler.errors import InvalidSetting

SQUARED = st.integers(1, 10**6)


def _integer_sum(**changes: Any) -> IntegerSum:
    settings: dict[str, Any] = {
        "squared_sensitivity": 2,
        "largest_change": 1,
        "grid_scale": 16,
        "share_sigma_grid": 400.0,
        "noise_contributors": 2,
        "coordinates": 10,
    }
    return IntegerSum(**settings | changes)


@given(parts=st.lists(SQUARED, min_size=1, max_size=20), sigma=st.floats(0.01, 1e4))
def test_many_small_compositions_are_worth_exactly_the_large_one(parts: list[int], sigma: float) -> None:
    together = GaussianSum(sum(parts), sigma)
    assert sum(GaussianSum(part, sigma).mu_squared for part in parts) == together.mu_squared


def test_mu_squared_is_exact_in_the_binary_number_sigma() -> None:
    assert GaussianSum(1, 0.1).mu_squared == 1 / Fraction(0.1) ** 2 != 100


def test_integer_noise_costs_slightly_more_than_real_noise_of_the_same_variance() -> None:
    event = _integer_sum()
    real = GaussianSum(2, 400 * math.sqrt(2) / 16)
    assert 1 < event.mu_squared / real.mu_squared < 1.0001
    assert event.charge_nano == math.ceil(event.mu_squared * NANO)


@given(numerator=st.integers(1, 10**12), denominator=st.integers(1, 10**12))
def test_nano_units_round_up_and_by_less_than_one(numerator: int, denominator: int) -> None:
    value = Fraction(numerator, denominator)
    assert 0 <= nano_units(value) - value * NANO < 1


@pytest.mark.parametrize("bad", [0, -1, 2.0, math.nan, True, "2"])
def test_a_sensitivity_that_is_not_an_exact_positive_number_is_refused(bad: Any) -> None:
    with pytest.raises(InvalidSetting, match="squared_sensitivity must be an exact positive number"):
        GaussianSum(bad, 1.0)
    with pytest.raises(InvalidSetting, match="mu_squared must be"):
        nano_units(bad)


@pytest.mark.parametrize("bad", [0.0, -1.0, math.nan, math.inf, True, "1"])
def test_a_sigma_that_is_not_a_positive_finite_number_is_refused(bad: Any) -> None:
    with pytest.raises(InvalidSetting, match="sigma_votes must be a positive finite number"):
        GaussianSum(1, bad)


@pytest.mark.parametrize(
    "change",
    [
        {"grid_scale": 0},
        {"grid_scale": 1.0},
        {"noise_contributors": 0},
        {"coordinates": True},
        {"largest_change": -1},
        {"share_sigma_grid": 0.4, "noise_contributors": 1000},
        {"share_sigma_grid": 1.0, "noise_contributors": 1},
    ],
)
def test_an_integer_event_outside_the_theorem_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(InvalidSetting):
        _integer_sum(**change)


def test_noise_of_exactly_the_least_size_that_the_proof_takes_is_taken() -> None:
    assert _integer_sum(share_sigma_grid=0.5, noise_contributors=24).variance_grid == 6
    assert _integer_sum(share_sigma_grid=1.0, noise_contributors=6).mu_squared == Fraction(2 * 16**2, 3)
    assert _integer_sum(share_sigma_grid=3.0, noise_contributors=1).mu_squared == Fraction(2 * 16**2, 6)
