"""The report and the page of evidence in a real browser: as wide as a phone, nothing axe objects to, A4 on paper."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Literal

import pytest
from playwright.sync_api import Browser

from feature_store.results.evidence import render_page as evidence_page
from feature_store.results.report.page import write_report
from labeler.evidence.derive import derive, software
from tests.e2e.browser.conftest import PATIENCE_MS, OpenPage, in_both_widths_and_schemes
from tests.feature_store.results.report.conftest import ReportMaker
from tests.feature_store.results.report.conftest import make_report as make_report
from tests.labeler.evidence.conftest import facts_of, round_of, task_with

Scheme = Literal["light", "dark"]
LONG = ("backpack of a tourist", "touring-bike", "calculator", "headphones", "computer-keyboard", "laptop-101", "mug")
A4_PT = (210 / 25.4 * 72, 297 / 25.4 * 72)


@pytest.fixture(scope="module")
def pages(make_report: ReportMaker, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("pages")
    write_report(make_report(classes=LONG, num_queries=30), folder / "report")
    task = task_with(name="objects on a desk", classes=list(LONG), records_per_person=2)
    facts = facts_of(task, round_of(task), round_of(task, number=1, first=20, entry=40))
    page = evidence_page(derive(facts, software("0.1.0")), verify_key="ab" * 32, signature="cd" * 64)
    (folder / "evidence.html").write_text(page)
    return {"report": folder / "report" / "report.html", "evidence": folder / "evidence.html"}


@in_both_widths_and_schemes(quick=2)
@pytest.mark.parametrize("name", ["report", "evidence"])
def test_a_page_fits_and_nothing_is_wrong_with_it(
    pages: dict[str, Path], open_page: OpenPage, name: str, width: int, scheme: Scheme
) -> None:
    visit = open_page(pages[name].as_uri(), width=width, scheme=scheme)
    visit.page.evaluate("document.querySelectorAll('details').forEach(one => { one.open = true })")
    assert visit.overflow_px() <= 0
    assert visit.axe_problems() == []
    assert visit.script_errors == []
    assert visit.failed_loads == []


def test_evidence_prints_on_a4_in_black_on_white(pages: dict[str, Path], chromium: Browser, tmp_path: Path) -> None:
    page = chromium.new_page(color_scheme="dark")
    page.set_default_timeout(PATIENCE_MS)
    page.goto(pages["evidence"].as_uri())
    data = page.pdf(path=tmp_path / "evidence.pdf", prefer_css_page_size=True)
    boxes = re.findall(rb"/MediaBox \[0 0 ([0-9.]+) ([0-9.]+)\]", data)
    assert boxes
    for width, height in boxes:
        # Chromium writes whole 96ths of an inch.
        assert (float(width), float(height)) == pytest.approx(A4_PT, abs=1.5)
    page.emulate_media(media="print")
    page.set_viewport_size({"width": 680, "height": 1000})  # what is left of A4 between its margins
    assert page.evaluate("document.documentElement.scrollWidth") <= 680
    colors = page.evaluate(
        "[...document.querySelectorAll('body, body *')].map(one => getComputedStyle(one))"
        ".map(style => style.color + ' on ' + style.backgroundColor)"
    )
    assert set(colors) <= {
        f"{ink} on {ground}"
        for ink in ("rgb(17, 17, 17)", "rgb(68, 68, 68)")
        for ground in ("rgb(255, 255, 255)", "rgba(0, 0, 0, 0)")
    }
    page.close()
