"""The REST interface as a page for people, made of the OpenAPI document: no script, no font, nothing from elsewhere.

The same text is a page of the service (`/api`, for whoever has no internet) and of the documentation (docs/site).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from functools import cache
from typing import TYPE_CHECKING, Any, Final

from markupsafe import Markup

if TYPE_CHECKING:
    from jinja2 import Environment

ROLES: Final[Mapping[str, str]] = {
    "open": "anybody",
    "optional": "anybody; with a token it tells more",
    "scraper": "a token of any role, or anybody where the settings open it",
    "signed": "an enrolled party, by its signature",
    "viewer": "a token of any role",
    "requester": "a token of role requester or admin",
    "admin": "a token of role admin",
}
"""Who may call a route, by what the document calls the least role."""

_SCHEMA: Final = "#/components/schemas/"


@cache
def _environment() -> Environment:
    from jinja2 import Environment, PackageLoader  # here: a coordinator starts without

    made = Environment(loader=PackageLoader("api", "templates"), autoescape=True, trim_blocks=True)
    made.filters |= {"kind": kind_of, "pretty": _pretty, "ways": ways_of, "fields": fields_of}
    made.filters |= {"anchor": anchor_of, "prose": prose}
    return made


def reference_page(document: Mapping[str, Any]) -> str:
    """The whole page, as the service shows it."""
    return _environment().get_template("reference.html.j2").render(document=document, roles=ROLES)


def reference_text(document: Mapping[str, Any]) -> str:
    """What stands in the page, for a page of somebody else."""
    return _environment().get_template("reference_text.html.j2").render(document=document, roles=ROLES)


def prose(text: str) -> Markup:
    """A sentence of a description, in which what stands between backticks is code."""
    return Markup(re.sub(r"`([^`]+)`", r"<code>\1</code>", str(Markup.escape(text))))  # escaped before it is marked up


def anchor_of(text: str) -> str:
    """A name for a place in the page: "get-v1-jobs"."""
    return "-".join("".join(letter if letter.isalnum() else " " for letter in text.lower()).split())


def kind_of(schema: Mapping[str, Any]) -> Markup:
    """What a schema takes, in a few words; a name of another leads there."""
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
    """(heading, [(method, path, operation)]), headings in the order in which they first occur."""
    found: dict[str, list[tuple[str, str, Mapping[str, Any]]]] = {}
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            found.setdefault((operation.get("tags") or ["other"])[0], []).append((method.upper(), path, operation))
    return list(found.items())


def fields_of(schema: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any], bool]]:
    """(name, schema, is required) of each field."""
    required = set(schema.get("required", ()))
    return [(name, one, name in required) for name, one in schema.get("properties", {}).items()]


def _pretty(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, indent=2, ensure_ascii=False)
