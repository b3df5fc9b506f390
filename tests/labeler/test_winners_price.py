"""Which tasks have a price of winners, and that it is never above the histogram's."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from labeler.accounting.winner import ONE_BIT, SWAP, IntegerWinner
from labeler.batching import round_charges
from labeler.budget import epsilon_spent
from labeler.methods.sensitivity import integer_event
from labeler.planning import price
from labeler.setting import LEVELS
from labeler.solving import solve_sigma
from labeler.task import StatedLevel
from tests.labeler.tasks import make_task

_task = partial(
    make_task,
    name="winners",
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
    event = integer_event(_task(**changes), level, 40)
    assert (event.change if isinstance(event, IntegerWinner) else None) == change


@pytest.mark.parametrize("colluding", [0, 1, 3])
def test_winners_cost_less_than_their_sums_whoever_colludes(colluding: int) -> None:
    task = _task(method="ensemble", k=1, colluding_agents=colluding)
    winners, sums = price(task), price(task.model_copy(update={"release": "histogram", "grid_scale": task.scale}))
    assert winners.instance.epsilon < 0.95 * sums.instance.epsilon
    assert winners.agent.epsilon < 0.9 * sums.agent.epsilon
    assert price(task, queries=20).agent.epsilon < winners.agent.epsilon
    for level in LEVELS:
        charged = round_charges(task, 40)[level]
        assert charged == winners.statement(level).charge_nano
        assert charged < round_charges(task.model_copy(update={"release": "histogram"}), 40)[level]
        spent = epsilon_spent(charged, task.delta)
        assert spent is not None
        assert spent == pytest.approx(winners.statement(level).epsilon, rel=1e-5)


@pytest.mark.parametrize("delta", [1e-17, 1e-100])
def test_a_delta_that_could_notice_what_is_outside_the_gaussian_pays_for_the_sums(delta: float) -> None:
    event = integer_event(_task(delta=delta), "instance", 40)
    assert event is not None
    assert event.opens_sums


def test_a_guarantee_too_large_for_the_bounds_of_winners_pays_for_the_sums() -> None:
    task = _task(sigma_votes=2.0, max_queries=5000)
    assert isinstance(integer_event(task, "instance", 1), IntegerWinner)
    event = integer_event(task, "instance", 5000)
    assert event is not None
    assert event.opens_sums


def test_the_noise_for_a_price_is_found_for_winners_too() -> None:
    task = _task(method="ensemble", k=1)
    sigma = solve_sigma(task, 1.0, level="agent")
    assert price(task.model_copy(update={"sigma_votes": sigma})).agent.epsilon <= 1.0
    assert price(task.model_copy(update={"sigma_votes": sigma * 0.999})).agent.epsilon > 1.0
    assert sigma < 0.91 * solve_sigma(task.model_copy(update={"release": "histogram"}), 1.0, level="agent")


def test_two_classes_are_a_duel_unless_an_answer_may_be_left_out() -> None:
    duel, abstaining = (
        integer_event(_task(classes=["a", "b"], **more), "instance", 40) for more in ({}, {"abstain_below": 2})
    )
    assert isinstance(duel, IntegerWinner)
    assert isinstance(abstaining, IntegerWinner)
    assert duel.is_duel
    assert not abstaining.is_duel
    variance = float(duel.variance_grid)
    assert duel.mu == pytest.approx(2 * duel.grid_scale / (2 * variance - 3) ** 0.5, rel=1e-12)
    assert abstaining.mu == pytest.approx(abstaining.grid_scale / (variance / 2 - 3) ** 0.5, rel=1e-12)
