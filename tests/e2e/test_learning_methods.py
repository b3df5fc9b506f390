"""Methods whose agents train, through `labeler run` on real digits: labels, models, cards, the same answer again."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from safetensors import safe_open

from feature_store.query_selection import known_axes
from feature_store.results.models import read_model
from feature_store.results.pseudo_labels import SCHEMA
from feature_store.shard import Shard, read_manifest, write_manifest
from labeler.budget import say_epsilon
from labeler.expectation import USUAL_AXES
from labeler.ledger import rounds as steps
from labeler.release import release_from_bytes

DIMENSION = 64
TRAINING = "[task.training]\nmin_records = 150\nregularisation = 0.02\ndimension = 16\n"
SETTINGS = {
    "ensemble": {"sigma_votes": 0.3},
    "blind-average": {"epsilon": 48.0},
    "aux-distill": {"epsilon": 16.0},
}


def task_file(folder: Path, method: str, **fields: object) -> Path:
    training = TRAINING if method != "ensemble" else ""
    given = {"name": f'"{method}"', "method": f'"{method}"', "delta": "1e-4"}
    given |= {key: str(value) for key, value in (SETTINGS[method] | fields).items()}
    path = folder / f"{method}.toml"
    path.write_text("[task]\n" + "".join(f"{key} = {value}\n" for key, value in given.items()) + training)
    return path


@pytest.mark.parametrize("method", SETTINGS)
def test_agents_that_train_label_the_public_images(labeler, federation, tmp_path, method) -> None:
    out = tmp_path / "job"
    summary = federation.run(labeler, task_file(tmp_path, method), out, "--seed", 1, *federation.scored)
    assert summary["labels"]["asked"] == summary["labels"]["answered"] == 120
    assert summary["labels"]["accuracy"] > 0.8
    assert summary["student"]["accuracy"] > 0.8
    table = pq.read_table(out / "pseudo_labels.parquet")
    assert table.schema.equals(SCHEMA)
    assert set(table["ledger_seq"].to_pylist()) == {1}
    assert len({*table["source"].to_pylist()}) == 120
    assert (table["noisy_votes"].null_count == 120) == (method == "blind-average")
    assert not (out / ".job" / "models").exists()
    again = labeler("student", out, "--test", federation.root / "test.shard", "--json")
    assert again.code == 0, again.err
    assert json.loads(again.out)["accuracy"] > 0.8
    cards = []
    for name in ("student.safetensors", "student-planned.safetensors"):
        with safe_open(out / name, framework="numpy") as file:
            cards.append(json.loads(file.metadata()["labeler"])["privacy_card"])
    assert cards[0] == cards[1]
    assert cards[0]["holds"] is False, "its noise has a seed"
    assert method != "blind-average" or "protects nobody" in (out / "privacy_card.md").read_text()
    assert cards[0]["guarantees"]["instance"]["epsilon"] == summary["privacy"]["instance"]["epsilon"]


SYSTEMS = {
    "AE-DPFL with a network": ("ensemble", "sigma_votes = 0.3", 'learner = "network"'),
    "AE-DPFL with domain adaptation": ("ensemble", "sigma_votes = 0.3", 'learner = "adapted"'),
    "FedD": (
        "aux-distill",
        "epsilon = 16.0",
        "min_records = 150\nregularisation = 0.02\ndimension = 16\nscore_share = 0.0",
    ),
    "DP-Helmet, svm": ("blind-average", "epsilon = 48.0", 'min_records = 150\nregularisation = 0.02\nlearner = "svm"'),
    "DP-Helmet, logistic": (
        "blind-average",
        "epsilon = 48.0",
        'min_records = 150\nregularisation = 0.02\nlearner = "logistic"',
    ),
}
"""The papers' systems that no other test of a whole job runs: a method, its price, and how agents train."""


@pytest.mark.parametrize("system", SYSTEMS)
def test_a_system_of_the_papers_is_a_job(labeler, federation, tmp_path, system) -> None:
    method, price, training = SYSTEMS[system]
    task, page = tmp_path / "task.toml", (Path(__file__).parents[2] / "docs/how-to/method.md").read_text()
    task.write_text(
        f'[task]\nname = "{system}"\nmethod = "{method}"\ndelta = 1e-4\n{price}\n[task.training]\n{training}\n'
    )
    summary = federation.run(labeler, task, tmp_path / "job", "--seed", 1, *federation.scored)
    assert summary["labels"]["asked"] == summary["labels"]["answered"] == 120
    assert summary["labels"]["accuracy"] > 0.7
    assert system.split(",")[0].split(" with ")[0] in page


def test_a_released_model_travels_with_its_privacy_card(labeler, federation, tmp_path) -> None:
    out = tmp_path / "job"
    task = task_file(tmp_path, "blind-average", colluding_agents=1)
    summary = federation.run(labeler, task, out)
    with safe_open(out / "model.safetensors", framework="numpy") as file:
        about = json.loads(file.metadata()["labeler"])
        assert file.get_tensor("weights").shape == (DIMENSION + 1, 4)
    card = about["privacy_card"]
    assert about["classes"] == ["zero", "one", "two", "three"]
    assert card["holds"]
    assert card["task_digest"] == summary["task"]["digest"]
    assert card["guarantees"]["instance"]["epsilon"] == summary["privacy"]["instance"]["epsilon"] <= 48.0
    assert (card["agents"], card["colluding_agents"], card["training"]["min_records"]) == (2, 1, 150)
    words = (out / "privacy_card.md").read_text()
    assert "DP-Helmet" in words
    assert "instance level" in words
    with safe_open(out / "student.safetensors", framework="numpy") as file:
        assert json.loads(file.metadata()["labeler"])["privacy_card"] == card


def test_a_model_looks_along_public_axes_and_its_file_labels_as_the_job_did(labeler, federation, tmp_path) -> None:
    out, task = tmp_path / "job", task_file(tmp_path, "blind-average", epsilon=8.0)
    task.write_text(task.read_text().replace("dimension = 16", "axes = 16"))
    assert federation.run(labeler, task, out)["labels"]["accuracy"] > 0.8
    model = read_model(out / "model.safetensors")
    assert model.arrays["weights"].shape == (17, 4)
    assert model.arrays["axes"].shape == (17, DIMENSION)
    public = Shard.open(federation.root / "public.shard")
    labels = pq.read_table(out / "pseudo_labels.parquet")["label"].to_numpy()
    assert np.array_equal(model.predict_proba(public.features[public.rows]).argmax(axis=1), labels)
    task.write_text(task.read_text().replace("axes = 16", "axes = 65"))
    refused = labeler("run", task, *federation.run_arguments, "--out", tmp_path / "other")
    assert refused.code == 2
    assert "asks for 65 axes" in refused.err


def test_class_means_along_public_axes_are_one_noisy_sum_that_labels_every_image(labeler, federation, tmp_path) -> None:
    out, task = tmp_path / "job", task_file(tmp_path, "blind-average", epsilon=4.0)
    task.write_text(task.read_text().replace(TRAINING, '[task.training]\nlearner = "means"\naxes = 10\n'))
    summary = federation.run(labeler, task, out, "--seed", 1, *federation.scored)
    assert summary["privacy"]["instance"]["epsilon"] <= 4.0
    assert summary["labels"]["accuracy"] > 0.8
    assert summary["student"]["accuracy"] > 0.8
    model = read_model(out / "model.safetensors")
    assert model.arrays["weights"].shape == (11, 4)
    public = Shard.open(federation.root / "public.shard")
    labels = pq.read_table(out / "pseudo_labels.parquet")["label"].to_numpy()
    assert np.array_equal(model.predict_proba(public.features[public.rows]).argmax(axis=1), labels)
    assert "one record moves an agent's sums by at most 1" in (out / "privacy_card.md").read_text()
    task.write_text(task.read_text().replace("axes = 10", ""))
    federation.run(labeler, task, tmp_path / "chosen", "--seed", 1, *federation.scored)
    chosen = read_model(tmp_path / "chosen" / "model.safetensors")
    assert len(chosen.arrays["weights"]) - 1 == known_axes(public.features) < USUAL_AXES


def test_a_task_that_counts_on_a_bound_is_refused_by_shards_that_keep_none_and_answered_by_those_that_do(
    labeler, federation, tmp_path
) -> None:
    task, out = task_file(tmp_path, "blind-average", epsilon=24.0), tmp_path / "job"
    task.write_text(task.read_text().replace("dimension = 16", "max_records = 400"))
    refused = labeler("run", task, *federation.run_arguments, "--out", out, "--json")
    assert refused.code == 1
    assert "embed it again with --max-records" in refused.err
    assert not (out / "report.json").exists()
    kept = []
    for path in federation.agents:
        manifest = read_manifest(path)
        assert manifest.records <= 400
        kept.append(tmp_path / path.name)
        shutil.copytree(path, kept[-1])
        write_manifest(kept[-1], manifest.model_copy(update={"max_records": 400}))
    shards = [part for path in kept for part in ("--shard", path)]
    public = ("--queries", federation.root / "public.shard", "--test", federation.root / "test.shard")
    result = labeler("run", task, *shards, *public, "--seed", 1, "--out", tmp_path / "kept", "--json")
    assert result.code == 0, result.err
    # Half the noise: what needed an epsilon of 48 without a bound.
    assert json.loads(result.out)["labels"]["accuracy"] > 0.8
    assert "at most 400 records" in (tmp_path / "kept" / "privacy_card.md").read_text()


@pytest.mark.parametrize(
    "method",
    [pytest.param(method, marks=[] if method == "aux-distill" else pytest.mark.long) for method in SETTINGS],
)
def test_an_interrupted_job_answers_the_same_without_training_again(
    labeler, federation, tmp_path, method, monkeypatch
) -> None:
    """Stopped after everybody answered: what was answered is read back, for training could end elsewhere."""
    task, out = task_file(tmp_path, method), tmp_path / "job"
    arguments = ["run", task, *federation.run_arguments, "--out", out, "--json"]
    sent: list[np.ndarray] = []

    store = steps.store_release

    def noting(connection, job_id: str, number: int, data: bytes) -> bool:
        sent.append(release_from_bytes(data).noisy_votes)
        return store(connection, job_id, number, data)

    def stop(connection, job_id: str, number: int, data: bytes) -> bool:
        sent.append(release_from_bytes(data).noisy_votes)
        raise KeyboardInterrupt

    with monkeypatch.context() as interrupted:
        interrupted.setattr(steps, "store_release", stop)
        stopped = labeler(*arguments)
    assert stopped.code == 75
    assert "it continues" in stopped.err
    # The answers of both agents to the one round, kept together, encrypted; and no model.
    assert len([path for path in (out / ".job" / "answers").rglob("*") if path.is_file()]) == 1
    assert not (out / ".job" / "models").exists()
    with monkeypatch.context() as elsewhere:
        for place in ("workers.learning.linear.train_head", "workers.learning.linear.train_rows"):
            elsewhere.setattr(place, lambda *_, **__: pytest.fail("trained again"))
        elsewhere.setattr("workers.learning.private_heads.fit_rows", lambda *_, **__: pytest.fail("trained again"))
        elsewhere.setattr(steps, "store_release", noting)
        result = labeler(*arguments)
    assert result.code == 0, result.err
    assert np.array_equal(sent[0], sent[1])


def test_a_method_needs_its_training_table_and_no_other_has_one(labeler, federation, tmp_path) -> None:
    task = task_file(tmp_path, "blind-average")
    task.write_text(task.read_text().replace(TRAINING, ""))
    result = labeler("run", task, *federation.run_arguments, "--out", tmp_path / "job")
    assert "training must be given for method blind-average" in result.err
    task = task_file(tmp_path, "ensemble")
    task.write_text(task.read_text() + TRAINING)
    result = labeler("run", task, *federation.run_arguments, "--out", tmp_path / "job")
    assert "training.learner must be linear or network or adapted for method ensemble, found softmax" in result.err


def test_a_run_says_what_a_group_of_images_would_lose(labeler, federation, tmp_path) -> None:
    task = federation.task_file(tmp_path, group_size=5)
    told = labeler("run", task, *federation.run_arguments, "--out", tmp_path / "job", "--seed", 1)
    assert told.code == 0, told.err
    privacy = json.loads((tmp_path / "job" / "report.json").read_text())["privacy"]
    assert privacy["group"]["epsilon"] > privacy["instance"]["epsilon"]
    assert f"Any 5 images: epsilon {say_epsilon(privacy['group']['epsilon'])}" in told.out
