"""Requests made from the document itself, against the running service: nothing makes it stumble.

Two phases of Schemathesis, both from one seed: `coverage` walks through the boundaries of every parameter and field,
also with methods, headers and types that the document does not know; `fuzzing` draws valid and invalid requests at
random. Every answer must be one that the document states.
"""

from __future__ import annotations

import socket
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import schemathesis
from schemathesis.config import SchemathesisConfig
from schemathesis.engine import events, from_schema

from tests.api.routes.conftest import ConfigOf, ServeIn, Service

SEED = 20270301
PHASES = ("coverage", "fuzzing")
CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_schema_conformance",
    "response_headers_conformance",
    "missing_required_header",
    "unsupported_method",
    "allow_header_conformance",
)
NOT_READY = ("GET /readyz", "not_a_server_error")
"""Nobody is there to answer jobs, so "not ready" (503) is the right answer, and a documented one."""


def through_the_door(address: tuple[str, int], timeout: Any, **_: Any) -> socket.socket:
    """Connect as urllib3 does, by the function that tests.doors has replaced."""
    return socket.create_connection(address, timeout if isinstance(timeout, int | float) else 30.0)


def config_for(service: Service, *, examples: int) -> SchemathesisConfig:
    only = {"enabled": False} | {name: {"enabled": True} for name in CHECKS}
    return SchemathesisConfig.from_dict(
        {
            "seed": SEED,
            "headers": {"Authorization": f"Bearer {service.tokens['admin']}"},
            "continue-on-failure": True,
            "request-timeout": 90,
            "checks": only,
            "phases": {"examples": {"enabled": False}, "stateful": {"enabled": False}},
            "generation": {"max-examples": examples, "database": "none"},
        }
    )


@schemathesis.hook("before_call")
def shorten_waiting(context: Any, case: schemathesis.Case, kwargs: dict[str, Any]) -> None:
    """A few labels at once are waited for no longer than the test needs."""
    if case.path == "/v1/labels" and isinstance(case.body, dict) and type(case.body.get("wait_s")) in (int, float):
        case.body["wait_s"] = min(case.body["wait_s"], 0.1)


def found_by_both_phases(service: Service, *, examples: int) -> tuple[Counter[tuple[str, str]], list[str]]:
    """How often each operation was called in each phase, and what was wrong."""
    config = config_for(service, examples=examples)
    schema = schemathesis.openapi.from_url(f"{service.url}/openapi.json", config=config)
    called: Counter[tuple[str, str]] = Counter()
    wrong: list[str] = []
    for event in from_schema(schema).execute():
        if isinstance(event, events.ScenarioFinished):
            called[event.recorder.label, event.phase.value.lower()] += len(event.recorder.interactions)
            for checks in event.recorder.checks.values():
                failed = [one for one in checks if one.failure_info and (event.recorder.label, one.name) != NOT_READY]
                wrong += [f"{event.recorder.label} {one.name}: {one.failure_info}" for one in failed]
        elif isinstance(event, events.NonFatalError):
            wrong.append(f"{event.label}: {event.value}")
        elif isinstance(event, events.FatalError):
            raise event.exception
    return called, wrong


def try_all(serve_in: ServeIn, config_of: ConfigOf, home: Path, *, examples: int) -> None:
    with serve_in(config_of(home)) as service:
        with service.http("requester") as http:
            job = http.post("/v1/jobs", json=service.vectors())
            assert job.status_code == 202, job.text
            document = http.get("/openapi.json").json()
        called, wrong = found_by_both_phases(service, examples=examples)
    assert not wrong, "\n\n".join(wrong)
    operations = {f"{method.upper()} {path}" for path, item in document["paths"].items() for method in item}
    for phase in PHASES:
        # The document itself was asked for to begin with; it has no parameter that could be walked through.
        tried = {label for (label, of), count in called.items() if of == phase and count} | {"GET /openapi.json"}
        assert tried == operations, phase


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.process
def test_no_request_made_from_the_document_makes_the_service_fail(
    serve_in: ServeIn, config_of: ConfigOf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("urllib3.util.connection.create_connection", through_the_door)
    try_all(serve_in, config_of, tmp_path / "home", examples=60)
