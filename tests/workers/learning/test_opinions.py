"""A released model scores records one by one: no record moves another one's cell, and nothing raises."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from feature_store.results.models import model_file, model_of_bytes
from feature_store.rows import probe_text, quantize
from feature_store.students import NoisyAnswers, fit_student
from labeler.errors import LabelerError, MixedShards
from labeler.methods.evaluate import Scored
from labeler.records import Records
from labeler.tally import QueryBatch
from labeler.task import Task
from tests.labeler.tasks import make_task
from tests.scored import linear_model
from tests.workers.answer import answer
from workers.learning.learner import Trainer

CLASSES, DIMENSION = ("a", "b", "c"), 24
RNG = np.random.default_rng(3)
CENTERS = RNG.normal(size=(3, DIMENSION))


def images(count: int, seed: int) -> tuple[Any, Any]:
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, 3, count).astype(np.int16)
    return quantize(CENTERS[labels] + 0.8 * rng.normal(size=(count, DIMENSION))), labels


def student(kind: str) -> bytes:
    public, truth = images(120, 1)
    votes = np.eye(3)[truth[:30]] * 40 + np.random.default_rng(2).normal(0, 4, (30, 3))
    answers = NoisyAnswers(public[:30], votes.argmax(axis=1), 4.0, 3, votes)
    fitted = fit_student(kind, answers, public, num_classes=3)
    return model_file(fitted.arrays, kind=fitted.kind, classes=CLASSES, card={"backbone_fingerprint": "b"})


MODELS = {kind: student(kind) for kind in ("pooled", "matched")} | {
    "linear": linear_model(CLASSES, DIMENSION, fingerprint="b"),
    "NaN": linear_model(CLASSES, DIMENSION, fingerprint="b", weights=np.full((DIMENSION + 1, 3), np.nan)),
    "infinite": linear_model(CLASSES, DIMENSION, fingerprint="b", weights=np.full((DIMENSION + 1, 3), 1e308)),
}


def asked(model: bytes) -> tuple[Task, QueryBatch]:
    rows = Scored(model, (0.4, 0.5, 0.6, 0.7, 0.8, 0.9), "confusion").rows(DIMENSION, num_classes=3)
    return make_task(method="evaluate", agents=1, max_queries=len(rows), backbone_fingerprint="b"), QueryBatch(rows)


@pytest.mark.parametrize("name", ["pooled", "matched", "linear"])
@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**20), count=st.integers(2, 60), data=st.data())
def test_one_record_moves_one_vote_bit_for_bit(name: str, seed: int, count: int, data: Any) -> None:
    task, batch = asked(MODELS[name])
    features, labels = images(count, seed)
    records = Records(features, np.arange(count), labels, "v")
    whole = answer(task, batch, records)
    assert whole.sum() == count
    gone = data.draw(st.integers(0, count - 1))
    change = whole - answer(task, batch, replace(records, rows=np.delete(np.arange(count), gone)))
    assert np.square(change).sum() == change.sum() == 1
    # In any order, and each alone: the cell of a record is its own.
    order = np.random.default_rng(seed).permutation(count)
    said, alone = Trainer().opinions(MODELS[name], features), Trainer().opinions(MODELS[name], features[order])
    for one, other in zip(said, alone, strict=True):
        assert np.array_equal(one[order], other)


def test_a_model_of_no_numbers_is_refused_before_and_fills_one_cell_after() -> None:
    features, _ = images(5, 1)
    task, batch = asked(MODELS["NaN"])
    with pytest.raises(LabelerError, match="does not give each of 3 classes a probability"):
        task.traits.check_questions(task, batch, Trainer())
    for name in ("NaN", "infinite"):
        predicted, stated = Trainer().opinions(MODELS[name], features)
        assert predicted[np.isnan(stated)].tolist() == [0] * int(np.isnan(stated).sum())
        assert np.isnan(stated).all() or name == "infinite"


def test_a_model_of_another_backbone_of_the_same_name_is_refused_before_anything_is_paid_for() -> None:
    """Each side keeps its features of the published probe; two grid units apart are rounding, three are not."""
    own = quantize(CENTERS).astype(np.float64)
    near, far = own.copy(), own.copy()
    near[1, 5] += 2
    far[1, 5] += 3
    of_job = model_of_bytes(MODELS["pooled"], name="a student")
    for probe, refusal in ((own, ""), (near, ""), (far, "this site embedded the probe otherwise")):
        model = model_file(of_job.arrays, kind=of_job.kind, classes=CLASSES, card=of_job.card, probe=probe_text(probe))
        task, batch = asked(model)
        if not refusal:
            task.traits.check_questions(task, batch, Trainer(probe_text(own)))
            continue
        with pytest.raises(MixedShards, match=refusal):
            task.traits.check_questions(task, batch, Trainer(probe_text(own)))
        task.traits.check_questions(task, batch, Trainer())  # features of a backbone that this program runs
