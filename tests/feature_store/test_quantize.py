"""Quantisation: the exact integers, row by row, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from feature_store.rows import FEATURE_SCALE, largest_square_length, quantize
from labeler.errors import BadData


def test_a_row_becomes_2048_times_its_direction() -> None:
    quantised = quantize(np.array([[3.0, 4.0], [0.0, -0.5]]))
    assert quantised.dtype == np.int16
    assert quantised.tolist() == [[round(2048 * 0.6), round(2048 * 0.8)], [0, -2048]]


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 300), st.integers(0, 2**32 - 1))
def test_inner_products_stay_exact_in_float32(dimension: int, seed: int) -> None:
    rows = quantize(np.random.default_rng(seed).normal(size=(4, dimension)) + 1e-9).astype(np.int64)
    squares = (rows**2).sum(axis=1)
    assert squares.max() <= largest_square_length(dimension) < 2**24
    assert np.abs(squares**0.5 - FEATURE_SCALE).max() <= dimension**0.5 / 2 + 1e-6


def test_a_row_does_not_depend_on_the_rows_beside_it(rng: np.random.Generator) -> None:
    features = rng.normal(size=(50, 33)).astype(np.float32)
    together = quantize(features)
    assert all(np.array_equal(quantize(features[row : row + 1])[0], together[row]) for row in range(50))


def test_length_does_not_matter_even_at_the_ends_of_the_range() -> None:
    row = np.array([[1.0, -2.0, 3.0]])
    assert np.array_equal(quantize(row * 1e-300), quantize(row))
    assert np.array_equal(quantize(row * 1e300), quantize(row))


@pytest.mark.parametrize("bad", [0.0, np.nan, np.inf])
def test_rows_without_a_direction_are_refused(bad: float) -> None:
    with pytest.raises(BadData, match="1 of 2 features are zero or not finite"):
        quantize(np.array([[1.0, 2.0], [bad, 0.0]]))


def test_integers_are_refused() -> None:
    with pytest.raises(BadData, match="must be floats"):
        quantize(np.ones((2, 2), dtype=np.int16))
