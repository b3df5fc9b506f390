"""Which tasks have a price of winners, and that it is never above the histogram's."""

from __future__ import annotations

from typing import Any

import pytest

from labeler.accounting.winner import ONE_BIT, SWAP
from labeler.methods.sensitivity import integer_event
from labeler.planning import price
from labeler.task import StatedLevel, Task, parse_task
from labeler.winner_price import winner_event, winner_guarantee, winner_guarantees


def _task(**changes: Any) -> Task:
    fields: dict[str, Any] = {
        "name": "winners",
        "classes": ["a", "b", "c"],
        "method": "knn",
        "k": 5,
        "sigma_votes": 12.0,
        "delta": 1e-5,
        "max_queries": 40,
        "release": "winner",
        "agents": 5,
        "colluding_agents": 1,
    }
    return parse_task(fields | changes)


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
    event = winner_event(_task(**changes), level, 40)
    assert (None if event is None else event.change) == change


@pytest.mark.parametrize("colluding", [0, 1, 3])
def test_winners_cost_less_than_their_sums_whoever_colludes(colluding: int) -> None:
    task = _task(method="ensemble", k=1, colluding_agents=colluding)
    stated = price(task)
    found = winner_guarantees(task, 40)
    assert set(found) == {"instance", "agent"}
    assert found["instance"].epsilon < 0.95 * stated.instance.epsilon
    assert found["agent"].epsilon < 0.85 * stated.agent.epsilon
    fewer = winner_guarantee(task, "agent", 20)
    assert fewer is not None
    assert fewer.epsilon < found["agent"].epsilon


def test_two_classes_are_a_duel_unless_an_answer_may_be_left_out() -> None:
    duel, abstaining = (
        winner_event(_task(classes=["a", "b"], **more), "instance", 40) for more in ({}, {"abstain_below": 2})
    )
    assert duel is not None
    assert abstaining is not None
    assert duel.is_duel
    assert not abstaining.is_duel
    event = integer_event(_task(classes=["a", "b"]), "instance", 40)
    assert event is not None
    variance = float(event.variance_grid)
    assert duel.mu == pytest.approx(2 * event.grid_scale / (2 * variance - 3) ** 0.5, rel=1e-12)
    assert abstaining.mu == pytest.approx(event.grid_scale / (variance / 2 - 3) ** 0.5, rel=1e-12)
