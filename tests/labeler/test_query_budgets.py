"""The budget of every query: shares add up to the ledger's charge, for every method, release and course of a job."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from labeler.accounting.lifetime import vote_nano
from labeler.batching import round_charges, round_sizes
from labeler.budget import UNBOUNDED_NANO, epsilon_spent
from labeler.methods import METHODS
from labeler.query_budgets import COLUMNS, ChargedRounds, apportion, query_budgets, running_prices
from labeler.setting import LEVELS, Level
from labeler.task import Task
from tests.labeler.tasks import make_task

QUERIES, ROUND = 10, 4
LIFE = {"budget_nano": 10**9, "least_similarity": 0.5}
TRAINING = {"min_records": 200, "regularisation": 0.05}
NEEDS: dict[str, dict[str, Any]] = {
    "knn": {"k": 3},
    "reverse-knn": {"k": 2},
    "ensemble": {},
    "blind-average": {"training": TRAINING},
    "aux-distill": {"training": TRAINING | {"dimension": 1}},
    "federated": {"training": TRAINING | {"iterations": 2, "sampled": {"rate": 0.5}}},
    "evaluate": {},
}
"""What a task of each method needs to say; a new method needs a line here."""
TASKS = [
    make_task(method=name, release=release, max_queries=QUERIES, **NEEDS[name])
    for name, traits in METHODS.items()
    for release in traits.releases
] + [make_task(method="reverse-knn", k=2, max_queries=QUERIES, lifetime_budget=LIFE)]


def prices_of(task: Task) -> dict[Level, list[int]]:
    return running_prices(task, ROUND)


def charged_of(task: Task, fates: list[bool]) -> list[ChargedRounds]:
    """A job's rounds as a ledger has them: posted, or given back; others spend from the account between them."""
    spent, found = dict.fromkeys(LEVELS, 17), []
    paid = 0
    for size, is_posted in zip(round_sizes(task, QUERIES, batch_queries=ROUND), itertools.cycle(fates), strict=False):
        charges = round_charges(task, size, answered=paid)
        nano: dict[Level, int] = {level: charges.get(level, UNBOUNDED_NANO) if is_posted else 0 for level in LEVELS}
        paid += size if is_posted else 0
        for level in LEVELS:
            spent[level] += nano[level]
        found.append(ChargedRounds((size,), nano, dict(spent)))
        for level in LEVELS:
            spent[level] += 1000
    return found


@pytest.mark.parametrize("task", TASKS, ids=lambda task: f"{task.method}-{task.release}-{task.lifetime_budget is None}")
@settings(deadline=None, max_examples=8, derandomize=True)
@given(fates=st.lists(st.booleans(), min_size=1, max_size=5), images=st.integers(1, 40))
def test_the_shares_of_a_job_add_up_to_its_charge_to_the_nano_unit(task: Task, fates: list[bool], images: int) -> None:
    charged = charged_of(task, fates)
    rows = images if task.traits.labels == "images" else QUERIES
    found = query_budgets(task, charged, rows=rows, prices=prices_of(task))
    assert found.kind in ("each", "running", "shared", "life")
    assert "instance" in found.shares
    for level, shares in found.shares.items():
        assert len(shares) == len(found.totals[level]) == rows
        assert (shares >= 0).all()
        charge = sum(one.nano[level] for one in charged)
        assert charge < UNBOUNDED_NANO
        if found.kind != "life":
            assert int(shares.sum()) == charge
    places = itertools.accumulate((sum(one.sizes) for one in charged), initial=0)
    if found.kind in ("each", "running"):
        for (start, end), one in zip(itertools.pairwise(places), charged, strict=True):
            for level, shares in found.shares.items():
                assert int(shares[start:end].sum()) == one.nano[level]
                assert found.totals[level][end - 1] == one.after[level]
    columns = found.columns("federation", 1e-5)
    assert tuple(columns) == COLUMNS
    assert None not in columns["share_nano"] + columns["total_nano"] + columns["total_epsilon"]
    for total, epsilon in zip(columns["total_nano"], columns["total_epsilon"], strict=True):
        exact = epsilon_spent(total, 1e-5)
        assert exact is not None
        assert epsilon >= exact


def test_every_method_says_what_the_share_of_a_question_is() -> None:
    kinds = {(task.method, task.release, task.traits.share_kind(task)) for task in TASKS}
    assert kinds == {
        ("knn", "histogram", "each"), ("knn", "winner", "running"),
        ("ensemble", "histogram", "each"), ("ensemble", "winner", "running"),
        ("reverse-knn", "histogram", "shared"), ("reverse-knn", "winner", "shared"),
        ("reverse-knn", "histogram", "life"),
        ("blind-average", "histogram", "shared"), ("aux-distill", "histogram", "shared"),
        ("federated", "histogram", "shared"), ("evaluate", "histogram", "shared"),
    }  # fmt: skip


def test_a_winner_takes_what_it_added_to_the_price_of_its_round_and_every_round_starts_anew() -> None:
    task = make_task(method="ensemble", release="winner", max_queries=6)
    prices = running_prices(task, 3)
    exact = [round_charges(task, count)["instance"] for count in (1, 2, 3)]
    assert prices["instance"] == exact
    charge: dict[Level, int] = dict(round_charges(task, 3))
    charged = [
        ChargedRounds((3,), charge, charge),
        ChargedRounds((3,), charge, {level: 2 * charge[level] for level in charge}),
    ]
    shares = query_budgets(task, charged, rows=6, prices=prices).shares["instance"].tolist()
    assert shares == [exact[0], exact[1] - exact[0], exact[2] - exact[1]] * 2


def test_a_price_that_falls_takes_nothing_more_and_one_of_an_earlier_version_is_still_divided_exactly() -> None:
    task = make_task(method="knn", release="winner")
    prices: dict[Level, list[int]] = {level: [10, 10, 30] for level in LEVELS}
    for charge, shares in ((30, [10, 0, 20]), (31, [10, 0, 21]), (0, [0, 0, 0])):
        nano: dict[Level, int] = dict.fromkeys(LEVELS, charge)
        assert (
            query_budgets(task, [ChargedRounds((3,), nano, nano)], rows=3, prices=prices).shares["agent"].tolist()
            == shares
        )


def test_a_charge_above_the_mark_of_no_bound_is_divided_too() -> None:
    task = make_task(method="knn")
    nano: dict[Level, int] = {"instance": UNBOUNDED_NANO + 5, "agent": UNBOUNDED_NANO}
    found = query_budgets(task, [ChargedRounds((4,), nano, nano)], rows=4, prices={})
    assert int(found.shares["instance"].sum()) == UNBOUNDED_NANO + 5
    assert set(found.shares) == {"instance"}


def test_with_votes_for_life_a_question_takes_at_most_a_vote_and_the_ledger_a_nano_unit_a_round() -> None:
    task = TASKS[-1]
    paid: dict[Level, int] = {"instance": 1, "agent": UNBOUNDED_NANO}
    found = query_budgets(
        task, [ChargedRounds((QUERIES,), paid, {"instance": 1001, "agent": UNBOUNDED_NANO})], rows=QUERIES, prices={}
    )
    assert set(found.shares["instance"].tolist()) == {vote_nano(task)}
    assert set(found.charge_nano.tolist()) == {1}
    assert set(found.totals["instance"].tolist()) == {1001}
    assert found.columns("federation", 1e-5)["agent_share_nano"] == [None] * QUERIES
    given_back = [ChargedRounds((QUERIES,), dict.fromkeys(LEVELS, 0), dict.fromkeys(LEVELS, 7))]
    assert set(query_budgets(task, given_back, rows=QUERIES, prices={}).shares["instance"].tolist()) == {0}


@given(total=st.integers(0, 10**13), weights=st.lists(st.integers(0, 10**13), min_size=1, max_size=30))
def test_parts_are_within_one_of_their_proportion(total: int, weights: list[int]) -> None:
    parts = apportion(total, weights)
    assert sum(parts) == total
    whole = sum(weights)
    assert not whole or all(
        math.floor(total * weight / whole - 1e-3) - 1 <= part <= total * weight // whole + 1
        for part, weight in zip(parts, weights, strict=True)
    )
    assert not whole or apportion(whole, weights) == weights
