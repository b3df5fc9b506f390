"""Numbers as people read them: bounds are never rounded down."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from feature_store.results.report.words import (
    best_guess,
)
from labeler.budget import say_epsilon


@given(st.floats(min_value=1e-12, max_value=999_999))
def test_a_bound_that_is_said_is_never_below_the_bound(epsilon):
    assert float(say_epsilon(epsilon).replace(",", "")) >= epsilon


def test_the_best_guess_is_a_coin_at_epsilon_zero_and_grows_as_theory_says():
    assert best_guess(0.0, 0.0) == 0.5
    assert best_guess(1.0, 0.0) == pytest.approx(math.e / (1 + math.e))
    assert best_guess(1.0, 1e-2) == pytest.approx((math.e + 1e-2) / (1 + math.e))
    assert best_guess(5000.0, 1e-4) == 1.0
