"""The files of the dashboard and of a site's desk: nothing from elsewhere, nothing inline, nothing missing."""

from __future__ import annotations

import hashlib
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from api import console as dashboard
from api.console.site import SHARED
from api.console.site import STATIC as DESK
from labeler.methods import DEFAULT_METHOD, METHODS

STATIC = Path(str(dashboard.STATIC))
FOLDERS = {"/dashboard/": STATIC, "/files/": Path(str(DESK))}
"""Address of the files -> their folder."""
SCRIPTS = {path.name: path.read_text() for path in sorted(STATIC.glob("*.js")) if not path.name.startswith("uPlot")}
DESK_SCRIPTS = {path.name: path.read_text() for path in sorted(FOLDERS["/files/"].glob("*.js"))}
VOID = {"meta", "link", "input", "br", "img"}
MARKUP = ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "new Function", "srcdoc")


class Outline(HTMLParser):
    """Every start tag with its attributes, and the text inside script elements."""

    def __init__(self, address: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.inline_script = ""
        self._open: list[str] = []
        self.feed((FOLDERS[address] / "index.html").read_text())

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


@pytest.mark.parametrize("address", FOLDERS)
def test_no_file_names_another_host(address: str) -> None:
    for path in sorted(FOLDERS[address].iterdir()):
        text = path.read_text()
        # A namespace is a name, not an address; the library's first line names its home.
        text = text.replace("http://www.w3.org/2000/svg", "").replace(
            "/*! https://github.com/leeoniya/uPlot (v1.6.32) */", ""
        )
        assert not re.findall(r"(?:https?:)?//[a-z0-9-]+\.[a-z]{2,}[^\s\"']*", text), path.name
        assert "@import" not in text, path.name
        assert "url(" not in text, path.name


@pytest.mark.parametrize("address", FOLDERS)
def test_a_page_has_nothing_inline_and_every_file_that_it_names_is_there(address: str) -> None:
    outline = Outline(address)
    assert outline.inline_script == ""
    for tag, attributes in outline.tags:
        assert "style" not in attributes, tag
        assert not [name for name in attributes if name.startswith("on")], tag
        assert tag != "style"
    named = [one for one in outline.values("src") + outline.values("href") if one != "/api" and not one.startswith("#")]
    assert len(named) == len(set(named))
    for one in named:
        name = one.removeprefix(address)
        assert "/" not in name, one
        shared = address == "/files/" and name in SHARED
        assert ((STATIC if shared else FOLDERS[address]) / name).is_file(), one


def test_the_policy_allows_only_our_own_files() -> None:
    policy = dashboard.HEADERS["Content-Security-Policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert "frame-ancestors 'none'" in policy


@pytest.mark.parametrize("scripts", [SCRIPTS, DESK_SCRIPTS], ids=["dashboard", "desk"])
def test_a_script_imports_what_exists_and_makes_no_markup_or_code_of_data(scripts: dict[str, str]) -> None:
    for name, code in scripts.items():
        used = re.sub(r"^import .*$", "", code, flags=re.MULTILINE)
        for names, source in re.findall(r"^import \{([^}]*)\} from \"\./(\w+\.js)\";$", code, flags=re.MULTILINE):
            other = scripts.get(source) or SCRIPTS[source]
            for wanted in (one.strip() for one in names.split(",")):
                pattern = rf"^export (?:async )?(?:function|const|class) {wanted}\b"
                assert re.search(pattern, other, flags=re.MULTILINE), f"{name} imports {wanted} from {source}"
                assert re.search(rf"\b{wanted}\b", used), f"{name} imports {wanted} for nothing"
        code = re.sub(r"FORBIDDEN = new Set\(.*\)", "", code)
        assert not [way for way in MARKUP if way in code], name
        assert not re.search(r"setAttribute\(\"style\"|cssText", code), name


def test_every_script_is_reached_from_the_page() -> None:
    reached = {address.rsplit("/", 1)[1] for address in Outline("/dashboard/").values("src")}
    while True:
        of = [SCRIPTS[name] for name in reached & SCRIPTS.keys()]
        more = {source for code in of for source in re.findall(r"from \"\./(\w+\.js)\"", code)}
        if more <= reached:
            break
        reached |= more
    assert SCRIPTS.keys() <= reached


def test_the_token_is_kept_for_the_tab_only() -> None:
    assert "sessionStorage" in SCRIPTS["api.js"]
    for name, code in SCRIPTS.items():
        assert "document.cookie" not in code
        assert "localStorage" not in code or name in ("theme.js", "alerts.js")  # a color, and digests
    assert "oken" not in SCRIPTS["theme.js"]


def test_elements_that_scripts_ask_for_are_in_the_page() -> None:
    ids = Outline("/dashboard/").values("id")
    assert len(ids) == len(set(ids))
    made_by_scripts = set(re.findall(r"id: \"([\w-]+)\"", "".join(SCRIPTS.values())))
    for name, code in SCRIPTS.items():
        for wanted in re.findall(r"byId\(\"([\w-]+)\"\)", code):
            assert wanted in ids or wanted in made_by_scripts, f"{name} asks for #{wanted}"


def test_motion_stops_for_those_who_ask() -> None:
    style = "".join((STATIC / name).read_text() for name in ("dashboard.css", "views.css"))
    assert "prefers-reduced-motion: reduce" in style
    assert ":focus-visible" in style


def test_the_vendored_library_is_what_its_note_says() -> None:
    note = (STATIC / "VENDORED.md").read_text()
    found = re.findall(r"^ +([0-9a-f]{64})  (\S+)$", note, flags=re.MULTILINE)
    assert [name for _, name in found] == ["uPlot.iife.min.js", "uPlot.min.css"]
    for digest, name in found:
        assert hashlib.sha256((STATIC / name).read_bytes()).hexdigest() == digest
    assert "MIT" in (STATIC / "uPlot.LICENSE.txt").read_text()


def test_the_form_of_a_task_begins_with_the_default_method_and_leaves_k_to_the_service() -> None:
    tags = Outline("/dashboard/").tags
    start = next(place for place, (tag, told) in enumerate(tags) if tag == "select" and told.get("id") == "task-method")
    offered = {}
    for tag, told in tags[start + 1 :]:
        if tag != "option":
            break
        offered[told["value"]] = told["data-k"]
    assert next(iter(offered)) == DEFAULT_METHOD
    assert offered == {name: str(METHODS[str(name)].default_k) for name in offered}
    k = next(told for tag, told in tags if told.get("id") == "task-k")
    assert "value" not in k
    assert k["placeholder"] == offered[DEFAULT_METHOD]
