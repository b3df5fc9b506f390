"""Theorem 7 of Zhu et al. 2021 (16 in its appendix): its numbers, its false lemma, and the rows beside a price."""

from __future__ import annotations

import math

import numpy as np
import pytest

from benchmarks.papers.ae_dpfl import task_for
from benchmarks.papers.theorem_7 import (
    NO_GUARANTEE,
    counterexample,
    epsilon_by_theorem_7,
    margins_of,
    theorem_7_rows,
    unanimous_rows,
)


def test_it_saves_two_percent_where_200_agents_are_unanimous_and_the_exact_price_saves_more() -> None:
    by_votes, papers, histogram, winners = unanimous_rows()
    assert [round(row.value, 2) for row in (by_votes, papers)] == [3.66, 3.72]
    assert round(histogram.value, 3) == 2.735  # the golden table: 500 questions, sigma 25, delta 1e-3
    assert winners.value < histogram.value < by_votes.value
    # A price that rests on votes never stands where a guarantee does.
    assert by_votes.method == NO_GUARANTEE
    assert all(row.epsilon is None for row in (by_votes, papers))


def by_hand(margin: float, alpha: float, sigma: float) -> float:
    """The theorem at one alpha, of one question with ten classes, written out once more."""
    x = margin**2 / (8 * sigma**2)
    inner = (2 * alpha - 1) * alpha / (2 * sigma**2) - x + math.log(10) / 2
    return 20 * math.exp(-x) + math.log1p(math.exp(inner)) / (alpha - 1)


def test_the_formula_is_that_of_the_theorem_at_its_best_order() -> None:
    orders = (1 + step / 100 for step in range(1, 10_000))
    found = min(500 * by_hand(200, alpha, 25) + math.log(1e3) / (alpha - 1) for alpha in orders)
    assert epsilon_by_theorem_7(np.full(500, 200), classes=10, sigma=25, delta=1e-3) == pytest.approx(found)


def test_without_agreement_it_is_what_the_paper_counts_whatever_the_votes_are() -> None:
    papers = min(500 * a / (2 * 25**2) + math.log(1e3) / (a - 1) for a in 1 + np.arange(1, 10_000) / 100)
    for margins in (np.zeros(500), np.repeat([0, 3, 40], [200, 200, 100])):
        assert epsilon_by_theorem_7(margins, classes=10, sigma=25, delta=1e-3) == pytest.approx(papers)
    # One question without a leader takes half of what 499 unanimous ones save, and five take all.
    mixed = np.repeat([0, 200], [1, 499])
    assert 3.67 < epsilon_by_theorem_7(mixed, classes=10, sigma=25, delta=1e-3) < papers
    five = np.repeat([0, 200], [5, 495])
    assert epsilon_by_theorem_7(five, classes=10, sigma=25, delta=1e-3) == pytest.approx(papers)


@pytest.mark.parametrize("sigma", [12, 15, 20.6, 25])
def test_it_saves_nothing_on_mnist_where_some_60_of_100_agents_know_a_digit(sigma: float) -> None:
    """As the paper's table prints: 4.3 and 4.3."""
    votes, none = (epsilon_by_theorem_7(np.full(500, most), classes=10, sigma=sigma, delta=1e-3) for most in (65, 0))
    assert votes == pytest.approx(none)


def test_its_lemma_is_false() -> None:
    """It bounds ln 2 by 0.0056: one answer has probability 1 - q on one input and 1/2 on its neighbor."""
    divergence, bound = counterexample()
    assert (round(divergence, 3), round(bound, 4)) == (0.693, 0.0056)
    assert divergence == pytest.approx(math.log(2), abs=1e-6)


def test_margins_are_between_the_two_best_and_rows_stand_beside_the_certified_price() -> None:
    ballots = [np.array([[1, 0, 0], [0, 1, 0]]), np.array([[1, 0, 0], [0, 0, 1]]), np.array([[0, 1, 0], [0, 0, 1]])]
    assert margins_of(ballots).tolist() == [1, 1]
    task = task_for(4.3, agents=3, queries=2, release="winner")
    rows = theorem_7_rows("c", task, [margins_of(ballots)] * 2, {})
    assert rows[0].sd == 0.0
    assert rows[-1].value <= 4.3
    assert len({row.method for row in rows}) == 4
