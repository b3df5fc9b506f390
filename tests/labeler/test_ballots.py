"""Ballots: what one record can change, shown on data full of ties and duplicates."""

from __future__ import annotations

import numpy as np
import pytest

from labeler.errors import InvalidSetting
from labeler.methods.ensemble import one_hot_ballots
from labeler.methods.knn import knn_ballots
from labeler.methods.reverse_knn import reverse_knn_ballots

CLASSES = 3


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
