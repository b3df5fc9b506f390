"""What one person can change, against brute force: every person is removed in turn, and the ballots are cast again."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from labeler.accounting.gaussian import epsilon_of_delta
from labeler.batching import round_charges
from labeler.errors import InvalidSetting
from labeler.methods import METHODS
from labeler.methods.ensemble import one_hot_ballots
from labeler.methods.knn import knn_ballots
from labeler.methods.reverse_knn import reverse_knn_ballots
from labeler.methods.sensitivity import answer_sum, largest_change, squared_sensitivity
from labeler.planning import price
from labeler.privacy_card import card_in_words, guarantee, privacy_card
from labeler.solving import solve_sigma
from labeler.task import Method, Task
from tests.labeler.tasks import check_change, make_task

CLASSES = 3
Integers = NDArray[np.int64]


def _task(method: Method, **changes: Any) -> Task:
    if method in ("blind-average", "aux-distill"):
        changes = {"training": {"min_records": 50, "regularisation": 0.05, "dimension": 10}} | changes
    return make_task(method=method, **changes)


def _kept(persons: list[int], most: int) -> list[int]:
    """Rows of the first records of each person; the row number is the record id. Written without looking at ours."""
    seen: dict[int, int] = {}
    kept = []
    for row, person in enumerate(persons):
        seen[person] = seen.get(person, 0) + 1
        if seen[person] <= most:
            kept.append(row)
    return kept


def _ballots(task: Task, similarities: Integers, labels: Integers, persons: list[int], gone: set[int]) -> Integers:
    """What an agent answers without some of its rows, whose ids stay: the person's cap first, then the agent's."""
    left = [row for row in range(len(labels)) if row not in gone]
    assert task.records_per_person is not None
    kept = [left[place] for place in _kept([persons[row] for row in left], task.records_per_person)]
    if task.max_agent_records is not None:
        kept = kept[: task.max_agent_records]
    similarities, labels = similarities[kept], labels[kept]
    queries = similarities.shape[1]
    if task.method == "knn":
        nearest = np.argsort(-similarities, axis=0, kind="stable")[: task.k].T
        return knn_ballots(labels[nearest], num_classes=CLASSES)
    if task.method == "ensemble":
        # A model at its most nervous: all of it hangs on who was in the training set.
        return one_hot_ballots(np.full(queries, hash(tuple(kept)) % CLASSES), num_classes=CLASSES)
    nearest = np.argsort(-similarities, axis=1, kind="stable")[:, : task.k]
    return reverse_knn_ballots(nearest, labels, num_queries=queries, num_classes=CLASSES)


@settings(max_examples=300, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    records=st.integers(1, 14),
    people=st.integers(1, 5),
    queries=st.integers(1, 6),
    k=st.integers(1, 8),
    most=st.integers(1, 5),
    cap=st.none() | st.integers(1, 12),
    method=st.sampled_from(["knn", "reverse-knn", "ensemble"]),
)
def test_no_record_and_no_person_changes_more_than_is_stated(
    seed: int, records: int, people: int, queries: int, k: int, most: int, cap: int | None, method: Method
) -> None:
    random = np.random.default_rng(seed)
    similarities = random.integers(0, 4, (records, queries))
    labels = random.integers(0, CLASSES, records)
    persons = random.integers(0, people, records).tolist()
    task = _task(
        method,
        k=1 if method == "ensemble" else k,
        records_per_person=most,
        max_agent_records=cap if method == "reverse-knn" else None,
    )
    whole = _ballots(task, similarities, labels, persons, set())
    for row in range(records):
        check_change(task, "instance", queries, whole - _ballots(task, similarities, labels, persons, {row}))
    for person in range(people):
        gone = {row for row in range(records) if persons[row] == person}
        check_change(task, "person", queries, whole - _ballots(task, similarities, labels, persons, gone))


def _planted(task: Task, similarities: Integers, labels: list[int], persons: list[int], gone: set[int]) -> int:
    change = _ballots(task, similarities, np.array(labels), persons, set())
    change = change - _ballots(task, similarities, np.array(labels), persons, gone)
    assert np.abs(change).max() == largest_change(task, "person" if len(gone) > 1 else "instance")
    return int(np.square(change).sum())


def test_the_bounds_of_a_person_are_attained() -> None:
    """Planted: one person's three records stand nearest, in one class; behind them everybody else's, in another."""
    knn = _task("knn", k=4, records_per_person=3)
    near = np.vstack([np.full((3, 5), 9), np.full((6, 5), 5)])
    found = _planted(knn, near, [0, 0, 0] + [1] * 6, [7, 7, 7, 1, 2, 3, 4, 5, 6], {0, 1, 2})
    assert found == squared_sensitivity(knn, "person", 5) == 2 * 5 * 3**2

    few = _task("knn", k=2, records_per_person=3)
    found = _planted(few, near, [0, 0, 0] + [1] * 6, [7, 7, 7, 1, 2, 3, 4, 5, 6], {0, 1, 2})
    assert found == squared_sensitivity(few, "person", 5) == 2 * 5 * 2**2

    places = np.tile([9, 8, 1, 0], (5, 1))
    free = _task("reverse-knn", k=2, records_per_person=3)
    found = _planted(free, places, [0, 0, 0, 1, 1], [7, 7, 7, 1, 2], {0, 1, 2})
    assert found == squared_sensitivity(free, "person", 4) == 2 * 3**2


def test_with_a_cap_on_the_agent_a_person_that_leaves_lets_others_in_and_costs_double() -> None:
    capped = _task("reverse-knn", k=2, records_per_person=3, max_agent_records=3)
    places = np.tile([9, 8, 1, 0], (6, 1))
    found = _planted(capped, places, [0, 0, 0, 1, 1, 1], [7, 7, 7, 1, 2, 3], {0, 1, 2})
    assert found == squared_sensitivity(capped, "person", 4) == 2 * 2 * 3**2
    # A person cannot have more of the agent's votes than the agent has.
    assert squared_sensitivity(_task("reverse-knn", k=2, records_per_person=50, max_agent_records=3), "person", 4) == 36


def test_a_cap_on_a_person_makes_one_record_a_replacement() -> None:
    """The person's next record comes in where the first leaves: other queries, another class."""
    capped, free = _task("reverse-knn", k=2, records_per_person=1), _task("reverse-knn", k=2)
    places = np.array([[9, 9, 0, 0], [0, 0, 9, 9]])
    change = _ballots(capped, places, np.array([0, 1]), [7, 7], set())
    change = change - _ballots(capped, places, np.array([0, 1]), [7, 7], {0})
    assert np.square(change).sum() == squared_sensitivity(capped, "instance", 4) == 4
    assert squared_sensitivity(free, "instance", 4) == 2
    # All of the person's records gone: only the one that voted is missed.
    assert squared_sensitivity(capped, "person", 4) == 2


@pytest.mark.parametrize("method", [name for name, traits in METHODS.items() if not traits.is_sampled])
def test_a_person_is_stated_only_where_the_task_bounds_a_persons_records(method: Method) -> None:
    queries = 100
    without, with_bound = price(_task(method)), price(_task(method, records_per_person=2))
    assert without.person is None
    assert "person" not in without.to_json()
    assert with_bound.person is not None
    stated = with_bound.to_json()["person"]
    assert stated["epsilon"] == with_bound.person.epsilon
    assert stated["records_per_person"] == 2
    assert "charge_nano" not in stated
    with pytest.raises(InvalidSetting, match="give the task records_per_person"):
        solve_sigma(_task(method), 1.0, level="person", queries=queries)


@pytest.mark.parametrize(
    ("method", "k", "records", "factor"),
    [
        ("knn", 5, 3, 3.0),
        ("knn", 2, 3, 2.0),
        ("ensemble", 1, 3, 1.0),
        ("reverse-knn", 4, 3, 3.0),
        ("blind-average", 1, 3, 3.0),
        ("aux-distill", 1, 3, 3.0),
    ],
)
def test_mu_of_a_person_is_that_of_one_record_times_the_factor_of_the_method(
    method: Method, k: int, records: int, factor: float
) -> None:
    """Closed form: mu of one record of a task without any cap, times m, min(m, k) or 1."""
    one = price(_task(method, k=k, sigma_votes=40.0)).instance
    person = price(_task(method, k=k, sigma_votes=40.0, records_per_person=records)).person
    assert person is not None
    # Rounding to the grid is paid once for all records of a person.
    assert person.mu == pytest.approx(factor * one.mu, rel=6e-3)
    assert epsilon_of_delta(1e-4, factor * one.mu) * (1 - 1e-2) < person.epsilon
    assert person.epsilon < epsilon_of_delta(1e-4, factor * one.mu) * 1.02


@pytest.mark.parametrize("method", ["blind-average", "aux-distill"])
def test_a_person_with_very_many_records_moves_a_model_by_no_more_than_its_diameter(method: Method) -> None:
    task = _task(method, sigma_votes=400.0, records_per_person=2**40, training={
        "min_records": 50, "regularisation": 0.05, "radius": 3.0, "dimension": 10
    })  # fmt: skip
    found = price(task)
    assert found.person is not None
    spec = answer_sum(task)
    assert spec.group_distance(2**40) == 2 * spec.largest_norm
    assert found.person.mu == pytest.approx(2 * found.agent.mu, rel=1e-2)


def test_the_card_of_a_model_states_a_person_or_that_nothing_is_stated() -> None:
    bounded, free = _task("blind-average", records_per_person=2), _task("blind-average")
    card = privacy_card(bounded, price(bounded), is_seeded=False)
    person = price(bounded).person
    assert person is not None
    assert card["guarantees"]["person"]["epsilon"] == person.epsilon
    assert card["records_per_person"] == 2
    assert "of one person at most 2 records of an agent were used" in card_in_words(card)
    assert "person level, where all records of one person" in card_in_words(card)
    plain = privacy_card(free, price(free), is_seeded=False)
    assert set(plain["guarantees"]) == {"instance", "agent"}
    assert "nothing is stated for a person" in card_in_words(plain)


def test_released_labels_carry_what_they_cost_a_person() -> None:
    bounded = price(_task("knn", k=3, records_per_person=2))
    assert bounded.person is not None
    assert guarantee(bounded)["person"]["epsilon"] == bounded.person.epsilon
    assert "person" not in guarantee(price(_task("knn", k=3)))


def test_ledgers_are_charged_for_a_record_and_an_agent_and_nobody_else() -> None:
    charges = round_charges(_task("reverse-knn", k=2, records_per_person=5, max_agent_records=9), 100)
    assert set(charges) == {"instance", "agent"}
    # The cap can bind, so one record costs twice what it costs without one.
    assert charges["instance"] == pytest.approx(2 * round_charges(_task("reverse-knn", k=2), 100)["instance"], abs=1)
