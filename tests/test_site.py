"""The documentation's site builds offline with every warning an error, its links lead somewhere, nothing is fetched."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from playwright.sync_api import Browser, expect

from api.access import ACCESS
from tests.e2e.browser.conftest import chromium  # noqa: F401  # a fixture

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"


class Html(HTMLParser):
    """Ids, links, and whatever a browser would fetch by itself."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.links: list[str] = []
        self.fetched: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = {name: value or "" for name, value in attrs}
        self.ids |= {found[name] for name in ("id", "name") if name in found}
        if tag == "a" and "href" in found:
            self.links.append(found["href"])
        if tag in ("script", "img", "iframe", "source") and "src" in found:
            self.fetched.append(found["src"])
        if tag == "link" and found.get("rel") not in ("canonical", "prev", "next"):
            self.fetched.append(found["href"])


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("mkdocs", reason="`make test-long` installs the extra docs")
    out = tmp_path_factory.mktemp("site")
    closed = {"http_proxy": "http://127.0.0.1:9", "https_proxy": "http://127.0.0.1:9", "NO_MKDOCS_2_WARNING": "1"}
    built = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(out)],
        cwd=ROOT,
        env=os.environ | closed | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert built.returncode == 0, built.stderr[-3000:]
    return out


@pytest.mark.long
@pytest.mark.process
def test_every_link_of_every_page_leads_somewhere_and_nothing_is_fetched_from_elsewhere(site: Path) -> None:
    pages = {path: Html(path.read_text(encoding="utf-8")) for path in site.rglob("*.html")}
    assert len(pages) > 35
    broken = []
    for path, page in pages.items():
        for address in (*page.fetched, *page.links):
            parts = urlsplit(address)
            if parts.scheme or parts.netloc:
                # A person may follow a link to another host; a page fetches nothing by itself.
                assert address in page.links, (path.name, address)
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            if target.is_dir():
                target /= "index.html"
            known = target.is_file() and (target not in pages or not parts.fragment)
            if not known and not (target in pages and unquote(parts.fragment) in pages[target].ids):
                broken.append((path.relative_to(site).as_posix(), address))
    assert not [one for one in broken if not one[0].startswith("404")]
    for style in site.rglob("*.css"):
        assert not re.search(r"url\(\s*['\"]?(?:https?:)?//", style.read_text(encoding="utf-8")), style.name


OVERFLOWS = """() => [...document.querySelectorAll('pre, pre > code, .md-content img, body')]
    .filter(one => one.scrollWidth > one.clientWidth + 1 || one.getBoundingClientRect().right > innerWidth)
    .map(one => one.tagName + ': ' + one.textContent.slice(0, 80))"""


@pytest.mark.long
@pytest.mark.process
@pytest.mark.parametrize("width", [1400, 390])
def test_no_line_of_code_and_no_picture_is_cut_off(
    site: Path,
    chromium: Browser,  # noqa: F811
    width: int,
) -> None:
    page = chromium.new_page(viewport={"width": width, "height": 900})
    cut = {}
    for path in site.rglob("*.html"):
        page.goto(path.as_uri(), wait_until="domcontentloaded")
        if found := page.evaluate(OVERFLOWS):
            cut[path.relative_to(site).as_posix()] = found
    page.close()
    assert not cut


@pytest.mark.long
@pytest.mark.process
def test_the_rest_interface_is_shown_from_a_folder_without_a_server(site: Path, chromium: Browser) -> None:  # noqa: F811
    page = chromium.new_page()
    page.goto((site / "reference" / "rest.html").as_uri())
    page.locator("[id$=-submit_job] .opblock-summary-control").click()
    expect(page.locator("[id$=-submit_job] .opblock-body")).to_contain_text("For a token of role requester or admin.")
    expect(page.locator(".opblock")).to_have_count(len(ACCESS))
    expect(page.locator(".errors-wrapper")).to_have_count(0)
    page.close()


@pytest.mark.long
@pytest.mark.process
def test_pages_that_are_made_hold_what_they_are_made_of(site: Path) -> None:
    from workers.commands.catalog import load_commands

    def shown(name: str) -> str:
        return re.sub(r"<[^>]+>", "", (site / name).read_text(encoding="utf-8")).replace("&quot;", '"')

    pages = sorted((site / "reference" / "cli").glob("*.html"))
    assert len(pages) == 5
    overview = shown("reference/cli.html")
    commands = "".join(shown(page.relative_to(site).as_posix()) for page in pages)
    for name, command in load_commands().items():
        assert f"labeler {name}" in commands
        assert f"labeler {name}" in overview
        for parameter in command.params:
            assert all(option in commands for option in parameter.opts if option.startswith("--")), (
                name,
                parameter.opts,
            )
    routes = shown("reference/rest.html")
    assert all(path.replace(":path", "") in routes for _, path in ACCESS)
    wire = shown("reference/wire.html")
    for vectors in tomllib.loads((ROOT / "tests" / "golden" / "wire_vectors.toml").read_text()).values():
        assert all(one["name"] in wire for one in vectors)
    assert "wrong-version" in shown("reference/errors.html")
    assert "test_driver.py" in shown("threat-model.html")
    for call in ("embed", "plan", "run", "connect", "load_student"):
        assert re.search(rf"\b{call}\b", shown("reference/python.html")), call


@pytest.mark.long
@pytest.mark.process
def test_every_diagram_is_drawn_and_every_notebook_is_a_page_with_its_file(site: Path) -> None:
    for name, source in {"index": "README.md", "ARCHITECTURE": "ARCHITECTURE.md", "round": "docs/round.md"}.items():
        fences = (ROOT / source).read_text().count("```mermaid")
        page = (site / f"{name}.html").read_text(encoding="utf-8")
        assert fences > 0
        assert len(re.findall(r'<div class="diagram"><svg', page)) == fences
        assert "flowchart LR" not in page
        assert len(set(re.findall(r'<svg[^>]*id="(diagram-\w+)"', page))) == fences, "each keeps its own styles"
    for notebook in (DOCS / "tutorials").glob("*.ipynb"):
        page = site / "tutorials" / f"{notebook.stem}.html"
        assert f'href="{notebook.name}"' in page.read_text(encoding="utf-8")
        assert (site / "tutorials" / notebook.name).read_bytes() == notebook.read_bytes()


@pytest.mark.parametrize("page", sorted((DOCS / "math").glob("*.md")), ids=lambda page: page.stem)
def test_a_page_of_the_mathematics_names_tests_that_are_there(page: Path) -> None:
    text = page.read_text()
    named = re.findall(r"`((?:tests|labeler)/[\w./-]+\.py)`", text)
    assert named
    for name in named:
        assert (ROOT / name).exists(), name
    for name in re.findall(r"`(test_\w+\.py)`", text):
        assert list((ROOT / "tests").rglob(name)), name


def test_every_method_has_a_page_with_mechanism_sensitivity_accountant_and_oracle() -> None:
    from labeler.methods import METHODS

    for method in METHODS:
        text = (DOCS / "math" / f"{method}.md").read_text()
        for word in ("**Mechanism.**", "**One record", "**One agent", "**Accountant:**", "**Oracles:**"):
            assert word in text, (method, word)


def test_every_page_of_the_folder_stands_in_the_site_s_order() -> None:
    order = (ROOT / "mkdocs.yml").read_text()
    for page in DOCS.rglob("*.md"):
        assert page.relative_to(DOCS).as_posix() in order, page
