"""The page: safe to open, readable by everybody, silent about what it does not know."""

from __future__ import annotations

import base64
import re
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest

from feature_store.results.report.model import JobReport, LevelPrice, Privacy
from feature_store.results.report.page import confusion_table, render_page
from feature_store.results.report.pictures import draw_pictures

VOID = {"meta", "img", "link", "br", "hr", "input", "circle", "rect", "path"}


class Page(HTMLParser):
    """What a page is made of."""

    def __init__(self, html: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.open: list[str] = []
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] != "style":
            self.text += data

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.tags if name == tag]


def render(report: JobReport) -> str:
    return render_page(report, draw_pictures(report))


@pytest.fixture(scope="module")
def html(make_report):
    """The whole page of the ordinary job."""
    return render(make_report())


def render_words(report: JobReport) -> str:
    """The page without its charts, which take most of the time."""
    return render_page(report, {})


def svgs(html: str) -> list[str]:
    return [base64.b64decode(found).decode() for found in re.findall(r"data:image/svg\+xml;base64,([\w+/=]+)", html)]


def test_every_element_is_closed_and_ids_are_unique(html):
    page = Page(html)
    assert page.open == []
    ids = [attributes["id"] for _, attributes in page.tags if "id" in attributes]
    assert len(ids) == len(set(ids))


def test_the_page_loads_nothing_and_runs_nothing(html):
    page = Page(html)
    assert not {"script", "link", "iframe", "object", "embed", "base", "form"} & {tag for tag, _ in page.tags}
    for _, attributes in page.tags:
        assert not [name for name in attributes if name.startswith("on")]
        assert (attributes.get("src") or "data:image/").startswith("data:image/")
        target = attributes.get("href")
        assert target is None or re.fullmatch(r"#[\w-]+|[\w.-]+", target)
    assert "url(" not in html
    assert "@import" not in html
    policy = [attributes["content"] for attributes in page.all("meta") if "http-equiv" in attributes]
    assert policy[0].startswith("default-src 'none'; img-src data:")


def test_pictures_inside_the_page_are_svg_without_scripts_that_follow_the_color_scheme(html):
    found = svgs(html)
    assert len(found) == 6
    for svg in found:
        root = ElementTree.fromstring(svg)
        assert not [element for element in root.iter() if element.tag.endswith("script")]
        links = [value for element in root.iter() for name, value in element.attrib.items() if name.endswith("href")]
        assert all(link.startswith(("#", "data:image/png")) for link in links)
        assert "prefers-color-scheme:dark" in svg
        assert "var(--c0)" in svg


def test_every_picture_has_words_and_every_table_a_caption(html):
    page = Page(html)
    images = page.all("img")
    assert all("alt" in attributes for attributes in images)
    # Of several pictures of one group the first speaks for all.
    assert sum(attributes["alt"] == "" for attributes in images) == 2 * 12
    assert all(attributes["alt"] for attributes in images if "svg" in attributes["src"])
    assert len(page.all("table")) == len(page.all("caption"))
    assert all(attributes.get("scope") in ("row", "col") for attributes in page.all("th"))


def test_names_from_strangers_are_shown_and_never_obeyed(make_report):
    evil = "<script>alert(1)</script>"
    report = make_report(
        classes=(evil, '" onerror="x', "$\\frac{1}{$ 🎧 {{ 7*7 }}"),
        source=f"{evil}\"'&.png",
        versions={evil: evil},
        backbone=evil,
    )
    html = render(report)
    assert "<script" not in html
    page = Page(html)
    assert page.text.count(evil) > 10
    assert "{{ 7*7 }}" in page.text
    assert not [name for _, attributes in page.tags for name in attributes if name.startswith("on")]
    for svg in svgs(html):
        assert "<script" not in svg
        ElementTree.fromstring(svg)


def test_without_truth_the_page_speaks_of_no_accuracy(make_report):
    report = make_report(has_truth=False)
    page = Page(render(report))
    assert "labels right" not in page.text
    assert "student right" not in page.text
    assert "Confused" not in page.text
    assert "calibration.png" not in [attributes.get("href") for attributes in page.all("a")]
    assert "wrong" not in page.text
    assert "truly" not in page.text
    assert "accuracy_vs_epsilon.png" not in [attributes.get("href") for attributes in page.all("a")]
    assert report.label_accuracy is None


def test_right_and_wrong_are_told_by_words_as_well_as_colors(make_report):
    page = Page(render_words(make_report()))
    tiles = [attributes["class"] for attributes in page.all("li") if "tile" in (attributes.get("class") or "")]
    assert page.text.count("right: ") == sum("right" in kind.split() for kind in tiles)
    assert page.text.count("wrong: ") == sum("wrong" in kind.split() for kind in tiles)
    assert page.text.count("wrong: ") > 8
    assert "truly dog" in page.text


def test_the_matrix_counts_every_image_whose_truth_is_known(make_report):
    report = make_report()
    table = confusion_table(report)
    cells = [cell["count"] for row in table["rows"] for cell in row["cells"]]
    assert sum(cells) == 80
    assert sum(row["total"] for row in table["rows"]) == 80
    assert sum(cell["count"] for row in table["rows"] for cell in row["cells"] if cell["is_right"]) == 72
    assert sum(pair["count"] for pair in table["pairs"]) == 8
    many = make_report(classes=tuple(f"c{number}" for number in range(13)), coverage=None)
    assert confusion_table(many)["rows"] == [], "a table of many classes is wider than a page"
    assert confusion_table(many)["pairs"]


def test_a_winner_release_shows_no_votes(make_report):
    page = Page(render(make_report(release="winner")))
    assert "vote_margins.png" not in [attributes.get("href") for attributes in page.all("a")]
    assert not [1 for attributes in page.all("ul") if attributes.get("class") == "bars"]
    assert "how close any question was" in page.text
    assert "noisy sum" not in page.text


def test_a_seeded_job_says_first_that_it_was_a_simulation(make_report):
    page = Page(render_words(make_report(is_seeded=True)))
    assert "With noise nobody can predict, nobody outside could learn" in page.text
    assert page.text.index("This was a simulation") < page.text.index("What was asked")


def test_a_missing_epsilon_is_given_with_its_reason(make_report):
    privacy = Privacy(1e-5, LevelPrice(None, "", "the index is unsafe"), LevelPrice(None, "", "not stated"))
    page = Page(render_words(make_report(privacy=privacy, curve=())))
    assert "There is no guarantee for a single private image of the 5 agents that answered: the index is" in page.text
    assert "not stated" in page.text
