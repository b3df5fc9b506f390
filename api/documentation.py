"""Descriptions of routes in the OpenAPI document, the document itself, and the page for people that is made from it.

Parameters shared by several routes are defined here with their bounds and an example. The page needs no script, no font
and no other host: the same text is a page of the service (`/api`, which works without internet) and of the
documentation (docs/site).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from functools import cache
from typing import TYPE_CHECKING, Annotated, Any, Final

from fastapi import Depends, FastAPI, Header, Path, Query
from fastapi.openapi.utils import get_openapi
from markupsafe import Markup
from pydantic import BaseModel

from api import examples
from api.access import ACCESS, VERSIONED, Need, reader
from api.coordinator.ownership import Reader
from api.problems import BY_STATUS, MEDIA_TYPE, TYPE_PREFIX
from api.schema import KEY, JobRequest, LabelsRequest, Problem

if TYPE_CHECKING:
    from jinja2 import Environment


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


ROLES: Final[Mapping[str, str]] = {
    "open": "anybody",
    "optional": "anybody; with a token it tells more",
    "scraper": "an administrator's or a viewer's token, or anybody where the settings open it",
    "signed": "an enrolled party, by its signature",
    "viewer": "a token of any role",
    "requester": "a token of role requester or admin",
    "admin": "a token of role admin",
}
"""The callers of a route, by the document's name for the least role."""

_SCHEMA: Final = "#/components/schemas/"


@cache
def _environment() -> Environment:
    from jinja2 import Environment, PackageLoader  # imported here: a coordinator starts without it

    made = Environment(loader=PackageLoader("api", "templates"), autoescape=True, trim_blocks=True)
    made.filters |= {"kind": kind_of, "ways": ways_of, "fields": fields_of, "anchor": anchor_of, "prose": prose}
    made.filters["pretty"] = lambda value: (
        value if isinstance(value, str) else json.dumps(value, indent=2, ensure_ascii=False)
    )
    return made


def reference_page(document: Mapping[str, Any]) -> str:
    """Return the whole page, as the service shows it."""
    return _environment().get_template("reference.html.j2").render(document=document, roles=ROLES)


def reference_text(document: Mapping[str, Any]) -> str:
    """Return the page's content, to embed in another page."""
    return _environment().get_template("reference_text.html.j2").render(document=document, roles=ROLES)


def prose(text: str) -> Markup:
    """Render a sentence of a description, with text between backticks as code."""
    return Markup(re.sub(r"`([^`]+)`", r"<code>\1</code>", str(Markup.escape(text))))  # escaped before it is marked up


def anchor_of(text: str) -> str:
    """Return an anchor in the page: "get-v1-jobs"."""
    return "-".join("".join(letter if letter.isalnum() else " " for letter in text.lower()).split())


def kind_of(schema: Mapping[str, Any]) -> Markup:
    """Describe a schema's values in a few words; names of other schemas are links."""
    return Markup(" or ").join(_kinds(schema)) or Markup("anything")


def _kinds(schema: Mapping[str, Any]) -> Iterator[Markup]:
    if "$ref" in schema:
        name = schema["$ref"].removeprefix(_SCHEMA)
        yield Markup('<a href="#{}">{}</a>').format(f"schema-{anchor_of(name)}", name)
    elif "const" in schema:
        yield Markup("<code>{}</code>").format(json.dumps(schema["const"]))
    elif "enum" in schema:
        yield Markup(", ").join(Markup("<code>{}</code>").format(json.dumps(one)) for one in schema["enum"])
    elif "anyOf" in schema or "oneOf" in schema:
        for one in schema.get("anyOf", schema.get("oneOf", [])):
            yield from _kinds(one)
    elif schema.get("type") == "array":
        yield Markup("list of ") + kind_of(schema.get("items", {}))
    elif isinstance(extra := schema.get("additionalProperties"), dict):
        yield Markup("names to ") + kind_of(extra)
    elif "type" in schema:
        bounds = ", ".join(f"{word} {schema[key]}" for key, word in _BOUNDS if key in schema)
        yield Markup.escape(schema.get("format", schema["type"]) + (f" ({bounds})" if bounds else ""))


_BOUNDS: Final = (
    ("minimum", "at least"),
    ("exclusiveMinimum", "above"),
    ("maximum", "at most"),
    ("exclusiveMaximum", "below"),
    ("minLength", "characters, at least"),
    ("maxLength", "characters, at most"),
    ("minItems", "entries, at least"),
    ("maxItems", "entries, at most"),
)


def ways_of(document: Mapping[str, Any]) -> list[tuple[str, list[tuple[str, str, Mapping[str, Any]]]]]:
    """Return (heading, [(method, path, operation)]), headings in order of first appearance."""
    found: dict[str, list[tuple[str, str, Mapping[str, Any]]]] = {}
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            found.setdefault((operation.get("tags") or ["other"])[0], []).append((method.upper(), path, operation))
    return list(found.items())


def fields_of(schema: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any], bool]]:
    """Return (name, schema, is required) of each field."""
    required = set(schema.get("required", ()))
    return [(name, one, name in required) for name, one in schema.get("properties", {}).items()]
