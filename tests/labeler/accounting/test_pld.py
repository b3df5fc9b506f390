"""The numerical accountant agrees with the closed form, also when it composes query by query."""

from __future__ import annotations

import math

import pytest

from labeler.accounting.events import GaussianSum
from labeler.accounting.gaussian import epsilon_of_delta
from tests.oracles.pld import epsilon_by_pld


@pytest.mark.parametrize(("squared", "sigma", "delta"), [(412, 25.0, 1e-4), (2, 30.0, 1e-6), (100, 2.5, 1e-5)])
def test_pld_is_just_above_the_closed_form(squared: int, sigma: float, delta: float) -> None:
    exact = epsilon_of_delta(delta, math.sqrt(squared) / sigma)
    assert exact - 1e-9 <= epsilon_by_pld([GaussianSum(squared, sigma)], delta) <= exact * 1.0001 + 1e-6


def test_queries_composed_one_by_one_are_worth_the_whole() -> None:
    one_by_one = epsilon_by_pld([GaussianSum(2, 25.0)] * 40, 1e-4)
    assert one_by_one == pytest.approx(epsilon_of_delta(1e-4, math.sqrt(80) / 25), rel=1e-4)
