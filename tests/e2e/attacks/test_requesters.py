"""Requesters among each other: a task of another's is closed, and a token that was revoked sees nothing more."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from api.client import Client
from api.client_http import ServiceProblem
from tests.e2e.service.conftest import Service
from tests.e2e.service.harm import QUERIES, new_task, paused, submit

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]


@pytest.fixture
def alice(attacked: Service) -> Iterator[Client]:
    with attacked.client() as admin:
        made = admin.create_token("alice", "requester")
    with attacked.client(token=made.token) as client:
        yield client


@pytest.fixture
def mallory(attacked: Service) -> Iterator[Client]:
    with attacked.client() as admin:
        made = admin.create_token("mallory", "requester")
    with attacked.client(token=made.token) as client:
        yield client


def refused(problem: pytest.ExceptionInfo[ServiceProblem]) -> int:
    return problem.value.status


def test_nobody_uses_up_or_reads_what_is_anothers(
    attacked: Service, alice: Client, mallory: Client, digit_features: np.ndarray
) -> None:
    task = new_task(alice, "alice's own")
    for _ in range(3):
        with pytest.raises(ServiceProblem) as problem:
            submit(mallory, task, digit_features)
        assert refused(problem) == 404
    assert alice.task(task.task_id).queries_left == QUERIES
    done = alice.wait(submit(alice, task, digit_features).job_id)
    assert (done.state, done.queries_done) == ("completed", QUERIES)
    for attempt in (mallory.job, mallory.cancel, mallory.forget):
        with pytest.raises(ServiceProblem) as problem:
            attempt(done.job_id)
        assert refused(problem) == 404
    with pytest.raises(ServiceProblem) as problem:
        mallory.labels(done.job_id, attacked.home.parent / "stolen.parquet")
    assert refused(problem) == 404
    assert not (attacked.home.parent / "stolen.parquet").exists()
    assert list(mallory.jobs()) == []
    assert list(mallory.tasks()) == []
    for page in (list(mallory.ledger()), list(mallory.ledger(search=done.job_id))):
        assert not any(done.job_id in str(entry) or task.task_id in str(entry) for entry in page)


def test_a_cancelled_job_gives_back_what_nobody_was_asked(
    attacked: Service, alice: Client, digit_features: np.ndarray
) -> None:
    task = new_task(alice, "asked later")
    with paused(attacked.pid("agent-1")), paused(attacked.pid("agent-2")):
        job = submit(alice, task, digit_features)
        assert alice.task(task.task_id).queries_left == 0
        assert alice.cancel(job.job_id).state == "cancelled"
        assert alice.task(task.task_id).queries_left == QUERIES, "no agent was asked, because none has said yes"
    again = alice.wait(submit(alice, task, digit_features).job_id)
    assert (again.state, again.queries_done) == ("completed", QUERIES)
    assert alice.task(task.task_id).queries_left == 0


def test_a_stream_ends_with_its_token(attacked: Service, alice: Client, digit_features: np.ndarray) -> None:
    with attacked.client() as admin, paused(attacked.pid("agent-1")):
        job = submit(alice, new_task(alice, "watched"), digit_features)
        events = alice._events(job.job_id, "")
        _, first = next(events)
        assert first.state not in ("completed", "cancelled")
        admin.revoke_token(alice.whoami().token_id)
        admin.cancel(job.job_id)
        later = [view.state for _, view in events]
        assert "cancelled" not in later
        with pytest.raises(ServiceProblem) as problem:
            next(alice._events(job.job_id, ""))
        assert refused(problem) == 401
