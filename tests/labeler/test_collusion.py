"""For whom a price holds: a participant that reads the release knows its own share of the noise."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from labeler.accounting.gaussian import epsilon_of_delta
from labeler.errors import InvalidTask
from labeler.planning import holds_against, price, resolve_colluding_agents
from labeler.solving import solve_sigma
from labeler.task import Task, Training
from tests.labeler.tasks import make_task

_task = partial(make_task, method="reverse-knn", sigma_votes=3.0, delta=1e-05, max_queries=20)


def _at_half(**changes: Any) -> Task:
    task = _task(**changes)
    return task.model_copy(update={"sigma_votes": solve_sigma(task, 0.5)})


@pytest.mark.parametrize(("agents", "worth"), [(2, 0.73), (3, 0.62), (5, 0.56)])
def test_a_stated_half_is_worth_less_against_a_participant_that_reads(agents: int, worth: float) -> None:
    """The numbers of the specification, at delta 1e-5, to the two digits that it prints."""
    found = price(_at_half(agents=agents, colluding_agents=0))
    assert found.instance.epsilon == pytest.approx(0.5, abs=1e-5)
    assert found.instance.participant_epsilon == pytest.approx(worth, abs=0.005)
    exact = epsilon_of_delta(1e-5, found.instance.mu * math.sqrt(agents / (agents - 1)))
    assert exact < found.instance.participant_epsilon < exact * 1.0001


@settings(max_examples=60, deadline=None)
@given(agents=st.integers(1, 12), colluding=st.integers(0, 3), dropouts=st.integers(0, 3), method=st.booleans())
def test_the_price_against_a_participant_is_that_of_the_shares_it_does_not_know(
    agents: int, colluding: int, dropouts: int, method: bool
) -> None:
    """The oracle: among all sets of contributors that may be opened, the fewest shares unknown to a reader in it."""
    if agents - colluding - dropouts < 1:
        return
    task = _task(
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
    task = _task(method="aux-distill", training=training, colluding_agents=0)
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
    task = _task(method="reverse-knn", max_agent_records=None)
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
    with pytest.raises(InvalidTask, match=r"lower max_dropouts, or say colluding_agents = 0"):
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
