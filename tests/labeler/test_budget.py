"""Caps and charges in whole numbers, against sixty digits and exact sums."""

from __future__ import annotations

import math
from decimal import Decimal
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mpmath import mp, mpf

from labeler.accounting.events import NANO, nano_units
from labeler.budget import (
    LEAST_DELTA,
    MOST_DELTA,
    MOST_EPSILON,
    NothingLeft,
    budget_for,
    short_epsilon,
)
from labeler.errors import InvalidSetting


def test_budget_comes_back_for_a_known_reason_only() -> None:
    with pytest.raises(InvalidSetting, match="one of never-asked, below-quorum, refused"):
        NothingLeft("job", "probably")  # type: ignore[arg-type]  # the point of the test


def exact_delta(epsilon: float, mu_squared: mpf) -> mpf:
    """Phi(-epsilon/mu + mu/2) - exp(epsilon) Phi(-epsilon/mu - mu/2), Balle and Wang 2018, as written, in 60 digits
    beyond what cancels."""
    with mp.workdps(60 + 120 + int(epsilon)):
        mu, eps = mp.sqrt(mu_squared), mpf(epsilon)
        upper = mp.erfc((eps / mu - mu / 2) / mp.sqrt(2)) / 2
        return upper - mp.exp(eps) * mp.erfc((eps / mu + mu / 2) / mp.sqrt(2)) / 2


@settings(max_examples=100)
@given(
    epsilon=st.one_of(
        st.floats(0, MOST_EPSILON),
        st.floats(-9, 3).map(lambda exponent: 10.0**exponent),
        st.sampled_from([0.0, 5e-324, 1e-300, 1.0, 599.9, MOST_EPSILON]),
    ),
    delta=st.one_of(
        st.floats(-100, -1).map(lambda exponent: max(LEAST_DELTA, 10.0**exponent)),
        st.floats(0.05, MOST_DELTA),
        st.sampled_from([LEAST_DELTA, 1e-12, 1e-5, 0.5, MOST_DELTA]),
    ),
)
def test_a_cap_is_worth_no_more_than_its_epsilon_and_delta_in_sixty_digits(epsilon: float, delta: float) -> None:
    """Over the whole accepted range, against an oracle that shares no code with the one that makes caps."""
    cap = budget_for(epsilon, delta)
    if cap:
        assert exact_delta(epsilon, mpf(cap) / NANO) <= mpf(delta)
    # A cap too large by three parts in a million would not pass, so the test can see what it is about.
    if cap > 10**7 and epsilon > 1e-3:
        assert exact_delta(epsilon, mpf(cap) * (1 + mpf(3) / 10**6) / NANO) > mpf(delta) * (1 - mpf(10) ** -3)


@given(more=st.floats(1.001, 3))
def test_a_larger_budget_is_never_a_smaller_cap(more: float) -> None:
    assert budget_for(1.0, 1e-5) <= budget_for(1.0 * more, 1e-5)
    assert budget_for(1.0, 1e-5) <= budget_for(1.0, 1e-5 * more)


@given(sigmas=st.lists(st.floats(1, 1e4), min_size=1, max_size=30))
def test_charges_add_up_to_at_least_the_exact_sum_and_at_most_one_unit_more_each(sigmas: list[float]) -> None:
    exact = [2 / Fraction(sigma) ** 2 for sigma in sigmas]
    charged = sum(nano_units(part) for part in exact)
    assert 0 <= charged - sum(exact) * NANO < len(sigmas)


@pytest.mark.parametrize(
    ("epsilon", "delta"),
    [
        (math.nan, 1e-4),
        (math.inf, 1e-4),
        (-1.0, 1e-4),
        (True, 1e-4),
        (1.0, 0.0),
        (1.0, 1.0),
        (1.0, math.nan),
        (1.0, True),
    ],
)
def test_a_malformed_budget_is_refused(epsilon: float, delta: float) -> None:
    with pytest.raises(InvalidSetting):
        budget_for(epsilon, delta)


def test_budgets_at_the_ends_of_their_range_are_made() -> None:
    assert budget_for(MOST_EPSILON, 1e-5) > budget_for(999.0, 1e-5) > 10**12
    assert budget_for(0.0, MOST_DELTA) > budget_for(0.0, 0.5) > budget_for(0, LEAST_DELTA) == 0


@given(st.floats(1e-20, 1e20), st.sampled_from([3, 4, 6]))
def test_an_epsilon_on_a_card_is_never_below_its_value_and_else_written_as_ever(epsilon: float, digits: int) -> None:
    nearest, text = f"{epsilon:.{digits}g}", short_epsilon(epsilon, digits=digits)
    assert Decimal(text) >= Decimal(repr(epsilon))
    if Decimal(nearest) >= Decimal(repr(epsilon)):
        assert text == nearest
    assert float(text) <= epsilon * (1 + 10.0 ** (1 - digits) * 1.001)
    assert short_epsilon(1.9942, digits=4) == "1.995"
