"""Deleting what a job sent and got, over the real service."""

from __future__ import annotations

from datetime import timedelta

import numpy as np
import pytest

from api.client import Client, ServiceProblem
from api.schema import JobView
from tests.api.routes.conftest import FINGERPRINT, Service, eventually, of_new_requester
from tests.api.routes.test_labels import complete

FEATURES = np.eye(3, 8).tolist()


@pytest.fixture
def service(service: Service) -> Service:
    return of_new_requester(service)


@pytest.fixture
def job(service: Service) -> JobView:
    with Client(service.url, service.tokens["requester"]) as client:
        return client.submit(service.task().task_id, features=FEATURES, backbone_fingerprint=FINGERPRINT)


@pytest.mark.process
def test_an_ended_job_is_forgotten_by_who_sent_it_and_its_labels_are_gone_for_good(
    service: Service, job: JobView
) -> None:
    path = f"/v1/jobs/{job.job_id}"
    with service.http("requester") as owner, service.http("viewer") as viewer, service.http("admin") as admin:
        early = owner.delete(f"{path}/data")
        assert (early.status_code, early.json()["type"]) == (409, "urn:labeler:problem:not-ready")
        complete(service, job.job_id, FEATURES)
        eventually(lambda: owner.get(f"{path}/labels").status_code == 200)
        assert viewer.delete(f"{path}/data").status_code == 403
        head = service.coordinator.ledger.head()
        gone = owner.delete(f"{path}/data")
        assert gone.status_code == 200
        assert gone.json()["forgotten_at"]
        assert gone.json()["state"] == "completed"
        for what in ("labels", "model"):
            answer = owner.get(f"{path}/{what}")
            assert (answer.status_code, answer.json()["type"]) == (410, "urn:labeler:problem:gone")
            assert "stay in the ledger" in answer.json()["detail"]
        again = admin.delete(f"{path}/data")
        assert again.json()["forgotten_at"] == gone.json()["forgotten_at"]
        (listed,) = (one for one in owner.get("/v1/jobs").json()["items"] if one["job_id"] == job.job_id)
        assert listed["forgotten_at"] == gone.json()["forgotten_at"]
    assert not (service.coordinator.config.home / "jobs" / job.job_id).exists()
    assert service.coordinator.ledger.head() == head
    assert service.coordinator.stores.jobs.release(job.job_id, 0) is not None
    service.coordinator.ledger.verify()


def test_another_requester_cannot_delete_what_is_not_its_own(service: Service, job: JobView) -> None:
    _, secret = service.coordinator.tokens.create("somebody else", "requester")
    with Client(service.url, service.tokens["requester"]) as owner:
        owner.cancel(job.job_id)
    with Client(service.url, secret) as other, pytest.raises(ServiceProblem) as refused:
        other.forget(job.job_id)
    assert refused.value.status in (403, 404)
    with Client(service.url, service.tokens["requester"]) as owner:
        assert owner.job(job.job_id).forgotten_at is None
        assert owner.forget(job.job_id).forgotten_at is not None


def test_an_operator_prunes_a_running_service_by_age(service: Service, job: JobView) -> None:
    from workers.commands.console import prune_service

    with Client(service.url, service.tokens["requester"]) as owner:
        owner.cancel(job.job_id)
    told: list[tuple[int, int]] = []

    def prune(age: timedelta, *, dry_run: bool) -> list[str]:
        def progress(stage: str, done: int, total: int) -> None:
            told.append((done, total))

        token = service.tokens["admin"]
        found = prune_service(service.url, token, None, age, dry_run=dry_run, progress=progress)
        jobs: list[str] = found["jobs"]
        return jobs

    assert job.job_id not in prune(timedelta(days=1), dry_run=False)
    assert job.job_id in prune(timedelta(0), dry_run=True)
    assert told == []
    gone = prune(timedelta(0), dry_run=False)
    assert job.job_id in gone
    assert told[-1] == (len(gone), len(gone))
    assert prune(timedelta(0), dry_run=True) == []
    with Client(service.url, service.tokens["requester"]) as owner:
        assert owner.job(job.job_id).forgotten_at is not None
