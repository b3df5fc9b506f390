"""BENCHMARKS.md is what its command makes of the documents of benches."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.report import HERE, PAGE, read_rows, render
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


def test_the_page_is_what_the_command_makes() -> None:
    assert PAGE.read_text() == render((HERE / "page.md").read_text(), HERE / "results"), (
        "run python -m benchmarks.report"
    )


def test_every_document_is_one_of_a_bench_and_stands_on_the_page() -> None:
    page = (HERE / "page.md").read_text()
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
