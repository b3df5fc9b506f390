"""The pseudo-label set keeps its schema, and never holds votes that were not released."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import UTC, datetime

import numpy as np
import pyarrow as pa
import pytest

from feature_store.results.pseudo_labels import SCHEMA, JobStamp, pseudo_label_table
from labeler.errors import InvalidSetting
from labeler.rounds.effects import AnswerStatus
from labeler.task import Task, parse_task

STAMP = JobStamp("job-1", "pixels", datetime(2026, 1, 1, tzinfo=UTC), {"delta": 1e-4}, is_seeded=True)


def task(**changes: object) -> Task:
    fields = {"name": "t", "classes": ["cat", "dog"], "sigma_votes": 9.0, "delta": 1e-4, "max_queries": 2, "agents": 2}
    return parse_task(fields | changes)


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
