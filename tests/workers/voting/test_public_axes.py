"""A public map in front of a linear model: exact, of each record by itself, priced like any other row of its norm."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from feature_store.query_selection import axis_rows, select_queries
from feature_store.rows import quantize
from feature_store.shard import Shard
from labeler.errors import BadData, InvalidSetting, InvalidTask, PrivacyRefusal
from labeler.linear_model import LinearModel, released_model
from labeler.methods.blind_average import linear_terms, weight_sum
from labeler.planning import price
from labeler.records import FEATURE_ONE, PublicAxes, axes_of
from labeler.release import Release
from labeler.tally import QueryBatch
from labeler.task import Task, parse_task
from tests.answering import AnsweringAgent
from tests.workers.builders import agent_of, shard_of_rows

DIMENSION, AXES, CLASSES = 12, 5, ("a", "b", "c")
PUBLIC = quantize(np.random.default_rng(2).normal(size=(80, DIMENSION)) + 3)


def _task(**changes: Any) -> Task:
    training = {"min_records": 20, "max_records": 40, "regularisation": 0.5, "axes": AXES}
    fields = {
        "name": "t", "classes": CLASSES, "method": "blind-average", "sigma_votes": 3.0, "delta": 1e-4, "agents": 1,
        "max_queries": AXES + 1, "backbone_fingerprint": "f", "training": training,
    }  # fmt: skip
    return parse_task(fields | changes)


def _agent(path: Path, count: int) -> AnsweringAgent:
    random = np.random.default_rng(1)
    labels = (np.arange(40) % 3).astype(np.int16)
    features = quantize(random.normal(size=(40, DIMENSION)) + 3 + 2 * np.eye(3, DIMENSION)[labels])
    shard = shard_of_rows(path, features[:count], labels[:count], classes=CLASSES, max_records=40)
    return agent_of(shard)[0]


@settings(max_examples=100, deadline=None)
@given(
    dimension=st.integers(1, 40),
    axes=st.integers(1, 9),
    largest=st.sampled_from([3, 2048, 32767]),
    seed=st.integers(0, 2**32 - 1),
)
def test_a_record_is_mapped_by_itself_to_length_one_whatever_stands_beside_it(
    dimension: int, axes: int, largest: int, seed: int
) -> None:
    """Against whole numbers in Python; bit for bit alone and among others, at the edge of int16, too."""
    rng = np.random.default_rng(seed)
    seen = PublicAxes(rng.integers(-largest, largest + 1, (axes + 1, dimension)).astype(np.int16))
    stored = rng.integers(-2048, 2049, (30, dimension)).astype(np.int16)
    stored[7] = np.clip(seen.rows[-1], -2048, 2048)
    together = seen(stored.astype(np.float32) / np.float32(FEATURE_ONE))
    lengths = np.linalg.norm(together, axis=1)
    assert np.all((np.abs(lengths - 1) < 1e-12) | (lengths == 0))
    for row in (0, 7, 29):
        exact = [
            sum(int(a) * (int(x) - int(m)) for a, x, m in zip(axis, stored[row], seen.rows[-1], strict=True))
            for axis in seen.rows[:-1]
        ]
        length = sum(one * one for one in exact) ** 0.5 or 1.0
        assert np.allclose(together[row], [one / length for one in exact], rtol=0, atol=1e-14)
        assert np.abs(seen(stored[row : row + 1] / FEATURE_ONE)[0] - together[row]).max() < 2.0**-48


def test_axes_are_the_principal_ones_of_public_images_and_the_last_row_is_their_mean() -> None:
    rows = select_queries(PUBLIC, strategy="weights", count=AXES).features
    assert np.array_equal(rows, axis_rows(PUBLIC, AXES))
    assert np.abs(rows[-1] - PUBLIC.mean(axis=0)).max() <= 0.5
    centred = PUBLIC - PUBLIC.mean(axis=0)
    _, _, leading = np.linalg.svd(centred, full_matrices=False)
    found = rows[:-1] / np.linalg.norm(rows[:-1], axis=1, keepdims=True)
    assert np.abs(np.abs((found * leading[:AXES]).sum(axis=1)) - 1).max() < 1e-4
    # Shorter along longer axes: partly whitened; the longest row is as long as a feature.
    assert np.all(np.diff(np.linalg.norm(rows[:-1], axis=1)) > -2)
    assert np.linalg.norm(rows[:-1], axis=1).max() == pytest.approx(2048, abs=3)
    with pytest.raises(InvalidSetting, match="asks for 13 axes"):
        axis_rows(PUBLIC, DIMENSION + 1)
    with pytest.raises(InvalidSetting, match="which have 3"):
        axis_rows(PUBLIC[:4], 4)


def test_another_map_is_another_question_and_is_answered_anew(tmp_path: Path) -> None:
    agent, task = _agent(tmp_path / "a", 40), _task()
    rows = axis_rows(PUBLIC, AXES)
    turned = rows.copy()
    turned[0] = -turned[0]
    one, other = (agent.ballots(task, QueryBatch(asked)) for asked in (rows, turned))
    assert np.abs(one[0] + other[0]).max() <= 1
    assert np.abs(one[1:] - other[1:]).max() <= 1


def test_the_released_model_and_its_arrays_look_along_the_same_axes(tmp_path: Path) -> None:
    agent, task, rows = _agent(tmp_path / "a", 40), _task(sigma_votes=1e-3), axis_rows(PUBLIC, AXES)
    opened = weight_sum(task).open(agent.ballots(task, QueryBatch(rows)))
    release = Release("histogram", opened.argmax(axis=1).astype(np.int16), opened, frozenset("a"), True)
    model = released_model(task, [release], rows)
    shard = Shard.open(tmp_path / "a")
    assert (model.predict(np.asarray(shard.features)) == shard.labels).mean() > 0.6
    again = LinearModel.of(model.arrays, linear_terms(task))
    assert np.array_equal(again.scores(PUBLIC), model.scores(PUBLIC))
    # A reader of the file computes the same by hand.
    z = (PUBLIC.astype(float) - rows[-1]) @ rows[:-1].T
    z *= np.sqrt(0.99) / np.linalg.norm(z, axis=1, keepdims=True)
    assert np.allclose(model.scores(PUBLIC), np.hstack([z, np.full((80, 1), 0.1)]) @ model.weights)
    for missing in (None, rows[1:]):
        with pytest.raises(BadData, match="rows of them are missing"):
            released_model(task, [release], missing)
    assert axes_of(_task(max_queries=13, training={"min_records": 20, "regularisation": 0.5}), None) is None


def test_the_price_is_that_of_any_model() -> None:
    plain = price(_task(training={"min_records": 20, "max_records": 40, "regularisation": 0.5}))
    assert price(_task()).instance.epsilon == plain.instance.epsilon


def test_axes_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidSetting, match="max_queries = 6, found 7"):
        price(_task(max_queries=7))
    training = {"min_records": 20, "regularisation": 0.5, "dimension": 2, "axes": 5}
    with pytest.raises(InvalidTask, match="only means something for method blind-average"):
        _task(method="aux-distill", max_queries=40, training=training)
    wide = _task(max_queries=14, training={"min_records": 20, "regularisation": 0.5, "axes": 13})
    with pytest.raises(PrivacyRefusal, match="looks along 13 axes"):
        _agent(tmp_path / "a", 30).check_task(wide, (14,))
    with pytest.raises(BadData, match="axes and a centre"):
        PublicAxes(np.zeros((1, 3), dtype=np.int16))
