"""What is answered before the router is answered as the router would: the same access, limits, refusals and bytes."""

from __future__ import annotations

from typing import Any

import pytest
from starlette.testclient import TestClient

from api.app import create_app
from api.coordinator.ownership import Reader
from api.front import Front
from api.schema import EstimateRequest
from tests.api.routes.conftest import FINGERPRINT, Service

MISSING = "f" * 64


@pytest.fixture
def both(service: Service) -> tuple[Any, Any]:
    """The same application twice: with the short ways, and with the router alone."""
    short, long = create_app(service.coordinator), create_app(service.coordinator)
    long.user_middleware = [one for one in long.user_middleware if one.cls is not Front]
    assert len(short.user_middleware) == len(long.user_middleware) + 1
    return short, long


def requests(service: Service, features: list[list[float]]) -> list[tuple[str, str, dict[str, Any]]]:
    task = service.task()
    job = {"task_id": task.task_id, "features": features, "backbone_fingerprint": FINGERPRINT}
    estimate, jobs = "/v1/jobs:estimate", "/v1/jobs"
    asked: list[tuple[str, str, dict[str, Any]]] = [
        ("POST", estimate, {"json": {"task_id": task.task_id, "queries": 3}}),
        ("POST", estimate, {"json": {"task_id": task.task_id}}),
        ("POST", estimate, {"json": {"task_id": MISSING}}),
        ("POST", estimate, {"json": {"task_id": task.task_id, "queries": 0}}),
        ("POST", estimate, {"json": {"task_id": task.task_id, "other": 1}}),
        ("POST", estimate, {"content": b"{", "headers": {"Content-Type": "application/json"}}),
        ("POST", estimate, {"content": b'{"queries": NaN}', "headers": {"Content-Type": "application/json"}}),
        ("POST", estimate, {"content": b"{}", "headers": {"Content-Type": "text/plain"}}),
        ("POST", estimate, {"content": b" " * 2_000_000, "headers": {"Content-Type": "application/json"}}),
        ("GET", estimate, {}),
        ("POST", jobs, {"json": job, "headers": {"Idempotency-Key": "the same"}}),
        ("POST", jobs, {"json": job, "headers": {"Idempotency-Key": "not one\u00e9"}}),
        ("POST", jobs, {"json": job | {"name": "x"}, "headers": {"Idempotency-Key": "the same"}}),
        ("POST", jobs, {"json": job | {"features": []}}),
        ("POST", jobs, {"json": {"task_id": MISSING, "features": features, "backbone_fingerprint": FINGERPRINT}}),
        ("POST", jobs, {"content": b"[1", "headers": {"Content-Type": "application/json"}}),
        ("POST", jobs, {"content": b"a=b", "headers": {"Content-Type": "application/x-www-form-urlencoded"}}),
        ("GET", "/v1/jobs/job-that-is-not-there", {}),
        ("GET", "/v1/jobs/" + "x" * 101, {}),
        ("GET", "/v1/jobs/%00", {}),
        ("GET", "/v1/jobs/a%2Fb", {}),
        ("GET", "/v1/jobs/", {}),
        ("PUT", "/v1/jobs/job-1", {}),
        ("POST", "/v1/messages", {"content": b"x", "headers": {"Content-Type": "application/octet-stream"}}),
        ("POST", "/v1/messages", {"content": b"x", "headers": {"Content-Type": "text/plain"}}),
        ("POST", "/v1/messages:poll", {"content": b"", "headers": {"Content-Type": "text/plain"}}),
    ]
    return asked


def test_the_short_way_and_the_routers_answer_alike(
    both: tuple[Any, Any], service: Service, features: list[list[float]]
) -> None:
    changing = {"x-request-id", "date"}
    for method, path, options in requests(service, features):
        for role in (None, "viewer", "requester"):
            found = []
            for app in both:
                client = TestClient(app, raise_server_exceptions=False)
                headers = dict(options.get("headers", {}))
                if role is not None:
                    headers["Authorization"] = f"Bearer {service.tokens[role]}"
                sent = {**options, "headers": {name: value.encode() for name, value in headers.items()}}
                answer = client.request(method, path, **sent)
                kept = {name: value for name, value in answer.headers.items() if name not in changing}
                found.append((answer.status_code, kept, answer.content))
            assert found[0] == found[1], (method, path, role)


def test_a_job_that_is_looked_at_is_the_same_by_both_ways_from_memory_or_not(
    both: tuple[Any, Any], service: Service, features: list[list[float]]
) -> None:
    task = service.task()
    with service.http("requester") as http:
        body = {"task_id": task.task_id, "features": features, "backbone_fingerprint": FINGERPRINT, "deadline_s": 900}
        job_id = http.post("/v1/jobs", json=body).json()["job_id"]
    service.coordinator.cancel(job_id, reader=service.reader("requester"))
    for role, status in (("requester", 200), ("admin", 200), ("viewer", 200)):
        headers = {"Authorization": f"Bearer {service.tokens[role]}"}  # type: ignore[index]
        answers = [TestClient(app).get(f"/v1/jobs/{job_id}", headers=headers) for app in (*both, both[0])]
        assert {answer.status_code for answer in answers} == {status}
        assert len({answer.content for answer in answers}) == 1
    other = service.coordinator.tokens.create("another requester", "requester")[1]
    answers = [TestClient(app).get(f"/v1/jobs/{job_id}", headers={"Authorization": f"Bearer {other}"}) for app in both]
    assert [answer.status_code for answer in answers] == [404, 404]
    assert answers[0].content == answers[1].content


def test_a_request_that_goes_both_ways_is_counted_once(service: Service) -> None:
    app = create_app(service.coordinator)
    spent: list[str] = []
    limits = app.state.limits
    spend = limits.spend
    limits.spend = lambda token_id: (spent.append(token_id), spend(token_id))
    headers = {"Authorization": f"Bearer {service.tokens['requester']}"}
    answer = TestClient(app).post("/v1/jobs:estimate", json={"task_id": "no task"}, headers=headers)
    assert answer.status_code == 422, "the short way leaves this to the router"
    assert len(spent) == 1


def test_a_price_whose_numbers_were_priced_before_is_known_at_once_to_whoever_made_the_task(service: Service) -> None:
    coordinator, reader = service.coordinator, service.reader("requester")
    first, other = (
        EstimateRequest(task_id=service.task(name=name, sigma_votes=23.5).task_id, queries=3)
        for name in ("tools", "other tools")
    )
    assert coordinator.estimates.estimate_at_once(other, reader=reader) is None
    coordinator.estimates.estimate(first, reader=reader)
    view = coordinator.estimates.estimate_at_once(other, reader=reader)
    assert view is not None
    assert view == coordinator.estimates.estimate(other, reader=reader)
    stranger = Reader(coordinator.tokens.create("another requester", "requester")[0].token_id, "requester")
    assert coordinator.estimates.estimate_at_once(other, reader=stranger) is None


def test_a_price_that_any_field_moves_is_not_worked_out_by_the_loop_that_serves_everybody(service: Service) -> None:
    coordinator, reader = service.coordinator, service.reader("requester")
    known = service.task(sigma_votes=23.5)
    coordinator.estimates.estimate(EstimateRequest(task_id=known.task_id, queries=3), reader=reader)
    for changes in ({"max_dropouts": 1}, {"dishonest_talliers": 1}, {"records_per_person": 2}):
        other = service.task(**({"sigma_votes": 23.5} | changes))
        asked = EstimateRequest(task_id=other.task_id, queries=3)
        assert coordinator.estimates.estimate_at_once(asked, reader=reader) is None, changes
