"""Descent in exact numbers: the bound after every number of steps, and what its margins cover."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mpmath import mp, mpf

from labeler.descent import (
    BLOCK_ROWS,
    DEPTH,
    LEAST_BLOCK_ROWS,
    MOST_PUBLIC_ROWS,
    MOST_RECORDS,
    MOST_WEIGHTS,
    Descent,
    steps_to_converge,
)
from labeler.errors import InvalidSetting

PLAIN = Descent(lipschitz=1.0, smoothness=0.25, regularisation=0.1, least=20, columns=3, iterations=50)


@settings(max_examples=100, deadline=None)
@given(
    regularisation=st.sampled_from([1e-6, 1e-3, 0.05, 1.0, 30.0]),
    clip_norm=st.sampled_from([1e-3, 0.3, 1.0, 20.0]),
    least=st.integers(1, 6),
    public=st.integers(0, 3),
    places=st.lists(st.integers(-3, 3), min_size=1, max_size=6),
    steps=st.integers(1, 40),
    change=st.sampled_from(["add", "remove", "replace"]),
    value=st.integers(-3, 3),
)
def test_logistic_descent_in_fifty_digits_keeps_the_bound_after_every_step(
    regularisation: float,
    clip_norm: float,
    least: int,
    public: int,
    places: list[int],
    steps: int,
    change: str,
    value: int,
) -> None:
    """An oracle that rounds nothing: one weight, records on a line, the mean over max(|D|, n) + m."""
    try:
        terms = Descent(clip_norm, clip_norm**2 / 4, regularisation, least + public, 1, iterations=steps)
    except InvalidSetting:
        assert regularisation == 1e-6  # which double precision does not carry for long rows
        return

    def path(own: list[int]) -> list[mpf]:
        rows = [mpf(clip_norm) * place / 3 for place in own]
        weight, found = mpf(0), []
        for _ in range(steps):
            slopes = sum((-row / (1 + mp.exp(weight * row)) for row in rows), mpf(0))
            slopes += sum((mpf(clip_norm) / (1 + mp.exp(-weight * clip_norm)) for _ in range(public)), mpf(0))
            mean = slopes / (max(len(own), least) + public)
            weight -= mpf(terms.learning_rate) * (mean + mpf(regularisation) * weight)
            found.append(weight)
        return found

    other = places[1:] if change == "remove" else [*places[change == "replace" :], value]
    with mp.workdps(50):
        for one, two in zip(path(places), path(other), strict=True):
            assert abs(one - two) <= terms.sensitivity
            assert max(abs(one), abs(two)) <= terms.largest_norm


def test_a_planted_record_uses_up_half_of_the_bound() -> None:
    """Opposite records, alone in the mean, regularized so strongly that slopes stay: the margins hide nothing."""
    terms = Descent(1.0, 0.25, 30.0, 1, 1, iterations=200)
    with mp.workdps(30):
        ends = []
        for sign in (1, -1):
            weight = mpf(0)
            for _ in range(terms.iterations):
                weight -= mpf(terms.learning_rate) * (-sign / (1 + mp.exp(weight * sign)) + 30 * weight)
            ends.append(weight)
    # A slope at zero is a half; the other half of L is what a confident mistake would add.
    assert 0.49 * terms.sensitivity < abs(ends[0] - ends[1]) <= 0.51 * terms.sensitivity


def test_blocks_and_weights_leave_no_sum_deeper_than_the_margin_covers() -> None:
    most_blocks = (MOST_RECORDS + MOST_PUBLIC_ROWS) // LEAST_BLOCK_ROWS
    assert BLOCK_ROWS + most_blocks + MOST_WEIGHTS < DEPTH


def test_the_bound_holds_its_margin_and_grows_with_what_it_covers() -> None:
    exact = 2 / (20 * 0.1)
    assert exact < PLAIN.sensitivity < exact * 1.001
    assert 1 / 0.1 < PLAIN.largest_norm < 10.001
    assert replace(PLAIN, feature_rounding=2.0**-32).rounding_margin > PLAIN.rounding_margin
    assert replace(PLAIN, least=40).rounding_margin == 2 * PLAIN.rounding_margin
    assert replace(PLAIN, radius=0.01).sensitivity == 2 * replace(PLAIN, radius=0.01).largest_norm
    assert replace(PLAIN, radius=0.5, balls=4).largest_norm == pytest.approx(1.0)
    assert replace(PLAIN, radius=0.5).reach == 0.5
    assert PLAIN.reach == 10


@pytest.mark.parametrize(
    "change",
    [
        {"regularisation": 1e-7, "least": 10**6},
        {"lipschitz": 1e-200},
        {"lipschitz": math.inf},
        {"lipschitz": math.nan},
        {"radius": 1e-200},
        {"regularisation": 1e101},
        {"iterations": 0},
        {"least": 0},
        {"feature_rounding": 1.0},
        {"smoothness": math.nan},
    ],
)
def test_terms_that_double_precision_cannot_carry_are_refused(change: dict[str, Any]) -> None:
    with pytest.raises(InvalidSetting):
        replace(PLAIN, **change)


def test_steps_are_enough_to_converge_or_the_most() -> None:
    for smoothness, regularisation in ((0.5, 0.1), (0.5, 0.01), (1e-12, 5.0)):
        steps = steps_to_converge(smoothness, regularisation, most=10**6)
        shrink = 1 - 2 * regularisation / (smoothness + 2 * regularisation)
        assert shrink**steps <= 1e-6
    assert steps_to_converge(0.5, 1e-6, most=2000) == 2000
    assert steps_to_converge(1e300, 1e-300, most=2000) == 2000
