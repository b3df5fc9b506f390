"""Prices and their inverses."""

from __future__ import annotations

import json
import math
from functools import partial
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from labeler.accounting.events import GaussianSum
from labeler.accounting.gaussian import epsilon_of_delta, mu_of_epsilon
from labeler.accounting.integer import papers_epsilon
from labeler.budget import Account, budget_for
from labeler.errors import InvalidSetting, UnsafeGrid
from labeler.methods.sensitivity import squared_sensitivity
from labeler.noise import MAX_SHARE_SIGMA_GRID
from labeler.planning import METHOD_OF_WINNERS, instance_epsilon, integer_event, price
from labeler.solving import solve_k, solve_queries, solve_sigma
from labeler.task import Level, Method, Task
from tests.labeler.tasks import make_task

_task = partial(
    make_task, classes=tuple("abcdefghij"), method="knn", k=50, sigma_votes=25.0, max_queries=206, colluding_agents=1
)


TASKS = st.builds(
    _task,
    k=st.integers(1, 60),
    sigma_votes=st.floats(2, 200),
    delta=st.floats(-9, -2).map(lambda exponent: 10.0**exponent),
    max_queries=st.integers(1, 3000),
    agents=st.integers(2, 50),
)


def test_the_papers_first_setting_costs_what_it_should_at_both_levels() -> None:
    found = price(_task())
    assert found.instance.continuous_epsilon == pytest.approx(2.97574, abs=5e-6)
    assert 2.97574 < found.instance.epsilon < 2.9759
    assert found.instance.as_in_paper_epsilon == pytest.approx(3.8143, abs=5e-5)
    agent = GaussianSum(206 * 50**2, 25.0, "agent")
    assert found.agent.as_in_paper_epsilon == papers_epsilon(agent, 1e-4)
    exact = epsilon_of_delta(1e-4, math.sqrt(agent.mu_squared))
    assert exact < found.agent.epsilon < 1.0001 * exact
    assert found.noise_share_sigma_votes == pytest.approx(25 / math.sqrt(2))
    assert found.total_sigma_votes == pytest.approx(25 * math.sqrt(3 / 2))
    assert found.quorum == 3


def test_the_json_has_the_shape_people_rely_on() -> None:
    found = json.loads(json.dumps(price(_task()).to_json(), allow_nan=False))
    assert {"instance", "agent", "delta", "as_in_paper", "noise_share_sigma"} <= set(found)
    assert set(found["as_in_paper"]) == {"instance", "agent"}
    for level in ("instance", "agent"):
        assert found[level]["epsilon"] > 0
        assert found["as_in_paper"][level]["epsilon"] > found[level]["epsilon"]
        assert isinstance(found[level]["charge_nano"], int)
    assert found["delta"] == 1e-4


def test_a_missing_bound_is_null_with_a_reason_and_never_a_number() -> None:
    found = price(_task(method="reverse-knn", k=5)).to_json()
    assert found["agent"]["epsilon"] is None
    assert found["agent"]["charge_nano"] is None
    assert "max_agent_records" in found["agent"]["reason"]
    assert found["as_in_paper"]["agent"]["epsilon"] is None
    assert found["instance"]["epsilon"] > 0

    beyond = price(_task(k=2000, agents=2)).to_json()
    assert beyond["agent"]["epsilon"] is None
    assert "sampler's reach" in beyond["agent"]["reason"]
    json.dumps(beyond, allow_nan=False)


def test_the_winner_costs_less_than_the_histogram_where_that_is_proved() -> None:
    histogram, winner = price(_task()), price(_task(release="winner"))
    assert winner.instance.epsilon < 0.91 * histogram.instance.epsilon
    assert (winner.instance.method, winner.agent) == (METHOD_OF_WINNERS, histogram.agent)
    assert winner.instance.continuous_epsilon == histogram.instance.continuous_epsilon


@settings(max_examples=40, deadline=None)
@given(task=TASKS)
def test_the_certified_epsilon_is_above_the_continuous_one_and_within_one_percent(task: Task) -> None:
    instance = price(task).instance
    assert instance.continuous_epsilon <= instance.epsilon
    if instance.continuous_epsilon < 60:
        assert instance.epsilon <= 1.01 * instance.continuous_epsilon + 1e-9


@settings(max_examples=25, deadline=None)
@given(task=TASKS, queries=st.integers(1, 3000))
def test_asking_less_never_costs_more(task: Task, queries: int) -> None:
    fewer, whole = price(task, queries=min(queries, task.max_queries)), price(task)
    for level in ("instance", "agent"):
        assert fewer.statement(level).epsilon <= whole.statement(level).epsilon
        assert (fewer.statement(level).charge_nano or 0) <= (whole.statement(level).charge_nano or 0)
    assert instance_epsilon(task, fewer.queries) == fewer.instance.epsilon


@settings(max_examples=25, deadline=None)
@given(task=TASKS)
def test_a_budget_equal_to_the_price_pays_for_the_task_once_and_not_twice(task: Task) -> None:
    statement = price(task).instance
    event = integer_event(task, "instance", task.max_queries)
    assert event is not None
    assert statement.charge_nano == event.charge_nano
    if 1e-3 < statement.epsilon < 60:
        cap = budget_for(statement.epsilon, task.delta)
        assert event.charge_nano <= cap < 2 * event.charge_nano
        assert Account("a", "instance", cap).reserve("job", event.charge_nano).left >= 0


@settings(max_examples=25, deadline=None)
@given(task=TASKS, target=st.floats(0.05, 20), level=st.sampled_from(["instance", "agent"]))
def test_the_solved_sigma_meets_the_target_and_no_smaller_one_does(task: Task, target: float, level: Level) -> None:
    try:
        sigma = solve_sigma(task, target, level=level)
    except UnsafeGrid:
        # So much noise is needed that a share of it is beyond the exact sampler, however coarse the grid.
        squared = squared_sensitivity(task, level, task.max_queries)
        needed = math.sqrt(squared or 0) / mu_of_epsilon(target, task.delta)
        assert needed / math.sqrt(task.noise_contributors) > 0.99 * MAX_SHARE_SIGMA_GRID
        return
    assert float(f"{sigma:.6g}") == sigma
    meets = price(_task(**task.model_dump() | {"sigma_votes": sigma})).statement(level).epsilon
    assert meets <= target
    misses = price(_task(**task.model_dump() | {"sigma_votes": sigma * (1 - 3e-5)})).statement(level).epsilon
    assert misses > target


@settings(max_examples=15, deadline=None)
@given(task=TASKS, target=st.floats(0.3, 20), level=st.sampled_from(["instance", "agent"]))
def test_the_solved_number_of_queries_meets_the_target_and_one_more_does_not(
    task: Task, target: float, level: Level
) -> None:
    def epsilon(queries: int) -> float:
        return price(_task(**task.model_dump() | {"max_queries": queries})).statement(level).epsilon

    try:
        queries = solve_queries(task, target, level=level)
    except InvalidSetting:
        assert epsilon(1) > target
        return
    assert epsilon(queries) <= target < epsilon(queries + 1)


@pytest.mark.parametrize(
    ("method", "level", "target"), [("knn", "agent", 50.0), ("knn", "agent", 3.0), ("reverse-knn", "instance", 0.3)]
)
def test_the_solved_k_meets_the_target_and_one_more_does_not(method: Method, level: Level, target: float) -> None:
    task = _task(method=method)
    k = solve_k(task, target, level=level)
    assert price(_task(method=method, k=k)).statement(level).epsilon <= target
    assert price(_task(method=method, k=k + 1)).statement(level).epsilon > target


def test_a_reverse_knn_record_cannot_vote_at_more_queries_than_there_are() -> None:
    assert solve_k(_task(method="reverse-knn"), 1000.0, level="instance") == 206
    assert solve_queries(_task(method="reverse-knn", k=5), 2.0) == 100_000_000


def test_solving_the_paper_setting_backwards_gives_the_paper_setting() -> None:
    target = price(_task()).instance.epsilon
    assert solve_sigma(_task(), target) == 25.0
    assert solve_queries(_task(), target) == 206
    assert solve_k(_task(), price(_task()).agent.epsilon) == 50


def test_an_impossible_target_is_refused_with_the_way_out() -> None:
    with pytest.raises(InvalidSetting, match=r"already queries = 1 costs epsilon .* raise sigma_votes"):
        solve_queries(_task(), 0.001)
    with pytest.raises(InvalidSetting, match="already k = 1 costs"):
        solve_k(_task(sigma_votes=1.0), 0.5)
    with pytest.raises(InvalidSetting, match="k does not change the instance-level price of knn"):
        solve_k(_task(), 1.0, level="instance")
    with pytest.raises(InvalidSetting, match="method ensemble has no k"):
        solve_k(_task(method="ensemble", k=1), 1.0)
    with pytest.raises(InvalidSetting, match="set ballot_radius, or max_agent_records"):
        solve_sigma(_task(method="reverse-knn"), 1.0, level="agent")
    with pytest.raises(InvalidSetting, match="max_agent_records"):
        solve_queries(_task(method="reverse-knn"), 1.0, level="agent")
    with pytest.raises(UnsafeGrid):
        solve_sigma(_task(grid_scale=16), 50.0)


@pytest.mark.parametrize("bad", [0.0, -1.0, math.nan, math.inf, True, "1", None])
def test_a_malformed_target_is_refused(bad: Any) -> None:
    for solve in (solve_sigma, solve_queries, solve_k):
        with pytest.raises(InvalidSetting, match="target epsilon must be"):
            solve(_task(), bad)


@pytest.mark.parametrize("bad", [0, 207, -1, 5.0, True])
def test_a_number_of_queries_outside_the_task_is_refused(bad: Any) -> None:
    with pytest.raises(InvalidSetting, match="queries must be between 1 and the task's max_queries 206"):
        price(_task(), queries=bad)


def test_collusion_and_dropouts_are_paid_for_in_noise_and_not_in_epsilon() -> None:
    """One of three colludes: the same 2.976, and noise larger by sqrt(3/2)."""
    alone, one = price(_task(colluding_agents=0)), price(_task(colluding_agents=1))
    assert alone.instance.continuous_epsilon == one.instance.continuous_epsilon
    assert round(one.instance.epsilon, 3) == round(alone.instance.epsilon, 3) == 2.976
    assert one.total_sigma_votes / alone.total_sigma_votes == pytest.approx(math.sqrt(3 / 2))
    assert one.noise_factors.total == one.noise_factors.collusion == pytest.approx(math.sqrt(3 / 2))
    assert (alone.noise_factors.total, alone.noise_factors.dropouts) == (1.0, 1.0)


def test_each_of_collusion_and_dropouts_has_its_factor() -> None:
    factors = price(_task(agents=10, colluding_agents=2, max_dropouts=3)).noise_factors
    assert factors.collusion == pytest.approx(math.sqrt(10 / 8))
    assert factors.dropouts == pytest.approx(math.sqrt(8 / 5))
    assert factors.total == pytest.approx(math.sqrt(10 / 5))


@pytest.mark.parametrize(
    ("colluding", "dropouts", "worth"), [(0, 0, 2.976), (1, 0, 3.779), (2, 0, 5.733), (1, 1, 5.733)]
)
def test_the_plan_says_what_shares_sized_as_in_the_papers_would_be_worth(
    colluding: int, dropouts: int, worth: float
) -> None:
    found = price(_task(colluding_agents=colluding, max_dropouts=dropouts)).to_json()
    assert round(found["as_in_paper_shares"]["instance"]["epsilon"], 3) == worth
    assert round(found["instance"]["epsilon"], 3) == 2.976


@pytest.mark.long
def test_a_winner_on_a_coarser_grid_costs_hardly_more() -> None:
    """With 100 agents the sums must fit the field; the integer bound of the coarser grid is what is stated."""
    many = {"agents": 100, "colluding_agents": 0}
    few, many_ = price(_task(release="winner")), price(_task(**many, release="winner"))
    assert many_.grid_scale < price(_task(**many)).grid_scale
    assert many_.instance.epsilon == pytest.approx(few.instance.epsilon, rel=1e-3)
