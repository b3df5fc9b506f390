"""Release winner through real processes: the answer the agents' noise determines, and nothing but labels."""

from __future__ import annotations

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from safetensors.numpy import load

from api.client import Client
from api.schema import TaskRequest, TaskView
from labeler.rounds.effects import FINISHED
from labeler.tally import QueryBatch
from tests.e2e.service.conftest import Service
from tests.e2e.service.harm import EVERYBODY, paid_at_instance_level, posted
from tests.e2e.service.test_crash_matrix import expected_release
from workers.tallier.peers import address_of, read_peers

AT_ONCE = 8


def make_task(client: Client, queries: int, **fields: Any) -> TaskView:
    request = {"name": "w", "method": "knn", "k": 5, "sigma_votes": 20.0, "delta": 1e-5, "max_queries": queries}
    return client.create_task(TaskRequest.model_validate(request | {"release": "winner"} | fields))


def submit(client: Client, task: TaskView, features: np.ndarray) -> str:
    fingerprint = task.task["backbone_fingerprint"]
    return client.submit(task.task_id, features=features, backbone_fingerprint=fingerprint).job_id


def expected(service: Service, task: TaskView, job_id: str) -> list[int]:
    """The labels of the reference, for the questions that the service made of what it was sent, batch by batch."""
    questions = load((service.home / "coordinator" / "jobs" / job_id / "questions.safetensors").read_bytes())
    with service.client() as client:
        sizes = [one.queries for one in client.job(job_id).rounds]
    labels: list[int] = []
    for size in sizes:
        batch = QueryBatch(questions["features"][len(labels) : len(labels) + size], first_query=len(labels))
        labels += expected_release(service, task.task, batch).labels.tolist()
    return labels


def labels_of(client: Client, job_id: str, folder: Path) -> Any:
    return pq.read_table(client.labels(job_id, folder / f"{job_id}.parquet", of="questions"))


QUICK = {"abstain_below": 40}
JOBS = [
    (120, QUICK),
    pytest.param(5_000, {}, marks=pytest.mark.long),
    pytest.param(40, {"method": "reverse-knn", "k": 1, "sigma_votes": 10.0}, marks=pytest.mark.long),
]


@pytest.mark.parametrize(("queries", "fields"), JOBS, ids=["a threshold", "many questions", "reverse-knn"])
def test_the_labels_are_those_of_the_reference_and_no_votes_come_with_them(
    service: Service, digit_features: np.ndarray, tmp_path: Path, queries: int, fields: dict[str, Any]
) -> None:
    features = np.resize(digit_features[500:], (queries, digit_features.shape[1]))
    with service.client() as client:
        task = make_task(client, queries, **fields)
        job = submit(client, task, features)
        assert client.wait(job).state == "completed"
        table = labels_of(client, job, tmp_path)
    reference = expected(service, task, job)
    assert table["label"].to_pylist() == reference
    assert table["status"].to_pylist() == ["abstained" if label < 0 else "answered" for label in reference]
    assert set(table["release"].to_pylist()) == {"winner"}
    assert table["noisy_votes"].null_count == queries
    assert (0 < reference.count(-1) < queries) == (fields is QUICK)


def is_computing(port: int) -> bool:
    """Whether a tallier waits for the two others at its port or is connected there: only while it computes."""
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        if fields[1].endswith(f":{port:04X}") and fields[3] in ("01", "0A"):
            return True
    return False


def is_seen_computing(client: Client, job: str, port: int) -> bool:
    """Whether the computation of a job was seen before the job was over."""
    while True:
        asked = time.monotonic()
        while time.monotonic() - asked < 0.5:
            if is_computing(port):
                return True
        if client.job(job).state in FINISHED:
            return False


@pytest.mark.long
def test_a_tallier_killed_in_the_middle_of_the_computation_costs_time_and_nothing_else(
    service: Service, digit_features: np.ndarray, tmp_path: Path
) -> None:
    features = digit_features[:1500]
    peers = read_peers(service.home / "talliers" / "tallier-1")
    assert peers is not None
    port = address_of(peers.listen).port
    with service.client() as client:
        victim = service.pid("tallier-1")
        # A computation is over in a moment: it is looked for without a pause, and in another job where it was missed.
        for number in range(10):
            task = make_task(client, len(features), name=f"try {number}")
            before = posted(client)
            job = submit(client, task, features)
            if is_seen_computing(client, job, port):
                break
        else:
            pytest.fail("ten computations were over before one of them was seen")
        os.kill(victim, signal.SIGKILL)
        done = client.wait(job)
        assert done.state == "completed"
        assert paid_at_instance_level(client, before) == dict.fromkeys(EVERYBODY, done.price.instance_charge_nano)
        table = labels_of(client, job, tmp_path)
        assert table["label"].to_pylist() == expected(service, task, job)
        # The service stays up: the next job is answered.
        another = make_task(client, 5)
        assert client.wait(submit(client, another, digit_features[:5])).state == "completed"


def answered(
    service: Service, features: np.ndarray, sigma_votes: float, folder: Path
) -> tuple[TaskView, str, list[int]]:
    """The task, the name and the labels of one job."""
    with service.client() as client:
        task = make_task(client, len(features), sigma_votes=sigma_votes)
        job = submit(client, task, features)
        assert client.wait(job).state == "completed"
        return task, job, labels_of(client, job, folder)["label"].to_pylist()


@pytest.mark.long
def test_eight_jobs_submitted_at_once_each_get_their_own_winners(
    service: Service, digit_features: np.ndarray, tmp_path: Path
) -> None:
    def one(number: int) -> tuple[TaskView, str, list[int]]:
        return answered(service, digit_features[20 * number : 20 * number + 20], 20.0 + number, tmp_path)

    with ThreadPoolExecutor(max_workers=AT_ONCE) as pool:
        done = list(pool.map(one, range(AT_ONCE)))
    references = [expected(service, task, job) for task, job, _ in done]
    # With this noise each list is as good as unique, so that an exchange of any two would show.
    assert len({tuple(labels) for labels in references}) == AT_ONCE
    assert [labels for *_, labels in done] == references
