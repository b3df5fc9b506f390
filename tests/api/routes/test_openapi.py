"""The document describes every route in words, with its problems and examples; the page at /api shows all of it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from html.parser import HTMLParser
from typing import Any

import jsonschema_rs
import pytest

from api import schema
from api.access import ACCESS
from api.documentation import kind_of, reference_text
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
        assert operation.get("x-least-role"), name
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


class Page(HTMLParser):
    """Ids, links, and whatever would be fetched."""

    def __init__(self) -> None:
        super().__init__()
        self.ids: list[str] = []
        self.links: list[str] = []
        self.fetched: list[str] = []
        self.tags: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = {name: value or "" for name, value in attrs}
        self.tags.add(tag)
        self.ids += [found["id"]] if "id" in found else []
        if "href" in found:
            (self.links if tag == "a" else self.fetched).append(found["href"])
        assert "style" not in found
        assert "src" not in found


@pytest.fixture(scope="module")
def answered(service: Service) -> tuple[str, dict[str, object]]:
    with service.http(None) as http:
        page = http.get("/api")
        assert page.status_code == 200
        assert page.headers["content-type"].startswith("text/html")
        for path in re.findall(r'<link [^>]*href="([^"]+)"', page.text):
            assert http.get(path).status_code == 200
        return page.text, http.get("/openapi.json").json()


def test_the_page_names_every_route_and_needs_nothing_from_elsewhere(answered) -> None:
    text, document = answered
    page = Page()
    page.feed(text)
    assert page.tags.isdisjoint({"script", "style", "img", "iframe", "form"})
    assert page.fetched == ["/dashboard/icon.svg", "/dashboard/reference.css"]
    assert len(page.ids) == len(set(page.ids))
    assert {link[1:] for link in page.links if link.startswith("#")} <= set(page.ids)
    assert {link for link in page.links if not link.startswith("#")} == {"/openapi.json", "/dashboard"}
    shown = set(re.findall(r"<h3><b>(\w+)</b> <code>([^<]+)</code></h3>", text))
    assert shown == {(method.upper(), path) for path, ways in document["paths"].items() for method in ways}
    for name in document["components"]["schemas"]:
        assert f"<h3>{name}</h3>" in text


def test_what_a_description_says_is_text_and_never_markup() -> None:
    document = {
        "paths": {
            "/<x>": {
                "get": {
                    "summary": "<b>&", "description": "`<u>` is `code`", "x-least-role": "open",
                    "responses": {"200": {"description": "<i>", "content": {"a/b": {"example": "</pre>"}}}},
                }
            }
        },
        "components": {"schemas": {}},
    }  # fmt: skip
    text = reference_text(document)
    assert "<b>&<" not in text
    assert "<i>" not in text
    assert text.count("</pre>") == 1
    assert "<code>&lt;u&gt;</code> is <code>code</code>" in text


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        ({"type": "integer", "minimum": 1}, "integer (at least 1)"),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "string or null"),
        ({"type": "array", "items": {"$ref": "#/components/schemas/Job"}}, 'list of <a href="#schema-job">Job</a>'),
        ({"enum": ["a", "b"]}, "<code>&#34;a&#34;</code>, <code>&#34;b&#34;</code>"),
        ({}, "anything"),
    ],
)
def test_a_schema_is_said_in_a_few_words(schema: dict[str, object], said: str) -> None:
    assert str(kind_of(schema)) == said
