"""The document describes every route in words, with its problems and examples; the page at /api shows it."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jsonschema_rs
import pytest

from api import console as dashboard
from api import schema
from api.access import ACCESS
from api.documentation import ROLES
from api.problems import MEDIA_TYPE
from api.routes import operations as operations_module
from tests.api.routes.conftest import Service

JsonObject = dict[str, Any]


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
        first = http.get("/openapi.json")

        def made_again(*_: object) -> None:
            raise AssertionError("it was made for the first who asked")

        monkeypatch.setattr(operations_module, "document", made_again)
        again = http.get("/openapi.json")
    assert (again.status_code, again.content) == (200, first.content)
    assert again.headers["content-type"] == first.headers["content-type"] == "application/json"


def test_strangers_who_ask_at_the_same_moment_have_it_made_once(own: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    make, calls = operations_module.document, []

    def counted(*args: Any) -> dict[str, Any]:
        calls.append(args)
        return make(*args)

    monkeypatch.setattr(operations_module, "document", counted)
    with own.http(None) as http, ThreadPoolExecutor(12) as pool:
        answers = list(pool.map(lambda _: http.get("/openapi.json").status_code, range(12)))
    assert answers == [200] * 12
    assert len(calls) == 1


def test_every_route_has_a_summary_a_description_and_a_least_role(document: JsonObject) -> None:
    assert document["openapi"].startswith("3.1")
    names = set()
    for name, operation in operations(document):
        assert operation.get("summary"), name
        assert len(operation.get("description", "")) > 20, name
        assert operation["description"].endswith(f" For {ROLES[operation['x-least-role']]}."), name
        names.add(name)
    assert len(names) == len(ACCESS)


OPERATION_IDS = {
    "create_task", "list_tasks", "read_task", "share_task", "unshare_task",
    "estimate_job", "submit_job", "list_jobs", "read_job", "cancel_job", "delete_job_data", "label_images",
    "job_labels", "job_model", "job_student", "job_evaluation", "job_events", "job_thumbnails",
    "read_budget", "read_agent_budget", "read_query_budgets", "read_ledger", "read_evidence",
    "list_parties", "enrol_party", "rotate_party_keys", "revoke_party",
    "create_invitation", "withdraw_invitation", "join_by_invitation",
    "read_whoami", "list_tokens", "create_token", "revoke_token", "send_messages", "poll_messages",
    "check_health", "check_readiness", "read_metrics", "read_openapi", "read_reference",
    "read_root", "read_docs", "read_redoc", "read_dashboard", "read_dashboard_file",
}  # fmt: skip
"""Names of the calls of a generated client: a new route adds one, and none changes."""


def test_operation_ids_are_names_that_a_generated_client_keeps(document: JsonObject) -> None:
    found = [operation["operationId"] for _, operation in operations(document)]
    assert set(found) == OPERATION_IDS
    assert len(found) == len(OPERATION_IDS)


def test_a_form_has_a_typed_request_that_is_taken_as_json(document: JsonObject, service: Service) -> None:
    for path, model in (("/v1/jobs", "JobRequest"), ("/v1/labels", "LabelsRequest")):
        form = document["paths"][path]["post"]["requestBody"]["content"]["multipart/form-data"]
        assert form["schema"]["properties"]["request"]["$ref"] == f"#/components/schemas/{model}"
        assert form["schema"]["properties"]["request"]["contentMediaType"] == "application/json"
        assert form["encoding"] == {"request": {"contentType": "application/json"}}
        # A generated client sends the part with that type; its field is understood, so the image is what is refused.
        with service.http("requester") as http:
            parts = {
                "request": (None, json.dumps(form["example"]["request"]), "application/json"),
                "images": ("photo-1.jpg", b"no image", "image/jpeg"),
            }
            answer = http.post(path, files=parts)
        assert answer.status_code in (404, 422), answer.text
        assert "request" not in answer.json()["detail"], answer.text


def test_every_answer_and_every_body_has_an_example_that_fits_its_schema_and_its_model(document: JsonObject) -> None:
    models = set()
    for name, operation in operations(document):
        contents = [(f"{name} {status}", answer) for status, answer in operation["responses"].items()]
        if "requestBody" in operation:
            contents.append((f"{name} body", operation["requestBody"]))
        for where, holder in contents:
            assert holder.get("content"), where
            for media_type, content in holder["content"].items():
                found = content.get("example")
                model = content.get("schema", {}).get("$ref", "").rsplit("/", 1)[-1]
                if found is None:
                    found = (
                        content["schema"].get("examples")
                        or document["components"]["schemas"].get(model, {}).get("examples")
                        or [None]
                    )[0]
                assert found is not None, (where, media_type)
                if (media_type.endswith("json") or media_type.startswith("multipart/")) and "schema" in content:
                    jsonschema_rs.Draft202012Validator(resolved(document, content["schema"])).validate(found)
                if hasattr(schema, model):
                    getattr(schema, model).model_validate_json(json.dumps(found))
                    models.add(model)
    assert {"TaskRequest", "JobRequest", "EnrolmentRequest", "JobView", "BudgetView"} <= models


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


def test_the_page_is_served_from_here_alone_and_its_policy_allows_its_own_script(service: Service) -> None:
    with service.http(None) as http:
        page = http.get("/api")
        fetched = re.findall(r'(?:href|src)="([^"]+)', page.text.partition("const ui")[0])
        assert len(fetched) == 3
        for path in fetched:
            assert path.startswith("/dashboard/")
            assert http.get(path).status_code == 200, path
    (inline,) = re.findall(r"<script>(.*?)</script>", page.text, flags=re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(inline.encode()).digest()).decode()
    policy = dashboard.HEADERS["Content-Security-Policy"].replace(
        "script-src 'self'", f"script-src 'self' 'sha256-{digest}'"
    )
    assert page.headers["Content-Security-Policy"] == f"sandbox allow-scripts; {policy}"
