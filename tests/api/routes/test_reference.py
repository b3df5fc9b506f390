"""The page at /api shows every route of the document, works offline, and every link in it leads somewhere."""

from __future__ import annotations

import re
from html.parser import HTMLParser

import pytest

from api.documentation import kind_of, reference_text
from tests.api.routes.conftest import Service


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
    for schema in document["components"]["schemas"]:
        assert f"<h3>{schema}</h3>" in text


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
