"""What `labeler bench scale` computes with: equal neighbours however a search is shared out, slopes, the plan."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks import run_bench
from benchmarks.scaling import plan
from benchmarks.scaling.bench import _coordinator, simulated
from benchmarks.scaling.fits import Slope
from benchmarks.scaling.jobs import Served
from benchmarks.scaling.picture import draw_slopes
from benchmarks.scaling.searching import (
    GIB_OF_A_PROCESS,
    Stored,
    has_ray,
    ids_by_definition,
    merged_ids,
    record_ids,
    search_together,
    write_features,
)
from feature_store.index.definition import check_features
from labeler.errors import InvalidSetting, LabelerError


def test_a_shard_searched_in_parts_has_the_neighbours_of_the_definition(tmp_path: Path) -> None:
    """Few numbers per feature, so that many similarities are equal and ids decide."""
    stored = Stored(str(tmp_path / "f.npy"), records=3000, dimension=3, queries=12, k=40)
    write_features(Path(stored.path), records=3000, dimension=3)
    features = np.load(stored.path, mmap_mode="r")
    check_features(np.array(features))
    assert 2040 < np.linalg.norm(features[17].astype(float)) < 2056
    one, two = (search_together(stored, processes=count, folder=tmp_path) for count in (1, 2))
    assert np.array_equal(merged_ids(one), ids_by_definition(stored, queries=12))
    assert np.array_equal(merged_ids(two), merged_ids(one))
    assert all(0 < part.peak_bytes < GIB_OF_A_PROCESS and part.cpu_s > 0 for part in one + two)
    assert len(np.unique(record_ids(3000))) == 3000
    with pytest.raises(LabelerError, match="searching process failed"):
        search_together(replace(stored, path=str(tmp_path / "none.npy")), processes=1, folder=tmp_path)


@pytest.mark.long
@pytest.mark.skipif(not has_ray(), reason="the extra ray is not installed")
def test_ray_finds_the_same_neighbours(tmp_path: Path) -> None:
    stored = Stored(str(tmp_path / "f.npy"), records=3000, dimension=3, queries=12, k=40)
    write_features(Path(stored.path), records=3000, dimension=3)
    (by_ray,) = search_together(stored, processes=1, folder=tmp_path, engine="ray")
    assert np.array_equal(merged_ids([by_ray]), ids_by_definition(stored, queries=12))
    assert 0 < by_ray.peak_bytes < GIB_OF_A_PROCESS


def test_a_slope_is_the_power_that_was_put_in() -> None:
    slope = Slope.of({size: 2e-3 * size**1.5 for size in (10, 100, 1000)})
    assert slope.exponent == pytest.approx(1.5)
    assert slope.per_unit_s == pytest.approx(2e-3 * 1000**0.5)


def test_the_plan_on_paper_counts_what_was_measured() -> None:
    costs = plan.UnitCosts(
        image_s=0.03, product_s=1e-11, round_s=4e-4, coordinator_job_s=0.01, coordinator_agent_s=1e-3, agent_s=5e-3,
        tallier_s=2e-3, journal_bytes=1e6, asked_bytes=20_000, shares_bytes=2_000,
    )  # fmt: skip
    parts = {part.name: part for part in plan.paper_plan(costs)}
    assert parts["embedders (coordinator's site)"].needed == pytest.approx(8e6 * 0.03 / 86_400)
    searched = parts["search (every agent, its own records)"]
    assert searched.needed == pytest.approx(1e6 * 8 * 1280 * 10_000 * 1e-11 / 86_400)
    assert parts["coordinators, per agent asked"].needed == pytest.approx(1e10 * 1e-3 / 86_400)
    assert parts["network of the coordinators"].needed == pytest.approx(1e10 * 24_000 / 86_400 / 1e9)
    assert parts["shards (all agents together)"].needed == pytest.approx(0.256)
    assert all(part.then for part in parts.values())


def test_the_coordinators_cost_is_divided_into_the_job_s_and_each_agent_s() -> None:
    few = Served(3, 2, jobs=10, wall_s=1, coordinator_s=0.5, agents_s=1, talliers_s=1, journal_bytes=1, errors=0)
    many = replace(few, agents=9, jobs=20, coordinator_s=2.2)
    assert _coordinator(few, many) == pytest.approx((0.02, 0.01))
    assert _coordinator(few, None) == pytest.approx((0.0, 0.05 / 3))


def test_the_picture_has_a_panel_for_each_thing_that_grows(tmp_path: Path) -> None:
    slope = Slope.of({10: 1.0, 100: 10.0})
    path = draw_slopes({"agents, knn": slope, "agents, ensemble": slope, "records searched": slope}, tmp_path / "new")
    assert path.read_bytes().startswith(b"\x89PNG")


def test_a_simulation_runs_in_an_interpreter_of_its_own() -> None:
    document = simulated("knn", (20, 40))
    assert [row["agents"] for row in document["rows"]] == [20, 40]


def test_only_papers_and_scale_write_files(tmp_path: Path) -> None:
    with pytest.raises(InvalidSetting, match="writes no files"):
        run_bench("speed", out=tmp_path)


@pytest.mark.long
def test_a_hundred_agents_learn_digits_at_agent_level(data_root: Path) -> None:
    rows = run_bench("thousand-agents", data=data_root)["rows"]
    assert {row["level"] for row in rows} == {"agent"}
    assert all(2.9 < row["epsilon"] <= 3 for row in rows)
    assert min(row["value"] for row in rows) > 80


@pytest.mark.long
@pytest.mark.timeout(1800)  # minutes of a core, which six processes may share
def test_the_scale_bench_measures_every_dimension(tmp_path: Path) -> None:
    document = run_bench("scale", data=tmp_path)
    cases = {row["case"].split(",")[0] for row in document["rows"]}
    assert {"images embedded", "records searched", "agents", "queries of a job", "on paper"} <= cases
    differ = [row["value"] for row in document["rows"] if row["metric"] == "neighbours that differ"]
    assert len(differ) >= 2  # by one process and by two; by Ray where it is installed
    assert not any(differ)
