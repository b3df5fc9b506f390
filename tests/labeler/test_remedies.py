"""What a refusal offers its reader, passes: its epsilon and its number of queries are within the budget."""

from __future__ import annotations

import re
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from api.coordinator.budgets import refusal
from api.coordinator.config import LimitsTable
from api.limits import Slots, TooManyRequests, Uploads, Window, instead_of, most_bytes, too_large
from labeler.accounting.lifetime import set_aside_nano
from labeler.batching import round_sizes, total_charges
from labeler.budget import MOST_EPSILON, budget_for, epsilon_left, say_epsilon_left
from labeler.errors import BudgetExceeded, InvalidSetting, QuotaUsedUp
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
    {"method": "reverse-knn", "k": 3, "release": "winner"},
    {"method": "knn", "max_queries": 12, "release": "winner"},
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
        assert (
            task.traits.least_asked(task) > 1
            or queries_that_fit(task, task.max_queries, level=level, left_nano=left) == 0
        )
        return
    count = int(ways[1].split()[3])
    assert total_charges(task, round_sizes(task, count))[level] <= left
    assert total_charges(task, round_sizes(task, count + 1))[level] > left


@pytest.mark.parametrize("share", [0.02, 0.4, 0.97])
@pytest.mark.parametrize("fields", [one for one in TASKS if "release" in one], ids=lambda one: one["method"])
def test_a_refusal_of_winners_names_an_epsilon_and_a_number_that_fit(fields: dict[str, Any], share: float) -> None:
    task = noised(make_task(**fields), 1.0)
    asked = total_charges(task, round_sizes(task, task.max_queries))["instance"]
    error = BudgetExceeded("", account="federation", level="instance", asked=asked, left=int(asked * share), cap=asked)
    said = str(refusal(error, task, queries=task.max_queries, delta=task.delta))
    found = re.search(r"Ask for epsilon ([\d.]+) or less", said)
    assert found, said
    smaller = noised(task, float(found[1]))
    assert 0.95 * error.left < total_charges(smaller, round_sizes(task, task.max_queries))["instance"] <= error.left
    assert ("ask at most" in said) == (task.traits.least_asked(task) == 1 and share > 0.1)


TOO_LARGE = [
    ("/v1/jobs", False),
    ("/v1/jobs", True),
    ("/v1/labels", True),
    ("/v1/enrolments", False),
    ("/v1/tasks", False),
]
DOES = {"/v1/jobs": "several jobs", "/v1/labels": "as a job", "/v1/enrolments": "agent join"}


@pytest.mark.parametrize(("path", "is_form"), TOO_LARGE)
def test_a_body_that_is_too_large_is_told_the_limit_what_came_and_what_to_do(path: str, is_form: bool) -> None:
    most = most_bytes(path, is_form=is_form, limits=LimitsTable())
    said = str(too_large(most, most + 5, instead=instead_of(path, is_form=is_form)))
    assert f"{most + 5} bytes" in said
    assert f"at most {most} are taken" in said
    assert DOES.get(path, "less") in said


def test_a_refusal_for_too_much_at_once_says_the_limit_and_when_to_come_again() -> None:
    of_one, of_all = Slots("prices", each=1, total=9), Slots("prices", each=9, total=1)
    for slots, words in ((of_one, "one client may have 1 prices"), (of_all, "1 prices of all clients")):
        with slots.hold("a"), pytest.raises(TooManyRequests, match=rf"{words}.*send it again"):
            slots.take("a")
    window = Window(2, lambda: 0.0, "one token may send")
    window.hit("a")
    window.hit("a")
    with pytest.raises(TooManyRequests, match="one token may send 2 requests a minute; send the next in 60 s"):
        window.hit("a")
    uploads = Uploads(10, free=lambda: 2**40)
    uploads.add("a", 8)
    with pytest.raises(QuotaUsedUp, match=r"may take 10 bytes.* take 8 already.* brings 5 more\. Wait until a job"):
        uploads.add("a", 5)


@pytest.mark.parametrize("nano", [1000, 10**17])
def test_a_budget_for_life_that_is_no_promise_names_the_settings_that_decide_it(nano: int) -> None:
    with pytest.raises(InvalidSetting, match=r"a (larger|smaller) epsilon for votes for life \(life_epsilon of "):
        set_aside_nano(nano)


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
