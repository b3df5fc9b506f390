"""Methods whose agents train, through real processes: a released model with its card, refusals, an evaluation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from safetensors import safe_open
from sklearn.datasets import load_digits

from api.client import Client, ServiceProblem
from api.schema import TaskRequest, TaskView
from feature_store.results.models import read_model
from feature_store.results.questions import QUESTIONS
from tests.command_line import Labeler
from tests.e2e.service.conftest import Service
from tests.e2e.service.harm import EVERYBODY, paid_at_instance_level, posted

DIMENSION = 64
QUERIES = 300
TRAINING = {"min_records": 150, "regularisation": 0.01, "dimension": 24}
METHODS: dict[str, dict[str, Any]] = {
    "ensemble": {"sigma_votes": 0.2, "max_queries": QUERIES},
    "blind-average": {"epsilon": 40.0, "max_queries": DIMENSION + 1, "training": TRAINING},
}


def make_task(client: Client, method: str, **fields: Any) -> TaskView:
    request = {"name": method, "method": method, "delta": 1e-5} | METHODS[method] | fields
    return client.create_task(TaskRequest.model_validate(request))


def submit(client: Client, task: TaskView, features: np.ndarray) -> str:
    fingerprint = task.task["backbone_fingerprint"]
    return client.submit(task.task_id, features=features, backbone_fingerprint=fingerprint).job_id


def test_a_released_model_is_downloaded_with_its_privacy_card(
    service: Service, digit_features: np.ndarray, tmp_path: Path
) -> None:
    with service.client() as client:
        task = make_task(client, "blind-average", colluding_agents=1)
        before = posted(client)
        job = submit(client, task, digit_features[:50])
        assert client.wait(job).state == "completed"
        assert paid_at_instance_level(client, before) == dict.fromkeys(EVERYBODY, task.price.instance_charge_nano)
        path = client.model(job, tmp_path / "model.safetensors")
        labels = pq.read_table(client.labels(job, tmp_path / "labels.parquet", of="questions"))["label"].to_numpy()
        # The journal alone has all of a model: the folders of jobs are in no backup.
        (service.home / "coordinator" / "jobs" / job / QUESTIONS).unlink()
        assert client.model(job, tmp_path / "again.safetensors").read_bytes() == path.read_bytes()
        asked = submit(client, make_task(client, "ensemble", max_queries=5), digit_features[:5])
        client.wait(asked)
        with pytest.raises(ServiceProblem, match="there is no model of the agents"):
            client.model(asked, tmp_path / "none.safetensors")
    with safe_open(path, framework="numpy") as file:
        about, weights = json.loads(file.metadata()["labeler"]), file.get_tensor("weights")
    card = about["privacy_card"]
    assert card["task_digest"] == task.task_id
    assert card["guarantees"]["instance"]["epsilon"] == task.price.instance_epsilon
    assert (card["holds"], card["colluding_agents"], card["agents"]) == (True, 1, 3)
    assert weights.shape == (DIMENSION + 1, len(about["classes"]))
    # Whoever has the file labels as the service does: features of norm 1, cut to 0.995, and a constant of 0.1.
    rows = digit_features[:50] / 2048.0
    rows *= np.sqrt(0.99) / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), np.sqrt(0.99))
    assert np.array_equal((rows @ weights[:-1] + 0.1 * weights[-1]).argmax(axis=1), labels)


@pytest.mark.long
def test_a_service_evaluates_the_student_of_a_job_and_states_what_is_right(
    service: Service, digit_features: np.ndarray, labeler: Labeler, tmp_path: Path
) -> None:
    """Digits that no agent holds stand for the sites' own: the three agents share the rest of one data set."""
    with service.client() as client:
        voted = client.create_task(
            TaskRequest(name="votes", method="reverse-knn", epsilon=2.0, delta=1e-5, max_queries=QUERIES)
        )
        job = submit(client, voted, digit_features[:QUERIES])
        assert client.wait(job).state == "completed"
        before = posted(client)
        told = labeler(
            "evaluate", job, "--url", service.url, "--token", service.token, "--epsilon", 2, "--records", 1200,
            "--out", tmp_path / "evaluation",
        )  # fmt: skip
        assert told.code == 0, told.err
        assert "Accuracy" in told.out
        found = json.loads((tmp_path / "evaluation" / "evaluation.json").read_text())
        done = client.job(found["job_id"])
        assert done.state == "completed", done
        assert (done.evaluates, done.price.instance_epsilon) == (True, pytest.approx(2.0, abs=1e-3))
        assert paid_at_instance_level(client, before) == dict.fromkeys(EVERYBODY, done.price.instance_charge_nano)
        assert client.evaluation(done.job_id) == found
        student = read_model(client.student(job, tmp_path / "student.safetensors"))
        measured = read_model(client.student(done.job_id, tmp_path / "measured.safetensors"))
        for wrong, call in (
            (done.job_id, lambda one: client.labels(one, tmp_path / "none")),
            (job, client.evaluation),
        ):
            with pytest.raises(ServiceProblem, match="evaluates") as refused:
                call(wrong)
            assert refused.value.status == 404
        evidence = json.loads(client.evidence(tmp_path / "evidence.json", task=done.task_id).read_bytes())
        public = client.labels(done.job_id, tmp_path / "counts.parquet", of="questions")
        assert np.isfinite(np.array(pq.read_table(public)["noisy_votes"].to_pylist())).all()
    assert "labeler.methods.evaluate.squared" in json.dumps(evidence)
    assert found["model"]["job_id"] == job
    assert found["contributors"] == 3
    low, high = found["accuracy"]["noise"]
    truth = load_digits().target
    right = (student.predict_proba(digit_features).argmax(axis=1) == truth).mean()
    # Of other digits than the 570 that were scored: chance, and the noise, move it by some three points.
    assert low - 0.1 <= right <= high + 0.1
    said = measured.predict_proba(digit_features)
    assert np.array_equal(said.argmax(axis=1), student.predict_proba(digit_features).argmax(axis=1))
    assert abs(said.max(axis=1).mean() - right) < 0.13
    assert read_model(tmp_path / "evaluation" / "measured.safetensors").measured is not None
    assert found["privacy"]["delta"] == 1e-5
    assert measured.card["guarantees"]["instance"]["epsilon"] == pytest.approx(4.0, abs=0.01)
