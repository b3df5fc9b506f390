"""The dashboard's files keep their promises: nothing from elsewhere, nothing inline, nothing missing, all readable."""

from __future__ import annotations

import hashlib
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from api import console as dashboard

STATIC = Path(str(dashboard.STATIC))
PAGE = (STATIC / "index.html").read_text()
STYLE = "".join((STATIC / name).read_text() for name in ("dashboard.css", "views.css"))
SCRIPTS = {path.name: path.read_text() for path in sorted(STATIC.glob("*.js")) if not path.name.startswith("uPlot")}
VOID = {"meta", "link", "input", "br", "img"}


class Outline(HTMLParser):
    """Every start tag with its attributes, and the text inside script elements."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.inline_script = ""
        self._open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag, f"</{tag}> closes something else"

    def handle_data(self, data: str) -> None:
        if self._open and self._open[-1] in ("script", "style"):
            self.inline_script += data.strip()

    def values(self, name: str) -> list[str]:
        return [value for _, attributes in self.tags if (value := attributes.get(name))]


@pytest.fixture(scope="module")
def outline() -> Outline:
    parser = Outline()
    parser.feed(PAGE)
    return parser


def test_no_file_names_another_host() -> None:
    for path in sorted(STATIC.iterdir()):
        text = path.read_text()
        # A namespace is a name, not an address; the library's first line names its home.
        text = text.replace("http://www.w3.org/2000/svg", "").replace(
            "/*! https://github.com/leeoniya/uPlot (v1.6.32) */", ""
        )
        assert not re.findall(r"(?:https?:)?//[a-z0-9-]+\.[a-z]{2,}[^\s\"']*", text), path.name
        assert "@import" not in text, path.name
        assert "url(" not in text, path.name


def test_the_page_has_no_inline_script_and_no_inline_style(outline: Outline) -> None:
    assert outline.inline_script == ""
    for tag, attributes in outline.tags:
        assert "style" not in attributes, tag
        assert not [name for name in attributes if name.startswith("on")], tag
        assert tag != "style"


def test_the_policy_allows_only_our_own_files() -> None:
    policy = dashboard.HEADERS["Content-Security-Policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert "frame-ancestors 'none'" in policy


def test_every_file_the_page_names_exists_and_lies_flat_under_dashboard(outline: Outline) -> None:
    named = [one for one in outline.values("src") + outline.values("href") if one != "/api" and not one.startswith("#")]
    assert len(named) == len(set(named))
    assert len(named) >= 6
    for address in named:
        prefix, name = address[: len("/dashboard/")], address[len("/dashboard/") :]
        assert prefix == "/dashboard/"
        assert "/" not in name
        assert (STATIC / name).is_file(), address


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_module_imports_what_exists(name: str) -> None:
    for names, source in re.findall(r"^import (?:\{([^}]*)\}) from \"(.*)\";$", SCRIPTS[name], flags=re.MULTILINE):
        assert re.fullmatch(r"\./\w+\.js", source)
        other = SCRIPTS[source.removeprefix("./")]
        for wanted in names.split(","):
            pattern = rf"^export (?:async )?(?:function|const|class) {wanted.strip()}\b"
            assert re.search(pattern, other, flags=re.MULTILINE), f"{name} imports {wanted.strip()} from {source}"
            used = re.sub(r"^import .*$", "", SCRIPTS[name], flags=re.MULTILINE)
            assert re.search(rf"\b{wanted.strip()}\b", used), f"{name} imports {wanted.strip()} for nothing"


def test_every_script_is_reached_from_the_page(outline: Outline) -> None:
    reached = {address.rsplit("/", 1)[1] for address in outline.values("src")}
    while True:
        more = {
            source
            for name in reached & SCRIPTS.keys()
            for source in re.findall(r"from \"\./(\w+\.js)\"", SCRIPTS[name])
        }
        if more <= reached:
            break
        reached |= more
    assert SCRIPTS.keys() <= reached


@pytest.mark.parametrize("name", SCRIPTS)
def test_no_script_turns_data_into_markup_or_code(name: str) -> None:
    code = re.sub(r"FORBIDDEN = new Set\(.*\)", "", SCRIPTS[name])
    for way in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "new Function", "srcdoc"):
        assert way not in code, way
    assert not re.search(r"setAttribute\(\"style\"|cssText", code)


def test_the_token_is_kept_for_the_tab_only() -> None:
    assert "sessionStorage" in SCRIPTS["api.js"]
    for name, code in SCRIPTS.items():
        assert "document.cookie" not in code
        assert "localStorage" not in code or name in ("theme.js", "alerts.js")  # a color, and digests
    assert "oken" not in SCRIPTS["theme.js"]


def test_elements_that_scripts_ask_for_are_in_the_page(outline: Outline) -> None:
    ids = outline.values("id")
    assert len(ids) == len(set(ids))
    made_by_scripts = set(re.findall(r"id: \"([\w-]+)\"", "".join(SCRIPTS.values())))
    for name, code in SCRIPTS.items():
        for wanted in re.findall(r"byId\(\"([\w-]+)\"\)", code):
            assert wanted in ids or wanted in made_by_scripts, f"{name} asks for #{wanted}"


def test_the_page_has_its_landmarks_one_h1_and_a_label_for_every_control(outline: Outline) -> None:
    tags = [tag for tag, _ in outline.tags]
    for landmark in ("header", "nav", "main", "footer", "h1"):
        assert tags.count(landmark) == 1, landmark
    ids = set(outline.values("id"))
    for reference in ("aria-labelledby", "aria-describedby", "for"):
        for value in outline.values(reference):
            assert set(value.split()) <= ids, value
    for target in outline.values("href"):
        assert not target.startswith("#") or target[1:] in ids
    labelled = set(outline.values("for"))
    for tag, attributes in outline.tags:
        if tag in ("input", "select") and attributes.get("type") != "radio":
            assert attributes.get("id") in labelled, attributes
        if tag == "section":
            assert attributes.get("aria-labelledby"), attributes
        if tag == "button":
            assert attributes.get("type") in ("button", "submit"), attributes
    assert dict(outline.tags)["html"]["lang"] == "en"
    polite = [attributes for _, attributes in outline.tags if attributes.get("aria-live") == "polite"]
    assert len(polite) == 1


def test_motion_stops_for_those_who_ask() -> None:
    assert "prefers-reduced-motion: reduce" in STYLE
    assert ":focus-visible" in STYLE


def test_the_vendored_library_is_what_its_note_says() -> None:
    note = (STATIC / "VENDORED.md").read_text()
    found = re.findall(r"^ +([0-9a-f]{64})  (\S+)$", note, flags=re.MULTILINE)
    assert [name for _, name in found] == ["uPlot.iife.min.js", "uPlot.min.css"]
    for digest, name in found:
        assert hashlib.sha256((STATIC / name).read_bytes()).hexdigest() == digest
    assert "MIT" in (STATIC / "uPlot.LICENSE.txt").read_text()


# Contrast: every colour of text on every ground that may carry text, in both themes.

COLORS = {
    name: (light, dark)
    for name, light, dark in re.findall(
        r"--([\w-]+): light-dark\((#[0-9a-f]{6}), (#[0-9a-f]{6})\);", STYLE.partition("* { box-sizing")[0]
    )
}
TEXTS = ("ink", "muted", "accent", "right", "wrong")
GROUNDS = ("ground", "card", "right-tint", "wrong-tint", "note-tint", "accent-tint")
ON_ACCENT = ("on-accent", "accent")
SHAPES = [
    *(("edge", ground) for ground in ("ground", "card", "note-tint", "wrong-tint")),
    *((bar, "track") for bar in ("accent", "wrong")),
    *((ring, ground) for ring in ("accent", "wrong") for ground in ("ground", "card")),
    *(("on-mark", mark) for mark in ("right", "wrong", "accent", "muted")),
    ("accent", "accent-tint"),
    ("wrong", "wrong-tint"),
]
"""Borders of controls, bars, focus rings, marks: 3 to 1 (WCAG 2.2, 1.4.11)."""
WITHOUT_TEXT = {"track", "accent", "wrong"}
"""Grounds that carry no text but `on-accent`."""


def luminance(color: str) -> float:
    parts = [int(color[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(first: str, second: str) -> float:
    low, high = sorted((luminance(first), luminance(second)))
    return (high + 0.05) / (low + 0.05)


def test_contrast_is_computed_as_the_guideline_says() -> None:
    assert contrast("#000000", "#ffffff") == pytest.approx(21)
    assert contrast("#777777", "#ffffff") == pytest.approx(4.478, abs=0.001)


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize(("text", "ground"), [*((text, ground) for text in TEXTS for ground in GROUNDS), ON_ACCENT])
def test_text_reads_on_its_ground(text: str, ground: str, theme: str) -> None:
    place = 0 if theme == "light" else 1
    assert contrast(COLORS[text][place], COLORS[ground][place]) >= 4.5


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize(("shape", "ground"), SHAPES)
def test_a_shape_that_means_something_is_seen(shape: str, ground: str, theme: str) -> None:
    place = 0 if theme == "light" else 1
    assert contrast(COLORS[shape][place], COLORS[ground][place]) >= 3


def test_no_rule_uses_a_colour_that_was_not_checked() -> None:
    rules = STYLE.partition("* { box-sizing")[2]
    texts = set(re.findall(r"(?<![\w-])color: var\(--([\w-]+)\)", rules))
    assert texts == {*TEXTS, "on-accent"}
    grounds = set(re.findall(r"background: var\(--([\w-]+)\)", rules))
    assert grounds == {*GROUNDS, *WITHOUT_TEXT}
    literal = re.findall(r"(?<![\w-])(?:color|background): (?:#|rgb)[^;]*", rules)
    assert literal == []
