"""Steady arithmetic gives what plain arithmetic gives, wherever plain arithmetic is not slow."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.special import softmax

from labeler.steady import LEAST, MOST, is_steady, largest, powers, shares, steady


@given(
    seed=st.integers(0, 2**32), places=st.integers(1, 400), ties=st.booleans(), size=st.sampled_from([1e-60, 1, 1e60])
)
def test_the_largest_are_those_of_a_sort_each_once(seed: int, places: int, ties: bool, size: float) -> None:
    rng = np.random.default_rng(seed)
    values = rng.integers(-2, 3, (3, places)).astype(float) if ties else rng.normal(size=(3, places)) * size
    count = min(10, places)
    found, sizes = largest(values, count)
    assert np.array_equal(sizes, np.sort(values, axis=1)[:, ::-1][:, :count])
    assert np.array_equal(sizes, np.take_along_axis(values, found, axis=1))
    assert all(len(set(row)) == count for row in found.tolist())
    # A row's places are its own, whatever other rows there are.
    assert np.array_equal(largest(values[1:2], count)[0][0], found[1])


def test_powers_and_shares_are_a_softmax_where_no_power_is_slow() -> None:
    scores = np.random.default_rng(1).normal(size=(50, 7)) * 30
    assert shares(powers(scores)) == pytest.approx(softmax(scores, axis=1), rel=1e-12, abs=1e-60)
    assert powers(np.array([[0.0, -1e9, -np.inf, -139.0, -138.0]])).tolist()[0] == [1, 0, 0, 0, np.exp(-138.0)]
    assert powers(np.full((1, 3), -np.inf)).tolist() == [[1, 1, 1]]


def test_what_is_made_steady_is_steady_and_what_was_stays_bit_for_bit() -> None:
    numbers = np.array([0.0, 5e-324, -1e-61, LEAST, 1.0, -MOST, 1e61, -np.inf])
    assert steady(numbers).tolist() == [0, 0, 0, LEAST, 1, -MOST, MOST, -MOST]
    assert is_steady(steady(numbers))
    assert not is_steady(np.array([np.nan]))
    assert not is_steady(np.array([1e-40], dtype=np.float32))
    drawn = np.random.default_rng(2).normal(size=1000)
    assert steady(drawn).tobytes() == drawn.tobytes()
