"""Benches run on small sizes and keep their shape; their data, and the pages that their documents make.

The numbers themselves belong in BENCHMARKS.md. No ratio of times is asserted: on shared cores it fails for no reason.
What it would have found, a second commit or a scan of the ledger for each reservation, is counted in
tests/labeler/ledger/test_ledger_cost.py.
"""

from __future__ import annotations

import gzip
import inspect
import json
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from typer.testing import CliRunner

from benchmarks import BENCHES, BenchRow, run_bench
from benchmarks.accounting.composition import poisson
from benchmarks.accuracy import office_caltech as office
from benchmarks.accuracy.office_caltech import Arena, Setting
from benchmarks.data import data_root as find_root
from benchmarks.data import mnist, usps
from benchmarks.report import HERE, PAGES, pages, read_rows, render
from benchmarks.speed import winner
from labeler.errors import BadData, InvalidSetting
from workers.commands.catalog import app

ROW_KEYS = {
    "case", "method", "metric", "value", "sd", "epsilon", "delta", "level", "reference", "seconds", "settings",
}  # fmt: skip


@pytest.mark.long
@pytest.mark.process
def test_the_speed_bench_reports_every_target() -> None:
    document = run_bench("speed")
    assert set(document) == {"name", "command", "commit", "rows", "seconds", "versions"}
    assert all(set(row) == ROW_KEYS for row in document["rows"])
    assert json.loads(json.dumps(document, allow_nan=False)) == document
    metrics = {row["metric"] for row in document["rows"]}
    assert {"time ratio", "labels per second", "million samples per second", "milliseconds"} <= metrics


@pytest.mark.process
def test_every_bench_has_its_function_and_the_command_loads_none() -> None:
    for where in BENCHES.values():
        module, function = where.split(":")
        taken = inspect.signature(getattr(import_module(module), function)).parameters
        assert "progress" in taken
        assert all(one.default is not one.empty for one in taken.values()), where
    assert CliRunner().invoke(app, ["bench"]).stdout.split() == list(BENCHES)
    assert json.loads(CliRunner().invoke(app, ["bench", "--json"]).stdout) == list(BENCHES)
    looked = (
        "import sys, workers.commands.catalog; sys.exit(any(name.startswith('benchmarks') for name in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", looked], check=False).returncode == 0


@pytest.mark.process
def test_a_bench_whose_package_is_missing_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(BENCHES, "rounds", f"{__name__}:prices_a_round")
    monkeypatch.setitem(sys.modules, __name__, SimpleNamespace(prices_a_round=prices_a_round))
    monkeypatch.setitem(sys.modules, "dp_accounting.pld", None)
    result = CliRunner().invoke(app, ["bench", "rounds"])
    assert isinstance(result.exception, InvalidSetting)
    assert "needs the package dp_accounting" in str(result.exception)
    assert ".[benchmarks]" in str(result.exception)


def prices_a_round(*, progress: object) -> list[BenchRow]:
    return [BenchRow("a", "b", "epsilon", poisson(2.0, 0.1, 3).epsilon(1e-5))]


@pytest.mark.parametrize("option", ["--seeds 3:5", "--minutes 1", "--trace", "--out tables", "--agents 3"])
@pytest.mark.process
def test_an_option_that_a_bench_does_not_take_is_refused(option: str) -> None:
    result = CliRunner().invoke(app, ["bench", "speed", *option.split()])
    assert isinstance(result.exception, InvalidSetting)
    assert "it takes full" in str(result.exception)


def test_an_unknown_bench_is_refused() -> None:
    with pytest.raises(InvalidSetting, match=r"choose papers, office-caltech, .*medical"):
        run_bench("sleep")


@pytest.mark.process
def test_a_bench_without_its_data_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidSetting, match="--data or LABELER_DATA"):
        run_bench("office-caltech", data=tmp_path)


@pytest.mark.long
@pytest.mark.slow
def test_real_photos_are_labelled_well_at_a_small_price(
    data_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tenth of Office-Caltech10 through the whole bench path: real photos, real backbone, real rounds."""
    for domain in office.DOMAINS:
        for folder in sorted((data_root / "office-caltech10" / domain).iterdir()):
            small = tmp_path / "office-caltech10" / domain / folder.name
            small.mkdir(parents=True)
            for image in sorted(folder.iterdir())[:7]:
                (small / image.name).symlink_to(image.resolve())
    (tmp_path / "backbones").symlink_to((data_root / "backbones").resolve())
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    arena = Arena(office.embed_domains(tmp_path, lambda *_: None))
    row = arena.measure("webcam", Setting("reverse-knn", 1, 10), epsilon=2.0, splits=3)
    assert row.epsilon is not None
    assert 1.9 < row.epsilon <= 2.0
    assert row.value > 70
    again = arena.measure("webcam", Setting("reverse-knn", 1, 10), epsilon=2.0, splits=3)
    assert again.value == row.value


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.process
def test_the_winner_bench_checks_its_winners_and_reports_every_target(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(winner, "SIZES", ((20, 3), (40, 3)))
    document = run_bench("winner")
    assert all(set(row) == ROW_KEYS for row in document["rows"])
    metrics = {row["metric"] for row in document["rows"]}
    assert {"seconds", "milliseconds per label", "time ratio"} <= metrics


@pytest.mark.process
def test_the_ledger_bench_compares_durable_reservations_with_bare_inserts() -> None:
    document = run_bench("ledger", entries=2_000)
    assert json.loads(json.dumps(document, allow_nan=False)) == document
    found = {(row["method"], row["metric"]): row["value"] for row in document["rows"]}
    assert found[("bare insert", "commits per second")] > 0
    assert found[("verify the whole chain", "entries per second")] > 0
    assert found[("reserve, 1 account / bare insert", "time ratio")] > 0


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.process
def test_the_start_bench_reports_starts_stops_and_light_commands() -> None:
    rows = run_bench("start")["rows"]
    found = {(row["method"], row["metric"]): row["value"] for row in rows}
    for method in ("first start", "second start", "stopped with a job under way"):
        assert found[method, "seconds until ready"] > 0
        assert found[method, "CPU seconds until ready"] > 0
        assert found[method, "seconds until stopped"] > 0
    assert found["second start", "starts in which something was killed"] == 0
    # Supervisor, nursery, its tracker, redis-server, coordinator, embedder, three talliers, five agents.
    assert found["second start", "processes"] == 14
    cases = {row["case"] for row in rows}
    assert {"labeler --help", "labeler status", "labeler plan"} <= cases


def test_digits_are_read_from_idx_files(tmp_path: Path) -> None:
    images = np.random.default_rng(0).integers(0, 256, size=(5, 28, 28)).astype(np.uint8)
    (tmp_path / "mnist").mkdir()
    for name in ("train", "t10k"):
        with gzip.open(tmp_path / "mnist" / f"{name}-images-idx3-ubyte.gz", "wb") as file:
            file.write(bytes(16) + images.tobytes())
        with gzip.open(tmp_path / "mnist" / f"{name}-labels-idx1-ubyte.gz", "wb") as file:
            file.write(bytes(8) + bytes([3, 1, 4, 1, 5]))
    found = mnist(tmp_path)
    assert np.array_equal(found.train.inputs, images)
    assert found.test.labels.tolist() == [3, 1, 4, 1, 5]
    (tmp_path / "mnist" / "t10k-labels-idx1-ubyte.gz").write_bytes(b"no gzip")
    with pytest.raises(BadData, match="no readable idx file"):
        mnist(tmp_path)


def test_usps_digits_are_framed_like_those_of_mnist(tmp_path: Path) -> None:
    (tmp_path / "usps").mkdir()
    for name in ("train", "test"):
        rows = np.hstack([[[7.0]], np.full((1, 256), 1.0)])
        with gzip.open(tmp_path / "usps" / f"zip.{name}.gz", "wt") as file:
            np.savetxt(file, rows)
    (digit,) = usps(tmp_path).train.inputs
    assert digit.shape == (28, 28)
    assert digit[4:24, 4:24].min() == 255
    digit = digit.copy()
    digit[4:24, 4:24] = 0
    assert not digit.any()
    assert usps(tmp_path).test.labels.tolist() == [7]


def test_a_set_that_is_not_there_is_looked_for_through_torchvision_and_never_fetched(tmp_path: Path) -> None:
    with pytest.raises(InvalidSetting, match="torchvision's MNIST is not in the folder named; add download=1"):
        mnist(tmp_path)
    with pytest.raises(InvalidSetting, match="torchvision's USPS is not in the folder named"):
        usps(tmp_path)


def test_the_folder_is_the_option_s_else_the_variable_s(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LABELER_DATA", str(tmp_path))
    assert find_root(None) == tmp_path
    (tmp_path / "other").mkdir()
    assert find_root(tmp_path / "other") == tmp_path / "other"
    with pytest.raises(InvalidSetting, match="--data or LABELER_DATA"):
        find_root(tmp_path / "missing")


def test_the_real_sets_have_their_published_sizes(data_root: Path) -> None:
    assert (len(mnist(data_root).train), len(mnist(data_root).test)) == (60_000, 10_000)
    assert (len(usps(data_root).train), len(usps(data_root).test)) == (7_291, 2_007)


ROWS = [
    {"case": "a", "method": "ours", "metric": "right, %", "value": 91.23456, "sd": 0.5, "epsilon": 0.9998},
    {"case": "a", "method": "ours", "metric": "right, %", "value": 1500, "reference": "86", "epsilon": 0.5},
    {"case": "b", "method": "ours", "metric": "right, %", "value": 7, "settings": {"seeds": [1, 2]}},
]


@pytest.fixture
def results(tmp_path: Path) -> Path:
    made_by = {"name": "mine", "command": "labeler bench mine --full", "commit": "0123abcd"}
    (tmp_path / "mine.json").write_text(json.dumps(made_by | {"rows": ROWS, "seconds": 1.0, "versions": {}}))
    return tmp_path


def test_the_pages_are_what_the_command_makes_and_short_enough_to_read() -> None:
    for target, made in pages().items():
        assert target.read_text() == made, "run python -m benchmarks.report"
        assert len(made.split()) <= (4000 if target.name == "BENCHMARKS.md" else 2500), target.name


def test_every_document_is_one_of_a_bench_and_stands_on_a_page() -> None:
    page = "".join(path.read_text() for path in PAGES.rglob("*.md"))
    for path in (HERE / "results").iterdir():
        document = json.loads(path.read_text())
        assert {"name", "command", "commit", "rows", "seconds", "versions"} <= set(document)
        assert document["command"].startswith("labeler bench ")
        assert re.fullmatch("[0-9a-f]{8}", document["commit"]), path.name
        assert read_rows(path)
        assert f"@table {path.stem} " in page


def test_a_table_has_a_column_for_each_value_of_a_field(results: Path) -> None:
    made = render("# Mine\n@table mine rows=case columns=epsilon also=reference\n", results).split("\n")
    assert made == [
        "# Mine",
        "|  | 0.5 | 1 | no noise | wanted, or printed by the paper |",
        "| --- | --- | --- | --- | --- |",
        "| a | 1,500 | 91.2 ± 0.5 |  | 86 |",
        "| b |  |  | 7 |  |",
        "",
        "*`labeler bench mine --full`; commit 0123abcd; seeds 1, 2*",
        "",
    ]


def test_a_number_in_a_sentence_is_of_one_row(results: Path) -> None:
    assert render("At 0.5 @{mine case=a epsilon=0.5} %.", results) == "At 0.5 1,500 %.\n"
    with pytest.raises(BadData, match="2 rows of mine"):
        render("@{mine case=a}", results)


def test_a_table_is_of_the_rows_that_are_asked_for(results: Path) -> None:
    made = render("@table mine rows=case,method show=value case!=a", results).split("\n")
    assert made[2:4] == ["| b | ours | 7 |", ""]
    for wanted in ("case~=^b", "case!~=a|c"):
        assert render(f"@table mine rows=case show=value {wanted}", results).split("\n")[2:4] == ["| b | 7 |", ""]
    with pytest.raises(BadData, match="no row of mine"):
        render("@table mine rows=case show=value case=c", results)
    with pytest.raises(BadData, match=r"other\.json is no document of a bench"):
        render("@table other rows=case show=value", results)
