"""Votes for life at the coordinator: what is set aside once, and a service that goes on answering beside it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from pydantic import ValidationError

from api.coordinator.budgets import budget_view, open_accounts
from api.coordinator.config import CoordinatorConfig
from api.coordinator.pricing import price_view
from api.schema import TaskRequest
from labeler.accounting.lifetime import ROUND_NANO, set_aside_nano
from labeler.budget import budget_for
from labeler.errors import BudgetExceeded, InvalidTask
from labeler.ledger.lifetimes import SET_ASIDE
from labeler.ledger.rounds import FEDERATION
from tests.api.conftest import House

AGENTS = ("east", "north", "west")
LIFE = {"method": "reverse-knn", "k": 1, "sigma_votes": 10.0, "lifetime_budget": {"least_similarity": 0.5}}


def with_life(house: House, epsilon: float | None, *, cap: float = 1.0, agents: float | None = None) -> House:
    """The same house, with so much set aside of a cap in every account."""
    caps: dict[str, Any] = {"instance_epsilon": cap, "agent_epsilon": "unlimited"}
    federation = caps | {"life_epsilon": epsilon}
    named = caps | {"life_epsilon": epsilon if agents is None else agents}
    fields = house.config.model_dump() | {"federation": federation, "agents": named}
    config = CoordinatorConfig.model_validate(fields)
    open_accounts(house.ledger, config, AGENTS)
    return replace(house, config=config)


def test_the_whole_promise_is_charged_once_and_twenty_jobs_add_twenty_nano_units(house: House) -> None:
    house = with_life(house, 1.0)
    budget = set_aside_nano(budget_for(1.0, 1e-5))
    task = house.task(**LIFE, max_queries=4)
    assert task.task.lifetime_budget is not None
    assert task.task.lifetime_budget.budget_nano == budget
    before = house.ledger.balance(FEDERATION, "instance")
    assert before.spent == budget
    for number in range(20):
        record = house.task(**LIFE, max_queries=4)
        house.submit(record, 4, key=f"job-{number}")
    after = {one.account: one for one in budget_view(house.ledger, 1e-5).accounts if one.level == "instance"}
    for account in (FEDERATION, "agent:east"):
        shown = after[account]
        assert shown.posted_nano + shown.reserved_nano == budget + 20 * ROUND_NANO
        assert shown.life_nano == budget
        assert shown.spent_epsilon is not None
        assert shown.life_epsilon is not None
        assert 0.99 < shown.life_epsilon <= shown.spent_epsilon <= 1.0
    # By sums of prices the same noise would have been refused at the eighth job.
    alone = price_view(house.task(**(LIFE | {"lifetime_budget": None}), max_queries=4).task, 4)
    assert alone.instance_charge_nano is not None
    assert 7 * alone.instance_charge_nano <= budget < 8 * alone.instance_charge_nano


def test_the_price_says_that_it_is_of_everything_and_what_a_vote_costs(house: House) -> None:
    house = with_life(house, 1.0)
    view = price_view(house.task(**LIFE, max_queries=4).task, 4)
    assert view.instance_epsilon is not None
    assert 0.99 < view.instance_epsilon <= 1.0
    assert (view.agent_epsilon, view.instance_charge_nano) == (None, ROUND_NANO)
    assert view.life is not None
    assert (view.life.votes, view.life.most_votes) == (7, 1)
    assert "together" in view.life.means
    assert "nobody is told" in view.life.means
    jobs = view.life.votes // view.life.most_votes
    assert f"falls silent after {jobs} such jobs, whoever asks" in view.life.means


@pytest.mark.parametrize(("federation", "agents"), [(None, 0.5), (0.5, None), (None, None)])
def test_a_federation_that_has_set_nothing_aside_makes_no_such_task(
    house: House, federation: float | None, agents: float | None
) -> None:
    caps: dict[str, Any] = {"instance_epsilon": 1.0, "agent_epsilon": "unlimited"}
    fields = house.config.model_dump() | {
        "federation": caps | {"life_epsilon": federation},
        "agents": caps | {"life_epsilon": agents},
    }
    house = replace(house, config=CoordinatorConfig.model_validate(fields))
    with pytest.raises(InvalidTask, match="has set nothing aside"):
        house.task(**LIFE, max_queries=4)


def test_no_task_says_more_than_the_least_that_was_set_aside(house: House) -> None:
    house = with_life(house, 1.0, agents=0.5)
    least = set_aside_nano(budget_for(0.5, 1e-5))
    task = house.task(**LIFE, max_queries=4).task
    assert task.lifetime_budget is not None
    assert task.lifetime_budget.budget_nano == least
    wanted = {"least_similarity": 0.5, "budget_nano": least + 1}
    with pytest.raises(InvalidTask, match=f"has set aside {least}"):
        house.task(**(LIFE | {"lifetime_budget": wanted}), max_queries=4)


def test_opening_accounts_again_adds_nothing_and_a_larger_promise_adds_the_rest(house: House) -> None:
    for epsilon in (0.5, 0.5, 0.8, 0.5):
        house = with_life(house, epsilon)
    budgets = [set_aside_nano(budget_for(epsilon, 1e-5)) for epsilon in (0.5, 0.8)]
    assert house.ledger.balance("agent:west", "instance").spent == budgets[1]
    posts = [one for one in house.ledger.entries(search=SET_ASIDE, limit=1000) if one.kind == "post"]
    assert {one.reservation_id for one in posts if one.account == FEDERATION} == {
        f"{SET_ASIDE}/{FEDERATION}/{budget}" for budget in budgets
    }


def test_what_is_spent_already_leaves_no_room_for_a_promise(house: House) -> None:
    house = with_life(house, None, cap=0.5)
    house.ledger.write_off(FEDERATION, "instance", "the disk was lost")
    with pytest.raises(BudgetExceeded, match="are left"):
        with_life(house, 0.5, cap=0.5)


def test_a_part_is_not_larger_than_the_whole_and_no_epsilon_is_solved_for(house: House) -> None:
    with pytest.raises(ValidationError, match="cannot be larger"):
        with_life(house, 2.0)
    request = {"name": "t", "delta": 1e-5, "max_queries": 4} | LIFE
    del request["sigma_votes"]
    with pytest.raises(ValidationError, match="not epsilon"):
        TaskRequest.model_validate(request | {"epsilon": 1.0})


def test_a_life_may_be_said_as_an_epsilon_and_no_more_of_it_than_is_set_aside(house: House) -> None:
    house = with_life(house, 1.0)
    for epsilon in (1.0, 0.5):
        task = house.task(
            **(LIFE | {"lifetime_budget": {"least_similarity": 0.5, "epsilon": epsilon}}), max_queries=4
        ).task
        assert task.lifetime_budget is not None
        assert task.lifetime_budget.budget_nano == set_aside_nano(budget_for(epsilon, 1e-5))
        assert price_view(task, 4).instance_epsilon == pytest.approx(epsilon, rel=1e-2)
    with pytest.raises(
        InvalidTask, match=r"lifetime_budget\.epsilon: 1\.1 .* has set aside epsilon 1\.000? \(at delta"
    ):
        house.task(**(LIFE | {"lifetime_budget": {"least_similarity": 0.5, "epsilon": 1.1}}), max_queries=4)
    with pytest.raises(ValidationError, match="not both"):
        TaskRequest(
            name="t", delta=1e-5, max_queries=4,
            **(LIFE | {"lifetime_budget": {"least_similarity": 0.5, "epsilon": 1.0, "budget_nano": 5}}),
        )  # fmt: skip
