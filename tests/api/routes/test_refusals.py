"""Every refusal is a problem document, and tells nothing it should not."""

from __future__ import annotations

import json
import logging

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from api import problems
from api.access import parse_json
from api.logs import LogFormatter, describe
from api.problems import PROBLEMS, TYPE_PREFIX
from api.request_context import RequestContext
from labeler.errors import BudgetExceeded, LabelerError
from tests.api.routes.conftest import FINGERPRINT, Service
from workers.cli import main


class _NoMetrics:
    def observe(self, **_: object) -> None:
        pass


@pytest.fixture
def app() -> FastAPI:
    app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None)
    app.state.delta = 1e-5
    problems.install(app)
    app.add_middleware(RequestContext, metrics=_NoMetrics())
    return app


@pytest.mark.parametrize("kind", PROBLEMS, ids=lambda kind: kind.__name__)
def test_every_error_of_the_tree_becomes_a_problem_document(app: FastAPI, kind: type[LabelerError]) -> None:
    @app.get("/fail")
    def fail() -> None:
        raise kind("why, the bound, and what was found")

    with TestClient(app) as http:
        response = http.get("/fail")
    assert response.headers["Content-Type"] == "application/problem+json"
    problem = response.json()
    assert response.status_code == problem["status"] == PROBLEMS[kind][0]
    assert problem["type"] == TYPE_PREFIX + kind.problem_type
    assert problem["title"]
    assert problem["detail"] == "why, the bound, and what was found"
    assert problem["instance"] == "/fail"
    assert ("Retry-After" in response.headers) == (response.status_code in (429, 503, 507))
    assert ("WWW-Authenticate" in response.headers) == (response.status_code == 401)


def test_a_refusal_for_budget_names_account_level_and_last_spenders(app: FastAPI) -> None:
    @app.get("/fail")
    def fail() -> None:
        raise BudgetExceeded(
            "no", account="federation", level="instance", asked=10, left=3, cap=20, last_spenders=(("job-1/0", 17),)
        )

    with TestClient(app) as http:
        problem = http.get("/fail").json()
    assert problem["account"] == "federation"
    assert problem["level"] == "instance"
    assert (problem["asked_nano"], problem["left_nano"], problem["cap_nano"]) == (10, 3, 20)
    assert problem["last_spenders"] == [{"reservation_id": "job-1/0", "amount_nano": 17}]
    assert problem["delta"] == 1e-5


def test_an_unexpected_error_gives_an_incident_id_and_logs_places_without_values(
    app: FastAPI, caplog: pytest.LogCaptureFixture
) -> None:
    @app.get("/fail")
    def fail() -> None:
        private = "vote-count-17"
        raise KeyError(private)

    with caplog.at_level(logging.ERROR, "labeler"), TestClient(app) as http:
        response = http.get("/fail")
    assert response.status_code == 500
    problem = response.json()
    assert problem["type"] == problems.INTERNAL
    assert len(problem["incident"]) == 16
    assert "vote" not in response.text
    assert "KeyError" not in response.text
    (record,) = [record for record in caplog.records if record.name == "labeler.api"]
    line = LogFormatter().format(record)
    assert problem["incident"] in line
    assert "KeyError" in line
    assert "in fail" in line
    assert "vote-count-17" not in line


def test_a_chain_of_errors_is_described_without_messages() -> None:
    try:
        try:
            raise OSError(28, "No space left on device", "/secret/place")
        except OSError as error:
            raise ValueError("secret value") from error
    except ValueError as error:
        text = describe(error)
    assert "builtins.ValueError" in text
    assert "No space left on device" in text
    assert "secret" not in text.replace("test_refusals", "")


def test_unknown_routes_and_methods_are_problem_documents_too(service: Service) -> None:
    with service.http("admin") as http:
        for method, path, status, name in (
            ("GET", "/v1/nothing", 404, "not-found"),
            ("GET", "/nothing", 404, "not-found"),
            ("PUT", "/v1/tasks", 405, "method-not-allowed"),
            ("GET", "/v1/jobs/", 404, "not-found"),
            ("GET", "/v1/jobs/%00", 422, "invalid-request"),
            ("GET", "/v1/ledger?search=%00", 422, "invalid-request"),
        ):
            response = http.request(method, path)
            assert response.status_code == status, (path, response.text)
            assert response.headers["Content-Type"] == "application/problem+json"
            assert response.json()["type"] == TYPE_PREFIX + name
            assert response.headers["X-Request-ID"]
        put = http.put("/v1/tasks")
        assert put.headers["Allow"] == "GET, HEAD, POST"
        assert put.json()["detail"] == "this route takes GET, HEAD, POST; found PUT"
        assert "/openapi.json lists them all" in http.get("/v1/nothing").json()["detail"]


@pytest.mark.parametrize(
    ("path", "field", "value", "said"),
    [
        ("/v1/tasks", "k", 0, "must be at least 1"),
        ("/v1/tasks", "sigma_vote", 3, "unknown field; did you mean sigma_votes?"),
        ("/v1/jobs", "taks_id", "x", "unknown field; did you mean task_id?"),
        ("/v1/labels", "wait_s", -1, "must be more than 0"),
        ("/v1/tokens", "role", "admn", "must be 'admin', 'requester' or 'viewer'; did you mean 'admin'?"),
    ],
)
def test_every_route_refuses_a_field_in_plain_words_with_the_name_that_was_meant(
    service: Service, path: str, field: str, value: object, said: str
) -> None:
    with service.http("admin") as http:
        problem = http.post(path, json={field: value}).json()
    assert {"field": f"body.{field}", "message": said} in problem["fields"]


def test_a_request_that_does_not_fit_names_its_fields_and_not_their_values(service: Service) -> None:
    with service.http("admin") as http:
        wrong = {"name": "x", "k": "secret-input", "sigma_votes": 1, "delta": 7, "max_queries": 1, "colour": "secret"}
        response = http.post("/v1/tasks", json=wrong)
    assert response.status_code == 422
    problem = response.json()
    assert problem["type"] == problems.INVALID_REQUEST
    assert {field["field"] for field in problem["fields"]} == {"body.k", "body.delta", "body.colour"}
    assert [field["message"][:14] for field in problem["fields"] if field["field"] == "body.colour"] == [
        "unknown field;"
    ]
    assert "secret" not in response.text


@pytest.mark.parametrize(
    ("content_type", "content", "status"),
    [
        ("text/plain", b"{}", 415),
        ("", b"{}", 415),
        ("application/json", b'{"task_id": NaN}', 400),
        ("application/json", b"[" * 100_000, 400),
        ("application/json", b'{"queries": 1e999}', 400),
        ("application/json", b"{", 400),
        ("application/json", b"", 422),
        ("application/json", b'{"a": "' + b"x" * 1_100_000 + b'"}', 413),
    ],
)
def test_bodies_that_cannot_be_taken_are_refused(
    service: Service, content_type: str, content: bytes, status: int
) -> None:
    with service.http("admin") as http:
        headers = {"Content-Type": content_type} if content_type else {}
        for path in ("/v1/jobs:estimate", "/v1/tasks", "/v1/tokens", "/v1/parties"):
            response = http.post(path, content=content, headers=headers)
            assert response.status_code == status, (path, response.text)
            assert response.headers["Content-Type"] == "application/problem+json"
            assert (response.json()["type"] == TYPE_PREFIX + "malformed-body") == (status == 400)


@pytest.mark.parametrize(
    ("path", "field", "message"),
    [
        ("/v1/jobs?limt=5", "query.limt", "this route knows after, limit, state; did you mean limit?"),
        ("/v1/jobs?limit=5&limit=6", "query.limit", "it was given 2 times; give it once"),
        ("/v1/jobs/job-0?wait_s=3", "query.wait_s", "this route knows no parameter"),
        ("/v1/budget?=", "query.", "this route knows no parameter"),
    ],
)
def test_a_parameter_that_a_route_does_not_know_is_refused_by_name_with_those_it_knows(
    service: Service, path: str, field: str, message: str
) -> None:
    with service.http("requester") as http:
        answer = http.get(path)
    assert answer.status_code == 422
    problem = answer.json()
    assert problem["type"] == TYPE_PREFIX + "invalid-request"
    assert problem["fields"] == [{"field": field, "message": message}]
    with service.http(None) as http:
        assert http.get(path).status_code == 401, "a stranger learns nothing of routes"


def test_what_may_be_repeated_is_and_probes_may_add_what_they_like(service: Service) -> None:
    with service.http("requester") as http:
        for path in ("/v1/jobs?state=completed&state=failed", "/v1/jobs?", "/healthz?verbose", "/dashboard?a=1&a=2"):
            assert http.get(path).status_code == 200, path
        posted = http.post("/v1/jobs:estimate?queries=3", json={"task_id": "f" * 64, "queries": 3})
    assert posted.json()["fields"] == [{"field": "query.queries", "message": "this route knows no parameter"}]


@pytest.mark.parametrize("name", ["x\x1b[2J\x1b]0;owned\x07", "two\nlines", "right\u202eto left"])
def test_a_name_with_control_characters_is_refused(service: Service, name: str) -> None:
    task = {"name": name, "sigma_votes": 40.0, "delta": 1e-5, "max_queries": 9, "backbone_fingerprint": FINGERPRINT}
    classes = task | {"name": "t", "classes": ["a", name]}
    with service.http("admin") as http:
        for path, body in (
            ("/v1/jobs", service.vectors(name=name)),
            ("/v1/tasks", task),
            ("/v1/tasks", classes),
            ("/v1/tokens", {"name": name, "role": "viewer"}),
        ):
            refused = http.post(path, json=body)
            assert refused.status_code in (400, 422), refused.text
            assert "only printable characters" in refused.text
            assert name not in refused.text


def test_square_brackets_in_a_name_are_no_markup_in_a_list_of_jobs(
    service: Service,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with service.http("requester") as http:
        assert http.post("/v1/jobs", json=service.vectors(name="[/x] :bomb:")).status_code == 202
    monkeypatch.setenv("LABELER_URL", service.url)
    monkeypatch.setenv("LABELER_TOKEN", service.tokens["requester"])
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr("sys.argv", ["labeler", "status"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code in (0, None)
    assert "[/x] :bomb:" in capsys.readouterr().out


BAD = {
    "NaN": b'{"k": NaN}',
    "Infinity": b'{"k": -Infinity}',
    "overflow": b'{"k": 1e999}',
    "overflow with a sign": b'{"k": [1.5, -1.5E+308, 2e308]}',
    "overflow with zeros": b"[1e0000309]",
    "overflow by digits": b"[" + b"9" * 309 + b".5]",
    "overflow by digits and exponent": b"[" + b"9" * 220 + b"e99]",
    "overflow among numbers": b"[" + b"0.25," * 1000 + b"1.0e+400]",
    "deep": b"[" * 200_000,
    "deep objects": b'{"a":' * 200_000,
    "long number": b"1" * 10_000,
    "not UTF-8": b'{"k": "\xff"}',
    "NUL": b'{"k": "\\u0000"}',
    "no JSON": b"{k: 1}",
    "empty": b"",
    "two documents": b"{} {}",
    "a name twice": b'{"task": {"delta": 1e-5, "delta": 1e-2}}',
    "a name twice, spelt otherwise": b'{"delta": 1e-5, "d\\u0065lta": 1e-2}',
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_no_json_is_refused_with_a_decode_error_that_does_not_carry_the_body(name: str) -> None:
    with pytest.raises(json.JSONDecodeError) as caught:
        parse_json(BAD[name])
    assert caught.value.doc == ""


def test_json_is_read() -> None:
    assert parse_json(b'{"a": [1, 2.5, -3e2, "\\u00fc", null, true]}') == {"a": [1, 2.5, -300.0, "ü", None, True]}
