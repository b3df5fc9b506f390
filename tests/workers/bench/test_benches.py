"""Benches run on small sizes and keep their shape; the numbers themselves belong in BENCHMARKS.md."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from labeler.errors import InvalidSetting
from workers.bench import office_caltech as office
from workers.bench import run_bench, winner
from workers.bench.office_caltech import Arena, Setting

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


def test_an_unknown_bench_is_refused() -> None:
    with pytest.raises(InvalidSetting, match=r"choose office-caltech, digits, .* winner-delay or papers"):
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
