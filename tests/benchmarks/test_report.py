"""Pages of benchmarks are what their command makes of the documents of benches."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.report import HERE, PAGES, pages, read_rows, render
from labeler.errors import BadData

ROWS = [
    {"case": "a", "method": "ours", "metric": "right, %", "value": 91.23456, "sd": 0.5, "epsilon": 1.0},
    {"case": "a", "method": "ours", "metric": "right, %", "value": 1500, "reference": "86", "epsilon": 0.5},
    {"case": "b", "method": "ours", "metric": "right, %", "value": 7, "settings": {"printed": "7 or 8"}},
]


@pytest.fixture
def results(tmp_path: Path) -> Path:
    (tmp_path / "mine.json").write_text(json.dumps({"name": "mine", "rows": ROWS, "seconds": 1.0, "versions": {}}))
    return tmp_path


def test_the_pages_are_what_the_command_makes_and_short_enough_to_read() -> None:
    for target, made in pages().items():
        assert target.read_text() == made, "run python -m benchmarks.report"
        assert len(made.split()) <= (4000 if target.name == "BENCHMARKS.md" else 2500), target.name


def test_every_document_is_one_of_a_bench_and_stands_on_a_page() -> None:
    page = "".join(path.read_text() for path in PAGES.rglob("*.md"))
    for path in (HERE / "results").iterdir():
        document = json.loads(path.read_text())
        assert {"name", "rows", "seconds", "versions"} <= set(document)
        assert {"commit", "command"} <= set(document.get("carried", {"commit", "command"}))
        assert read_rows(path)
        assert f"@table {path.stem} " in page


def test_a_table_has_a_column_for_each_value_of_a_field(results: Path) -> None:
    made = render("# Mine\n@table mine rows=case columns=epsilon also=reference\n", results).split("\n")
    assert made == [
        "# Mine",
        "|  | 0.5 | 1.0 | no noise | wanted, or printed by the paper |",
        "| --- | --- | --- | --- | --- |",
        "| a | 1,500 | 91.2 ± 0.5 |  | 86 |",
        "| b |  |  | 7 or 8 |  |",
        "",
    ]


def test_a_table_is_of_the_rows_that_are_asked_for(results: Path) -> None:
    made = render("@table mine rows=case,method show=value case!=a", results).split("\n")
    assert made[2:] == ["| b | ours | 7 or 8 |", ""]
    with pytest.raises(BadData, match="no row of mine"):
        render("@table mine rows=case show=value case=c", results)
    with pytest.raises(BadData, match=r"other\.json is no document of a bench"):
        render("@table other rows=case show=value", results)
