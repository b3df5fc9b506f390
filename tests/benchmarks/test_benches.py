"""Benches run on small sizes and keep their shape; the numbers themselves belong in BENCHMARKS.md.

No ratio of times is asserted: on shared cores it fails for no reason. What it would have found, a second commit or a
scan of the ledger for each reservation, is counted in tests/labeler/ledger/test_ledger_cost.py.
"""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from benchmarks import BENCHES, BenchRow, run_bench
from benchmarks.accounting.composition import poisson
from benchmarks.accuracy import office_caltech as office
from benchmarks.accuracy.office_caltech import Arena, Setting
from benchmarks.speed import winner
from benchmarks.speed.start import cpu_seconds_below
from labeler.errors import InvalidSetting
from workers.commands.catalog import app

ROW_KEYS = {
    "case", "method", "metric", "value", "sd", "epsilon", "delta", "level", "reference", "seconds", "settings",
}  # fmt: skip


@pytest.mark.long
def test_the_speed_bench_reports_every_target() -> None:
    document = run_bench("speed")
    assert set(document) == {"name", "rows", "seconds", "versions"}
    assert all(set(row) == ROW_KEYS for row in document["rows"])
    assert json.loads(json.dumps(document, allow_nan=False)) == document
    metrics = {row["metric"] for row in document["rows"]}
    assert {"time ratio", "labels per second", "million samples per second", "milliseconds"} <= metrics


def test_every_bench_has_its_function_and_the_command_loads_none() -> None:
    for where in BENCHES.values():
        module, function = where.split(":")
        taken = inspect.signature(getattr(import_module(module), function)).parameters
        assert "progress" in taken
        assert all(one.default is not one.empty for one in taken.values()), where
    assert CliRunner().invoke(app, ["bench"]).stdout.split() == list(BENCHES)
    looked = (
        "import sys, workers.commands.catalog; sys.exit(any(name.startswith('benchmarks') for name in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", looked], check=False).returncode == 0


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
def test_an_option_that_a_bench_does_not_take_is_refused(option: str) -> None:
    result = CliRunner().invoke(app, ["bench", "speed", *option.split()])
    assert isinstance(result.exception, InvalidSetting)
    assert "it takes full" in str(result.exception)


def test_an_unknown_bench_is_refused() -> None:
    with pytest.raises(InvalidSetting, match=r"choose papers, office-caltech, .*medical"):
        run_bench("sleep")


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
def test_the_winner_bench_checks_its_winners_and_reports_every_target(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(winner, "SIZES", ((20, 3), (40, 3)))
    document = run_bench("winner")
    assert all(set(row) == ROW_KEYS for row in document["rows"])
    metrics = {row["metric"] for row in document["rows"]}
    assert {"seconds", "milliseconds per label", "time ratio"} <= metrics


def test_the_ledger_bench_compares_durable_reservations_with_bare_inserts() -> None:
    document = run_bench("ledger")
    assert json.loads(json.dumps(document, allow_nan=False)) == document
    found = {(row["method"], row["metric"]): row["value"] for row in document["rows"]}
    assert found[("bare insert", "commits per second")] > 0
    assert found[("verify the whole chain", "entries per second")] > 0
    assert found[("reserve, 1 account / bare insert", "time ratio")] > 0


pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="/proc is Linux's")

BUSY = """
import subprocess, sys, time
if len(sys.argv) > 1:
    child = subprocess.Popen([sys.executable, "-c", sys.argv[1]], stdin=subprocess.PIPE)
until = time.process_time() + 0.3
while time.process_time() < until: pass
print("done", flush=True)
time.sleep(60)
"""


def test_what_a_process_and_its_children_have_used_is_counted() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", BUSY, BUSY], stdout=subprocess.PIPE, start_new_session=True
    ) as process:
        try:
            assert process.stdout is not None
            assert [process.stdout.readline(), process.stdout.readline()] == [b"done\n", b"done\n"]
            used = cpu_seconds_below(process.pid)
            assert len(used) == 2
            assert process.pid in used
            assert all(seconds >= 0.25 for seconds in used.values())
        finally:
            os.killpg(process.pid, 9)


@pytest.mark.long
@pytest.mark.slow
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
