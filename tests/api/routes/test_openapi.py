"""The document describes every route: in words, with its problems, and with an example of every request and answer."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import jsonschema_rs
import pytest

from api import examples, schema
from api.access import ACCESS
from api.problems import MEDIA_TYPE
from api.routes import operations as operations_module
from tests.api.routes.conftest import Service

JsonObject = dict[str, Any]

EXAMPLES: dict[str, tuple[type, Any]] = {
    "task request": (schema.TaskRequest, examples.TASK_REQUEST),
    "task": (schema.TaskView, examples.TASK),
    "tasks": (schema.TaskPage, examples.TASK_PAGE),
    "estimate request": (schema.EstimateRequest, examples.ESTIMATE_REQUEST),
    "estimate": (schema.EstimateView, examples.ESTIMATE),
    "job request": (schema.JobRequest, examples.JOB_REQUEST),
    "job": (schema.JobView, examples.JOB),
    "jobs": (schema.JobPage, examples.JOB_PAGE),
    "labels request": (schema.LabelsRequest, examples.LABELS_REQUEST),
    "labels": (schema.LabelsView, examples.LABELS),
    "thumbnails request": (schema.ThumbnailsRequest, examples.THUMBNAILS_REQUEST),
    "thumbnails": (schema.ThumbnailsView, examples.THUMBNAILS),
    "budget": (schema.BudgetView, examples.BUDGET),
    "ledger": (schema.LedgerPage, examples.LEDGER_PAGE),
    "party request": (schema.PartyRequest, examples.PARTY_REQUEST),
    "keys request": (schema.KeysRequest, examples.KEYS_REQUEST),
    "party": (schema.PartyView, examples.PARTY),
    "parties": (schema.PartiesView, examples.PARTIES),
    "invitation request": (schema.InvitationRequest, examples.INVITATION_REQUEST),
    "invitation": (schema.InvitationView, examples.INVITATION),
    "withdrawn": (schema.WithdrawnView, examples.WITHDRAWN),
    "enrolment request": (schema.EnrolmentRequest, examples.ENROLMENT_REQUEST),
    "enrolment": (schema.EnrolmentView, examples.ENROLMENT),
    "token request": (schema.TokenRequest, examples.TOKEN_REQUEST),
    "token": (schema.TokenView, examples.TOKEN_MADE),
    "tokens": (schema.TokenPage, examples.TOKEN_PAGE),
    "ready": (schema.ReadinessView, examples.READY),
    "not ready": (schema.ReadinessView, examples.NOT_READY),
}


@pytest.fixture(scope="module")
def document(service: Service) -> JsonObject:
    with service.http(None) as http:
        made: JsonObject = http.get("/openapi.json").json()
    return made


def operations(document: JsonObject) -> Iterator[tuple[str, JsonObject]]:
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            yield f"{method.upper()} {path}", operation


def resolved(document: JsonObject, node: JsonObject) -> JsonObject:
    found: JsonObject = {"$schema": "https://json-schema.org/draft/2020-12/schema", **node}
    found["components"] = document["components"]
    return found


def test_a_stranger_who_asks_again_and_again_has_nothing_made_again(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    with service.http(None) as http:
        first = {path: http.get(path) for path in ("/openapi.json", "/api")}

        def made_again(*_: object) -> None:
            raise AssertionError("it was made for the first who asked")

        monkeypatch.setattr(operations_module, "document", made_again)
        monkeypatch.setattr(operations_module, "reference_page", made_again)
        for path, before in first.items():
            again = http.get(path)
            assert (again.status_code, again.content) == (200, before.content)
            assert again.headers["content-type"] == before.headers["content-type"]
    assert first["/openapi.json"].headers["content-type"] == "application/json"


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_is_what_its_model_takes(name: str) -> None:
    model, example = EXAMPLES[name]
    model.model_validate_json(json.dumps(example))  # type: ignore[attr-defined]


def test_every_route_has_a_summary_a_description_and_a_least_role(document: JsonObject) -> None:
    assert document["openapi"].startswith("3.1")
    names = set()
    for name, operation in operations(document):
        assert operation.get("summary"), name
        assert len(operation.get("description", "")) > 20, name
        assert operation.get("x-least-role"), name
        names.add(name)
    assert len(names) == len(ACCESS)


def test_every_answer_and_every_body_has_an_example_that_fits_its_schema(document: JsonObject) -> None:
    for name, operation in operations(document):
        contents = [(f"{name} {status}", answer) for status, answer in operation["responses"].items()]
        if "requestBody" in operation:
            contents.append((f"{name} body", operation["requestBody"]))
        for where, holder in contents:
            assert holder.get("content"), where
            for media_type, content in holder["content"].items():
                found = content.get("example")
                if found is None:
                    model = content["schema"].get("$ref", "").rsplit("/", 1)[-1]
                    found = (
                        content["schema"].get("examples")
                        or document["components"]["schemas"].get(model, {}).get("examples")
                        or [None]
                    )[0]
                assert found is not None, (where, media_type)
                if media_type.endswith("json") and "schema" in content:
                    jsonschema_rs.Draft202012Validator(resolved(document, content["schema"])).validate(found)


def test_every_parameter_is_described_and_has_an_example(document: JsonObject) -> None:
    for name, operation in operations(document):
        for parameter in operation.get("parameters", ()):
            assert parameter.get("description"), (name, parameter["name"])
            assert parameter.get("examples") or parameter["schema"].get("examples"), (name, parameter["name"])


def test_every_route_with_a_token_documents_its_refusals(document: JsonObject) -> None:
    for name, operation in operations(document):
        if operation["x-least-role"] not in ("viewer", "requester", "admin"):
            continue
        for status in ("401", "403", "429", "503"):
            assert MEDIA_TYPE in operation["responses"][status]["content"], (name, status)
        assert operation["security"] == [{"token": []}], name
    assert {"401", "403", "429"} <= set(document["paths"]["/metrics"]["get"]["responses"])


def test_no_answer_is_documented_with_the_validation_error_of_the_framework(document: JsonObject) -> None:
    assert "HTTPValidationError" not in json.dumps(document)
    assert {"JobRequest", "Problem"} <= set(document["components"]["schemas"])
