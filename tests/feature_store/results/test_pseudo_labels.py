"""The pseudo-label set keeps its schema, holds no votes that were not released, and names its questions."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import UTC, datetime
from fractions import Fraction
from functools import partial

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from feature_store.results.pseudo_labels import SCHEMA, JobStamp, pseudo_label_table, query_rows
from labeler.errors import InvalidSetting
from labeler.rounds.effects import AnswerStatus
from labeler.task import Task
from tests.labeler.tasks import budgets_of, make_task

STAMP = JobStamp("job-1", "pixels", datetime(2026, 1, 1, tzinfo=UTC), {"delta": 1e-4}, is_seeded=True)


task = partial(make_task, classes=["cat", "dog"], sigma_votes=9.0, max_queries=2, agents=2)


def table(agreed: Task, votes: np.ndarray | None, labels: tuple[int, ...] = (1, -1), stamp: JobStamp = STAMP):
    return pseudo_label_table(
        agreed,
        stamp,
        query_ids=["q0", "q1"],
        sources=["a.png", "b.png"],
        labels=np.array(labels, np.int16),
        statuses=[AnswerStatus.ANSWERED, AnswerStatus.ABSTAINED],
        ledger_seq=np.array([1, 1]),
        noisy_votes=votes,
        budgets=budgets_of(agreed, 2),
    )


def test_a_histogram_release_becomes_rows_with_its_noisy_votes() -> None:
    rows = table(task(), np.array([[1.5, 2.5], [0.0, -1.0]]))
    assert rows.schema.equals(SCHEMA)
    assert rows["label_name"].to_pylist() == ["dog", None]
    assert rows["status"].to_pylist() == ["answered", "abstained"]
    assert rows["noisy_votes"].to_pylist() == [[1.5, 2.5], None], "a sum without a label looks like an answer"
    assert json.loads(rows.schema.metadata[b"classes"]) == ["cat", "dog"]
    assert json.loads(rows.schema.metadata[b"seeded"]) is True


@pytest.mark.parametrize(("question", "share"), [({"instance": 0.025, "agent": 0.5}, 0.025), (None, None)])
def test_a_row_says_its_share_of_mu_squared_where_the_method_has_one(
    question: dict[str, float] | None, share: float | None
) -> None:
    privacy = {"mu_squared": {"job": {"instance": 0.05}, "question": question}}
    rows = table(task(), np.zeros((2, 2)), stamp=replace(STAMP, privacy=privacy))
    assert rows.schema.field("mu_squared_share").type == pa.float64()
    assert rows["mu_squared_share"].to_pylist() == [share, share]


def test_a_winner_release_has_no_votes() -> None:
    assert table(task(release="winner"), None)["noisy_votes"].to_pylist() == [None, None]
    with pytest.raises(InvalidSetting, match="opens no votes"):
        table(task(release="winner"), np.zeros((2, 2)))


def test_a_label_that_is_no_class_is_refused() -> None:
    with pytest.raises(InvalidSetting, match="outside -1 to 1"):
        table(task(), None, labels=(2, 0))


def test_of_equally_similar_images_the_first_names_its_cluster() -> None:
    images = np.array([[0, 5], [7, 0], [7, 0], [7, 0], [0, 9]], np.int16)
    centres = np.array([[2048, 0], [0, 2048]], np.int16)
    found = query_rows(np.array([-1, -1]), np.array([1, 0, 0, 0, 1]), centres=centres, images=images)
    assert found.tolist() == [1, 0]


def test_where_the_images_are_gone_the_first_of_a_cluster_names_it() -> None:
    centres = np.zeros((2, 1), np.int16)
    assert query_rows(np.array([-1, -1]), np.array([1, 0, 1]), centres=centres, images=None).tolist() == [1, 0]


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 30), st.integers(1, 4))
def test_the_rule_is_the_one_that_a_loop_in_whole_numbers_finds(seed: int, images: int, clusters: int) -> None:
    random = np.random.default_rng(seed)
    features = random.integers(-3, 4, (images, 3)).astype(np.int16)
    features[~features.any(axis=1)] = 1
    centres = random.integers(-3, 4, (clusters, 3)).astype(np.int16)
    assignment = random.integers(0, clusters, images)
    found = query_rows(np.full(clusters, -1), assignment, centres=centres, images=features)
    for cluster in range(clusters):
        members = np.flatnonzero(assignment == cluster)
        if not len(members):
            continue
        # The square of a cosine with its sign, as a fraction: no rounding.
        products = (features[members].astype(int) @ centres[cluster].astype(int)).tolist()
        squares = np.square(features[members].astype(int)).sum(axis=1).tolist()
        cosines = [Fraction(p * abs(p), s) for p, s in zip(products, squares, strict=True)]
        assert cosines[members.tolist().index(found[cluster])] == max(cosines)
        # Among images of the same numbers nothing but their place can decide.
        assert all((features[row] != features[found[cluster]]).any() for row in members if row < found[cluster])
