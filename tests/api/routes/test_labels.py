"""Labels of a completed job: every format over HTTP, by the client, and as the answer to a small question.

The steps of embedder, agents and talliers are written straight into the stores; their own tests, and those of the whole
service, say that they take them.
"""

from __future__ import annotations

import io
import json
import threading
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from safetensors.numpy import save_file

from api.client import Client
from api.schema import JobView, LabelsRequest, TaskView
from feature_store.results.image_labels import IMAGE_SCHEMA
from feature_store.results.models import read_model
from feature_store.results.pseudo_labels import SCHEMA
from feature_store.rows import quantize
from labeler.budget import NANO
from labeler.release import Release, release_to_bytes
from tests.api.routes.conftest import AGENTS, CLASSES, FINGERPRINT, TALLIERS, Service, eventually, of_new_requester
from tests.command_line import Labeler, labeler
from tests.job_steps import take_step

__all__ = ["labeler"]

Features = list[list[float]]


@pytest.fixture(scope="module")
def service(service: Service) -> Service:
    return of_new_requester(service)


def complete(service: Service, job_id: str, features: Features) -> None:
    """Take a job through its states as everybody else would."""
    coordinator = service.coordinator
    jobs = coordinator.stores.jobs
    folder = coordinator.config.home / "jobs" / job_id
    count = len(features)
    arrays = {
        "features": quantize(np.array(features)),
        "rows": np.arange(count, dtype=np.int64),
        "assignment": np.arange(count, dtype=np.int64),
    }
    save_file(arrays, folder / "partial", {"fingerprint": FINGERPRINT, "backbone": "pixels"})
    (folder / "partial").rename(folder / "questions.safetensors")
    service.agree(job_id)
    eventually(lambda: jobs.rounds(job_id)[0].state == "asked")
    for tallier in TALLIERS:
        take_step(jobs, "report_holdings", job_id, 0, tallier, dict.fromkeys(AGENTS, "5" * 32))
    coordinator.driver.wake(job_id)
    eventually(lambda: jobs.rounds(job_id)[0].state == "posted")
    votes = np.full((count, len(CLASSES)), -1.25)
    votes[np.arange(count), np.arange(count) % 3] = 40.5
    labels = votes.argmax(axis=1).astype(np.int16)
    release = Release("histogram", labels, votes, frozenset(AGENTS), is_seeded=False)
    take_step(jobs, "store_release", job_id, 0, release_to_bytes(release))
    jobs.change(job_id, "completed", expected=("collecting", "tallying"))


@pytest.fixture(scope="module")
def task(service: Service) -> TaskView:
    return service.task()


@pytest.fixture(scope="module")
def completed(service: Service, task: TaskView) -> JobView:
    features = np.eye(3, 8).tolist()
    with Client(service.url, service.tokens["requester"]) as client:
        ids = ["a", "b", "c"]
        job = client.submit(task.task_id, features=features, query_ids=ids, backbone_fingerprint=FINGERPRINT)
        seen: list[JobView] = []
        watcher = threading.Thread(target=lambda: client.wait(job.job_id, seen.append))
        watcher.start()
        complete(service, job.job_id, features)
        watcher.join(240)
        assert not watcher.is_alive()
        versions = [one.version for one in seen]
        assert versions == sorted(set(versions))
        assert seen[-1].state == "completed"
        return client.job(job.job_id)


def test_a_completed_job_is_downloaded_in_every_format(service: Service, completed: JobView) -> None:
    path = f"/v1/jobs/{completed.job_id}/labels?of=questions"
    with service.http("requester") as http:
        lines = http.get(path)
        assert lines.headers["Content-Type"] == "application/jsonl"
        assert f'filename="{completed.job_id}-questions.jsonl"' in lines.headers["Content-Disposition"]
        rows = [json.loads(line) for line in lines.text.splitlines()]
        assert [(row["query_id"], row["label_name"]) for row in rows] == list(zip("abc", CLASSES, strict=True))
        assert {row["mu_squared"] for row in rows} == {completed.price.instance_question_nano / NANO}  # type: ignore[operator]
        table = pq.read_table(io.BytesIO(http.get(path + "&format=parquet").content))
        assert table.schema.equals(SCHEMA)
        assert table.column("noisy_votes").to_pylist()[0] == [40.5, -1.25, -1.25]
        assert b"privacy" in table.schema.metadata
        tasks = http.get(path + "&format=label-studio").json()
        assert [one["predictions"][0]["result"][0]["value"]["choices"][0] for one in tasks] == list(CLASSES)
        text = http.get(path + "&format=csv")
        assert text.headers["Content-Type"] == "text/csv; charset=utf-8"
        assert text.text.splitlines() == ["file_name,label", "a,backpack", "b,keyboard", "c,mug"]
        assert http.get(path + "&format=xml").status_code == 422


def test_the_shell_says_the_name_of_the_task_and_what_the_job_and_each_question_took(
    service: Service, completed: JobView, labeler: Labeler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LABELER_URL", service.url)
    monkeypatch.setenv("LABELER_TOKEN", service.tokens["requester"])
    said = labeler("status", completed.job_id).out
    assert f"Task       {completed.task_name}\n" in said
    assert f"Cost       so far epsilon {completed.price.instance_epsilon:.3g} per private image" in said
    share = completed.price.instance_question_nano
    assert share is not None
    assert f"each question takes {share / NANO:.3g} of mu squared per private image\n" in said
    assert f"task {completed.task_name}" in " ".join(labeler("status").out.split())


def test_the_student_of_a_job_is_evaluated_by_a_task_of_its_own(service: Service, completed: JobView) -> None:
    with Client(service.url, service.tokens["requester"]) as client:
        asked = client.evaluate(completed.job_id, epsilon=1.0, backbone_fingerprint=FINGERPRINT)
        task = client.task(asked.task_id).task
    assert (task["method"], task["classes"]) == ("evaluate", list(CLASSES))
    assert task["max_queries"] == asked.queries


def test_without_further_words_every_image_is_labelled_in_every_format(
    service: Service, completed: JobView, tmp_path: Path
) -> None:
    path = f"/v1/jobs/{completed.job_id}/labels"
    with Client(service.url, service.tokens["requester"]) as client:
        table = pq.read_table(client.labels(completed.job_id, tmp_path / "labels.parquet"))
        student = read_model(client.student(completed.job_id, tmp_path / "student.safetensors"))
    assert table.schema.equals(IMAGE_SCHEMA)
    with service.http("requester") as http:
        rows = http.get("/v1/budget/queries", params={"job_id": completed.job_id}).json()["items"]
    assert completed.cost is not None
    paid = completed.cost.instance_nano
    assert sum(table["share_nano"].to_pylist()) == sum(one["share_nano"] for one in rows) == paid
    assert table["source"].to_pylist() == ["a", "b", "c"]
    assert table["label_name"].to_pylist() == list(CLASSES)
    assert set(table["origin"].to_pylist()) == {"asked"}
    assert student.fingerprint == FINGERPRINT
    assert student.job_id == completed.job_id
    with service.http("requester") as http:
        lines = http.get(path)
        assert f'filename="{completed.job_id}-labels.jsonl"' in lines.headers["Content-Disposition"]
        assert [json.loads(line) for line in lines.text.splitlines()] == table.to_pylist()
        tasks = http.get(path, params={"format": "label-studio"}).json()
        of_questions = http.get(path, params={"format": "label-studio", "of": "questions"}).json()
        assert {one["data"]["task"] for one in (*tasks, *of_questions)} == {completed.task_name}
        assert [one["predictions"][0]["score"] for one in tasks] == [
            round(x, 4) for x in table["confidence"].to_pylist()
        ]
        text = http.get(path, params={"format": "csv"}).text.splitlines()
        assert text[0] == "file_name,label,confidence,origin"
        assert text[1].startswith("a,backpack,")
        assert http.get(path, params={"of": "answers"}).status_code == 422
        sent = http.get(f"/v1/jobs/{completed.job_id}/student")
        assert sent.content == (tmp_path / "student.safetensors").read_bytes()
    with service.http("viewer") as http:
        assert http.get(path).status_code == 403
        assert http.get(f"/v1/jobs/{completed.job_id}/student").status_code == 403


def test_a_small_question_is_answered_at_once(service: Service, task: TaskView, features: Features) -> None:
    request = LabelsRequest(task_id=task.task_id, features=features, backbone_fingerprint=FINGERPRINT, wait_s=60)
    before = {job.job_id for job in service.coordinator.stores.jobs.unfinished()}

    def answer() -> None:
        eventually(lambda: {job.job_id for job in service.coordinator.stores.jobs.unfinished()} - before != set())
        (job,) = [job for job in service.coordinator.stores.jobs.unfinished() if job.job_id not in before]
        complete(service, job.job_id, features)

    helper = threading.Thread(target=answer)
    helper.start()
    with Client(service.url, service.tokens["requester"]) as client:
        view = client.ask(request)
    helper.join(240)
    assert view.state == "completed"
    assert [row.label_name for row in view.labels] == ["backpack", "keyboard"]
