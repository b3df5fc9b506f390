"""The sensitivities against brute force on the ballots themselves: no randomness decides, so no false alarms."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from labeler.errors import InvalidSetting
from labeler.methods.ensemble import one_hot_ballots
from labeler.methods.knn import knn_ballots
from labeler.methods.reverse_knn import reverse_knn_ballots
from labeler.methods.sensitivity import integer_event, largest_change, most_votes_per_cell, squared_sensitivity
from labeler.task import Level, Method, Task
from tests.labeler.tasks import check_change, make_task

CLASSES = 3


def _task(method: Method, **changes: Any) -> Task:
    return make_task(method=method, **changes)


def _ballots(task: Task, similarities: NDArray[np.int64], labels: NDArray[np.int64]) -> NDArray[np.int64]:
    """Ballots from similarities of shape (records, queries) full of ties; the row number is the record id."""
    queries = similarities.shape[1]
    if task.method == "knn":
        nearest = np.argsort(-similarities, axis=0, kind="stable")[: task.k].T
        return knn_ballots(labels[nearest], num_classes=CLASSES)
    if task.max_agent_records is not None:
        similarities, labels = similarities[: task.max_agent_records], labels[: task.max_agent_records]
    nearest = np.argsort(-similarities, axis=1, kind="stable")[:, : task.k]
    return reverse_knn_ballots(nearest, labels, num_queries=queries, num_classes=CLASSES)


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    records=st.integers(1, 12),
    queries=st.integers(1, 6),
    k=st.integers(1, 8),
    cap=st.none() | st.integers(1, 12),
    method=st.sampled_from(["knn", "reverse-knn"]),
)
def test_no_record_and_no_agent_changes_more_than_is_charged(
    seed: int, records: int, queries: int, k: int, cap: int | None, method: Method
) -> None:
    random = np.random.default_rng(seed)
    similarities = random.integers(0, 4, (records, queries))
    labels = random.integers(0, CLASSES, records)
    task = _task(method, k=k, max_agent_records=cap if method == "reverse-knn" else None)
    whole = _ballots(task, similarities, labels)
    for record in range(records):
        without = _ballots(task, np.delete(similarities, record, axis=0), np.delete(labels, record))
        check_change(task, "instance", queries, whole - without)
    if method == "knn" or cap is not None:
        check_change(task, "agent", queries, whole)


def test_the_bounds_are_attained() -> None:
    knn = _task("knn", k=4)
    # One record more, and at each of 5 queries a vote moves from class 1 to class 0.
    near, far = np.full((1, 5), 9), np.full((4, 5), 5)
    labels = np.array([0, 1, 1, 1, 1])
    change = _ballots(knn, np.vstack([near, far]), labels) - _ballots(knn, far, labels[1:])
    assert np.square(change).sum() == squared_sensitivity(knn, "instance", 5) == 10
    assert np.square(_ballots(knn, far, labels[1:])).sum() == squared_sensitivity(knn, "agent", 5) == 5 * 16

    reverse = _task("reverse-knn", k=3, max_agent_records=4)
    similarities = np.tile([9, 8, 7, 1, 0], (4, 1))
    ballots = _ballots(reverse, similarities, np.zeros(4, np.int64))
    assert np.square(ballots).sum() == squared_sensitivity(reverse, "agent", 5) == 16 * 3


def test_a_cap_on_records_lets_another_record_in_and_is_charged_double() -> None:
    capped, free = _task("reverse-knn", k=2, max_agent_records=1), _task("reverse-knn", k=2)
    similarities = np.array([[9, 9, 0, 0], [0, 0, 9, 9]])
    labels = np.array([0, 1])
    change = _ballots(capped, similarities, labels) - _ballots(capped, similarities[1:], labels[1:])
    assert np.square(change).sum() == squared_sensitivity(capped, "instance", 4) == 4
    change = _ballots(free, similarities, labels) - _ballots(free, similarities[1:], labels[1:])
    assert np.square(change).sum() == squared_sensitivity(free, "instance", 4) == 2


def test_one_hot_moves_one_vote_per_query_and_an_agent_casts_one() -> None:
    task = _task("ensemble")
    before = one_hot_ballots(np.zeros(7, np.int64), num_classes=CLASSES)
    after = one_hot_ballots(np.ones(7, np.int64), num_classes=CLASSES)
    assert np.square(before - after).sum() == squared_sensitivity(task, "instance", 7) == 14
    assert np.square(before).sum() == squared_sensitivity(task, "agent", 7) == 7


def test_reverse_knn_pays_once_for_the_batch_however_many_queries_it_has() -> None:
    task = _task("reverse-knn", k=5)
    assert [squared_sensitivity(task, "instance", queries) for queries in (1, 4, 5, 6, 1000)] == [1, 4, 5, 5, 5]


def test_reverse_knn_without_a_public_number_of_records_has_no_agent_level_bound() -> None:
    assert squared_sensitivity(_task("reverse-knn"), "agent", 10) is None
    assert largest_change(_task("reverse-knn"), "agent") is None


def test_the_release_makes_no_difference() -> None:
    levels: tuple[Level, Level] = ("instance", "agent")
    for level in levels:
        histogram, winner = _task("knn", k=3), _task("knn", k=3, release="winner")
        assert squared_sensitivity(histogram, level, 9) == squared_sensitivity(winner, level, 9)


@pytest.mark.parametrize("bad", [0, -3, 2.0, True, None])
def test_a_number_of_queries_that_is_not_a_positive_integer_is_refused(bad: Any) -> None:
    with pytest.raises(InvalidSetting, match="queries"):
        squared_sensitivity(_task("knn"), "instance", bad)


CAPS = {"max_agent_records": 7, "records_per_person": 4}


@pytest.mark.parametrize(
    ("method", "caps", "squared", "largest"),
    [
        # Of a whole batch of 6 queries with k = 3, at the levels instance, person, agent; see the table of the module.
        ("knn", {}, (12, None, 54), (1, None, 3)),
        ("knn", {"records_per_person": 2}, (12, 48, 54), (1, 2, 3)),
        ("knn", {"records_per_person": 4}, (12, 108, 54), (1, 3, 3)),
        ("ensemble", {}, (12, None, 6), (1, None, 1)),
        ("ensemble", {"records_per_person": 4}, (12, 12, 6), (1, 1, 1)),
        ("reverse-knn", {}, (3, None, None), (1, None, None)),
        ("reverse-knn", {"max_agent_records": 7}, (6, None, 147), (1, None, 7)),
        ("reverse-knn", {"records_per_person": 4}, (6, 48, None), (1, 4, None)),
        ("reverse-knn", CAPS, (6, 96, 147), (1, 4, 7)),
        ("reverse-knn", {"max_agent_records": 7, "records_per_person": 9}, (6, 294, 147), (1, 7, 7)),
    ],
)
def test_what_is_charged_is_what_the_table_says(
    method: Method, caps: dict[str, int], squared: tuple[int | None, ...], largest: tuple[int | None, ...]
) -> None:
    asked = _task(method, k=1 if method == "ensemble" else 3, **caps)
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


@pytest.mark.parametrize(
    ("method", "fields", "person", "cell"),
    [
        ("knn", {"k": 5}, None, 5),
        ("knn", {"k": 5, "records_per_person": 3}, 3, 5),
        ("knn", {"k": 2, "records_per_person": 3}, 2, 2),
        ("ensemble", {"records_per_person": 3}, 1, 1),
        ("reverse-knn", {"k": 5}, None, 2**40),
        ("reverse-knn", {"k": 5, "records_per_person": 3}, 3, 2**40),
        ("reverse-knn", {"k": 5, "records_per_person": 3, "max_agent_records": 2}, 2, 2),
        ("reverse-knn", {"k": 5, "records_per_person": 3, "max_agent_records": 7}, 3, 7),
    ],
)
def test_the_votes_of_a_person_and_of_a_cell_are_those_of_the_table(
    method: str, fields: dict[str, Any], person: int | None, cell: int
) -> None:
    asked = _task(method, **fields)
    assert most_votes_per_cell(asked) == cell
    if person is not None:
        assert largest_change(asked, "person") == person
        return
    with pytest.raises(InvalidSetting, match="a price is stated for a person only where"):
        largest_change(asked, "person")


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
