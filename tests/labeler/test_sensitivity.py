"""What one record, one person and one agent change, against brute force on the ballots themselves.

Records and persons are removed in turn, and the ballots are cast again: no randomness decides, so no false alarms.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from labeler.accounting.gaussian import epsilon_of_delta
from labeler.batching import round_charges
from labeler.errors import InvalidSetting
from labeler.methods import METHODS
from labeler.methods.ensemble import one_hot_ballots
from labeler.methods.knn import knn_ballots
from labeler.methods.reverse_knn import reverse_knn_ballots
from labeler.methods.sensitivity import (
    bounded_numbers,
    counted_votes,
    integer_event,
    largest_change,
    squared_sensitivity,
)
from labeler.planning import price
from labeler.privacy_card import card_in_words, guarantee, privacy_card
from labeler.solving import solve_sigma
from labeler.task import Method, StatedLevel, Task
from tests.labeler.tasks import make_task

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
    """What an agent answers without some of its rows, whose ids stay: the person's cap first, then the agent's.

    Similarities have shape (records, queries) and are full of ties.
    """
    kept = [row for row in range(len(labels)) if row not in gone]
    if task.records_per_person is not None:
        kept = [kept[place] for place in _kept([persons[row] for row in kept], task.records_per_person)]
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


def _rows(*stretches: tuple[int, list[int]]) -> Integers:
    """So many records with such similarities to the queries, for each stretch."""
    return np.vstack([np.tile(row, (count, 1)) for count, row in stretches])


ALIKE, PLACES = [9] * 5, [9, 8, 1, 0]
PERSON = (_rows((3, ALIKE), (6, [5] * 5)), [0, 0, 0] + [1] * 6, [7, 7, 7, 1, 2, 3, 4, 5, 6])
"""Planted: one person's three records stand nearest, in one class; behind them everybody else's, in another."""
TWO_PLACES = np.array([[9, 9, 0, 0], [0, 0, 9, 9]])


@pytest.mark.parametrize(
    ("task", "planted", "gone", "level", "squared"),
    [
        # One record more, and at each of 5 queries a vote moves from class 1 to class 0.
        (_task("knn", k=4), (_rows((1, ALIKE), (4, [5] * 5)), [0, 1, 1, 1, 1], [0] * 5), {0}, "instance", 10),
        (_task("knn", k=4), (_rows((4, ALIKE)), [1] * 4, [0] * 4), {0, 1, 2, 3}, "agent", 5 * 4**2),
        (_task("knn", k=4, records_per_person=3), PERSON, {0, 1, 2}, "person", 2 * 5 * 3**2),
        (_task("knn", k=2, records_per_person=3), PERSON, {0, 1, 2}, "person", 2 * 5 * 2**2),
        (
            _task("reverse-knn", k=3, max_agent_records=4),
            (_rows((4, [9, 8, 7, 1, 0])), [0] * 4, [0] * 4),
            {0, 1, 2, 3},
            "agent",
            3 * 4**2,
        ),
        (_task("reverse-knn", k=2), (TWO_PLACES, [0, 1], [7, 7]), {0}, "instance", 2),
        # A cap lets another record in: other queries, another class. It is charged double.
        (_task("reverse-knn", k=2, max_agent_records=1), (TWO_PLACES, [0, 1], [7, 7]), {0}, "instance", 4),
        (_task("reverse-knn", k=2, records_per_person=1), (TWO_PLACES, [0, 1], [7, 7]), {0}, "instance", 4),
        # All of the person's records gone: only the one that voted is missed.
        (_task("reverse-knn", k=2, records_per_person=1), (TWO_PLACES, [0, 1], [7, 7]), {0, 1}, "person", 2),
        (
            _task("reverse-knn", k=2, records_per_person=3),
            (_rows((5, PLACES)), [0, 0, 0, 1, 1], [7, 7, 7, 1, 2]),
            {0, 1, 2},
            "person",
            2 * 3**2,
        ),
        (
            _task("reverse-knn", k=2, records_per_person=3, max_agent_records=3),
            (_rows((6, PLACES)), [0, 0, 0, 1, 1, 1], [7, 7, 7, 1, 2, 3]),
            {0, 1, 2},
            "person",
            2 * 2 * 3**2,
        ),
    ],
)
def test_the_bounds_are_attained(
    task: Task, planted: tuple[Integers, list[int], list[int]], gone: set[int], level: StatedLevel, squared: int
) -> None:
    similarities, labels, persons = planted
    whole, rest = (_ballots(task, similarities, np.array(labels), persons, without) for without in (set(), gone))
    assert np.abs(whole - rest).max() == largest_change(task, level)
    queries = similarities.shape[1]
    assert np.square(whole - rest).sum() == squared_sensitivity(task, level, queries) == squared


def test_one_hot_moves_one_vote_per_query_and_an_agent_casts_one() -> None:
    task = _task("ensemble")
    before = one_hot_ballots(np.zeros(7, np.int64), num_classes=CLASSES)
    after = one_hot_ballots(np.ones(7, np.int64), num_classes=CLASSES)
    assert np.square(before - after).sum() == squared_sensitivity(task, "instance", 7) == 14
    assert np.square(before).sum() == squared_sensitivity(task, "agent", 7) == 7


def test_reverse_knn_pays_once_for_the_batch_however_many_queries_it_has() -> None:
    task = _task("reverse-knn", k=5)
    assert [squared_sensitivity(task, "instance", queries) for queries in (1, 4, 5, 6, 1000)] == [1, 4, 5, 5, 5]


@pytest.mark.parametrize("bad", [0, -3, 2.0, True, None])
def test_a_number_of_queries_that_is_not_a_positive_integer_is_refused(bad: Any) -> None:
    with pytest.raises(InvalidSetting, match="queries"):
        squared_sensitivity(_task("knn"), "instance", bad)


CAPS = {"max_agent_records": 7, "records_per_person": 4}


@pytest.mark.parametrize(
    ("method", "caps", "squared", "largest", "cell"),
    [
        # Of a whole batch of 6 queries with k = 3, at the levels instance, person, agent; see the table of the module.
        ("knn", {}, (12, None, 54), (1, None, 3), 3),
        ("knn", {"records_per_person": 2}, (12, 48, 54), (1, 2, 3), 3),
        ("knn", {"records_per_person": 4}, (12, 108, 54), (1, 3, 3), 3),
        ("ensemble", {}, (12, None, 6), (1, None, 1), 1),
        ("ensemble", {"records_per_person": 4}, (12, 12, 6), (1, 1, 1), 1),
        ("reverse-knn", {}, (3, None, None), (1, None, None), 2**40),
        ("reverse-knn", {"max_agent_records": 7}, (6, None, 147), (1, None, 7), 7),
        ("reverse-knn", {"records_per_person": 4}, (6, 48, None), (1, 4, None), 2**40),
        ("reverse-knn", CAPS, (6, 96, 147), (1, 4, 7), 7),
        ("reverse-knn", {"max_agent_records": 7, "records_per_person": 9}, (6, 294, 147), (1, 7, 7), 7),
    ],
)
def test_what_is_charged_is_what_the_table_says(
    method: Method, caps: dict[str, int], squared: tuple[int | None, ...], largest: tuple[int | None, ...], cell: int
) -> None:
    asked = _task(method, k=1 if method == "ensemble" else 3, **caps)
    assert counted_votes(asked).per_cell(asked) == cell
    for level, votes, change in zip(("instance", "person", "agent"), squared, largest, strict=True):
        if level == "person" and "records_per_person" not in caps:
            for step in (lambda: squared_sensitivity(asked, "person", 6), lambda: largest_change(asked, "person")):
                with pytest.raises(InvalidSetting) as refusal:
                    step()
                assert str(refusal.value) == (
                    "a price is stated for a person only where the task says with how many records of one person an "
                    "agent answers at most; give the task records_per_person"
                )
            continue
        assert squared_sensitivity(asked, level, 6) == votes, level
        assert largest_change(asked, level) == change, level


def test_fewer_queries_than_neighbours_are_the_places_of_a_record() -> None:
    assert squared_sensitivity(_task("reverse-knn", k=3), "instance", 2) == 2
    assert squared_sensitivity(_task("reverse-knn", k=3, **CAPS), "person", 2) == 64
    assert squared_sensitivity(_task("reverse-knn", k=3, **CAPS), "agent", 2) == 98


@pytest.mark.parametrize("level", ["instance", "person", "agent"])
def test_the_event_of_a_task_has_its_fields_and_its_level(level: Any) -> None:
    asked = _task("knn", k=3, records_per_person=2, colluding_agents=1)
    found = integer_event(asked, level, 7)
    assert found is not None
    squared, largest = {"instance": (14, 1), "person": (56, 2), "agent": (63, 3)}[level]
    assert (found.squared_sensitivity, found.largest_change, found.level) == (squared, largest, level)
    assert (found.coordinates, found.noise_contributors) == (21, asked.noise_contributors)
    assert (found.grid_scale, found.share_sigma_grid) == (asked.scale, asked.share_sigma_grid)
    assert integer_event(_task("reverse-knn", k=3), "agent", 7) is None


# The ballots.


def test_each_query_counts_the_labels_of_its_neighbours() -> None:
    votes = knn_ballots(np.array([[0, 2, 2], [1, -1, -1]]), num_classes=3)
    assert votes.tolist() == [[1, 0, 2], [0, 1, 0]]
    assert votes.dtype == np.int64


def test_no_neighbour_means_no_vote() -> None:
    assert knn_ballots(np.full((2, 4), -1), num_classes=3).tolist() == [[0, 0, 0], [0, 0, 0]]


def test_each_record_votes_in_its_own_column_at_its_nearest_queries() -> None:
    votes = reverse_knn_ballots(np.array([[0, 1], [1, -1]]), np.array([2, 0]), num_queries=3, num_classes=3)
    assert votes.tolist() == [[0, 0, 1], [1, 0, 1], [0, 0, 0]]


def test_a_model_casts_one_vote_per_query() -> None:
    assert one_hot_ballots(np.array([1, -1]), num_classes=2).tolist() == [[0, 1], [0, 0]]


@pytest.mark.parametrize("label", [3, -2])
def test_a_label_outside_the_task_is_refused_without_naming_it(label: int) -> None:
    with pytest.raises(InvalidSetting, match="outside the 3 classes"):
        knn_ballots(np.array([[label]]), num_classes=3)


# The price of a person.


@pytest.mark.parametrize("method", [name for name, traits in METHODS.items() if "training.sampled" not in traits.takes])
def test_a_person_is_stated_only_where_the_task_bounds_a_persons_records(method: Method) -> None:
    queries = 100
    without, with_bound = price(_task(method)), price(_task(method, records_per_person=2))
    assert without.person is None
    assert "person" not in guarantee(without)
    assert "person" not in without.to_json()
    assert with_bound.person is not None
    assert guarantee(with_bound)["person"]["epsilon"] == with_bound.person.epsilon
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
    spec = bounded_numbers(task).answer_sum(task)
    assert spec.group_distance(2**40) == 2 * spec.largest_norm
    assert found.person.mu == pytest.approx(2 * found.agent.mu, rel=1e-2)


def test_the_card_of_a_model_says_where_nothing_is_stated_for_a_person() -> None:
    free = _task("blind-average")
    plain = privacy_card(free, price(free), is_seeded=False)
    assert "nothing is stated for a person" in card_in_words(plain)


def test_ledgers_are_charged_for_a_record_and_an_agent_and_nobody_else() -> None:
    charges = round_charges(_task("reverse-knn", k=2, records_per_person=5, max_agent_records=9), 100)
    assert set(charges) == {"instance", "agent"}
    # The cap can bind, so one record costs twice what it costs without one.
    assert charges["instance"] == pytest.approx(2 * round_charges(_task("reverse-knn", k=2), 100)["instance"], abs=1)
