"""Methods whose agents train, through real processes: priced, labeled, released with a card, unmoved by a crash."""

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
from tests.e2e.service.harm import EVERYBODY, arm, paid_at_instance_level, posted
from tests.processes import wait_until

DIMENSION = 64
QUERIES = 300
STEPS = 10
TRAINING = {"min_records": 150, "regularisation": 0.01, "dimension": 24}
METHODS: dict[str, dict[str, Any]] = {
    "ensemble": {"sigma_votes": 0.2, "max_queries": QUERIES},
    "blind-average": {"epsilon": 40.0, "max_queries": DIMENSION + 1, "training": TRAINING},
    "aux-distill": {"epsilon": 20.0, "max_queries": QUERIES, "training": TRAINING},
    "federated": {
        "sigma_votes": 1.0,
        "max_queries": STEPS * (DIMENSION + 1),
        "training": {
            "min_records": 150,
            "regularisation": 1e-4,
            "iterations": STEPS,
            "sampled": {"rate": 0.4, "learning_rate": 8.0, "momentum": 0.5},
        },
    },
}
"""Of the last the first round pays for all, and each further one the least there is: they are one price, too."""


def make_task(client: Client, method: str, **fields: Any) -> TaskView:
    request = {"name": method, "method": method, "delta": 1e-5} | METHODS[method] | fields
    return client.create_task(TaskRequest.model_validate(request))


def submit(client: Client, task: TaskView, features: np.ndarray) -> str:
    fingerprint = task.task["backbone_fingerprint"]
    return client.submit(task.task_id, features=features, backbone_fingerprint=fingerprint).job_id


def processes_of(service: Service, role: str) -> dict[str, int]:
    """Process ids of those of a role that run now."""
    running_now = json.loads((service.home / "processes.json").read_text())
    return {name: pid for name, pid in running_now.items() if name.startswith(role)}


@pytest.mark.long
@pytest.mark.parametrize("method", METHODS)
def test_a_job_labels_every_image_and_charges_every_account_once(
    service: Service, digit_features: np.ndarray, tmp_path: Path, method: str
) -> None:
    with service.client() as client:
        task = make_task(client, method)
        before = posted(client)
        job = submit(client, task, digit_features[:QUERIES])
        done = client.wait(job)
        assert done.state == "completed", done
        table = pq.read_table(client.labels(job, tmp_path / "labels.parquet", of="questions"))
        paid = paid_at_instance_level(client, before)
        shares = [one.share_nano for one in client.query_budgets(job_id=job)]
    assert paid == dict.fromkeys(EVERYBODY, task.price.instance_charge_nano)
    assert shares == table["share_nano"].to_pylist()[::-1]
    assert sum(share or 0 for share in shares) == task.price.instance_charge_nano
    assert len(table) == QUERIES
    assert set(table["status"].to_pylist()) == {"answered"}
    assert (table["noisy_votes"].null_count == QUERIES) == (method in ("blind-average", "federated"))
    assert np.mean(table["label"].to_numpy() == load_digits().target[:QUERIES]) > 0.6
    privacy = json.loads(table.schema.metadata[b"privacy"])
    assert privacy["instance"]["epsilon"] == task.price.instance_epsilon


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
def test_a_model_whose_noise_the_talliers_add_is_released_at_the_price_of_two_unknown_agents(
    service: Service, digit_features: np.ndarray, tmp_path: Path
) -> None:
    """Two of three agents may collude: among agents one share of noise is left, among talliers two."""
    with service.client() as client:
        task = make_task(client, "blind-average", dishonest_talliers=1)
        by_agents = make_task(client, "blind-average", colluding_agents=2)
        job = submit(client, task, digit_features[:QUERIES])
        assert client.wait(job).state == "completed"
        path = client.model(job, tmp_path / "model.safetensors")
        labels = pq.read_table(client.labels(job, tmp_path / "labels.parquet", of="questions"))["label"].to_numpy()
    assert task.price.dishonest_talliers == 1
    assert task.price.instance_epsilon == pytest.approx(by_agents.price.instance_epsilon, rel=1e-3)
    assert np.mean(labels == load_digits().target[:QUERIES]) > 0.6
    with safe_open(path, framework="numpy") as file:
        card = json.loads(file.metadata()["labeler"])["privacy_card"]
    assert (card["holds"], card["dishonest_talliers"]) == (True, 1)


@pytest.mark.long
def test_a_model_along_public_axes_is_asked_for_and_labels_every_image(
    service: Service, digit_features: np.ndarray, tmp_path: Path
) -> None:
    with service.client() as client:
        training = TRAINING | {"axes": 20}
        task = make_task(client, "blind-average", epsilon=10.0, max_queries=21, training=training)
        job = submit(client, task, digit_features[:QUERIES])
        assert client.wait(job).state == "completed"
        model = read_model(client.model(job, tmp_path / "model.safetensors"))
        labels = pq.read_table(client.labels(job, tmp_path / "labels.parquet", of="questions"))["label"].to_numpy()
        # More axes than so few images have: refused or failed before anybody is charged.
        before = posted(client)
        again = make_task(client, "blind-average", epsilon=10.0, max_queries=21, training=training, name="few")
        few = client.wait(submit(client, again, digit_features[:10]))
        assert few.state in ("failed", "refused")
        assert posted(client) == before
    assert np.mean(labels == load_digits().target[:QUERIES]) > 0.6
    assert model.arrays["axes"].shape == (21, DIMENSION)
    assert np.array_equal(model.predict_proba(digit_features[:QUERIES]).argmax(axis=1), labels)


def test_a_job_of_the_wrong_size_says_which_task_to_make(service: Service, digit_features: np.ndarray) -> None:
    with service.client() as client:
        task = make_task(client, "blind-average", max_queries=DIMENSION)
        before = posted(client)
        done = client.wait(submit(client, task, digit_features[:5]))
        # The agents say so before the questions are made, so nobody is asked and nobody pays.
        assert done.state == "refused", done
        assert done.problem is not None
        assert f"max_queries = {DIMENSION + 1}" in done.problem.detail
        # The job ends some seconds after the first no, and who says no later is heard all the same.
        everybody = {"agent-1", "agent-2", "agent-3"}
        wait_until(lambda: set(client.job(done.job_id).declined) == everybody, what="the no of everybody")
        assert posted(client) == before
        with pytest.raises(ServiceProblem, match="aux-distill task is asked all its 300 queries at once"):
            submit(client, make_task(client, "aux-distill"), digit_features[:10])


@pytest.mark.long
@pytest.mark.parametrize(
    ("method", "fault", "role"),
    [
        ("blind-average", "agent.stored", "agent-"),
        # Between two steps: the answer is sent as it was stored; the next step is asked from the journal's releases.
        ("federated", "agent.stored", "agent-"),
        ("federated", "coordinator.released", "coordinator"),
    ],
)
def test_who_is_killed_goes_on_with_what_was_stored(
    service: Service, digit_features: np.ndarray, tmp_path: Path, method: str, fault: str, role: str
) -> None:
    """The journal keeps the answer and no model; every account is charged once."""
    with service.client() as client:
        task = make_task(client, method, name=fault)
        before = posted(client)
        alive = processes_of(service, role)
        arm(service, f"{fault}\n")
        job = submit(client, task, digit_features[:QUERIES])
        wait_until(
            lambda: len(now := processes_of(service, role)) == len(alive) and now != alive,
            what="what was killed to be started again",
        )
        assert not service.faults.exists()
        assert client.wait(job).state == "completed"
        paid = paid_at_instance_level(client, before)
        table = pq.read_table(client.labels(job, tmp_path / "labels.parquet", of="questions"))
    assert paid == dict.fromkeys(EVERYBODY, task.price.instance_charge_nano)
    assert np.mean(table["label"].to_numpy() == load_digits().target[:QUERIES]) > 0.6


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
