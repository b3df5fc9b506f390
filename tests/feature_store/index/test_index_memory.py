"""A memory limit is kept, as the kernel counts it, and the plan behind it adds up."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from feature_store.index.engine_faiss import FaissEngine
from feature_store.index.engine_numpy import NumpyEngine
from feature_store.index.mapped import unmap_pages
from feature_store.index.memory import MemoryBudget
from feature_store.index.memory_probe import measure_search_memory
from labeler.errors import InvalidSetting

needs_linux = pytest.mark.skipif(sys.platform != "linux", reason="resident memory is read from /proc")


@needs_linux
@pytest.mark.parametrize("engine", ["numpy", "faiss", "torch"])
def test_searching_a_shard_four_times_the_limit_stays_under_the_limit(engine: str, tmp_path: Path) -> None:
    use = measure_search_memory(tmp_path, records=8000, dimension=1280, queries=60, k=50, engine=engine)
    assert use.shard_bytes == 4 * use.limit_bytes
    assert use.added_bytes <= use.limit_bytes
    assert list(tmp_path.iterdir()) == []


@needs_linux
def test_the_measurement_sees_an_index_that_loads_everything(tmp_path: Path) -> None:
    use = measure_search_memory(
        tmp_path, records=10_000, dimension=512, queries=20, k=5, limit_bytes=200_000_000, engine="faiss"
    )
    assert use.added_bytes >= 10_000 * 512 * 4


def test_records_that_fit_twice_stay_in_memory() -> None:
    assert MemoryBudget(None, 10**9, 1280).keeps_records
    assert MemoryBudget(40_000_000, 1000, 1280).keeps_records
    assert not MemoryBudget(12_800_000, 20_000, 1280).keeps_records


@pytest.mark.parametrize("limit", [1_500_000, 10_000_000, 10**9])
@pytest.mark.parametrize("engine", [NumpyEngine(), FaissEngine()])
def test_a_plan_never_exceeds_the_limit(limit: int, engine: NumpyEngine | FaissEngine) -> None:
    budget = MemoryBudget(limit, 10_000, 1280)
    for found in (1, 50, 200, 2000):
        try:
            plan = budget.plan(engine, found=found, resident=False)
        except InvalidSetting:
            assert limit < 2_000_000
            continue
        assert plan.block_rows is not None
        queries = plan.query_rows * (4 * 1280 + engine.bytes_per_query(plan.block_rows))
        assert 48 * 10_000 + 6 * 1280 * plan.block_rows + queries <= limit


def test_pages_of_read_only_maps_come_back_when_they_are_needed(tmp_path: Path) -> None:
    stored = np.arange(60_000, dtype=np.int16).reshape(-1, 10)
    np.save(tmp_path / "features.npy", stored)
    mapped = np.load(tmp_path / "features.npy", mmap_mode="r")
    assert int(mapped.sum(dtype=np.int64)) == int(stored.sum(dtype=np.int64))
    unmap_pages(mapped[5:])
    np.testing.assert_array_equal(mapped, stored)


def test_changes_in_a_private_copy_of_a_file_are_not_thrown_away(tmp_path: Path) -> None:
    np.save(tmp_path / "features.npy", np.zeros((4, 4), dtype=np.int16))
    mapped = np.load(tmp_path / "features.npy", mmap_mode="c")
    mapped[0, 0] = 7
    unmap_pages(mapped)
    assert mapped[0, 0] == 7
    frozen = mapped.view()
    frozen.flags.writeable = False
    unmap_pages(frozen)
    assert mapped[0, 0] == 7
