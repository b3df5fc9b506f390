"""`labeler evaluate`: real shards, a real student, one noised histogram, and a model that states what is right."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from numpy.typing import NDArray

from feature_store.results.models import Measured, model_file, read_model
from feature_store.shard import Shard
from labeler.errors import BadData, InvalidTask, MixedShards
from labeler.privacy_card import card_in_words
from tests.command_line import Labeler
from tests.scored import linear_model
from tests.workers.conftest import CLASSES, DIMENSION, MakeShard
from workers.notebook.job import LabeledJob
from workers.run.labeling import run_job
from workers.run.preparation import LabelingJob, evaluation_job
from workers.run.task_file import TaskFile

TASK = {"name": "t", "method": "reverse-knn", "epsilon": 20.0, "delta": 1e-5, "colluding_agents": 0}


def shards_of(make_shard: MakeShard, records: int = 300) -> list[Path]:
    return [make_shard(f"{records} {seed}.shard", records=records, seed=records + seed).path for seed in range(2)]


@pytest.fixture
def timid(tmp_path: Path) -> Path:
    """A released model that is right on most images, and hardly surer of its class than of others."""
    weights = np.random.default_rng(7).normal(size=(len(CLASSES), DIMENSION)).T
    weights = 0.4 * np.vstack([weights + np.random.default_rng(3).normal(size=weights.shape), np.zeros((1, 3))])
    path = tmp_path / "timid.safetensors"
    path.write_bytes(linear_model(CLASSES, DIMENSION, fingerprint="backbone", weights=weights))
    return path


@pytest.fixture
def student(make_shard: MakeShard, tmp_path: Path) -> Path:
    """A student of a finished job, with the labels of its public images beside it."""
    public = make_shard("public.shard", records=90, seed=9, public=True)
    file = TaskFile.model_validate({"task": TASK, "queries": {"strategy": "clustered", "count": 9}})
    run_job(LabelingJob(file, tuple(shards_of(make_shard, 60)), public.path, tmp_path / "job"))
    return tmp_path / "job" / "student.safetensors"


def exact(model: Path, shards: list[Path]) -> NDArray[np.bool_]:
    """Whether the model is right on each private record: what no release says."""
    stored, opened = read_model(model), [Shard.open(path) for path in shards]
    return np.concatenate([stored.predict_proba(one.features).argmax(axis=1) == one.labels for one in opened])


def test_an_evaluation_finds_what_is_right_and_the_model_states_it_from_then_on(
    timid: Path, make_shard: MakeShard, tmp_path: Path, labeler: Labeler
) -> None:
    sites = shards_of(make_shard, 1000)
    command = [
        "evaluate", timid, "--shard", sites[0], "--shard", sites[1], "--epsilon", 1, "--out", tmp_path / "evaluation",
    ]  # fmt: skip
    result = labeler(*command)
    assert result.code == 0, result.err
    assert "Accuracy" in result.out
    assert "the sites' own" in result.out
    found = json.loads((tmp_path / "evaluation" / "evaluation.json").read_text())
    right = exact(timid, sites)
    assert 0.7 < right.mean() < 0.99
    low, high = found["accuracy"]["noise"]
    # The interval is of 95 %; three times as wide it misses once in 10^8 runs.
    assert abs(right.mean() - (low + high) / 2) <= 1.5 * (high - low)
    count = found["records"]
    assert abs(count["value"] - 2000) <= 3 * (count["noise"][1] - count["value"])
    assert found["privacy"]["guarantees"]["instance"]["epsilon"] == pytest.approx(1.0, abs=1e-3)
    # The same command again finds the same, and asks nobody.
    again = labeler(*command, "--json")
    assert again.document["counts"] == found["counts"]
    measured = read_model(tmp_path / "evaluation" / "measured.safetensors")
    further = make_shard("further.shard", records=600, seed=5)
    before, after = read_model(timid).predict_proba(further.features), measured.predict_proba(further.features)
    is_right = after.argmax(axis=1) == further.labels
    assert np.array_equal(before.argmax(axis=1), after.argmax(axis=1))
    # Noise, and chance among 600 images, move it by two points: four times that.
    assert abs(after.max(axis=1).mean() - is_right.mean()) < 0.08 < 0.15 < is_right.mean() - before.max(axis=1).mean()


def test_a_measured_model_says_where_its_confidence_comes_from_and_what_both_have_cost(
    student: Path, make_shard: MakeShard, tmp_path: Path, labeler: Labeler
) -> None:
    shards = [part for path in shards_of(make_shard) for part in ("--shard", path)]
    assert labeler("evaluate", student.parent, *shards, "--epsilon", 2, "--out", tmp_path / "e").code == 0
    measured, labels = tmp_path / "e" / "measured.safetensors", tmp_path / "new.parquet"
    card = dict(read_model(measured).card)
    assert card["guarantees"]["instance"]["epsilon"] == pytest.approx(22.0, abs=0.01)
    assert card["delta"] == 2e-5
    assert "the sites' own" in card_in_words(card)
    told = labeler("predict", measured, tmp_path / "public.shard", "--out", labels)
    assert told.code == 0, told.err
    table = pq.read_table(labels)
    assert json.loads(table.schema.metadata[b"privacy"])["instance"]["epsilon"] == pytest.approx(22.0, abs=0.01)
    stated = read_model(measured).predict_proba(Shard.open(tmp_path / "public.shard").features).max(axis=1)
    assert table["confidence"].to_numpy() == pytest.approx(stated, abs=1e-6)


def test_a_model_of_which_no_record_lies_beside_it_costs_what_the_evaluation_costs_and_claims_the_rest(
    student: Path, make_shard: MakeShard, tmp_path: Path, labeler: Labeler
) -> None:
    """A file that travelled alone, and one that took another's place, id and card in the folder of a job."""
    shards = [part for path in shards_of(make_shard) for part in ("--shard", path)]
    stored = read_model(student)
    alone = tmp_path / "alone.safetensors"
    alone.write_bytes(student.read_bytes())
    cheap = json.loads(json.dumps(stored.card))
    cheap["guarantees"]["instance"]["epsilon"] = -0.2
    arrays = dict(stored.arrays) | {"temperature": stored.arrays["temperature"] * (1 + 2**-50)}
    about = {"kind": stored.kind, "classes": CLASSES, "job_id": stored.job_id}
    borrowed = model_file(arrays, card=cheap, **about)
    saved_again = model_file(stored.arrays, card=cheap, **about)
    for number, (path, content, epsilon, claim) in enumerate(
        (
            (alone, None, 2.0, "claims epsilon 20"),
            (student, borrowed, 2.0, "states no price"),
            (student, saved_again, 22.0, None),
        )
    ):
        if content is not None:
            path.write_bytes(content)
        out = tmp_path / f"e{number}"
        assert labeler("evaluate", path, *shards, "--epsilon", 2, "--out", out).code == 0
        card = read_model(out / "measured.safetensors").card
        assert card["guarantees"]["instance"]["epsilon"] == pytest.approx(epsilon, abs=0.01)
        assert (claim or "") in card.get("model_claim", "")
        assert ("model_claim" in card) == (claim is not None)
        labels = tmp_path / f"{number}.parquet"
        assert labeler("predict", out / "measured.safetensors", tmp_path / "public.shard", "--out", labels).code == 0
        privacy = json.loads(pq.read_table(labels).schema.metadata[b"privacy"])
        assert privacy.get("model_claim") == card.get("model_claim")


def test_a_notebook_evaluates_the_student_of_its_job(student: Path, make_shard: MakeShard, tmp_path: Path) -> None:
    job = LabeledJob(student.parent)
    found = job.evaluate(shards_of(make_shard), tmp_path / "e", epsilon=2.0, layout="classes", colluding_agents=0)
    assert (found["layout"], found["contributors"]) == ("classes", 2)
    assert found["privacy"]["colluding_agents"] == 0
    assert read_model(tmp_path / "e" / "measured.safetensors").measured is not None


def test_a_task_file_evaluates_and_bands_are_those_of_the_public_images(
    student: Path, make_shard: MakeShard, tmp_path: Path, labeler: Labeler
) -> None:
    task = tmp_path / "task.toml"
    task.write_text(
        '[task]\nname = "e"\nmethod = "evaluate"\nepsilon = 2.0\ndelta = 1e-5\n'
        '[evaluation]\nlayout = "classes"\nbands = 2\n'
    )
    shards = [part for path in shards_of(make_shard) for part in ("--shard", path)]
    result = labeler("run", task, *shards, "--images", student, "--out", tmp_path / "out", "--seed", 3, "--json")
    assert result.code == 0, result.err
    found = result.document
    stated = pq.read_table(student.with_name("student_labels.parquet"))["confidence"].to_numpy()
    assert found["edges"] == pytest.approx([np.median(stated)], abs=1e-5)
    assert [one["class"] for one in found["recall"]] == list(CLASSES)
    assert found["balanced_accuracy"] is not None
    assert not found["privacy"]["holds"]
    assert "simulation" in found["privacy"]["warning"]


def asked(model: Path, shards: list[Path], out: Path, **fields: Any) -> dict[str, Any]:
    task = {"epsilon": 1.0, "delta": 1e-5} | fields
    return run_job(evaluation_job(model, shards, out, task=task, evaluation={}))


@pytest.mark.parametrize(
    ("model", "says"),
    [
        (linear_model(("cat", "dog"), DIMENSION, fingerprint="backbone"), "has other classes"),
        (linear_model(CLASSES, DIMENSION, fingerprint="another"), "reads features of backbone another"),
        (linear_model(CLASSES, 9, fingerprint="backbone"), "from features of 16 numbers"),
        (linear_model(CLASSES, DIMENSION, fingerprint="backbone", weights=np.full((17, 3), np.nan)), "a probability"),
        (
            linear_model(CLASSES, DIMENSION, fingerprint="backbone", weights=np.full((17, 3), 1e-310)),
            "no record changes",
        ),
        (b"text", "model is no model of a job"),
        (model_file({"weights": np.ones((17, 3))}, kind="linear", classes=CLASSES, card={}), "holds no privacy card"),
    ],
)
def test_a_model_that_cannot_be_scored_is_refused_before_anything_is_paid_for(
    model: bytes, says: str, make_shard: MakeShard, tmp_path: Path
) -> None:
    (tmp_path / "model").write_bytes(model)
    with pytest.raises((BadData, MixedShards), match=says):
        asked(tmp_path / "model", shards_of(make_shard), tmp_path / "out")
    assert not (tmp_path / "out" / ".job" / "journal.db").exists()


def test_bad_shards_and_settings_are_refused_before_anything_is_paid_for(
    make_shard: MakeShard, tmp_path: Path, labeler: Labeler
) -> None:
    (tmp_path / "model").write_bytes(linear_model(CLASSES, DIMENSION, fingerprint="backbone"))
    a, _ = shards_of(make_shard)
    public = make_shard("public.shard", public=True).path
    for shards, says in (([public], "is a public shard"), ([a, a], "hold the same records"), ([tmp_path], "shard")):
        named = [part for path in shards for part in ("--shard", path)]
        found = labeler("evaluate", tmp_path / "model", *named, "--out", tmp_path / "out")
        assert found.code != 0
        assert says in found.err
    for fields, says in (({"k": 3}, "k must be 1"), ({"release": "winner"}, "histogram"), ({"sort": 1}, "sort")):
        with pytest.raises(InvalidTask, match=says):
            asked(tmp_path / "model", [a], tmp_path / "out", **fields)
    with pytest.raises(InvalidTask, match="layout"):
        evaluation_job(tmp_path / "model", [a], tmp_path / "out", task={}, evaluation={"layout": "all"})
    assert not (tmp_path / "out" / ".job" / "journal.db").exists()


@pytest.mark.parametrize("classes", [2, 3, 10])
def test_a_measured_confidence_below_that_of_chance_keeps_every_label(classes: int) -> None:
    said = np.random.default_rng(1).dirichlet(np.full(classes, 0.3), size=20_000)
    found = Measured((0.2, 0.4, 0.6, 0.8), ((0.05, 0.2, 0.3, 0.5, 0.9),))(said)
    assert np.array_equal(found.argmax(axis=1), said.argmax(axis=1))


def test_a_measured_confidence_keeps_the_label_and_every_row_a_probability() -> None:
    said = np.random.default_rng(1).dirichlet(np.full(4, 0.4), size=500)
    said[:2] = [[1, 0, 0, 0], [0.25, 0.25, 0.25, 0.25]]
    found = Measured((0.5, 0.8), ((0.3, 0.1, 0.9),))(said)
    top = said.max(axis=1)
    assert found.sum(axis=1) == pytest.approx(np.ones(500))
    assert found.min() >= 0
    assert found.max(axis=1) == pytest.approx(np.select([top < 0.5, top < 0.8], [0.3, 0.25], 0.9))
    assert np.array_equal(found.argmax(axis=1), said.argmax(axis=1))
    by_class = Measured((), ((0.9,), (0.8,), (0.7,), (0.6,)))(said)
    assert by_class.max(axis=1) == pytest.approx(np.array([0.9, 0.8, 0.7, 0.6])[said.argmax(axis=1)])
    with pytest.raises(ValueError, match="one share"):
        Measured((0.5,), ((0.3,),))
