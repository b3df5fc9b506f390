"""Prices: the number that is shown is the number that is charged, and looking costs nothing."""

from __future__ import annotations

from typing import Any

import pytest

from api.coordinator import pricing
from api.coordinator.pricing import estimate, finite_levels, price_view, round_amounts
from api.schema import EstimateView
from labeler import batching, planning
from labeler.accounting import sampled, winner
from labeler.accounting.losses import NotCertified, only_certified
from labeler.batching import round_charges, round_sizes, total_charges
from labeler.budget import MOST_EPSILON, UNBOUNDED_NANO, budget_for
from labeler.errors import InvalidSetting, NotReady
from labeler.ledger.tasks import TaskRecord
from labeler.planning import price
from tests.api.conftest import House
from tests.api.coordinator.site import Site


def estimated(house: House, record: TaskRecord, queries: int) -> EstimateView:
    balances = {(one.account, one.level): one for one in house.ledger.balances()}
    return estimate(record.task, record.participants, queries, balances, delta=house.config.delta)


def test_the_price_is_the_certified_one_and_its_charge_is_what_the_rounds_cost(house: House) -> None:
    task = house.task(max_queries=10_000).task
    view = price_view(task, 10_000)
    assert view.instance_epsilon == price(task).instance.epsilon
    assert view.agent_epsilon == price(task).agent.epsilon
    rounds = [round_charges(task, size) for size in round_sizes(task, 10_000)]
    assert view.instance_charge_nano == sum(charges["instance"] for charges in rounds)
    assert view.agent_charge_nano == total_charges(task, round_sizes(task, 10_000))["agent"]


def test_a_price_for_a_person_is_shown_where_the_task_states_one_and_charged_nowhere(house: House) -> None:
    record = house.task(method="reverse-knn", records_per_person=3)
    view = price_view(record.task, 100)
    person = price(record.task, queries=100).person
    assert person is not None
    assert (view.person_epsilon, view.records_per_person) == (person.epsilon, 3)
    assert view.person_epsilon is not None
    assert view.instance_epsilon is not None
    # Under its cap a record is a replacement: 2 in mu squared; a person is 3 removals, 9.
    assert view.person_epsilon > view.instance_epsilon
    assert {account.level for account in estimated(house, record, 100).accounts} == {"instance", "agent"}
    plain = price_view(house.task(method="reverse-knn").task, 100)
    assert (plain.person_epsilon, plain.records_per_person) == (None, None)


def test_a_price_for_a_group_of_records_is_shown_where_the_task_names_its_size_and_charged_nowhere(
    house: House,
) -> None:
    record = house.task(method="reverse-knn", group_size=5)
    view, plain = price_view(record.task, 100), price_view(house.task(method="reverse-knn").task, 100)
    group = price(record.task, queries=100).group
    assert group is not None
    assert (view.group_epsilon, view.group_size) == (group.epsilon, 5)
    assert (plain.group_epsilon, plain.group_size) == (None, None)
    assert (view.instance_epsilon, view.instance_charge_nano) == (plain.instance_epsilon, plain.instance_charge_nano)
    assert {account.level for account in estimated(house, record, 100).accounts} == {"instance", "agent"}


def test_a_level_without_a_bound_has_no_number_and_says_why(house: House) -> None:
    task = house.task(method="reverse-knn").task
    view = price_view(task, 100)
    assert view.agent_epsilon is None
    assert view.agent_charge_nano is None
    assert "agent level: no finite guarantee" in view.reason
    assert finite_levels(task, 100) == ("instance",)
    assert round_amounts(task, 100, finite=("instance",))["agent"] == UNBOUNDED_NANO


def test_no_cap_that_can_be_configured_covers_an_unbounded_round() -> None:
    assert budget_for(MOST_EPSILON, 0.9) < UNBOUNDED_NANO


def test_an_estimate_shows_every_account_and_how_many_such_jobs_are_left(house: House) -> None:
    record = house.task()
    cost = price_view(record.task, 100)
    assert cost.instance_epsilon is not None
    assert cost.instance_charge_nano is not None
    view = estimated(house.with_caps(federation=(cost.instance_epsilon * 2, "unlimited")), record, 100)
    assert view.affordable
    assert view.refusal == ""
    assert [(one.account, one.level) for one in view.accounts][:4] == [
        ("federation", "instance"),
        ("federation", "agent"),
        ("agent:east", "instance"),
        ("agent:east", "agent"),
    ]
    assert len(view.accounts) == 8
    assert view.jobs_left == budget_for(cost.instance_epsilon * 2, 1e-5) // cost.instance_charge_nano
    assert view.quorum == 3
    assert house.ledger.entries(search="reserve") == []


def test_an_estimate_says_what_can_be_expected_and_warns_where_noise_drowns_the_votes(house: House) -> None:
    drowned = estimated(house, house.task(name="drowned", k=1, sigma_votes=400.0), 100)
    assert drowned.expected_accuracy is not None
    assert (drowned.expected_accuracy.high or 1) < 0.8
    assert "epsilon" in drowned.warning
    clear = estimated(house, house.task(name="clear", k=60, sigma_votes=20.0), 100)
    assert clear.expected_accuracy is not None
    assert (clear.expected_accuracy.low or 0) > 0.5
    assert clear.warning == ""
    learnt = house.task(method="reverse-knn", k=1, sigma_votes=40.0, max_queries=20)
    balances = {(one.account, one.level): one for one in house.ledger.balances()}
    few, many = (
        estimate(learnt.task, learnt.participants, 20, balances, delta=1e-5, records=records)
        for records in (60, 60_000)
    )
    assert few.warning != "" == many.warning
    assert many.expected_accuracy is not None
    assert many.expected_accuracy.records == 60_000


def test_a_job_that_is_not_covered_is_refused_in_words(house: House) -> None:
    record = house.task()
    view = estimated(house.with_caps(federation=(0.1, "unlimited"), agents=(5.0, "unlimited")), record, 100)
    assert not view.affordable
    assert view.jobs_left == 0
    assert "account 'federation', instance level: a job of 100 queries costs epsilon 1.357 " in view.refusal
    # The cap is 0.1, and what passes is said as a requester asks for it.
    assert "Ask for epsilon 0.1 or less, or ask the operator about the budget." in view.refusal
    assert [one.account for one in view.accounts if not one.enough] == ["federation"]


def test_a_level_without_a_bound_needs_an_account_without_a_cap(house: House) -> None:
    record = house.task(method="reverse-knn")
    assert estimated(house, record, 100).affordable
    assert estimated(house, record, 100).jobs_left is None
    view = estimated(house.with_caps(federation=("unlimited", 100.0)), record, 100)
    assert not view.affordable
    assert "no finite epsilon" in view.refusal
    assert view.accounts[1].asked_nano is None


def test_more_queries_than_the_task_has_are_refused(house: House) -> None:
    with pytest.raises(InvalidSetting, match="between 1 and the task's max_queries 100"):
        estimated(house, house.task(), 101)


def test_an_account_that_was_never_opened_is_named(house: House) -> None:
    record = house.task()
    with pytest.raises(NotReady, match="'federation' has not been opened"):
        estimate(record.task, record.participants, 1, {}, delta=1e-5)


TRAINING = {
    "min_records": 150,
    "regularisation": 1e-4,
    "iterations": 12,
    "radius": 60.0,
    "sampled": {"rate": 0.25, "learning_rate": 4.0, "momentum": 0.5},
}


@pytest.mark.parametrize(
    "fields",
    [
        {"method": "ensemble", "k": 1, "release": "winner", "sigma_votes": 23.0, "max_queries": 12},
        {"method": "federated", "k": None, "sigma_votes": 1.0, "max_queries": 48, "training": TRAINING},
    ],
    ids=["winners", "sampled"],
)
def test_what_is_not_certified_yet_is_not_begun_among_short_prices(house: House, fields: dict[str, Any]) -> None:
    """Not even the search for what a short budget covers, of a job whose price is known."""
    Site(house)  # three talliers
    record = house.task(**fields)
    queries = record.task.max_queries
    for remembered in (pricing._price, pricing._price_view, planning._is_finite, batching._charges):
        remembered.cache_clear()
    for certified in (winner.winner_pair, winner._gaussian_part, sampled.sampled_pair, sampled._profiles):
        certified.cache_clear()
    with pytest.raises(NotCertified), only_certified():
        estimated(house, record, queries)
    known = estimated(house, record, queries)
    with only_certified():
        assert estimated(house, record, queries) == known
    cost = known.price.instance_epsilon or 0.0
    short = house.with_caps(federation=(cost * 0.7, "unlimited"))
    with pytest.raises(NotCertified), only_certified():
        estimated(short, record, queries)
    refused = estimated(short, record, queries)
    assert not refused.affordable
    with only_certified():
        assert estimated(short, record, queries) == refused
