"""Descriptions of routes in the OpenAPI document, the document itself, and the page that shows it to people.

Parameters shared by several routes are defined here with their bounds and an example. The page is FastAPI's, with files
of Swagger UI that come from a package. So it needs no other host, as a page of the service (`/api`) and of the
documentation (docs/hooks.py).
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping
from importlib.resources import files
from importlib.resources.abc import Traversable
from typing import Annotated, Any, Final

from fastapi import Depends, FastAPI, Header, Path, Query
from fastapi.openapi.docs import get_swagger_ui_html
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel

from api import examples
from api.access import ACCESS, VERSIONED, Need, reader
from api.coordinator.ownership import Reader
from api.problems import BY_STATUS, MEDIA_TYPE, TYPE_PREFIX
from api.schema import KEY, JobRequest, LabelsRequest, Problem

Answers = dict[int | str, dict[str, Any]]

SCHEMA_REF = "#/components/schemas/{model}"


def problem(status: int, *, slug: str = "", title: str = "", detail: str = "") -> dict[str, Any]:
    """Return one documented problem response with its example."""
    known = BY_STATUS.get(status, ("", "", ""))
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
    """Return the `responses` of a JSON route: its answer with an example, and its problems.

    Args:
        problems: statuses besides those of every route with a token (401, 403, 429, 503).
        is_open: the route takes no token.
        other: further answers, by "status_NNN".
    """
    content = {"application/json": {"example": _swapped(example, None, _NULL)}}
    documented: Answers = {status: {"description": description, "content": content}}
    # A route that may refuse a body's type may also receive malformed JSON.
    of_body = (400,) if 415 in problems else ()
    every = (*of_body, *problems) if is_open else (*of_body, 401, 403, 429, 503, *problems)
    documented.update({code: problem(code) for code in sorted(every)})
    documented.update(
        {int(name.removeprefix("status_")): _swapped(answer, None, _NULL) for name, answer in other.items()}
    )
    return documented


BUDGET_REFUSAL = {
    "slug": "budget-exceeded",
    "title": "The price is higher than what is left",
    "detail": "account federation at instance level: 12100000 nano-units of mu^2 were asked for, 5000000 are left",
}


def body(model: type[BaseModel], example: Any) -> dict[str, Any]:
    """Return the content of a JSON request body with its example, for routes that read their body themselves."""
    return {"schema": {"$ref": SCHEMA_REF.format(model=model.__name__)}, "example": example}


JSON_PART: Final = {"request": {"contentType": "application/json"}}
"""The encoding of a form whose part `request` is a model as JSON."""


def typed_part(model: type[BaseModel], description: str) -> dict[str, Any]:
    """Return the schema of a form's part that is a model as JSON: generated clients take the model, not a text."""
    reference = SCHEMA_REF.format(model=model.__name__)
    return {"$ref": reference, "contentMediaType": "application/json", "description": description}


_NAMED_MODELS: Final = (JobRequest, LabelsRequest, Problem)
"""Models that routes refer to only by name."""


ROLES: Final[Mapping[Need, str]] = {
    "open": "anybody",
    "optional": "anybody; with a token it tells more",
    "scraper": "an administrator's or a viewer's token, or anybody where the settings open it",
    "signed": "an enrolled party, by its signature",
    "invited": "a holder of an invitation, by its one-use token",
    "viewer": "a token of any role",
    "auditor": "a token of role viewer or admin",
    "requester": "a token of role requester or admin",
    "admin": "a token of role admin",
}
"""The callers of a route, by the name for the least role in the document."""


def document(app: FastAPI) -> dict[str, Any]:
    """Return the OpenAPI document of the app, made once."""
    if app.openapi_schema is not None:
        return app.openapi_schema
    made = get_openapi(
        title=app.title, version=app.version, description=app.description, routes=app.routes, summary=app.summary
    )
    components = made.setdefault("components", {})
    schemas = components.setdefault("schemas", {})
    for model in _NAMED_MODELS:
        schema = model.model_json_schema(ref_template=SCHEMA_REF, mode="validation")
        for name, inner in schema.pop("$defs", {}).items():
            schemas.setdefault(name, inner)
        schemas.setdefault(model.__name__, schema)
    components["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer", "bearerFormat": "lab_..."}}
    for path, operations in made["paths"].items():
        for method, operation in operations.items():
            named = (method.upper(), path)
            need = ACCESS.get(named) or ACCESS.get((named[0], path.replace("}", ":path}")))
            operation["x-least-role"] = need
            operation["description"] += f" For {ROLES[need or 'open']}."
            if path.startswith(VERSIONED):
                # Every route may receive an unknown parameter.
                operation["responses"].setdefault("422", problem(422))
            if method in _WRITING:
                # Every route that writes may find the disk full.
                operation["responses"].setdefault("507", problem(507))
            operation["security"] = _SECURITY.get(need or "open", [{"token": []}])
    freed: dict[str, Any] = _swapped(made, _NULL, None)
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


def _swapped(node: Any, old: str | None, new: str | None) -> Any:
    """Replace a value in an example: FastAPI drops nulls, and with them required members, so a word stands for them."""
    if isinstance(node, dict):
        return {name: _swapped(value, old, new) for name, value in node.items()}
    if isinstance(node, list):
        return [_swapped(value, old, new) for value in node]
    return new if node == old else node


MAX_PAGE = 200
MAX_ID_LENGTH = 100

Who = Annotated[Reader, Depends(reader)]
"""The reader, for routes whose answer depends on ownership."""

TaskId = Annotated[str, Path(max_length=MAX_ID_LENGTH, examples=[examples.TASK_ID], description="digest of a task")]
JobId = Annotated[str, Path(max_length=MAX_ID_LENGTH, examples=[examples.JOB_ID], description="id of a job")]
AgentId = Annotated[str, Path(max_length=MAX_ID_LENGTH, examples=["hospital-a"], description="id of an agent")]
PartyId = Annotated[
    str, Path(max_length=MAX_ID_LENGTH, examples=["hospital-a"], description="id of an agent or a tallier")
]
TokenId = Annotated[str, Path(max_length=MAX_ID_LENGTH, examples=[examples.TOKEN_ID], description="id of a token")]

After = Annotated[
    str | None,
    Query(max_length=300, examples=["MjAyNy0wMy0wMQ"], description="`next` of the page before; absent for the first"),
]
Limit = Annotated[int, Query(ge=1, le=MAX_PAGE, examples=[50], description="items on one page")]

IdempotencyKey = Annotated[
    str | None,
    Header(
        alias="Idempotency-Key",
        pattern=f"^{KEY}$",
        examples=["march-photographs-1"],
        description="1 to 200 visible ASCII characters. The same key with the same body gives the same job, however "
        "often it is sent; with another body it is refused.",
    ),
]


SWAGGER: Final[Traversable] = files("fastapi_offline") / "static"
"""A folder with the files of Swagger UI: a package holds them, so that a page needs no other host."""

SWAGGER_FILES: Final = ("swagger-ui-bundle.js", "swagger-ui.css")


def reference_page(title: str, shown: Mapping[str, Any]) -> tuple[bytes, str]:
    """Return FastAPI's page of Swagger UI, and the source in a Content-Security-Policy of its only inline script.

    The page sends no example: one that is tried by mistake would cost budget. It holds the document, so that it fetches
    nothing.

    Args:
        shown: the OpenAPI document.
    """
    page = get_swagger_ui_html(
        openapi_url="/openapi.json",
        title=title,
        swagger_js_url="/dashboard/swagger-ui-bundle.js",
        swagger_css_url="/dashboard/swagger-ui.css",
        swagger_favicon_url="/dashboard/icon.svg",
        swagger_ui_parameters={"supportedSubmitMethods": [], "spec": shown},
    )
    html = bytes(page.body)
    script = html.partition(b"<script>")[2].partition(b"</script>")[0]
    return html, f"'sha256-{base64.b64encode(hashlib.sha256(script).digest()).decode()}'"
