"""Epsilon for any g records of all agents: two oracles, its edges, refusals, and every place that states it."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from dp_accounting.pld import privacy_loss_distribution as pld
from hypothesis import given, settings
from hypothesis import strategies as st

from labeler.accounting.gaussian import epsilon_of_delta
from labeler.errors import InvalidSetting, InvalidTask
from labeler.methods.sensitivity import group_event, integer_event
from labeler.planning import Price, price
from labeler.privacy_card import card_in_words, dearer_card, guarantee, guarantee_of, joined_cards, privacy_card
from labeler.task import Task
from tests.labeler.tasks import make_task

DELTA = 1e-5
MODEL = {"min_records": 20, "regularisation": 0.1, "dimension": 3}
WAYS: dict[str, dict[str, Any]] = {
    "knn": {"method": "knn", "k": 5},
    "knn, winners": {"method": "knn", "k": 5, "release": "winner"},
    "knn, attributes": {"method": "knn", "k": 5, "attributes_per_record": 2},
    "ensemble": {"method": "ensemble"},
    "reverse-knn": {"method": "reverse-knn", "k": 2},
    "reverse-knn, capped": {"method": "reverse-knn", "max_agent_records": 50, "records_per_person": 2},
    "reverse-knn, on a ball": {"method": "reverse-knn", "ballot_radius": 40},
    "reverse-knn, offsets": {"method": "reverse-knn", "offset_share": 0.15},
    "evaluate": {"method": "evaluate"},
    "softmax": {"method": "blind-average", "training": MODEL},
    "logistic": {"method": "blind-average", "training": MODEL | {"learner": "logistic", "max_records": 40}},
    "class means": {"method": "blind-average", "training": {"learner": "means"}},
    "aux-distill": {"method": "aux-distill", "training": MODEL},
    "talliers": {"method": "knn", "k": 5, "dishonest_talliers": 1},
}


def task(way: str, **changes: Any) -> Task:
    fields = {"agents": 5, "colluding_agents": 1, "max_queries": 20, "sigma_votes": 30.0, "delta": DELTA}
    return make_task(**fields | WAYS[way] | changes)


def stated(way: str, size: int, **changes: Any) -> Price:
    return price(task(way, group_size=size, **changes))


@pytest.mark.parametrize("size", [1, 2, 5, 10])
@pytest.mark.parametrize("way", WAYS)
def test_a_group_is_priced_by_two_oracles(way: str, size: int) -> None:
    """g mu for the mu of one record in the histogram: a closed form, and dp-accounting's loss distribution."""
    found = stated(way, size)
    assert found.group is not None
    one = integer_event(task(way, release="histogram"), "instance", 20)
    assert one is not None
    mu = size * math.sqrt(one.mu_squared)
    oracle = pld.from_gaussian_mechanism(1 / mu, value_discretization_interval=1e-3).get_epsilon_for_delta(DELTA)
    for value in (oracle, epsilon_of_delta(DELTA, mu)):
        if size > 1 or "winners" not in way:
            assert 0.995 * value <= found.group.epsilon <= 1.01 * value
        else:
            assert found.group.epsilon < value
    # Noise and charge are those of one record, whoever stands together.
    alone = price(task(way))
    assert (found.instance, found.agent, found.sigma_votes) == (alone.instance, alone.agent, alone.sigma_votes)


@pytest.mark.parametrize("way", WAYS)
def test_a_group_of_one_is_one_record(way: str) -> None:
    found = stated(way, 1)
    assert found.group == found.instance


@settings(max_examples=60, deadline=None)
@given(
    way=st.sampled_from([*WAYS]),
    sizes=st.tuples(st.integers(1, 40), st.integers(1, 40)).map(sorted),
    sigma=st.floats(10, 1000),
    delta=st.floats(1e-9, 1e-2),
)
def test_a_larger_group_never_costs_less(way: str, sizes: list[int], sigma: float, delta: float) -> None:
    smaller, larger = (stated(way, size, sigma_votes=sigma, delta=delta).group for size in sizes)
    assert smaller is not None
    assert larger is not None
    assert smaller.epsilon <= larger.epsilon
    assert smaller.participant_epsilon <= larger.participant_epsilon


def test_beyond_the_reach_of_the_noise_nothing_is_stated_and_the_reason_names_the_group() -> None:
    found = stated("reverse-knn", 2**40).group
    assert found is not None
    assert found.epsilon == math.inf
    assert found.reason is not None
    assert "lower group_size" in found.reason


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        (
            {
                "method": "federated", "max_queries": 10,
                "training": MODEL | {"iterations": 2, "sampled": {"rate": 0.5}},
            },
            "no sampled training",
        ),
        (
            {"method": "reverse-knn", "lifetime_budget": {"budget_nano": 10**8, "least_similarity": 0}},
            "no lifetime_budget",
        ),
        ({"method": "knn", "group_size": 0}, "group_size: must be at least 1"),
        ({"method": "knn", "group_size": 2.5}, "group_size: must be a whole number"),
    ],
)  # fmt: skip
def test_what_is_not_proved_is_refused(fields: dict[str, Any], why: str) -> None:
    with pytest.raises(InvalidTask, match=why):
        make_task(**{"max_queries": 20, "group_size": 3} | fields)


def test_an_event_that_is_no_plain_sum_has_no_group() -> None:
    winners = integer_event(task("knn, winners"), "instance", 20)
    assert winners is not None
    with pytest.raises(InvalidSetting, match="not proved"):
        winners.of_group(2)


def test_agents_with_noise_of_their_own_count_the_numbers_of_each() -> None:
    one, many = (group_event(task("aux-distill", group_size=size), 20) for size in (1, 3))
    assert one is not None
    assert many is not None
    assert many.coordinates == 3 * one.coordinates
    assert many == replace(one.of_group(3), coordinates=many.coordinates)


def test_a_task_without_it_is_written_and_hashed_as_before() -> None:
    plain = task("knn")
    assert "group_size" not in plain.model_dump()
    assert task("knn", group_size=None).digest == plain.digest != task("knn", group_size=1).digest


def test_plan_card_and_metadata_state_it_and_no_charge() -> None:
    asked = task("reverse-knn", group_size=5)
    found = price(asked)
    assert found.group is not None
    document = found.to_json()["group"]
    assert document["epsilon"] == found.group.epsilon
    assert document["group_size"] == 5
    assert "charge_nano" not in document
    card = privacy_card(asked, found, is_seeded=False)
    assert "any 5 records of all agents together" in card["guarantees"]["group"]["neighbours"]
    assert "group level, where any 5 records" in card_in_words(card)
    for metadata in (guarantee(found), guarantee_of(card)):
        assert metadata["group"] == {
            "epsilon": found.group.epsilon, "method": found.group.method, "group_size": 5,
        }  # fmt: skip
    assert "group" not in privacy_card(task("reverse-knn"), price(task("reverse-knn")), is_seeded=False)["guarantees"]


def test_cards_of_two_jobs_join_groups_of_one_size_only() -> None:
    cards = [
        privacy_card(one, price(one), is_seeded=False)
        for one in (task("reverse-knn", group_size=size) for size in (5, 5, 2))
    ]
    same, other = (joined_cards(cards[0], one, confidence="")["guarantees"]["group"] for one in cards[1:])
    assert same["epsilon"] == 2 * cards[0]["guarantees"]["group"]["epsilon"]
    assert other["epsilon"] is None
    assert "group" in dearer_card(cards[0], cards[1])["guarantees"]
    assert "group" not in dearer_card(cards[0], cards[2])["guarantees"]
