"""Tasks: what is left out is filled in from the federation, and an agent that differs is named."""

from __future__ import annotations

import re
import secrets
from typing import Any

import pytest

from api.coordinator.tasks import describe_task, task_view
from api.schema import TaskRequest
from labeler.errors import InvalidTask, LabelerError
from labeler.ledger.chain import Head
from labeler.planning import price
from labeler.task import parse_task
from tests.api.conftest import CLASSES, FINGERPRINT, House


def test_all_active_agents_take_part_and_their_facts_fill_the_gaps(house: House) -> None:
    house.enrol("gone")
    house.parties.revoke("gone")
    record = house.task()
    assert record.participants == ("east", "north", "west")
    assert record.task.agents == 3
    assert record.task.talliers == 3
    assert record.task.classes == CLASSES
    assert record.task.backbone_fingerprint == FINGERPRINT
    assert house.tasks.get(record.digest) == record


@pytest.mark.parametrize("delta", [5e-324, 1e-320, 2.3e-308, 1e-100, 1 - 2**-53])
@pytest.mark.parametrize("method", ["knn", "reverse-knn", "ensemble"])
def test_a_task_of_any_delta_can_be_shown(house: House, delta: float, method: str) -> None:
    """One that cannot would break every list that it stands in, for everybody who may see it."""
    record = house.task(method=method, delta=delta, k=1)
    found = task_view(house.tasks.get(record.digest)).price.instance_epsilon
    assert found is None or found > 0


def test_a_task_that_cannot_be_priced_is_not_kept(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("api.coordinator.tasks.price_view", lambda *_: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        house.task()
    assert house.tasks.list() == []


def test_equal_requests_make_different_tasks(house: House) -> None:
    assert house.task().digest != house.task().digest


def test_the_noise_is_solved_for_a_price(house: House) -> None:
    record = house.task(sigma_votes=None, epsilon=2.0)
    assert 1.99 < price(record.task).instance.epsilon <= 2.0
    view = task_view(record)
    assert view.price.instance_epsilon == price(record.task).instance.epsilon
    assert view.queries_left == 100


def test_describing_a_task_keeps_nothing_and_says_the_same_twice(house: House) -> None:
    request = TaskRequest(name="animals", sigma_votes=40.0, delta=1e-5, max_queries=10)
    first, participants = describe_task(request, config=house.config, parties=house.parties)
    second, _ = describe_task(request, config=house.config, parties=house.parties)
    assert first.digest == second.digest
    assert participants == ("east", "north", "west")
    assert house.tasks.list() == []


def test_named_agents_and_classes_are_taken_as_they_are(house: House) -> None:
    record = house.task(agents=["west", "east"], classes=CLASSES, backbone_fingerprint=FINGERPRINT)
    assert record.participants == ("east", "west")


def test_the_configured_classes_are_the_default(house: House) -> None:
    house.config = house.config.model_copy(update={"classes": tuple(reversed(CLASSES))})
    with pytest.raises(InvalidTask, match="agents east, north, west have other classes"):
        house.task()


def test_an_agent_that_differs_is_named(house: House) -> None:
    house.enrol("zoo", classes=("cat", "dog"))
    with pytest.raises(InvalidTask, match="agents zoo have other classes"):
        house.task()
    assert house.task(agents=["east", "north"]).task.agents == 2
    house.enrol("lab", fingerprint="0" * 16)
    with pytest.raises(InvalidTask, match=re.escape("agents lab (0000000000000000) made their features")):
        house.task(agents=["east", "lab"])


def test_an_agent_that_has_not_reported_is_named(house: House) -> None:
    house.parties.enrol("new", "agent", "1" * 64, "2" * 64)
    with pytest.raises(InvalidTask, match="agents new have not reported"):
        house.task()
    assert house.task(classes=CLASSES, backbone_fingerprint=FINGERPRINT).task.agents == 4


@pytest.mark.parametrize(
    ("fields", "error", "said"),
    [
        ({"abstain_below": 3}, InvalidTask, "only means something for release winner"),
        (
            {"agents": ["east", "nobody"]},
            InvalidTask,
            "agents: nobody are not enrolled, or were revoked; enrol their keys first, or leave them out. Enrolled are "
            "east, north, west; GET /v1/parties lists everybody",
        ),
        ({"agents": ["east", "east"]}, InvalidTask, "names one twice"),
        ({"agents": []}, InvalidTask, "no agent is enrolled"),
        ({"colluding_agents": 3}, InvalidTask, "too few agents for the collusion stated"),
        ({"method": "reverse-knn", "k": 200}, InvalidTask, "only 100 queries are asked"),
        ({"max_agent_records": 5}, InvalidTask, "only means something for method reverse-knn"),
    ],
)
def test_what_cannot_be_a_task_is_refused_in_a_sentence(
    house: House, fields: dict[str, Any], error: type[LabelerError], said: str
) -> None:
    with pytest.raises(error, match=re.escape(said)):
        house.task(**fields)
    assert house.tasks.list() == []


@pytest.mark.parametrize("noise", [{"sigma_votes": 400.0}, {"sigma_votes": None, "epsilon": 5.0}])
def test_a_reverse_knn_task_whose_one_round_fits_no_message_is_refused_with_how_many_would(
    house: House, noise: dict[str, Any]
) -> None:
    fields = {"method": "reverse-knn", "max_queries": 4096, "classes": [f"class {n}" for n in range(3000)], **noise}
    for agent in ("east", "north", "west"):
        house.parties.contact(agent, house.clock(), {}, Head(1, "a" * 64))
    with pytest.raises(InvalidTask, match="Make a task of at most 2752 queries"):
        house.task(backbone_fingerprint=FINGERPRINT, **fields)


def test_one_participant_may_know_its_noise_unless_the_request_says_otherwise(house: House) -> None:
    assert house.task().task.colluding_agents == 1
    assert house.task(agents=["east"]).task.colluding_agents == 0
    view = task_view(house.task(colluding_agents=0))
    assert view.task["colluding_agents"] == view.price.colluding_agents == 0
    assert "a reader who takes part in no way" in view.price.holds_against
    assert view.price.participant_epsilon is not None
    assert view.price.instance_epsilon is not None
    assert view.price.participant_epsilon > view.price.instance_epsilon
    with pytest.raises(InvalidTask, match="say colluding_agents = 0"):
        house.task(agents=["east", "west"], max_dropouts=1)


def test_a_task_may_have_the_talliers_add_the_noise_and_its_price_says_so(house: House) -> None:
    view = task_view(house.task(dishonest_talliers=1))
    plain = task_view(house.task(colluding_agents=2))
    assert view.task["dishonest_talliers"] == view.price.dishonest_talliers == 1
    assert view.price.colluding_agents == 2, "all agents but the one a number is about"
    assert "all other participants and one of the three talliers" in view.price.holds_against
    assert view.price.participant_epsilon == view.price.instance_epsilon
    assert "dishonest_talliers" not in plain.task
    assert plain.price.dishonest_talliers is None
    record, other = house.tasks.get(view.task_id), house.tasks.get(plain.task_id)
    assert record.task.total_sigma_votes**2 == pytest.approx(other.task.total_sigma_votes**2 / 2)
    assert parse_task(view.task).digest == view.task_id


def tell(house: House, **groups: str | None) -> None:
    """Enrol talliers, in their order, that have told which group they find winners with."""
    for number, (name, group) in enumerate(groups.items()):
        house.parties.enrol(name, "tallier", secrets.token_hex(32), secrets.token_hex(32), tallier=number)
        facts = {} if group is None else {"winner_group": group}
        house.parties.contact(name, house.clock(), facts, Head(1, "a" * 64))


def test_a_winner_task_is_taken_when_three_talliers_have_pinned_each_other(house: House) -> None:
    tell(house, t0="a" * 64, t1="a" * 64, t2="a" * 64)
    record = house.task(release="winner", abstain_below=4)
    assert (record.task.release, record.task.abstain_below, record.task.talliers) == ("winner", 4, 3)


@pytest.mark.parametrize(
    ("groups", "said"),
    [
        ({}, "only 0 talliers are enrolled"),
        ({"t0": "a" * 64, "t1": None, "t2": "a" * 64}, "together, and t1 cannot; their sites exchange addresses"),
        ({"t0": "a" * 64, "t1": "a" * 64, "t2": "b" * 64}, "pinned certificates that do not match each other's"),
    ],
)
def test_a_winner_task_is_refused_until_all_three_talliers_can_find_winners(
    house: House, groups: dict[str, str | None], said: str
) -> None:
    tell(house, **groups)
    with pytest.raises(InvalidTask, match=re.escape(said)):
        house.task(release="winner")
    assert house.tasks.list() == []


def test_a_winner_task_with_two_talliers_is_refused_with_the_reason(house: House) -> None:
    house.config = house.config.model_copy(update={"talliers": 2})
    tell(house, t0="a" * 64, t1="a" * 64)
    with pytest.raises(InvalidTask, match="of two, one dishonest tallier is no minority"):
        house.task(release="winner")
