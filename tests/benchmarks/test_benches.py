"""Benches run on small sizes and keep their shape; the numbers themselves belong in BENCHMARKS.md."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from benchmarks import BENCHES, run_bench, winner
from benchmarks import office_caltech as office
from benchmarks.accounting.composition import poisson
from benchmarks.office_caltech import Arena, Setting
from benchmarks.papers import PAPERS
from benchmarks.rows import BenchRow
from labeler.errors import InvalidSetting
from workers.commands import bench as command
from workers.commands.catalogue import app

ROW_KEYS = {
    "case", "method", "metric", "value", "sd", "epsilon", "delta", "level", "reference", "seconds", "settings",
}  # fmt: skip


def test_the_speed_bench_reports_every_target() -> None:
    document = run_bench("speed")
    assert set(document) == {"name", "rows", "seconds", "versions"}
    assert all(set(row) == ROW_KEYS for row in document["rows"])
    assert json.loads(json.dumps(document, allow_nan=False)) == document
    metrics = {row["metric"] for row in document["rows"]}
    assert {"time ratio", "labels per second", "million samples per second", "milliseconds"} <= metrics


def test_the_command_names_every_bench_and_every_paper_without_loading_one() -> None:
    assert tuple(BENCHES) == command.BENCHES
    assert tuple(PAPERS) == command.PAPERS
    looked = (
        "import sys, workers.commands.catalogue; sys.exit(any(name.startswith('benchmarks') for name in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", looked], check=False).returncode == 0


def test_a_study_whose_package_is_missing_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    def prices_a_round(*_: object) -> list[BenchRow]:
        return [BenchRow("a", "b", "epsilon", poisson(2.0, 0.1, 3).epsilon(1e-5))]

    monkeypatch.setitem(BENCHES, "rounds", prices_a_round)
    monkeypatch.setitem(sys.modules, "dp_accounting.pld", None)
    result = CliRunner().invoke(app, ["bench", "rounds"])
    assert isinstance(result.exception, InvalidSetting)
    assert "needs the package dp_accounting" in str(result.exception)
    assert ".[benchmarks]" in str(result.exception)


def test_three_talliers_leave_half_of_the_noise_that_three_agents_need_against_two_of_them() -> None:
    rows = run_bench("noise-by-talliers")["rows"]
    assert all(set(row) == ROW_KEYS for row in rows)
    stated = {row["method"]: float(row["reference"].split()[0]) for row in rows if row["reference"]}
    agents, one, two, as_much = stated.values()
    assert one == pytest.approx(agents / 2, rel=1e-3)
    assert two == pytest.approx(agents, rel=1e-3)
    assert as_much == pytest.approx(agents, rel=1e-3)
    epsilon = {row["method"]: row["epsilon"] for row in rows}
    assert len(epsilon) == 4
    assert sorted(epsilon.values())[0] < 0.75 * sorted(epsilon.values())[1]


def test_sampled_training_is_charged_above_its_exact_profile_and_certified_close_to_it() -> None:
    rows = run_bench("sampled-training")["rows"]
    assert all(set(row) == ROW_KEYS for row in rows)
    ratios = {(row["case"], row["method"], row["delta"]): row["value"] for row in rows if row["delta"] is not None}
    assert len(ratios) == 8
    for (_, method, _), ratio in ratios.items():
        assert 0.999 < ratio < (1.003 if method == "certified profile" else 1.3)


def test_an_unknown_bench_is_refused() -> None:
    with pytest.raises(InvalidSetting, match=r"choose office-caltech, .*backbones, .* or papers"):
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
    assert {
        "seconds",
        "milliseconds per label",
        "time ratio",
        "accuracy of answered labels, %",
        "answered, %",
    } <= metrics
