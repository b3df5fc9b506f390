"""Golden values of the privacy accounting, each with its source.

`PRIVACY.md`, section 3 (the project's privacy page): six configurations of kNN-DPFL and AE-DPFL, each with the papers'
Renyi conversion, the improved conversion of Canonne, Kamath, Steinke 2020, and the exact value; and what
noise shares sized as in the papers are really worth under collusion.
"""

from __future__ import annotations

import math
from typing import Any

import pytest

from labeler.accounting.events import GaussianSum
from labeler.accounting.gaussian import epsilon_of_delta
from labeler.accounting.integer import improved_epsilon, papers_epsilon
from labeler.planning import price
from labeler.task import Task
from tests.labeler.tasks import make_task
from tests.oracles.pld import epsilon_by_pld

# queries, squared sensitivity of one query, sigma in votes, delta, papers' conversion, improved, exact: as printed
TABLE = [
    (206, 2, 25, 1e-4, "3.8143", "3.2749", "2.9757"),
    (109, 2, 25, 1e-4, "2.709", "2.272", "2.056"),
    (206, 2, 15, 1e-4, "6.723", "5.981", "5.471"),
    (109, 2, 15, 1e-4, "4.709", "4.099", "3.734"),
    (500, 1, 25, 1e-3, "3.7245", "3.0893", "2.7354"),
    (500, 1, 30, 1e-3, "3.0482", "2.4816", "2.1890"),
]


def task_of(queries: int, squared: int, sigma: float, delta: float, **changes: int) -> Task:
    """The task whose records, or whose agents where one vote comes or goes, cost what a row of the table says."""
    way: dict[str, Any] = {"method": "knn", "k": 50} if squared == 2 else {"method": "ensemble", "k": 1}
    asked = {"sigma_votes": sigma, "delta": delta, "max_queries": queries, "agents": 3}
    return make_task(name="golden", classes=tuple("abcdefghij"), **way | asked | changes)


def _printed_like(value: float, golden: str) -> str:
    return f"{value:.{len(golden.partition('.')[2])}f}"


@pytest.mark.parametrize(("queries", "squared", "sigma", "delta", "papers", "improved", "exact"), TABLE)
def test_every_column_agrees_to_the_last_digit_printed(
    queries: int, squared: int, sigma: float, delta: float, papers: str, improved: str, exact: str
) -> None:
    event = GaussianSum(queries * squared, sigma)
    assert _printed_like(papers_epsilon(event, delta), papers) == papers
    assert _printed_like(improved_epsilon(event, delta), improved) == improved
    assert _printed_like(epsilon_of_delta(delta, math.sqrt(event.mu_squared)), exact) == exact
    assert _printed_like(epsilon_by_pld([event], delta), exact) == exact


@pytest.mark.parametrize(("queries", "squared", "sigma", "delta", "papers", "improved", "exact"), TABLE)
def test_the_price_of_the_integer_mechanism_is_at_most_one_in_ten_thousand_above_the_exact_column(
    queries: int, squared: int, sigma: float, delta: float, papers: str, improved: str, exact: str
) -> None:
    task = task_of(queries, squared, sigma, delta, colluding_agents=1)
    statement = price(task).instance if squared == 2 else price(task).agent
    continuous = epsilon_of_delta(delta, math.sqrt(queries * squared) / sigma)
    assert continuous < statement.epsilon < continuous * 1.0001
    assert statement.continuous_epsilon == pytest.approx(continuous, rel=1e-12)
    assert _printed_like(statement.as_in_paper_epsilon, papers) == papers


@pytest.mark.parametrize(
    ("colluding", "dropouts", "golden"), [(0, 0, "2.976"), (1, 0, "3.779"), (2, 0, "5.733"), (1, 1, "5.733")]
)
def test_shares_sized_as_in_the_papers_are_worth_less_when_agents_collude(
    colluding: int, dropouts: int, golden: str
) -> None:
    found = price(task_of(206, 2, 25, 1e-4, colluding_agents=colluding, max_dropouts=dropouts)).to_json()
    assert _printed_like(found["as_in_paper_shares"]["instance"]["epsilon"], golden) == golden
    assert _printed_like(found["instance"]["epsilon"], golden) == "2.976"
