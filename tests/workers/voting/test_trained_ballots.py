"""Agents that train: the trained model alone decides, retries repeat, and what cannot be trained is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from feature_store.query_selection import model_rows
from feature_store.rows import quantize
from labeler.errors import PrivacyRefusal
from labeler.methods.blind_average import linear_terms, weight_sum
from labeler.records import ModelStore, Records
from labeler.setting import LEAST
from labeler.tally import QueryBatch
from labeler.task import Task
from tests.answering import AnsweringAgent
from tests.labeler.tasks import make_task
from tests.workers.answer import answer as answer_of
from workers.learning.linear import LARGEST_WEIGHT, predict, train_head

DIMENSION, CLASSES = 6, 3
BATCH = QueryBatch(quantize(np.random.default_rng(9).normal(size=(40, DIMENSION))))
ROWS = QueryBatch(model_rows(DIMENSION))


def task(method: str, **fields: Any) -> Task:
    given: dict[str, Any] = {"agents": 2, "backbone_fingerprint": "backbone"}
    given["max_queries"] = DIMENSION + 1 if method == "blind-average" else len(BATCH)
    if method != "ensemble":
        given["training"] = {"min_records": 8, "regularisation": 0.1, "dimension": 4}
    return make_task(method=method, **given | fields)


def records_of(seed: int, count: int) -> Records:
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, CLASSES, size=count).astype(np.int16)
    centres = np.random.default_rng(3).normal(size=(CLASSES, DIMENSION))
    features = quantize(centres[labels] + 0.5 * rng.normal(size=(count, DIMENSION)))
    return Records(features, np.arange(count), labels, f"version {seed} {count}")


def test_scores_of_a_head_are_exact_whatever_the_order_of_summation() -> None:
    head = train_head(records_of(1, 30).trainable(None), num_classes=CLASSES)
    assert np.abs(head[:-1]).max() < LARGEST_WEIGHT
    exact = BATCH.features.astype(object) @ head[:-1].astype(object) + 2048 * head[-1].astype(object)
    assert np.array_equal(predict(head, BATCH.features), np.argmax(exact.astype(float), axis=1))
    order = np.random.default_rng(0).permutation(DIMENSION)
    shuffled = np.vstack([head[:-1][order], head[-1:]])
    assert np.array_equal(predict(shuffled, BATCH.features[:, order]), predict(head, BATCH.features))


@pytest.mark.parametrize("present", [[1], [0, 2], [0, 1, 2]])
def test_classes_without_a_record_are_never_predicted(present: list[int]) -> None:
    records = records_of(2, 60)
    keep = np.isin(records.labels, present)
    some = Records(records.features[keep], records.record_ids[keep], records.labels[keep], "v")
    head = train_head(some.trainable(None), num_classes=CLASSES)
    predicted = predict(head, BATCH.features)
    assert set(predicted.tolist()) <= set(present)
    assert (predict(head, some.features) == some.labels).mean() > 0.8


def agent_for(shard: Any, models: ModelStore | None = None) -> AnsweringAgent:
    return AnsweringAgent("a", shard, noise_secret=bytes(range(32)), models=models, is_seeded=True)


def asked_of(method: str, shard: Any) -> tuple[Task, QueryBatch]:
    dimension = shard.dimension
    queries = QueryBatch(np.asarray(shard.features)[:40])
    batch = QueryBatch(model_rows(dimension)) if method == "blind-average" else queries
    fields = {"classes": shard.classes, "max_queries": len(batch), "agents": 1}
    return task(method, **fields), batch


@pytest.mark.parametrize("method", ["ensemble", "blind-average", "aux-distill"])
def test_a_retry_sends_the_same_bytes_from_the_kept_model(
    make_shard: Any, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    shard, models = make_shard("own"), ModelStore()
    asked, batch = asked_of(method, shard)
    first = agent_for(shard, models).answer(asked, batch)
    for place in (
        "workers.learning.linear.train_head",
        "workers.learning.linear.train_rows",
        "workers.learning.private_heads.fit_rows",
    ):
        monkeypatch.setattr(place, lambda *_, **__: pytest.fail("trained again"))
    again = agent_for(shard, models).answer(asked, batch)
    with pytest.raises(pytest.fail.Exception, match="trained again"):
        agent_for(shard, ModelStore()).answer(asked, batch)
    assert [share.share.fingerprint() for share in first] == [share.share.fingerprint() for share in again]


def test_a_model_is_made_once_until_a_record_is_deleted_and_does_not_print() -> None:
    store, made = ModelStore(), np.array([[3, -4], [5, 2**60]], dtype=np.int64)

    def never() -> np.ndarray:
        raise AssertionError("trained again")

    assert np.array_equal(store.once("v1", "m", lambda: made), made)
    assert np.array_equal(store.once("v1", "other", lambda: made + 1), made + 1)
    assert np.array_equal(store.once("v1", "m", never), made)
    assert str(2**60) not in repr(store)
    store.once("v2", "m", lambda: made + 1)
    with pytest.raises(AssertionError):
        store.once("v1", "m", never)
    store.clear()
    with pytest.raises(AssertionError):
        store.once("v2", "m", never)


@pytest.mark.parametrize("method", ["blind-average", "aux-distill"])
def test_a_batch_of_another_size_than_the_task_is_refused(make_shard: Any, method: str) -> None:
    shard = make_shard("own")
    asked, batch = asked_of(method, shard)
    with pytest.raises(PrivacyRefusal, match=f"a {method} task is answered in one batch"):
        agent_for(shard).answer(asked, QueryBatch(batch.features[:-1]))


def test_a_model_of_another_dimension_is_refused_before_it_is_charged(make_shard: Any) -> None:
    shard = make_shard("own")
    narrow = task("blind-average", classes=shard.classes, agents=1)
    wide = task(
        "aux-distill", classes=shard.classes, agents=1, max_queries=100,
        training={"min_records": 8, "regularisation": 0.1, "dimension": shard.dimension + 1},
    )  # fmt: skip
    rows = np.resize(np.asarray(shard.features), (100, shard.dimension))
    for asked, batch, because in (
        (narrow, QueryBatch(rows[: DIMENSION + 1]), "has one row more than that"),
        (wide, QueryBatch(rows), "axes .training.dimension. of features that have 16 numbers"),
    ):
        agent = AnsweringAgent("a", shard, noise_secret=bytes(32), is_seeded=True)
        with pytest.raises(PrivacyRefusal, match=because):
            agent.answer(asked, batch)
        assert not agent.charged


@pytest.mark.parametrize("count", [0, 1, 40])
@pytest.mark.parametrize("noise", [0.001, 100.0])
def test_without_scores_every_agent_weighs_the_same_at_every_image(count: int, noise: float) -> None:
    """FedD: whatever an agent holds, its soft labels add up to one vote, but for rounding down."""
    training = {"min_records": 8, "regularisation": 0.1, "dimension": 4, "score_share": 0.0}
    asked = task("aux-distill", training=training, sigma_votes=noise)
    rows = answer_of(asked, BATCH, records_of(5, count)).sum(axis=1)
    assert rows.max() <= asked.scale
    assert rows.min() > asked.scale - CLASSES
    with_scores = task("aux-distill", sigma_votes=noise)
    assert answer_of(with_scores, BATCH, records_of(5, count)).sum(axis=1).min() < asked.scale - CLASSES


@pytest.mark.parametrize("count", [0, 1, 40])
@pytest.mark.parametrize("share", [0.0, LEAST, 1 - 2**-53])
def test_no_share_of_the_scores_makes_a_number_that_a_processor_handles_slowly(share: float, count: int) -> None:
    """With a share of 5e-324, refused, one was computed where an agent holds nothing, and none with a record."""
    training = {"min_records": 8, "regularisation": 0.1, "dimension": 4, "score_share": share}
    with np.errstate(under="raise", over="raise", invalid="raise"):
        answer_of(task("aux-distill", training=training, sigma_votes=1e12), BATCH, records_of(5, count))


def test_the_weights_an_agent_sends_are_its_learner_s(tmp_path: Path) -> None:
    from benchmarks.learning.linear_users import train_linear

    asked, records = task("blind-average"), records_of(4, 30)
    terms = linear_terms(asked)
    weights = train_linear(records.features / np.float32(2048), records.labels, terms=terms)
    sent = answer_of(asked, ROWS, records) / weight_sum(asked).scale * terms.sensitivity
    assert np.allclose(sent, weights, atol=1e-3)
