"""Tables of papers: cells are kept and read back, made again when their code changed, drawn and written as files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from PIL import Image

from benchmarks import BenchRow, papers, run_bench
from benchmarks.data import cache_folder
from benchmarks.papers import PAPERS, Cell, ae_dpfl, run_cells
from benchmarks.papers.chart import draw_chart
from labeler.errors import InvalidSetting

ON_CIFAR_10 = ("fedauxfdp", "dp-helmet")
"""Tables over features of CIFAR-10's test images; their own tests run the same cells on small made-up features."""


def row(value: float, **fields: object) -> BenchRow:
    return BenchRow("digits", "a method", "accuracy, %", value, **fields)  # type: ignore[arg-type]


def counted(ran: list[str], key: str) -> Cell:
    def run(progress: object) -> list[BenchRow]:
        ran.append(key)
        return [row(float(len(key)), epsilon=1.5, settings={"key": key})]

    return Cell(key, run)


def test_an_interrupted_table_goes_on_with_the_cells_that_are_missing(tmp_path: Path) -> None:
    ran: list[str] = []

    def stop(progress: object) -> list[BenchRow]:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_cells("p", [counted(ran, "one"), Cell("two", stop)], keep=tmp_path)
    rows = run_cells("p", [counted(ran, "one"), counted(ran, "three")], keep=tmp_path)
    assert ran == ["one", "three"]
    assert [one.settings["key"] for one in rows] == ["one", "three"]
    assert all(one.seconds is not None and one.epsilon == 1.5 for one in rows)


def test_a_cell_is_measured_again_when_code_it_rests_on_has_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[str] = []
    run_cells("p", [counted(ran, "one")], keep=tmp_path)
    monkeypatch.setattr(papers, "_code_digest", lambda: "of other code")
    run_cells("p", [counted(ran, "one")], keep=tmp_path)
    assert ran == ["one", "one"]


def test_the_chart_shows_what_was_reached_under_a_finite_epsilon(tmp_path: Path) -> None:
    rows = [row(80.0 + value, epsilon=value, sd=1.0) for value in (0.5, 1.0, 4.0)] + [row(97.0)]
    assert draw_chart(rows, tmp_path / "chart.png")
    with Image.open(tmp_path / "chart.png") as image:
        assert min(image.size) > 400
    assert not draw_chart([row(97.0), BenchRow("x", "y", "seconds", 3.0, epsilon=1.0)], tmp_path / "none.png")
    assert not (tmp_path / "none.png").exists()


@pytest.mark.process
def test_a_table_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        InvalidSetting, match="choose ae-dpfl, theorem-7, attributes, federated, prifedsync, fedauxfdp, dp-helmet"
    ):
        run_bench("papers", paper="pate", data=tmp_path)
    with pytest.raises(InvalidSetting, match="speed takes no paper"):
        run_bench("speed", paper="ae-dpfl")
    with pytest.raises(InvalidSetting, match="there is no folder"):
        run_bench("papers", data=tmp_path / "nowhere")


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.process
@pytest.mark.timeout(2400)
@pytest.mark.parametrize("paper", PAPERS)
def test_the_quick_version_of_every_table_runs_on_real_data(
    data_root: Path, tmp_path: Path, paper: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # One point of figure 2 releases winners, one the histogram.
    monkeypatch.setattr(ae_dpfl, "FIGURE_RECORDS", (50,))
    monkeypatch.setattr(ae_dpfl, "FIGURE_AGENTS", (800,))
    if paper in ON_CIFAR_10 and not list(cache_folder().glob("*/cifar10-test/manifest.json")):
        pytest.skip("features of CIFAR-10's test images, minutes of work, are not computed yet; its tables do it once")
    document = run_bench("papers", paper=paper, data=data_root, out=tmp_path)
    written = json.loads((tmp_path / f"{paper}.json").read_text())
    assert written["rows"] == document["rows"]
    assert json.loads(json.dumps(document, allow_nan=False)) == document
    accuracies = [one for one in document["rows"] if "accuracy" in one["metric"]]
    assert all(0 <= one["value"] <= 100 for one in accuracies)
    assert all(one["delta"] and one["level"] for one in document["rows"] if one["epsilon"] is not None)
    assert any(one["reference"] for one in document["rows"])
    for picture in tmp_path.glob("*.png"):
        with Image.open(picture) as image:
            image.verify()
