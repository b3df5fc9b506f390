"""How routes describe themselves in the OpenAPI document: answers with examples, and the problems each may end in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel

from api.access import ACCESS, VERSIONED, Need
from api.problems import TYPE_PREFIX
from api.refusals import MEDIA_TYPE

Answers = dict[int | str, dict[str, Any]]

SCHEMA_REF = "#/components/schemas/{model}"
_PROBLEMS: dict[int, tuple[str, str, str]] = {
    401: ("not-authenticated", "No token, or one that is not known", "this needs a bearer token"),
    403: ("not-allowed", "The token's role does not reach this far", "this needs a token of role admin or higher"),
    404: ("not-found", "There is nothing of that name", "there is no job of that id"),
    409: (
        "not-ready",
        "It is not in the state for this",
        "the job is collecting; labels follow once completed",
    ),
    410: ("gone", "It was deleted for good", "what the job asked and got was deleted; its charge stays in the ledger"),
    413: ("too-large", "The body is larger than is taken", "the body has 70000000 bytes; at most 67108864 are taken"),
    415: ("unsupported-media-type", "The body has a type that is not taken", "send the body as application/json"),
    422: (
        "invalid-request",
        "The request does not fit the schema",
        "body.k: Input should be at least 1",
    ),
    429: ("rate-limited", "Too many requests", "one token may send 600 requests a minute; send the next in 3 s"),
    507: (
        "storage-full",
        "There is no room left to keep it",
        "the upload cannot be kept: the disk is full, or its quota is used up",
    ),
    503: ("unavailable", "A part of the service cannot be reached now", "the mailbox does not answer; try again"),
}


def problem(status: int, *, slug: str = "", title: str = "", detail: str = "") -> dict[str, Any]:
    """One documented problem response with its example."""
    known = _PROBLEMS.get(status, ("", "", ""))
    slug, title, detail = slug or known[0], title or known[1], detail or known[2]
    example = {"type": TYPE_PREFIX + slug, "title": title, "status": status, "detail": detail, "instance": "/v1/..."}
    schema = {"$ref": SCHEMA_REF.format(model="Problem")}
    answer: dict[str, Any] = {"description": title, "content": {MEDIA_TYPE: {"schema": schema, "example": example}}}
    if status in (429, 503, 507):
        answer["headers"] = {"Retry-After": {"description": "seconds", "schema": {"type": "integer"}}}
    if status == 401:
        answer["headers"] = {"WWW-Authenticate": {"schema": {"type": "string"}}}
    return answer


def answers(
    description: str,
    example: Any,
    *,
    status: int = 200,
    problems: tuple[int, ...] = (),
    is_open: bool = False,
    **other: dict[str, Any],
) -> Answers:
    """The `responses` of a JSON route: its answer with an example, and its problems.

    Args:
        problems: statuses beyond those every route with a token has (401, 403, 429, 503).
        is_open: the route takes no token.
        other: further answers, by "status_NNN".
    """
    content = {"application/json": {"example": _guarded(example)}}
    documented: Answers = {status: {"description": description, "content": content}}
    every = problems if is_open else (401, 403, 429, 503, *problems)
    documented.update({code: problem(code) for code in sorted(every)})
    documented.update({int(name.removeprefix("status_")): _guarded(answer) for name, answer in other.items()})
    return documented


BUDGET_REFUSAL = {
    "slug": "budget-exceeded",
    "title": "The price is higher than what is left",
    "detail": "account federation at instance level: 12100000 nano-units of mu^2 were asked for, 5000000 are left",
}


def body(model: type[BaseModel], example: Any) -> dict[str, Any]:
    """The content of a JSON request body with its example, for routes that read their body themselves."""
    return {"schema": {"$ref": SCHEMA_REF.format(model=model.__name__)}, "example": example}


def once(app: FastAPI, name: str, make: Callable[[], bytes | memoryview]) -> bytes:
    """What a stranger may ask for again and again, and the app's routes alone decide: made for the first who asks.

    Args:
        make: writes it, in milliseconds of a processor.
    """
    kept: dict[str, bytes] = app.state.made_once
    if name not in kept:
        kept[name] = bytes(make())
    return kept[name]


def document(app: FastAPI, *extra_models: type[BaseModel]) -> dict[str, Any]:
    """The OpenAPI document of the app, made once.

    Args:
        extra_models: models that routes refer to by name only.
    """
    if app.openapi_schema is not None:
        return app.openapi_schema
    made = get_openapi(
        title=app.title, version=app.version, description=app.description, routes=app.routes, summary=app.summary
    )
    components = made.setdefault("components", {})
    schemas = components.setdefault("schemas", {})
    for model in extra_models:
        schema = model.model_json_schema(ref_template=SCHEMA_REF, mode="validation")
        for name, inner in schema.pop("$defs", {}).items():
            schemas.setdefault(name, inner)
        schemas.setdefault(model.__name__, schema)
    components["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer", "bearerFormat": "lab_..."}}
    for path, operations in made["paths"].items():
        for method, operation in operations.items():
            need = _need(method.upper(), path)
            operation["x-least-role"] = need
            if path.startswith(VERSIONED):
                # A parameter that no route knows may come with every one.
                operation["responses"].setdefault("422", problem(422))
            if method in _WRITING:
                # Whatever writes may find the disk full; no route can leave it out.
                operation["responses"].setdefault("507", problem(507))
            operation["security"] = _SECURITY.get(need or "open", [{"token": []}])
    freed: dict[str, Any] = _freed(made)
    app.openapi_schema = freed
    return freed


_SECURITY: dict[Need, list[dict[str, list[str]]]] = {
    "open": [],
    "signed": [],
    "invited": [],
    "optional": [{}, {"token": []}],
}
_WRITING = frozenset({"post", "put", "patch", "delete"})
_NULL = "(null)"


def _guarded(node: Any) -> Any:
    """Nulls of an example behind a word: FastAPI drops every null of the document, and with it required members."""
    if isinstance(node, dict):
        return {name: _guarded(value) for name, value in node.items()}
    if isinstance(node, list):
        return [_guarded(value) for value in node]
    return _NULL if node is None else node


def _freed(node: Any) -> Any:
    if isinstance(node, dict):
        return {name: _freed(value) for name, value in node.items()}
    if isinstance(node, list):
        return [_freed(value) for value in node]
    return None if node == _NULL else node


def _need(method: str, path: str) -> Need | None:
    return ACCESS.get((method, path)) or ACCESS.get((method, path.replace("}", ":path}")))
