"""A memory limit is kept, as the kernel counts it, and the plan behind it adds up."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from benchmarks.speed.speed import measure_search_memory
from feature_store.index import build_index, nearest_by_definition
from feature_store.index.exact_index import ExactIndex, NumpyEngine, check_memory_limit, rows_at_once
from feature_store.rows import unmap_pages
from labeler.errors import InvalidSetting

needs_linux = pytest.mark.skipif(sys.platform != "linux", reason="resident memory is read from /proc")


@needs_linux
# torch is loaded for it alone, which takes longer than all the others together
@pytest.mark.parametrize("engine", ["numpy", "int16", pytest.param("torch", marks=pytest.mark.long)])
def test_searching_a_shard_four_times_the_limit_stays_under_the_limit(engine: str, tmp_path: Path) -> None:
    # Which arenas and pages a thread is given is chance, a megabyte of it; a search that needs more needs it each time.
    for _ in range(8):
        use = measure_search_memory(tmp_path, records=16_000, dimension=1280, queries=60, k=50, engine=engine)
        if use.added_bytes <= use.limit_bytes:
            break
    assert use.shard_bytes == 4 * use.limit_bytes
    assert use.added_bytes <= use.limit_bytes
    assert list(tmp_path.iterdir()) == []


def test_records_that_fit_twice_stay_in_memory() -> None:
    features, ids = np.ones((1000, 1280), np.int16), np.arange(1000)
    assert ExactIndex(features, ids, NumpyEngine()).is_kept
    assert ExactIndex(features, ids, NumpyEngine(), memory_limit_bytes=40_000_000, max_records=1000).is_kept
    assert not ExactIndex(features, ids, NumpyEngine(), memory_limit_bytes=40_000_000).is_kept
    assert not ExactIndex(features, ids, NumpyEngine(), memory_limit_bytes=12_800_000, max_records=20_000).is_kept


@pytest.mark.parametrize("dimension", [1, 3, 64, 1280])
def test_a_limit_refuses_a_dimension_and_never_a_number_of_records(dimension: int) -> None:
    """What passes the check at start-up has room for every size and every k; else a refusal would tell."""
    engine = NumpyEngine()
    for limit in (1, 1000, 400_000, 560_000, 600_000, 2_000_000, 50_000_000):
        try:
            check_memory_limit(limit, dimension, engine)
        except InvalidSetting:
            assert limit < 1_000_000
            continue
        rows = rows_at_once(engine, dimension, limit)
        assert rows is not None
        assert rows >= 1
        # A part, and one query that finds all of it.
        assert (48 + 6 * dimension) * rows + engine.bytes_per_query(rows) + 72 * rows <= limit


@pytest.mark.parametrize("engine", ["numpy", "int16"])
@pytest.mark.parametrize("removed", [0, 5, 500])
def test_a_shard_beyond_every_table_is_searched_in_parts_with_equal_neighbors(engine: str, removed: int) -> None:
    """27,290 records under such a limit were answered and 27,291 refused."""
    rng = np.random.default_rng(removed)
    limit = 560_000
    most = rows_at_once(NumpyEngine(), 4, limit)
    assert most is not None
    # Small integers, so that equal similarities cross the parts.
    for count in (most, most + 1, 3 * most + 1):
        features = rng.integers(-2, 3, (count, 4)).astype(np.int16)
        ids = rng.permutation(count).astype(np.int64)
        queries = rng.integers(-2, 3, (9, 4)).astype(np.int16)
        index = build_index(features, ids, engine=engine, memory_limit_bytes=limit)
        assert isinstance(index, ExactIndex)
        assert not index.is_kept
        gone = rng.permutation(ids)[:removed]
        assert index.remove(gone) == removed
        assert index.remove(gone, missing_ok=True) == 0
        kept = np.flatnonzero(~np.isin(ids, gone))
        assert len(index) == len(kept)
        for k in (1, 40, 3000):
            found, expected = index.search(queries, k), nearest_by_definition(features[kept], ids[kept], queries, k)
            np.testing.assert_array_equal(found.record_ids, expected.record_ids)
            np.testing.assert_array_equal(found.similarities, expected.similarities)
            np.testing.assert_array_equal(found.rows, np.where(expected.rows < 0, -1, kept[expected.rows]))


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
