"""What an index must refuse, each with an error that says why and shows no private value; and its memory limit."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from benchmarks.speed.speed import measure_search_memory
from feature_store.index import ENGINES, build, build_index, load_engine, nearest_by_definition, refuse_unsafe
from feature_store.index.build import current_name
from feature_store.index.exact_index import ExactIndex, NumpyEngine, rows_under_limit
from feature_store.rows import unmap_pages
from labeler.errors import BadData, InvalidSetting, UnsafeIndex

FEATURES = np.array([[1, 2, 3], [4, 5, 6], [7, 8, 1777]], dtype=np.int16)
IDS = np.array([11, 5, 7])


@pytest.mark.parametrize(
    ("features", "sentence"),
    [
        (FEATURES.astype(np.float32), "must be int16, found float32"),
        (np.full((3, 3), np.nan), "must be int16, found float64"),
        (FEATURES.astype(np.int32), "must be int16, found int32"),
        (FEATURES.astype(np.uint16), "must be int16"),
        (FEATURES[0], r"shape \(n, d\)"),
        (FEATURES[None], r"shape \(n, d\)"),
        (np.empty((3, 0), dtype=np.int16), "d at least 1"),
        (FEATURES.tolist(), "found list"),
        (np.array([[2049, 0, 0]] * 3, dtype=np.int16), "3 of 3 rows .* outside the exact range"),
        (np.array([[-2049, 0, 0]] * 3, dtype=np.int16), "3 of 3 rows"),
        (np.array([[-32768, 0, 0], [0, 0, 0], [32767] * 3], dtype=np.int16), "2 of 3 rows"),
        (np.full((3, 4), 2048, dtype=np.int16), "3 of 3 rows"),  # the sum of squares is 2^24 exactly
        (np.full((3, 9000), 2047, dtype=np.int16), "3 of 3 rows"),
    ],
)
def test_features_without_exact_similarities_are_refused(features: object, sentence: str) -> None:
    with pytest.raises(BadData, match=sentence):
        build_index(features, IDS, engine="numpy")  # type: ignore[arg-type]


def test_the_message_about_bad_features_holds_no_feature() -> None:
    with pytest.raises(BadData) as refused:
        build_index(np.array([[1777, 2031, 1999, 2040, 2047]], dtype=np.int16), IDS[:1], engine="numpy")
    assert not any(value in str(refused.value) for value in ("1777", "2031", "1999", "2040", "2047"))


@pytest.mark.parametrize(
    ("record_ids", "sentence"),
    [
        (np.array([5, 7, 5]), "1 record ids occur more than once"),
        (np.array([5, 7]), "3 records but 2 record_ids"),
        (np.array([5, 7, -1]), "1 record ids are negative"),
        (np.array([5.0, 7.0, 8.0]), "int64"),
        (np.array([5, 7, 8], dtype=np.int32), "int64"),
        (np.array([[5], [7], [8]]), "int64"),
        ([5, 7, 8], "int64"),
    ],
)
def test_record_ids_that_cannot_break_ties_are_refused(record_ids: object, sentence: str) -> None:
    with pytest.raises(BadData, match=sentence):
        build_index(FEATURES, record_ids, engine="numpy")  # type: ignore[arg-type]


@pytest.mark.parametrize("engine", ["numpy", "faiss"])
def test_queries_are_checked_like_features(engine: str) -> None:
    index = build_index(FEATURES, IDS, engine=engine)
    for queries, sentence in [
        (FEATURES.astype(np.float64), "queries must be int16"),
        (np.full((1, 3), np.nan, dtype=np.float32), "queries must be int16"),
        (FEATURES[:, :2], "queries have dimension 2, the index has 3"),
        (np.full((2, 3), 30000, dtype=np.int16), "2 of 2 rows of queries"),
        (FEATURES[0], r"shape \(n, d\)"),
    ]:
        with pytest.raises(BadData, match=sentence):
            index.search(queries, 1)  # type: ignore[arg-type]


def test_unknown_ids_are_counted_and_nothing_is_removed() -> None:
    index = build_index(FEATURES, IDS, engine="numpy")
    with pytest.raises(InvalidSetting, match="2 of 3 record ids to remove are not in the index"):
        index.remove(np.array([5, 6, 99]))
    assert len(index) == 3
    assert index.remove(np.array([5, 6, 99, 5]), missing_ok=True) == 1
    with pytest.raises(InvalidSetting, match="1 of 1"):
        index.remove(np.array([5]))
    assert index.remove(np.array([5]), missing_ok=True) == 0
    assert index.remove(np.array([], dtype=np.int64)) == 0
    with pytest.raises(InvalidSetting, match="int64"):
        index.remove([7])  # type: ignore[arg-type]
    assert len(index) == 2


@pytest.mark.parametrize(
    "kind",
    [
        "hnsw",
        "HNSW32",
        "IVF100_HNSW32,Flat",
        "IndexHNSWFlat",
        "cagra",
        "nsg",
        "graph",
        "nndescent",
        "PQ16",
        "OPQ16,PQ16",
        "PCA64,Flat",
        "SQ8",
        "LSH",
        "ITQ,LSH",
        "whitening",
        "ivf",
        "ivfpq",
        "ivf-pq",
        "IVF256,PQ16",
        "IVF4096,Flat",
    ],
)
def test_an_index_that_depends_on_other_records_is_refused_with_the_reason(kind: str) -> None:
    with pytest.raises(UnsafeIndex, match=r"refused for instance-level privacy: .*record"):
        refuse_unsafe(kind)
    with pytest.raises(UnsafeIndex, match="record"):
        build_index(FEATURES, IDS, engine=kind)


def test_safe_and_unknown_names_are_told_apart() -> None:
    for name in ENGINES:
        refuse_unsafe(name)
    with pytest.raises(
        InvalidSetting, match="engine 'annoyance' is unknown; choose one of auto, faiss, faiss-gpu, numpy"
    ):
        build_index(FEATURES, IDS, engine="annoyance")
    with pytest.raises(InvalidSetting, match="must be a name"):
        build_index(FEATURES, IDS, engine=3)  # type: ignore[arg-type]


@pytest.mark.parametrize("former", ["int16", "torch"])
def test_an_engine_of_an_earlier_version_is_auto_and_said_once(former: str, caplog: pytest.LogCaptureFixture) -> None:
    """A home that names it still starts: an agent that does not start answers nothing."""
    current_name.cache_clear()
    for _ in range(2):
        index = build_index(FEATURES, IDS, engine=former)
        assert isinstance(index, ExactIndex)
        assert isinstance(index.engine, type(load_engine("auto")))
    assert [record.__dict__["engine"] for record in caplog.records] == [former]


def test_without_faiss_auto_is_numpy_and_faiss_by_name_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A coordinator's image has none."""
    monkeypatch.setattr(build, "find_spec", lambda _: None)
    monkeypatch.setattr(build, "has_driver", lambda: False)
    assert isinstance(load_engine("auto"), NumpyEngine)
    with pytest.raises(InvalidSetting, match="use engine numpy or auto"):
        load_engine("faiss")


def test_a_memory_limit_without_room_for_one_record_is_refused_at_once() -> None:
    with pytest.raises(InvalidSetting, match="memory_limit_bytes 1000 is too small for records"):
        build_index(np.zeros((500, 64), np.int16), np.arange(500), engine="numpy", memory_limit_bytes=1000)


def test_rounded_matrix_products_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A library told elsewhere to multiply with bfloat16 must not answer."""
    from feature_store.index.exact_index import NumpyBlock, NumpyEngine

    exact = NumpyBlock.scores
    monkeypatch.setattr(NumpyBlock, "scores", lambda self, queries, tile: exact(self, queries, tile) + np.float32(1))
    with pytest.raises(UnsafeIndex, match="not exact integers"):
        ExactIndex(FEATURES, IDS, NumpyEngine()).search(FEATURES, 2)


def test_torch_told_to_save_precision_is_exact_all_the_same(rng: np.random.Generator) -> None:
    import torch

    from feature_store.index.engine_gpu import TorchEngine

    features = rng.integers(-250, 251, (300, 256)).astype(np.int16) // 2
    features[:, 0] = 1501
    index = ExactIndex(features, np.arange(300), TorchEngine(devices=["cpu"]))
    expected = build_index(features, np.arange(300), engine="numpy").search(features[:50], 9)
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("medium")
        with torch.autocast("cpu", dtype=torch.bfloat16):
            found = index.search(features[:50], 9)
        assert isinstance(index, ExactIndex)
        assert isinstance(index.engine, TorchEngine), "it left torch for the processor"
        np.testing.assert_array_equal(found.record_ids, expected.record_ids)
    finally:
        torch.set_float32_matmul_precision(before)


def test_neighbors_do_not_print_their_contents() -> None:
    found = build_index(FEATURES, IDS, engine="numpy").search(FEATURES, 2)
    assert repr(found) == "Neighbors(3 queries, k=2, contents private)"


needs_linux = pytest.mark.skipif(sys.platform != "linux", reason="resident memory is read from /proc")


@needs_linux
@pytest.mark.parametrize("engine", ["numpy", "faiss"])
@pytest.mark.process
def test_searching_a_shard_four_times_the_limit_stays_under_the_limit(engine: str, tmp_path: Path) -> None:
    # Which arenas and pages a thread is given is chance, a megabyte of it; a search that needs more needs it each time.
    for _ in range(24):
        use = measure_search_memory(tmp_path, records=16_000, queries=60, engine=engine)
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
    for limit in (1, 1000, 400_000, 560_000, 600_000, 2_000_000, 50_000_000):
        try:
            rows = rows_under_limit(limit, dimension)
        except InvalidSetting:
            assert limit < 1_000_000
            continue
        assert rows >= 1
        # A part, and one query that finds all of it.
        assert (48 + 6 * dimension) * rows + 24 * 2048 + 168 * rows <= limit


@pytest.mark.parametrize("engine", ["numpy", "faiss"])
@pytest.mark.parametrize("removed", [0, 5, 400])
def test_a_shard_beyond_every_table_is_searched_in_parts_with_equal_neighbors(engine: str, removed: int) -> None:
    """27,290 records under such a limit were answered and 27,291 refused."""
    rng = np.random.default_rng(removed)
    limit = 560_000
    most = rows_under_limit(limit, 4)
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
