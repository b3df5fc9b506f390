"""Release winner through real processes: the answer the agents' noise determines, and nothing but labels."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from safetensors.numpy import load

from api.client import Client
from api.schema import TaskRequest, TaskView
from labeler.tally import QueryBatch
from tests.e2e.service.conftest import Service
from tests.e2e.service.test_crash_matrix import expected_release


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
