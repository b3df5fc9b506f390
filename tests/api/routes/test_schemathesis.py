"""Requests made from the document itself, against the running service: nothing makes it stumble."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis.errors import Unsatisfiable
from schemathesis.checks import (
    content_type_conformance,
    not_a_server_error,
    response_schema_conformance,
    status_code_conformance,
)

from tests.api.routes.conftest import DIMENSION, FINGERPRINT, ConfigOf, ServeIn

CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]
POSITIVE, NEGATIVE = schemathesis.GenerationMode.POSITIVE, schemathesis.GenerationMode.NEGATIVE
STREAM = "/v1/jobs/{job_id}/events"
WAITS = "/v1/labels"


@pytest.mark.slow
def test_no_request_made_from_the_document_makes_the_service_fail(
    serve_in: ServeIn, config_of: ConfigOf, tmp_path: Path
) -> None:
    with serve_in(config_of(tmp_path / "home")) as service, requests.Session() as session:
        with service.http("requester") as http:
            vector = [1.0] + [0.0] * (DIMENSION - 1)
            body = {"task_id": service.task().task_id, "features": [vector], "backbone_fingerprint": FINGERPRINT}
            job = http.post("/v1/jobs", json=body)
            assert job.status_code == 202, job.text
        session.headers["Authorization"] = f"Bearer {service.tokens['admin']}"
        document = schemathesis.openapi.from_url(f"{service.url}/openapi.json")
        tried: dict[str, int] = {}

        def try_all(operation: schemathesis.APIOperation, mode: schemathesis.GenerationMode) -> None:
            @seed(20270301)
            @settings(
                max_examples=5 if operation.path in (STREAM, WAITS) else 8,
                deadline=None,
                database=None,
                phases=[Phase.explicit, Phase.generate],
                suppress_health_check=list(HealthCheck),
            )
            @given(case=operation.as_strategy(generation_mode=mode))
            def run(case: schemathesis.Case) -> None:
                tried[operation.label] = tried.get(operation.label, 0) + 1
                if operation.path == STREAM:
                    # A job that exists would stream until the job ends.
                    case.path_parameters = {"job_id": "job-none"}
                if operation.path == WAITS and isinstance(case.body, dict):
                    case.body["wait_s"] = 0.1
                # Nobody is there to answer, so "not ready" is the right answer, and a documented one.
                checks = CHECKS[1:] if operation.path == "/readyz" else CHECKS
                case.call_and_validate(session=session, checks=checks, timeout=30)

            # Some inputs have no wrong form: any text is a valid name in a path.
            with contextlib.suppress(Unsatisfiable) if mode is NEGATIVE else contextlib.nullcontext():
                run()

        operations = [result.ok() for result in document.get_all_operations()]
        for operation in operations:
            for mode in (POSITIVE, NEGATIVE):
                has_input = operation.body or any(True for _ in operation.iter_parameters())
                if mode is POSITIVE or has_input:
                    try_all(operation, mode)
        assert len(tried) == len(operations)
        assert min(tried.values()) >= 1
