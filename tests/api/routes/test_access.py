"""Role x route over every route of the app; tokens; rate limits."""

from __future__ import annotations

import json
import logging
import time
from pathlib import Path
from typing import Any

import pytest
from fastapi import routing

from api import examples
from api.access import ACCESS, Need, reaches
from api.app import create_app
from api.limits import RateLimits, TooManyRequests
from api.logs import LogFormatter
from labeler.errors import InvalidSetting, Unavailable
from tests.api.routes.conftest import ConfigOf, ServeIn, Service

FILLED = {
    "{task_id}": "0" * 64,
    "{job_id}": "job-none",
    "{agent_id}": "nobody",
    "{party_id}": "nobody",
    "{token_id}": "tok-none",
    "{asset:path}": "app.js",
}
CALLERS = (None, "viewer", "requester", "admin")


def concrete(path: str) -> str:
    for name, value in FILLED.items():
        path = path.replace(name, value)
    return path


def allowed(role: Any, need: Need) -> bool:
    if need in ("open", "optional", "signed", "invited"):
        return True
    if need in ("auditor", "scraper"):
        return role in ("viewer", "admin")
    return role is not None and reaches(role, need)


def test_every_route_has_a_row_and_every_row_a_route(service: Service) -> None:
    app = create_app(service.coordinator)
    every = getattr(routing, "iter_route_contexts", list)  # an older FastAPI has them in one list
    routes = {(method, route.path) for route in every(app.routes) for method in route.methods or ()}
    assert routes == set(ACCESS)


@pytest.mark.parametrize("path", sorted({path for _, path in ACCESS}))
def test_a_method_that_no_route_knows_is_told_those_of_its_own_path(service: Service, path: str) -> None:
    with service.http("admin") as http:
        response = http.request("OPTIONS", concrete(path))
    assert response.status_code == 405
    known = {method for method, where in ACCESS if where == path}
    assert set(response.headers["Allow"].split(", ")) == known | ({"HEAD"} if "GET" in known else set())


@pytest.mark.parametrize("path", sorted({path for _, path in ACCESS}))
def test_head_is_answered_where_get_is_with_its_headers_and_no_body(service: Service, path: str) -> None:
    place = concrete(path)
    with service.http("admin") as http:
        head, get = http.head(place), http.get(place)
        assert http.get("/healthz").status_code == 200  # the connection goes on behind an answer without its body
    assert (head.status_code, head.content) == (get.status_code, b"")
    assert head.status_code != 405 or ("GET", path) not in ACCESS
    assert set(head.headers) - {"transfer-encoding"} == set(get.headers) - {"transfer-encoding"}
    assert head.headers.get("Content-Type") == get.headers.get("Content-Type")
    with service.http(None) as http:
        assert http.head(place).status_code == http.get(place).status_code


def test_head_of_a_stream_ends_and_is_counted_as_head(service: Service) -> None:
    with service.http("requester") as http:
        job_id = http.post("/v1/jobs", json=service.vectors()).json()["job_id"]
        head = http.head(f"/v1/jobs/{job_id}/events")
        assert (head.status_code, head.headers["Content-Type"].partition(";")[0]) == (200, "text/event-stream")
        status = http.head(f"/v1/jobs/{job_id}")
        assert int(status.headers["Content-Length"]) > 100
    with service.http("viewer") as http:
        counts = [line for line in http.get("/metrics").text.splitlines() if 'method="HEAD"' in line]
    assert any('route="/v1/jobs/{job_id}/events"' in line for line in counts)


@pytest.mark.parametrize("role", CALLERS)
@pytest.mark.parametrize(("method", "path"), ACCESS)
def test_a_role_reaches_what_the_table_says_and_nothing_else(
    service: Service, method: str, path: str, role: Any
) -> None:
    with service.http(role) as http:
        response = http.request(method, concrete(path), headers={"Content-Type": "application/x-none"})
    if allowed(role, ACCESS[method, path]):
        # Past the gate: whatever is wrong now is wrong with the request, which was made to be wrong.
        assert response.status_code in (200, 307, 404, 415, 503), response.text
    elif role is None:
        assert response.status_code == 401
        assert response.headers["WWW-Authenticate"].startswith("Bearer")
        assert response.json()["type"] == "urn:labeler:problem:not-authenticated"
    else:
        assert response.status_code == 403
        assert response.json()["type"] == "urn:labeler:problem:not-allowed"


@pytest.mark.parametrize(
    "header", ["", "Bearer", "Bearer lab_wrong", "Basic YTpi", "lab_wrong", "Bearer " + "x" * 5000]
)
def test_what_is_no_known_token_is_refused(service: Service, header: str) -> None:
    with service.http(None) as http:
        response = http.get("/v1/budget", headers={"Authorization": header})
    assert response.status_code == 401
    assert "wrong" not in response.text


def test_a_revoked_token_is_refused(service: Service) -> None:
    record, secret = service.coordinator.tokens.create("leaver", "admin")
    with service.http(None) as http:
        headers = {"Authorization": f"Bearer {secret}"}
        assert http.get("/v1/budget", headers=headers).status_code == 200
        with service.http("admin") as admin:
            assert admin.delete(f"/v1/tokens/{record.token_id}").json()["revoked_at"] is not None
        assert http.get("/v1/budget", headers=headers).status_code == 401


def test_metrics_need_a_token_wherever_the_request_comes_from(service: Service) -> None:
    # A TLS proxy on this machine that sets no X-Forwarded-For makes every stranger a neighbor.
    with service.http(None) as http, service.http("viewer") as viewer:
        for headers in ({}, {"X-Forwarded-For": "203.0.113.7"}, {"X-Forwarded-For": "127.0.0.1"}):
            assert http.get("/metrics", headers=headers).status_code == 401
            assert viewer.get("/metrics", headers=headers).status_code == 200


def test_metrics_are_open_where_the_settings_say_so(serve_in: ServeIn, config_of: ConfigOf, tmp_path: Path) -> None:
    config = config_of(tmp_path / "home").model_copy(update={"metrics": "open"})
    with serve_in(config) as service, service.http(None) as http:
        assert "labeler_ledger_seq" in http.get("/metrics").text


NOT_READY = {
    "name": "service",
    "ok": False,
    "detail": "no job can be taken now; an administrator's token gets the reason",
}


def test_only_an_administrator_is_told_more_than_ready_or_not(service: Service) -> None:
    with service.http(None) as http, service.http("admin") as admin:
        told = [http.get("/readyz")]
        assert http.get("/readyz", headers={"Authorization": "Bearer lab_wrong"}).status_code == 401
        for role in ("viewer", "requester"):
            with service.http(role) as holder:
                told.append(holder.get("/readyz"))
        named = admin.get("/readyz")
    for answer in told:
        assert answer.status_code == named.status_code == 503
        assert answer.json() == {"ready": False, "checks": [NOT_READY], "version": ""}
    details = {check["name"]: check["detail"] for check in named.json()["checks"]}
    assert details.keys() == {"journal", "storage", "redis", "embedder", "talliers", "agents"}
    assert "tallier-0" in details["talliers"]
    assert details["journal"].split()[0].isdecimal()
    assert named.json()["version"]


def test_a_stranger_is_not_told_where_the_journal_is_when_it_is_away(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    def away(*_: object, **__: object) -> None:
        raise Unavailable("the journal labeler on db.internal:5432: PostgreSQL cannot be reached or refused the login")

    monkeypatch.setattr(service.coordinator.tokens, "find", away)
    monkeypatch.setattr(service.coordinator.invitations, "enrol", away)
    monkeypatch.setattr(service.coordinator.health, "_room", away)
    with service.http(None) as http:
        answers = [
            http.get("/readyz"),
            http.get("/v1/budget", headers={"Authorization": "Bearer lab_unknown"}),
            http.get("/readyz", headers={"Authorization": "Bearer lab_unknown"}),
            http.post("/v1/enrolments", json=examples.ENROLMENT_REQUEST),
        ]
    assert [answer.status_code for answer in answers] == [503] * 4
    assert not [answer.text for answer in answers if "db.internal" in answer.text or "PostgreSQL" in answer.text]
    assert answers[1].json()["detail"] == "the service cannot answer this now; its operator finds the reason in its log"


def test_a_token_is_shown_once_and_listed_without_its_secret(service: Service) -> None:
    with service.http("admin") as http:
        made = http.post("/v1/tokens", json={"name": "night job", "role": "requester"})
        secret = made.json()["token"]
        assert secret.startswith("lab_")
        listed = http.get("/v1/tokens?limit=200")
        assert made.json()["token_id"] in {item["token_id"] for item in listed.json()["items"]}
        assert secret not in listed.text
        first = http.get("/v1/tokens?limit=2").json()
        second = http.get("/v1/tokens", params={"limit": 2, "after": first["next"]}).json()
        seen = [item["token_id"] for item in (*first["items"], *second["items"])]
        assert len(set(seen)) == len(seen)
        assert http.get("/v1/tokens?after=%21%21").status_code == 422
    with service.http("viewer") as http:
        assert http.get("/v1/whoami").json()["role"] == "viewer"


def test_a_token_that_calls_too_often_is_told_when_to_come_back(
    serve_in: ServeIn, config_of: ConfigOf, tmp_path: Path
) -> None:
    with serve_in(config_of(tmp_path / "home", max_requests_per_minute=5)) as service:
        with service.http("viewer") as http:
            answers = [http.get("/v1/whoami") for _ in range(6)]
        assert [answer.status_code for answer in answers] == [200] * 5 + [429]
        assert 1 <= int(answers[-1].headers["Retry-After"]) <= 60
        assert answers[-1].json()["type"] == "urn:labeler:problem:rate-limited"
        with service.http("admin") as http:
            assert http.get("/v1/whoami").status_code == 200


def test_failures_of_an_address_are_limited_and_harm_no_good_token() -> None:
    limits = RateLimits(requests_per_minute=10, failures_per_minute=3)
    for _ in range(3):
        limits.failures.hit("192.0.2.1")
    with pytest.raises(TooManyRequests) as caught:
        limits.failures.hit("192.0.2.1")
    assert caught.value.retry_after_s >= 1
    limits.failures.hit("192.0.2.2")
    limits.requests.hit("tok-1")
    with pytest.raises(InvalidSetting):
        RateLimits(requests_per_minute=0)


def test_a_minute_is_counted_from_any_moment_and_what_is_idle_is_forgotten() -> None:
    now_s = [100.0]
    limits = RateLimits(requests_per_minute=3, steady=lambda: now_s[0])

    def send(at_s: float) -> int | None:
        """None where it is taken, else how long to wait."""
        now_s[0] = at_s
        try:
            limits.requests.hit("tok-1")
        except TooManyRequests as refused:
            return refused.retry_after_s
        return None

    taken_at = (100.0, 130.0, 159.0)
    assert [send(at_s) for at_s in taken_at] == [None] * 3
    assert (send(159.5), send(159.6)) == (1, 1), "one that was refused is not counted"
    assert (send(160.0), send(160.5)) == (None, 30), "the first is a minute old, the second is not"
    assert (send(190.0), send(219.0), send(219.5)) == (None, None, 1)
    for number in range(1000):
        limits.failures.hit(f"192.0.2.{number}")
    now_s[0] += 61.0
    limits.failures.hit("198.51.100.1")
    assert len(limits.failures._times) == 1


def test_logs_hold_no_token_no_body_and_no_query(service: Service, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "labeler"), service.http("admin") as http:
        http.get("/v1/ledger?search=my-secret-search", headers={"X-Request-ID": "trace-0001"})
        http.post("/v1/tokens", json={"name": "my-secret-name", "role": "viewer"})
        http.get("/v1/jobs/my-secret-job")
        # An answer is sent before its line is written.
        while sum(record.name == "labeler.access" for record in caplog.records) < 3:
            time.sleep(0.01)
    lines = [LogFormatter().format(record) for record in caplog.records if record.name == "labeler.access"]
    assert len(lines) == 3
    text = "\n".join(lines)
    assert "my-secret" not in text
    assert service.tokens["admin"] not in text
    logged = json.loads(lines[0])
    assert {"route", "status", "ms", "token_id", "method"} <= set(logged)
    assert logged["route"] == "/v1/ledger"
