"""Evidence from a running service: for auditors and administrators, signed, and the same as from its home."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from api.client import Client
from api.client_http import ServiceProblem
from api.coordinator.ownership import Reader
from api.schema import JobRequest
from feature_store.results.evidence import read_signed
from labeler.system.keys import PartyKeys
from tests.api.routes.conftest import DIMENSION, FINGERPRINT, Service


@pytest.fixture
def asked(service: Service) -> str:
    """The digest of a task of which a job waits."""
    task = service.task(name="asked for evidence")
    request = JobRequest(
        task_id=task.task_id, features=((1.0,) * DIMENSION,), backbone_fingerprint=FINGERPRINT, name="patient-meier"
    )
    service.coordinator.submit(request, None, reader=Reader(service.holder("requester"), "requester"))
    return task.task_id


@pytest.mark.parametrize("role", ["viewer", "admin"])
def test_an_auditor_reads_evidence_that_the_coordinator_signed(service: Service, asked: str, role: str) -> None:
    with service.http(role) as http:  # type: ignore[arg-type]  # one of the roles
        answer = http.get("/v1/evidence", params={"task": asked})
        page = http.get("/v1/evidence", params={"task": asked, "format": "html"})
    assert answer.status_code == 200, answer.text
    signed = read_signed(answer.content)
    signed.check(PartyKeys.load(service.coordinator.config.home / "keys.json").public.verify_key)
    [task] = signed.evidence.facts.tasks
    assert [job.state for job in task.jobs] == ["under way"]
    assert "meier" not in answer.text
    assert "attachment" in answer.headers["content-disposition"]
    assert page.headers["content-type"].startswith("text/html")
    assert "sandbox" in page.headers["content-security-policy"]
    assert asked in page.text


def test_a_requester_reads_none_because_it_names_the_jobs_of_all(service: Service, asked: str) -> None:
    with service.http("requester") as http:
        answer = http.get("/v1/evidence", params={"task": asked})
    assert answer.status_code == 403
    assert "every requester" in answer.json()["detail"]


def test_a_period_and_a_task_are_looked_at_strictly(service: Service, asked: str) -> None:
    now = datetime.now(UTC)
    with service.http("viewer") as http:
        assert http.get("/v1/evidence", params={"task": "0" * 64}).status_code == 404
        assert http.get("/v1/evidence", params={"task": "no digest"}).status_code == 422
        later = http.get("/v1/evidence", params={"since": (now + timedelta(days=1)).isoformat()})
        backwards = {"since": now.isoformat(), "until": (now - timedelta(days=1)).isoformat()}
        assert http.get("/v1/evidence", params=backwards).status_code == 422
    assert read_signed(later.content).evidence.facts.tasks == ()


def test_a_client_downloads_it(service: Service, asked: str, tmp_path: Path) -> None:
    with Client(service.url, service.tokens["viewer"]) as client:
        path = client.evidence(tmp_path / "evidence.json", task=asked)
        assert read_signed(path.read_bytes()).evidence.facts.scope.task == asked
        with pytest.raises(ServiceProblem, match="no task"):
            client.evidence(tmp_path / "none.json", task="0" * 64)
    assert not (tmp_path / "none.json").exists()
