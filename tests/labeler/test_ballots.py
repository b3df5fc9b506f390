"""Ballots: what one record can change, shown on data full of ties and duplicates."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from labeler.errors import InvalidSetting
from labeler.methods.ensemble import one_hot_ballots
from labeler.methods.knn import knn_ballots
from labeler.methods.reverse_knn import reverse_knn_ballots

CLASSES = 3


def nearest(
    queries: NDArray[np.int64], records: NDArray[np.int64], ids: NDArray[np.int64], k: int
) -> NDArray[np.int64]:
    """Rows of the first k records by (similarity descending, id ascending), -1 padded: the definition, spelled out."""
    similarity = queries @ records.T
    order = np.lexsort((np.broadcast_to(ids, similarity.shape), -similarity), axis=1)[:, :k]
    padded = np.full((len(queries), k), -1)
    padded[:, : order.shape[1]] = order
    return padded


def knn(
    queries: NDArray[np.int64], records: NDArray[np.int64], ids: NDArray[np.int64], labels: NDArray[np.int64], k: int
):
    found = np.append(labels, -1)[nearest(queries, records, ids, k)]
    return knn_ballots(found, num_classes=CLASSES)


def reverse_knn(queries: NDArray[np.int64], records: NDArray[np.int64], labels: NDArray[np.int64], k: int):
    cells = nearest(records, queries, np.arange(len(queries)), k)
    return reverse_knn_ballots(cells, labels, num_queries=len(queries), num_classes=CLASSES)


@st.composite
def federations(draw: st.DrawFn):
    """Tiny coordinates and few labels, so that ties and duplicates abound."""
    n, q = draw(st.integers(1, 9)), draw(st.integers(1, 5))
    small = st.integers(-1, 1)
    rows = lambda count: np.array(draw(st.lists(st.tuples(small, small), min_size=count, max_size=count)))  # noqa: E731
    ids = np.array(draw(st.permutations(range(n + 1))))
    labels = np.array(draw(st.lists(st.integers(0, CLASSES - 1), min_size=n + 1, max_size=n + 1)))
    return rows(q), rows(n + 1), ids, labels, draw(st.integers(1, 6))


@given(federations())
def test_adding_or_removing_one_record_moves_at_most_one_vote_per_query(federation) -> None:
    queries, records, ids, labels, k = federation
    change = knn(queries, records, ids, labels, k) - knn(queries, records[:-1], ids[:-1], labels[:-1], k)
    assert (np.abs(change).sum(axis=1) <= 2).all()
    assert ((change**2).sum(axis=1) <= 2).all()


@given(federations())
def test_replacing_one_record_moves_at_most_one_vote_per_query(federation) -> None:
    queries, records, ids, labels, k = federation
    without_last, without_first = slice(0, -1), slice(1, None)
    if len(ids) < 3:
        return
    one = knn(queries, records[without_last], ids[without_last], labels[without_last], k)
    other = knn(queries, records[without_first], ids[without_first], labels[without_first], k)
    assert ((one - other) ** 2).sum(axis=1).max() <= 2


@given(federations())
def test_one_record_changes_at_most_k_coordinates_of_a_whole_reverse_knn_batch(federation) -> None:
    queries, records, _, labels, k = federation
    change = reverse_knn(queries, records, labels, k) - reverse_knn(queries, records[:-1], labels[:-1], k)
    assert np.abs(change).max() <= 1
    assert (change**2).sum() <= min(k, len(queries))


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
