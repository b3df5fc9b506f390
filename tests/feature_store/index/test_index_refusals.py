"""What an index must refuse, each with an error that says why and shows no private value."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from feature_store.index import ENGINES, build_index, refuse_unsafe
from feature_store.index.exact_index import ExactIndex
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


@pytest.mark.parametrize("engine", ["numpy", "int16", "torch"])
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
        InvalidSetting, match="engine 'annoyance' is unknown; choose one of auto, numpy, int16, faiss, torch"
    ):
        build_index(FEATURES, IDS, engine="annoyance")
    with pytest.raises(InvalidSetting, match="must be a name"):
        build_index(FEATURES, IDS, engine=3)  # type: ignore[arg-type]


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

    from feature_store.index.engine_torch import TorchEngine

    features = rng.integers(-250, 251, (300, 256)).astype(np.int16) // 2
    features[:, 0] = 1501
    index = build_index(features, np.arange(300), engine="torch")
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


def test_importing_the_index_loads_neither_faiss_nor_torch() -> None:
    code = "import sys, feature_store.index; sys.exit(any(name in sys.modules for name in ('faiss', 'torch')))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
