"""Theorem 7 of Zhu et al. 2021 (16 in its appendix C): a price that falls where votes agree. It is no guarantee.

Let a winner lead by m votes, under noise of sigma votes on each of C classes. The theorem says that it is
(alpha, epsilon)-RDP for one agent, with

    epsilon = 2 C e^-x + log(1 + e^((2 alpha - 1) alpha / (2 sigma^2) - x + log(C) / 2)) / (alpha - 1),
    x = m^2 / (8 sigma^2).

Questions add up at one alpha, each at no more than alpha / (2 sigma^2), what it costs whatever the votes are. The
paper's conversion log(1 / delta) / (alpha - 1) is added, and the best alpha is taken.

**Two reasons why no product states it.** Lemma 15, from which it follows, is false as stated. It asks for an answer
that has probability 1 - q on one input. Then it uses that it has it on the neighbor, too. `counterexample` has a
divergence of 0.693, which the lemma bounds by 0.0056. And an epsilon that is computed from votes is itself private: who
hears it learns how the agents voted. Rows here are printed next to the certified price, and nothing is charged by them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from benchmarks import BenchRow, mean_row
from benchmarks.papers import Cell
from labeler.planning import statement
from labeler.task import Task, parse_task

METRIC: Final = "epsilon of one agent"
NO_GUARANTEE: Final = "as the paper's Theorem 7 computes it from the votes, no guarantee"

_ORDERS: Final = 1 + np.arange(1, 10_000) / 100


def epsilon_by_theorem_7(margins: Sequence[float] | NDArray[Any], *, classes: int, sigma: float, delta: float) -> float:
    """Return the data-dependent epsilon of questions with these margins, as the theorem says it. No guarantee.

    Args:
        margins: of each question, how many votes its winner leads by.
        classes: C.
        sigma: noise on each count, votes.
        delta: failure probability.
    """
    whatever = _ORDERS / (2 * sigma**2)
    total = np.zeros_like(_ORDERS)
    for margin, questions in zip(*np.unique(margins, return_counts=True), strict=True):
        x = float(margin) ** 2 / (8 * sigma**2)
        grown = np.logaddexp(0, (2 * _ORDERS - 1) * whatever - x + math.log(classes) / 2)
        total += questions * np.minimum(2 * classes * math.exp(-x) + grown / (_ORDERS - 1), whatever)
    return float(np.min(total + math.log(1 / delta) / (_ORDERS - 1)))


def counterexample(q: float = 1e-8, alpha: float = 1.1) -> tuple[float, float]:
    """Return a Renyi divergence and the bound of lemma 15 on it: one answer has probability 1 - q on an input and 1/2
    on its neighbor.
    """
    here, neighbor = (1 - q, q), (0.5, 0.5)

    def divergence(order: float, ps: tuple[float, float], qs: tuple[float, float]) -> float:
        return math.log(sum(a**order * b ** (1 - order) for a, b in zip(ps, qs, strict=True))) / (order - 1)

    both_ways = max(divergence(2 * alpha, here, neighbor), divergence(2 * alpha, neighbor, here))
    spread = math.sqrt(q) * (1 - q) ** (alpha - 1) * math.exp((alpha - 1) * both_ways)
    return divergence(alpha, here, neighbor), -math.log1p(-q) + math.log1p(spread) / (alpha - 1)


def margins_of(ballots: Sequence[NDArray[np.int64]]) -> NDArray[np.int64]:
    """Return how many votes each question's winner leads by; of ballots of shape (num_questions, num_classes)."""
    votes = np.sort(np.sum(ballots, axis=0), axis=1)
    return np.asarray(votes[:, -1] - votes[:, -2])


def theorem_7_rows(
    case: str,
    task: Task,
    margins: Sequence[NDArray[np.int64]],
    settings: dict[str, Any],
    *,
    printed: tuple[str | None, str | None] = (None, None),
) -> list[BenchRow]:
    """Return what one agent's votes cost: by Theorem 7, by the paper whatever the votes are, and as it is certified.

    Args:
        task: one of winners.
        margins: of its questions, an array for each repetition.
        printed: what the paper prints for the first two rows.
    """
    paid = statement(task, "agent", task.max_queries)
    by_votes = [
        epsilon_by_theorem_7(one, classes=task.num_classes, sigma=task.sigma_votes, delta=task.delta) for one in margins
    ]
    histogram = paid.epsilon if paid.histogram_epsilon is None else paid.histogram_epsilon
    told: dict[str, Any] = {
        "delta": task.delta,
        "level": "agent",
        "settings": settings | {"sigma_votes": task.sigma_votes, "queries": task.max_queries},
    }
    return [
        mean_row(case, NO_GUARANTEE, METRIC, by_votes, reference=printed[0], **told),
        *(
            mean_row(case, method, METRIC, [value], reference=reference, **told)
            for method, value, reference in (
                ("as in the paper, whatever the votes", paid.as_in_paper_epsilon, printed[1]),
                ("certified, of the histogram", histogram, None),
                ("certified, of the winners", paid.epsilon, None),
            )
        ),
    ]


def cells(root: Path, *, full: bool) -> list[Cell]:  # noqa: ARG001  # as every table's
    """Return the paper's own scale; the rows of MNIST's votes stand with AE-DPFL."""
    return [Cell("Theorem 7, agents of one mind", lambda _: unanimous_rows())]


def unanimous_rows() -> list[BenchRow]:
    """Return the rows of the paper's own scale at its best: 200 agents that all agree on each of 500 questions."""
    agents, queries = 200, 500
    task = parse_task(
        {
            "name": "unanimous",
            "classes": [str(number) for number in range(10)],
            "method": "ensemble",
            "delta": 1e-3,
            "max_queries": queries,
            "release": "winner",
            "agents": agents,
            "colluding_agents": 0,
            "sigma_votes": 25.0,
        }
    )
    case, printed = f"{agents} agents of one mind", ("2.7 for its digits", "3.6 for its digits")
    return theorem_7_rows(case, task, [np.full(queries, agents)], {"agents": agents}, printed=printed)
