"""A report: a page that is safe to open and readable by everybody, whole files, and numbers in a stable shape."""

from __future__ import annotations

import base64
import io
import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from xml.etree import ElementTree

import numpy as np
import pytest
from PIL import Image

from feature_store.results.report.coverage import map_public_set
from feature_store.results.report.model import JobReport, LevelPrice, Privacy
from feature_store.results.report.page import confusion_table, render_page, report_json, write_report
from feature_store.results.report.pictures import draw_pictures
from feature_store.results.report.words import what_epsilon_means
from labeler.errors import UnreadableImage

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


PICTURES = {"accuracy_vs_epsilon", "budget", "price", "coverage", "vote_margins", "calibration"}


def names(folder):
    return {path.name for path in folder.iterdir()}


def test_a_report_is_a_page_and_readable_pictures_and_nothing_else(make_report, tmp_path):
    write_report(make_report(), tmp_path / "new" / "out")
    out = tmp_path / "new" / "out"
    assert names(out) == {"report.html"} | {f"{name}.png" for name in PICTURES}
    for name in PICTURES:
        with Image.open(io.BytesIO((out / f"{name}.png").read_bytes())) as image:
            image.load()
            assert min(image.size) > 150
            pixels = np.asarray(image.convert("L"))
        assert len(np.unique(pixels)) > 10
        rim = np.concatenate([pixels[0], pixels[-1], pixels[:, 0], pixels[:, -1]])
        assert (rim == rim[0]).all(), f"{name} is cut off at its rim"


def test_pictures_of_an_earlier_report_do_not_stay(make_report, tmp_path):
    write_report(make_report(), tmp_path)
    (tmp_path / "own.png").write_bytes(b"mine")
    write_report(make_report(release="winner", has_truth=False), tmp_path)
    assert names(tmp_path) == {"report.html", "budget.png", "price.png", "coverage.png", "own.png"}


def test_a_thumbnail_that_is_no_image_leaves_nothing_behind(make_report, tmp_path):
    report = make_report()
    broken = replace(report.queries[0], thumbnails=(b"\x89PNG\r\n\x1a\nand then nothing",))
    with pytest.raises(UnreadableImage, match="q0"):
        write_report(replace(report, queries=(broken, *report.queries[1:])), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_report_json_has_the_promised_shape(make_report):
    document = json.loads(json.dumps(report_json(make_report()), allow_nan=False))
    assert {"task", "labels", "student", "privacy", "agents", "versions"} <= set(document)
    assert document["labels"] == {
        "asked": 12, "answered": 11, "abstained": 1, "refused_budget": 0, "failed_quorum": 0, "accuracy": 10 / 11,
    }  # fmt: skip
    assert document["student"]["accuracy"] == 0.961
    assert document["privacy"]["delta"] == 1e-4
    method = "exact bound for the integer mechanism"
    assert document["privacy"]["instance"] == {"epsilon": 0.9751, "participant_epsilon": None, "method": method}
    assert set(document["privacy"]["agent"]) == {"epsilon", "participant_epsilon", "method"}
    assert document["agents"] == {"number": 5, "contributed": 5, "quorum": 4, "colluding": 1, "max_dropouts": 1}
    assert document["privacy"]["colluding_agents"] == 1
    assert "any one participant, who may be the reader" in document["privacy"]["holds_against"]
    assert "seconds" not in json.dumps(document)


def test_report_json_without_truth_has_no_accuracy_anywhere(make_report):
    assert "accuracy" not in json.dumps(report_json(make_report(has_truth=False)))


def test_a_report_states_a_person_where_the_task_does_and_says_so_where_it_does_not(make_report):
    report = make_report()
    assert "person" not in report_json(report)["privacy"]
    assert any("does not bound how many images of one person vote" in said for said in what_epsilon_means(report))
    privacy = replace(report.privacy, person=LevelPrice(1.25, "proved"), records_per_person=2)
    stated = replace(report, privacy=privacy)
    found = report_json(stated)["privacy"]["person"]
    assert (found["epsilon"], found["records_per_person"]) == (1.25, 2)
    assert any("at most 2 vote, epsilon is 1.25" in said for said in what_epsilon_means(stated))
    page = render_page(stated, {})
    assert "epsilon, one person" in page
    assert "at most 2 images vote" in page


@pytest.mark.parametrize(
    ("price", "said"),
    [
        (LevelPrice(2.5, "proved"), "For any 5 images of all agents together, whoever they show, epsilon is 2.50."),
        (LevelPrice(None, "", "too many."), "For any 5 images of all agents together there is no bound: too many."),
    ],
)
def test_a_report_states_a_group_of_images_where_the_task_names_its_size(make_report, price: LevelPrice, said: str):
    report = make_report()
    assert "group" not in report_json(report)["privacy"]
    stated = replace(report, privacy=replace(report.privacy, group=price, group_size=5))
    found = report_json(stated)["privacy"]["group"]
    assert (found["epsilon"], found["group_size"]) == (price.epsilon, 5)
    assert said in what_epsilon_means(stated)
    assert "epsilon, 5 images" in render_page(stated, {})


def test_a_report_without_a_student_or_an_agent_epsilon_is_still_json(make_report):
    report = make_report(student=None)
    privacy = replace(report.privacy, agent=LevelPrice(None, "", "records are not bounded"))
    document = report_json(replace(report, privacy=privacy))
    assert document["student"] == {}
    assert document["privacy"]["agent"] == {
        "epsilon": None, "participant_epsilon": None, "method": "", "reason": "records are not bounded",
    }  # fmt: skip


def test_the_map_covers_cells_of_answered_queries_only():
    features = np.eye(4)[[0, 0, 1, 1, 2, 3]]
    cells = np.array([0, 0, 1, 1, -1, 2])
    chart = map_public_set(features, np.eye(4)[:3], np.array([True, False, True]), cells=cells)
    assert chart.point_query.tolist() == [0, 0, -1, -1, -1, 2]
    assert chart.fraction == 0.5


def test_the_map_without_cells_covers_what_is_near_an_answered_query(rng):
    centers = 10 * np.eye(3, 8)
    features = np.repeat(centers, 40, axis=0) + rng.normal(size=(120, 8)) * 0.3
    chart = map_public_set(features, centers, np.array([True, True, False]))
    assert set(chart.point_query[80:].tolist()) == {-1}
    assert (chart.point_query[:40] == 0).mean() > 0.8
    assert 0.5 < chart.fraction < 0.67
    again = map_public_set(features, centers, np.array([True, True, False]))
    assert np.array_equal(chart.points, again.points)


def test_the_page_and_its_numbers_say_how_alike_two_draws_of_the_noise_are(make_report) -> None:
    report = make_report(stability=(0.552, 0.8))
    line = "Another draw of the noise would give about 55% to 80% of the labels the same."
    assert line in Page(render(report)).text
    assert report_json(report)["images"]["stability"] == {"low": 0.552, "high": 0.8}
    assert "Another draw" not in render(make_report())
    assert "stability" not in report_json(make_report())["images"]
