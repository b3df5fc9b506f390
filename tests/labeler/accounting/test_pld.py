"""The numerical accountant agrees with the closed form, also when it composes query by query."""

from __future__ import annotations

import math

import pytest

from labeler.accounting.events import GaussianSum, IntegerSum
from labeler.accounting.gaussian import epsilon_of_delta
from labeler.errors import InvalidSetting, PrivacyRefusal
from tests.oracles.pld import epsilon_by_pld


@pytest.mark.parametrize(("squared", "sigma", "delta"), [(412, 25.0, 1e-4), (2, 30.0, 1e-6), (100, 2.5, 1e-5)])
def test_pld_is_just_above_the_closed_form(squared: int, sigma: float, delta: float) -> None:
    exact = epsilon_of_delta(delta, math.sqrt(squared) / sigma)
    assert exact - 1e-9 <= epsilon_by_pld([GaussianSum(squared, sigma)], delta) <= exact * 1.0001 + 1e-6


def test_queries_composed_one_by_one_are_worth_the_whole() -> None:
    one_by_one = epsilon_by_pld([GaussianSum(2, 25.0)] * 40, 1e-4)
    assert one_by_one == pytest.approx(epsilon_of_delta(1e-4, math.sqrt(80) / 25), rel=1e-4)


def test_what_it_does_not_know_is_refused() -> None:
    integer = IntegerSum(2, 1, 16, 400.0, 1, 10)
    with pytest.raises(PrivacyRefusal, match="does not know the event IntegerSum"):
        epsilon_by_pld([integer], 1e-4)
    with pytest.raises(PrivacyRefusal, match="do not compose"):
        epsilon_by_pld([GaussianSum(2, 1.0), GaussianSum(2, 1.0, "agent")], 1e-4)
    with pytest.raises(InvalidSetting, match="no event"):
        epsilon_by_pld([], 1e-4)
    with pytest.raises(InvalidSetting, match="delta"):
        epsilon_by_pld([GaussianSum(2, 1.0)], 0.0)


@pytest.mark.parametrize("delta", [0.0, 1.0, 1.5])
def test_a_delta_outside_its_range_is_refused(delta: float) -> None:
    with pytest.raises(InvalidSetting) as refusal:
        epsilon_by_pld([GaussianSum(2, 25.0)], delta)
    assert str(refusal.value) == f"delta must be strictly between 0 and 1, found {delta}"


def test_what_is_refused_is_said_word_for_word() -> None:
    with pytest.raises(InvalidSetting) as nothing:
        epsilon_by_pld([], 1e-5)
    assert str(nothing.value) == "there is no event to account for"
    with pytest.raises(PrivacyRefusal) as mixed:
        epsilon_by_pld([GaussianSum(2, 25.0), GaussianSum(2, 25.0, "agent")], 1e-5)
    assert str(mixed.value) == (
        "instance-level and agent-level events do not compose; account for each level by itself"
    )


def test_wider_bins_cost_more() -> None:
    events = [GaussianSum(2, 5.0)] * 3
    narrow, wide = (epsilon_by_pld(events, 1e-5, value_discretization_interval=width) for width in (1e-4, 0.05))
    assert narrow < wide < narrow + 0.2
