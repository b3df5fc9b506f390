"""Numbers as people read them: bounds are never rounded down."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from feature_store.results.report.words import (
    best_guess,
    noise_in_words,
    say_delta,
    say_percent,
)
from labeler.budget import say_epsilon, say_estimate
from labeler.task import Task
from workers.progress import say_seconds


@pytest.mark.parametrize(
    ("epsilon", "said"),
    [
        (None, "none"), (0.0, "0"), (0.98, "0.980"), (0.9801, "0.981"), (2.9757, "2.98"), (612.1, "613"),
        (12345.6, "12,346"), (2e6, "over a million"), (0.00012341, "0.000124"), (1e-9, "1.0e-9"), (999.5, "1,000"),
    ],
)  # fmt: skip
def test_an_epsilon_reads_as_a_bound(epsilon, said):
    assert say_epsilon(epsilon) == said


@given(st.floats(min_value=1e-12, max_value=999_999))
def test_a_bound_that_is_said_is_never_below_the_bound(epsilon):
    assert float(say_epsilon(epsilon).replace(",", "")) >= epsilon


def test_estimates_round_to_nearest_like_printed_tables():
    assert say_estimate(2.97571) == "2.9757"
    assert say_estimate(3.81434) == "3.8143"


def test_other_numbers_read_well():
    assert [say_delta(value) for value in (1e-4, 2.5e-6, 0.001)] == ["1e-4", "2.5e-6", "1e-3"]
    assert [say_percent(value) for value in (0.9611, 1.0, 0.0, 0.99999, None)] == [
        "96.1 %", "100 %", "0 %", "99.9 %", "not known",
    ]  # fmt: skip
    assert [say_seconds(value) for value in (0.0042, 0.31, 3.26, 59.7, 200, 7300)] == [
        "4.2 ms", "0.31 s", "3.3 s", "1 min 0 s", "3 min 20 s", "2 h 1 min",
    ]  # fmt: skip


def test_the_best_guess_is_a_coin_at_epsilon_zero_and_grows_as_theory_says():
    assert best_guess(0.0, 0.0) == 0.5
    assert best_guess(1.0, 0.0) == pytest.approx(math.e / (1 + math.e))
    assert best_guess(1.0, 1e-2) == pytest.approx((math.e + 1e-2) / (1 + math.e))
    assert best_guess(5000.0, 1e-4) == 1.0


def test_the_noise_of_the_talliers_is_told():
    fields = {"name": "t", "classes": ("a", "b"), "k": 5, "sigma_votes": 10.0, "delta": 1e-4, "max_queries": 4}
    told = " ".join(noise_in_words(Task.model_validate(fields | {"agents": 3, "dishonest_talliers": 1})))
    assert "The three talliers hide the sum under noise" in told
    assert "agents add none" in told
    assert "However many agents collude" in told
    assert "1.22 times" in told
    assert "One of the three talliers" in told


def test_the_noise_of_colluding_and_missing_agents_is_told():
    fields = {"name": "t", "classes": ("a", "b"), "k": 5, "sigma_votes": 10.0, "delta": 1e-4, "max_queries": 4}
    told = " ".join(
        noise_in_words(Task.model_validate(fields | {"agents": 6, "colluding_agents": 1, "max_dropouts": 1}))
    )
    assert "standard deviation of 5 votes" in told
    assert "Up to 1 agent may pool" in told
    assert "fewer than 5 of 6" in told
    assert "12.2 votes of noise, 1.22 times" in told
    plain = " ".join(noise_in_words(Task.model_validate(fields | {"agents": 4})))
    assert "No agent may fail to answer" in plain
    assert "caution" not in plain
