"""Prices and their inverses, of histograms and of winners, and for whom they hold."""

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
from labeler.accounting.winner import ONE_BIT, SWAP, IntegerWinner
from labeler.batching import round_charges
from labeler.budget import budget_for, epsilon_spent
from labeler.errors import InvalidSetting, InvalidTask, UnsafeGrid
from labeler.methods.sensitivity import integer_event, squared_sensitivity
from labeler.noise import MAX_SHARE_SIGMA_GRID
from labeler.planning import METHOD_OF_WINNERS, holds_against, instance_epsilon, price, resolve_colluding_agents
from labeler.setting import LEVELS
from labeler.solving import solve_k, solve_queries, solve_sigma
from labeler.task import Level, Method, StatedLevel, Task, Training
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


@settings(max_examples=40)
@given(task=TASKS)
def test_the_certified_epsilon_is_above_the_continuous_one_and_within_one_percent(task: Task) -> None:
    instance = price(task).instance
    assert instance.continuous_epsilon <= instance.epsilon
    if instance.continuous_epsilon < 60:
        assert instance.epsilon <= 1.01 * instance.continuous_epsilon + 1e-9


@settings(max_examples=25)
@given(task=TASKS, queries=st.integers(1, 3000))
def test_asking_less_never_costs_more(task: Task, queries: int) -> None:
    fewer, whole = price(task, queries=min(queries, task.max_queries)), price(task)
    for level in ("instance", "agent"):
        assert fewer.statement(level).epsilon <= whole.statement(level).epsilon
        assert (fewer.statement(level).charge_nano or 0) <= (whole.statement(level).charge_nano or 0)
    assert instance_epsilon(task, fewer.queries) == fewer.instance.epsilon


@settings(max_examples=25)
@given(task=TASKS)
def test_a_budget_equal_to_the_price_pays_for_the_task_once_and_not_twice(task: Task) -> None:
    statement = price(task).instance
    event = integer_event(task, "instance", task.max_queries)
    assert event is not None
    assert statement.charge_nano == event.charge_nano
    if 1e-3 < statement.epsilon < 60:
        cap = budget_for(statement.epsilon, task.delta)
        assert event.charge_nano <= cap < 2 * event.charge_nano


@settings(max_examples=25)
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


@settings(max_examples=15)
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
    with pytest.raises(InvalidSetting, match="set ballot_radius, or max_agent_records, in"):
        solve_sigma(_task(method="reverse-knn"), 1.0, level="agent")
    with pytest.raises(InvalidSetting, match="max_agent_records"):
        solve_queries(_task(method="reverse-knn"), 1.0, level="agent")
    with pytest.raises(UnsafeGrid):
        solve_sigma(_task(grid_scale=16), 50.0)


@pytest.mark.parametrize("bad", [0.0, -1.0, math.nan, math.inf, True, "1", None])
def test_a_malformed_target_is_refused(bad: Any) -> None:
    for solve in (solve_sigma, solve_queries, solve_k):
        with pytest.raises(InvalidSetting, match=f"target epsilon must be a positive finite number, found {bad!r}"):
            solve(_task(), bad)


@pytest.mark.parametrize("bad", [0, 207, -1, 5.0, True])
def test_a_number_of_queries_outside_the_task_is_refused(bad: Any) -> None:
    with pytest.raises(InvalidSetting, match="queries must be between 1 and the task's max_queries 206"):
        price(_task(), queries=bad)


@pytest.mark.parametrize(("agents", "colluding", "dropouts"), [(3, 0, 0), (3, 1, 0), (10, 2, 3), (10, 0, 3)])
def test_collusion_and_dropouts_are_paid_for_in_noise_and_not_in_epsilon(
    agents: int, colluding: int, dropouts: int
) -> None:
    """One of three colludes: the same 2.976, and noise larger by sqrt(3/2). Each has its own factor."""
    found = price(_task(agents=agents, colluding_agents=colluding, max_dropouts=dropouts))
    assert round(found.instance.epsilon, 3) == 2.976
    assert found.instance.continuous_epsilon == price(_task()).instance.continuous_epsilon
    factors, left = found.noise_factors, agents - colluding
    assert factors.collusion == pytest.approx(math.sqrt(agents / left))
    assert factors.dropouts == pytest.approx(math.sqrt(left / (left - dropouts)))
    assert factors.total == pytest.approx(math.sqrt(agents / (left - dropouts)))
    assert found.total_sigma_votes == pytest.approx(25 * factors.total)


@pytest.mark.long
def test_a_winner_on_a_coarser_grid_costs_hardly_more() -> None:
    """With 100 agents the sums must fit the field; the integer bound of the coarser grid is what is stated."""
    many = {"agents": 100, "colluding_agents": 0}
    few, many_ = price(_task(release="winner")), price(_task(**many, release="winner"))
    assert many_.grid_scale < price(_task(**many)).grid_scale
    assert many_.instance.epsilon == pytest.approx(few.instance.epsilon, rel=1e-3)


# Winners: which tasks have a price of them, and that it is never above the histogram's.


_winners = partial(
    make_task,
    method="knn",
    k=5,
    sigma_votes=12.0,
    delta=1e-05,
    max_queries=40,
    release="winner",
    agents=5,
    colluding_agents=1,
)


@pytest.mark.parametrize(
    ("changes", "level", "change"),
    [
        ({}, "instance", SWAP),
        ({}, "agent", None),
        ({"k": 1}, "agent", ONE_BIT),
        ({"records_per_person": 1}, "person", SWAP),
        ({"records_per_person": 2}, "person", None),
        ({"method": "ensemble", "k": 1}, "instance", SWAP),
        ({"method": "ensemble", "k": 1}, "agent", ONE_BIT),
        ({"method": "reverse-knn", "k": 1, "max_agent_records": 1}, "instance", None),
        ({"method": "reverse-knn", "k": 1, "max_agent_records": 1}, "agent", None),
        ({"release": "histogram"}, "instance", None),
    ],
)
def test_winners_have_a_price_where_one_vote_of_a_row_comes_goes_or_moves(
    changes: dict[str, Any], level: StatedLevel, change: str | None
) -> None:
    event = integer_event(_winners(**changes), level, 40)
    assert (event.change if isinstance(event, IntegerWinner) else None) == change


@pytest.mark.parametrize("colluding", [0, 3])
def test_winners_cost_less_than_their_sums_whoever_colludes(colluding: int) -> None:
    task = _winners(method="ensemble", k=1, colluding_agents=colluding)
    winners, sums = price(task), price(task.model_copy(update={"release": "histogram", "grid_scale": task.scale}))
    assert winners.instance.method == METHOD_OF_WINNERS != sums.instance.method
    assert winners.instance.epsilon < 0.95 * sums.instance.epsilon
    assert winners.agent.epsilon < 0.9 * sums.agent.epsilon
    assert price(task, queries=20).agent.epsilon < winners.agent.epsilon
    for level in LEVELS:
        assert winners.statement(level).continuous_epsilon == sums.statement(level).continuous_epsilon
        charged = round_charges(task, 40)[level]
        assert charged == winners.statement(level).charge_nano
        assert charged < round_charges(task.model_copy(update={"release": "histogram"}), 40)[level]
        spent = epsilon_spent(charged, task.delta)
        assert spent is not None
        assert spent == pytest.approx(winners.statement(level).epsilon, rel=1e-5)


@pytest.mark.parametrize("delta", [1e-17, 1e-100])
def test_a_delta_that_could_notice_what_is_outside_the_gaussian_pays_for_the_sums(delta: float) -> None:
    event = integer_event(_winners(delta=delta), "instance", 40)
    assert event is not None
    assert event.opens_sums


def test_a_guarantee_too_large_for_the_bounds_of_winners_pays_for_the_sums() -> None:
    task = _winners(sigma_votes=2.0, max_queries=5000)
    assert isinstance(integer_event(task, "instance", 1), IntegerWinner)
    event = integer_event(task, "instance", 5000)
    assert event is not None
    assert event.opens_sums


def test_the_noise_for_a_price_is_found_for_winners_too() -> None:
    task = _winners(method="ensemble", k=1)
    sigma = solve_sigma(task, 1.0, level="agent")
    assert price(task.model_copy(update={"sigma_votes": sigma})).agent.epsilon <= 1.0
    assert price(task.model_copy(update={"sigma_votes": sigma * 0.999})).agent.epsilon > 1.0
    assert sigma < 0.91 * solve_sigma(task.model_copy(update={"release": "histogram"}), 1.0, level="agent")


def test_two_classes_are_a_duel_unless_an_answer_may_be_left_out() -> None:
    duel, abstaining = (
        integer_event(_winners(classes=["a", "b"], **more), "instance", 40) for more in ({}, {"abstain_below": 2})
    )
    assert isinstance(duel, IntegerWinner)
    assert isinstance(abstaining, IntegerWinner)
    assert duel.is_duel
    assert not abstaining.is_duel
    variance = float(duel.variance_grid)
    assert duel.mu == pytest.approx(2 * duel.grid_scale / (2 * variance - 3) ** 0.5, rel=1e-12)
    assert abstaining.mu == pytest.approx(abstaining.grid_scale / (variance / 2 - 3) ** 0.5, rel=1e-12)


# For whom a price holds: a participant that reads the release knows its own share of the noise.


_known = partial(make_task, method="reverse-knn", sigma_votes=3.0, delta=1e-05, max_queries=20)


def _at_half(**changes: Any) -> Task:
    task = _known(**changes)
    return task.model_copy(update={"sigma_votes": solve_sigma(task, 0.5)})


@pytest.mark.parametrize(("agents", "worth"), [(2, 0.73), (3, 0.62), (5, 0.56)])
def test_a_stated_half_is_worth_less_against_a_participant_that_reads(agents: int, worth: float) -> None:
    """The numbers of the specification, at delta 1e-5, to the two digits that it prints."""
    found = price(_at_half(agents=agents, colluding_agents=0))
    assert found.instance.epsilon == pytest.approx(0.5, abs=1e-5)
    assert found.instance.participant_epsilon == pytest.approx(worth, abs=0.005)
    exact = epsilon_of_delta(1e-5, found.instance.mu * math.sqrt(agents / (agents - 1)))
    assert exact < found.instance.participant_epsilon < exact * 1.0001


@settings(max_examples=60)
@given(agents=st.integers(1, 12), colluding=st.integers(0, 3), dropouts=st.integers(0, 3), method=st.booleans())
def test_the_price_against_a_participant_is_that_of_the_shares_it_does_not_know(
    agents: int, colluding: int, dropouts: int, method: bool
) -> None:
    """The oracle: among all sets of contributors that may be opened, the fewest shares unknown to a reader in it."""
    if agents - colluding - dropouts < 1:
        return
    task = _known(
        method="reverse-knn" if method else "knn", agents=agents, colluding_agents=colluding, max_dropouts=dropouts
    )
    # The owner of the record contributes, or nothing is told of it; the reader contributes or not.
    unknown = [
        number - (1 if reads and number > 1 else 0)
        for number in range(max(1, task.quorum), agents + 1)
        for reads in (False, True)
    ]
    found = price(task).instance
    factor = math.sqrt(task.noise_contributors / min(min(unknown), task.noise_contributors))
    worth = epsilon_of_delta(task.delta, found.mu * factor)
    assert worth <= found.participant_epsilon <= worth * 1.001
    assert found.participant_epsilon >= found.epsilon


def test_noise_of_an_agents_own_holds_against_all_others() -> None:
    training = Training(min_records=100, regularisation=0.1, dimension=2)
    task = _known(method="aux-distill", training=training, colluding_agents=0)
    found = price(task)
    assert found.instance.participant_epsilon == found.instance.epsilon
    assert "all other participants" in found.holds_against


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"agents": 1}, "nobody else knows any of its noise"),
        ({"agents": 2}, "then epsilon is 0.730 per private image"),
        ({"agents": 5}, "then epsilon is 0.565 per private image"),
        ({"agents": 5, "colluding_agents": 1}, "and any one participant, who may be the reader"),
        ({"agents": 5, "colluding_agents": 3}, "and any 3 participants, who may be readers"),
    ],
)
def test_a_price_says_in_words_for_whom_it_holds(changes: dict[str, int], said: str) -> None:
    found = price(_at_half(**changes))
    assert said in found.holds_against
    assert found.to_json()["holds_against"] == found.holds_against
    assert found.to_json()["colluding_agents"] == changes.get("colluding_agents", 0)


def test_a_price_without_a_bound_says_so_for_participants_too() -> None:
    task = _known(method="reverse-knn", max_agent_records=None)
    assert price(task).agent.to_json()["participant_epsilon"] is None
    assert "there is no bound per private image" in holds_against(task, None)


@pytest.mark.parametrize(
    ("given_", "agents", "dropouts", "found"),
    [(None, 1, 0, 0), (None, 2, 0, 1), (None, 3, 1, 1), (None, 500, 3, 1), (0, 2, 1, 0), (0, 5, 0, 0), (2, 5, 0, 2)],
)
def test_one_participant_is_counted_on_unless_the_user_says_otherwise(
    given_: int | None, agents: int, dropouts: int, found: int
) -> None:
    assert resolve_colluding_agents(given_, agents=agents, max_dropouts=dropouts) == found


def test_two_agents_of_which_one_may_be_missing_are_told_what_to_do() -> None:
    with pytest.raises(InvalidTask, match=r"lower max_dropouts to 0, or say colluding_agents = 0"):
        resolve_colluding_agents(None, agents=2, max_dropouts=1)
    assert resolve_colluding_agents(None, agents=2, max_dropouts=1, method="aux-distill") == 0


def test_a_stored_task_keeps_its_number_and_its_digest() -> None:
    """Made by a version in which the default was 0; the digest is that of then."""
    stored = {
        "name": "t", "classes": ["a", "b"], "method": "knn", "k": 1, "sigma_votes": 25.0, "delta": 1e-4,
        "max_queries": 10, "release": "histogram", "agents": 3, "max_dropouts": 0, "max_agent_records": None,
        "talliers": 3, "grid_scale": None, "backbone_fingerprint": "f", "nonce": "",
    }  # fmt: skip
    assert Task.model_validate(stored).colluding_agents == 0
    assert Task.model_validate(stored).digest == Task.model_validate(stored | {"colluding_agents": 0}).digest
    assert Task.model_validate(stored).digest == "484f2282a9759bd3e50347c57a3f676775bee553453b60c10c00befb08967e72"


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"method": "knn", "max_queries": 20}, "one record moves at most one vote at each of the 20 questions"),
        ({"method": "reverse-knn", "k": 1}, "one record moves one vote in all, at the question nearest to it"),
        ({"method": "ensemble"}, None),
    ],
)
def test_a_price_says_what_one_record_moves_in_the_words_of_its_method(
    fields: dict[str, Any], said: str | None
) -> None:
    task = make_task(**fields)
    assert task.traits.one_record(task) == price(task).one_record == said
