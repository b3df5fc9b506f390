"""What a refusal offers its reader, passes: its epsilon and its number of queries are within the budget."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from labeler.batching import round_sizes, total_charges
from labeler.budget import MOST_EPSILON, budget_for, epsilon_left, say_epsilon_left
from labeler.setting import LEVELS
from labeler.solving import queries_that_fit, solve_sigma, ways_to_fit
from labeler.task import Task
from tests.labeler.tasks import make_task


@settings(deadline=None)
@given(
    nano=st.integers(10**7, 10**13 - 1), delta=st.sampled_from((1e-12, 1e-6, 1e-5, 1e-3, 0.1)), digits=st.integers(1, 3)
)
def test_the_epsilon_that_is_left_is_covered_and_the_next_one_is_not(nano: int, delta: float, digits: int) -> None:
    epsilon = float(say_epsilon_left(epsilon_left(nano, delta), digits=digits).replace(",", ""))
    assert epsilon == 0.0 or budget_for(epsilon, delta) <= nano
    exact = Decimal(repr(epsilon))
    next_one = float(exact + Decimal(1).scaleb(exact.adjusted() - digits + 1))
    if epsilon > 0 and next_one < MOST_EPSILON:
        assert budget_for(next_one, delta) > nano


TASKS: list[dict[str, Any]] = [
    {"method": "knn", "max_queries": 100},
    {"method": "knn", "max_queries": 50_000, "agents": 10},
    {"method": "reverse-knn", "k": 3},
    {"method": "reverse-knn", "k": 3, "ballot_radius": 20.0},
    {"method": "knn", "dishonest_talliers": 1},
    {"method": "ensemble"},
]


@settings(deadline=None, max_examples=15)
@given(
    fields=st.sampled_from(TASKS), epsilon=st.floats(0.5, 8), share=st.floats(0.01, 0.99), level=st.sampled_from(LEVELS)
)
def test_what_a_refusal_offers_is_within_the_rest(
    fields: dict[str, Any], epsilon: float, share: float, level: Any
) -> None:
    task = noised(make_task(**fields), epsilon)
    charges = total_charges(task, round_sizes(task, task.max_queries))
    if level not in charges:
        return
    left = int(charges[level] * share)
    ways = ways_to_fit(task, task.max_queries, level=level, asked_nano=charges[level], left_nano=left)
    offered = float(ways[0].removeprefix("ask for epsilon ").removesuffix(" or less"))
    smaller = noised(task, offered)
    assert total_charges(smaller, round_sizes(task, task.max_queries))[level] <= left
    if len(ways) == 1:
        assert task.traits.single_round or queries_that_fit(task, task.max_queries, level=level, left_nano=left) == 0
        return
    count = int(ways[1].split()[3])
    assert total_charges(task, round_sizes(task, count))[level] <= left
    assert total_charges(task, round_sizes(task, count + 1))[level] > left


def noised(task: Task, epsilon: float) -> Task:
    return task.model_copy(update={"sigma_votes": solve_sigma(task, epsilon)})


def test_a_task_without_a_price_at_a_level_is_told_the_fields_that_give_it_one() -> None:
    task = make_task(method="reverse-knn", k=3)
    assert ways_to_fit(task, 100, level="agent", asked_nano=0, left_nano=5) == [
        "give the task `ballot_radius` or `max_agent_records`"
    ]


def test_more_queries_than_fit_are_no_way_out_where_their_number_changes_nothing() -> None:
    task = noised(make_task(method="reverse-knn", k=3), 1.0)
    charge = total_charges(task, round_sizes(task, 100))["instance"]
    ways = ways_to_fit(task, 100, level="instance", asked_nano=charge, left_nano=charge // 2)
    assert [way.split()[:3] for way in ways] == [["ask", "for", "epsilon"]]
