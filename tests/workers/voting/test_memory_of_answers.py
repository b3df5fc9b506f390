"""Memory after a charge is bounded by public facts: twice as many records need no more of it.

Peaks are of Python's own count of what is allocated, which is exact: no chance, so no false alarms.
"""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from feature_store.query_selection import axis_rows, model_rows
from labeler.errors import PrivacyRefusal
from labeler.methods.ensemble import most_records
from labeler.methods.knn import attribute_ballots
from labeler.randomness import seeded_source
from labeler.records import Records
from labeler.tally import QueryBatch
from labeler.task import Task, parse_task
from tests.scored import scored
from tests.workers.answer import answer
from workers.learning.linear import train_head

MIB = 2**20


def records(count: int, dimension: int, classes: int) -> Records:
    """Records of which some were deleted: those that stay are copied where they are read."""
    rng = np.random.default_rng(1)
    features = rng.integers(-300, 300, (count, dimension), dtype=np.int16)
    labels = (np.arange(count) % classes).astype(np.int16)
    return Records(features, np.arange(count), labels, str(count), rows=np.arange(1, count))


def peak_of(step: Callable[[], object]) -> float:
    """The most that is allocated at once beyond what there was, MiB."""
    tracemalloc.start()
    try:
        step()
        return tracemalloc.get_traced_memory()[1] / MIB
    finally:
        tracemalloc.stop()


def test_a_head_of_two_hundred_classes_needs_as_much_for_any_number_of_records(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("workers.learning.linear.STEPS", 1)
    train_head(records(400, 8, 200).trainable(None), num_classes=200)  # what is loaded for it is no part of it
    small, large = (
        peak_of(lambda own=own: train_head(own.trainable(most_records(dimension=8, num_classes=200)), num_classes=200))
        for own in (records(count, 8, 200) for count in (40_000, 160_000))
    )
    # Which of them come first is looked up in a few words per record.
    assert large < small + 40 * 120_000 / MIB
    assert large < 150


@pytest.mark.parametrize("learner", ["network", "adapted"])
def test_a_network_needs_as_much_for_any_number_of_records_above_the_cap(
    learner: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("workers.learning.network.STEPS", 1)
    monkeypatch.setattr("labeler.methods.ensemble.MOST_NUMBERS", 2**20)
    task, batch = answering("ensemble", 20, 64, 8, training={"learner": learner})
    answer(task, batch, records(400, 64, 20))  # what is loaded for it is no part of it
    small, large = (
        peak_of(lambda own=own: answer(task, batch, own)) for own in (records(n, 64, 20) for n in (10_000, 40_000))
    )
    # The cap is 7,281 records; of more, which come first is looked up in a few words each.
    assert large < small + 40 * 30_000 / MIB
    assert large < 20


def answering(method: str, classes: int, dimension: int, queries: int, **changes: Any) -> tuple[Task, QueryBatch]:
    names = [f"class {number}" for number in range(classes)]
    fields = {"name": "t", "classes": names, "method": method, "sigma_votes": 9e3, "delta": 1e-5, "agents": 1}
    axes = (changes.get("training") or {}).get("axes")
    rng = np.random.default_rng(2)
    features = rng.integers(-300, 300, (queries, dimension), dtype=np.int16)
    if method == "evaluate":
        asked = scored(names, dimension).rows(dimension, num_classes=classes)
        return parse_task(fields | {"max_queries": len(asked)} | changes), QueryBatch(asked)
    if method == "federated":
        rows = dimension + 1 if axes is None else axes + 1
        asked = model_rows(dimension) if axes is None else axis_rows(features, axes)
        model = np.zeros((rows, classes))
        return parse_task(fields | {"max_queries": rows} | changes), QueryBatch(asked, 0, model)
    return parse_task(fields | {"max_queries": queries} | changes), QueryBatch(features)


SAMPLED = {"min_records": 5, "regularisation": 0.1, "iterations": 1, "sampled": {"rate": 0.5}}
OF_AGENT = SAMPLED | {"sampled": {"rate": 0.5, "unit": "agent"}}


@pytest.mark.parametrize(
    ("method", "classes", "dimension", "counts", "most", "changes"),
    [
        ("reverse-knn", 3, 256, (40_000, 80_000), 150, {"k": 1}),
        ("evaluate", 3, 256, (4_000, 8_000), 150, {}),
        ("federated", 3000, 4, (4200, 8400), 300, {"training": SAMPLED | {"axes": 3}}),
        ("federated", 3000, 4, (4200, 8400), 300, {"training": OF_AGENT | {"axes": 3}}),
    ],
)
def test_an_answer_needs_as_much_for_twice_as_many_records(
    method: str, classes: int, dimension: int, counts: tuple[int, int], most: float, changes: dict[str, Any]
) -> None:
    task, batch = answering(method, classes, dimension, 8, **changes)
    found = []
    for count in counts:
        own = records(count, dimension, classes)
        found.append(peak_of(lambda own=own: answer(task, batch, own, source=seeded_source(1))))
    assert max(found) < most
    # A few words per record, its id, its row and its coin, and no number of its features, no class and no question.
    assert found[1] < found[0] + 40 * (counts[1] - counts[0]) / MIB + 1


def test_counting_attributes_of_all_records_needs_no_more_memory_for_more_of_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A k beyond all of them would else have told, by whether an answer comes, how many fit into memory."""
    monkeypatch.setattr("labeler.methods.knn.NEIGHBORS_AT_ONCE", 2**16)
    task, batch = answering("knn", 200, 4, 30, k=1_000_000, attributes_per_record=3)
    peaks = []
    for count in (3_000, 20_000):
        own = records(count, 4, 200)
        labels = (np.random.default_rng(0).random((count, 200), dtype=np.float32) < 0.1).astype(np.int16)
        own = replace(own, all_labels=labels)
        votes: list[NDArray[np.int64]] = []
        peaks.append(peak_of(lambda own=own, votes=votes: votes.append(answer(task, batch, own))))
        assert np.array_equal(votes[0][0], attribute_ballots(own.labels[None], most=3)[0])
    # An index and k places of it are some 100 bytes a record; with all labels it would be 5,000.
    assert peaks[1] - peaks[0] < 17_000 * 1_000 / MIB


def test_a_head_with_more_weights_than_a_site_has_room_for_is_refused_before_the_charge() -> None:
    task, _ = answering("ensemble", 4000, 1024, 8)
    with pytest.raises(PrivacyRefusal, match="4100000 weights, and a site trains at most"):
        task.traits.check_room(task, 1024)
    task.traits.check_room(task, 128)
