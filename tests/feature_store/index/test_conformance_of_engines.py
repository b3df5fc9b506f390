"""One suite for every engine: equal record ids, similarities and rows to the definition, no tolerance.

The data are built to hurt: few distinct vectors, so that most queries have ties across the last place, and
vectors of full norm, so that a float of less than 24 bits would be seen.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from numpy.typing import NDArray

from feature_store.index import NO_RECORD, NO_SIMILARITY, Neighbors, build_index, nearest_by_definition
from feature_store.index.engine_faiss import WINDOW
from feature_store.index.exact_index import ExactIndex
from tests.feature_store.index.fake_devices import ENGINES


@dataclass(frozen=True)
class Case:
    features: NDArray[np.int16]
    record_ids: NDArray[np.int64]
    queries: NDArray[np.int16]


def _vectors(rng: np.random.Generator, count: int, dimension: int) -> NDArray[np.int16]:
    vectors = rng.standard_normal((count, dimension))
    vectors *= 4090 / np.linalg.norm(vectors, axis=1, keepdims=True)
    return np.clip(np.trunc(vectors), -2048, 2048).astype(np.int16)


def _with_ids(rng: np.random.Generator, features: NDArray[np.int16], queries: NDArray[np.int16]) -> Case:
    return Case(features, rng.choice(2**62, len(features), replace=False).astype(np.int64), queries)


def _case(name: str) -> Case:
    rng = np.random.default_rng(20261120)
    if name == "many ties":
        distinct = _vectors(rng, 9, 24)
        return _with_ids(rng, distinct[rng.integers(0, 9, 300)], np.concatenate([distinct, _vectors(rng, 30, 24)]))
    if name == "all equal":
        return _with_ids(rng, np.repeat(_vectors(rng, 1, 16), 200, axis=0), _vectors(rng, 25, 16))
    if name == "zero queries of small integers":
        queries = rng.integers(-1, 2, (40, 8)).astype(np.int16)
        queries[::4] = 0
        return _with_ids(rng, rng.integers(-2, 3, (250, 8)).astype(np.int16), queries)
    if name == "real scale":
        features = _vectors(rng, 600, 1280)
        features[100:200] = features[:100]
        features[200:260] //= 2
        return _with_ids(rng, features, np.concatenate([features[:40], _vectors(rng, 40, 1280)]))
    return _with_ids(rng, _vectors(rng, 1, 1), _vectors(rng, 3, 1))


CASES = {
    name: _case(name)
    for name in ("many ties", "all equal", "zero queries of small integers", "real scale", "one record of one number")
}


def _assert_equal(found: Neighbors, expected: Neighbors) -> None:
    assert (found.record_ids.dtype, found.similarities.dtype, found.rows.dtype) == (np.int64, np.int32, np.int64)
    np.testing.assert_array_equal(found.record_ids, expected.record_ids)
    np.testing.assert_array_equal(found.similarities, expected.similarities)
    np.testing.assert_array_equal(found.rows, expected.rows)


@pytest.fixture(params=CASES, ids=lambda name: name.replace(" ", "-"))
def case(request: pytest.FixtureRequest) -> Case:
    return CASES[request.param]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("k", [1, 2, 7, 50, 200, 1000])
def test_neighbors_are_those_of_the_definition(case: Case, engine: str, k: int) -> None:
    found = build_index(case.features, case.record_ids, engine=engine).search(case.queries, k)
    _assert_equal(found, nearest_by_definition(case.features, case.record_ids, case.queries, k))


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("k", [1, 7, 120])
@pytest.mark.parametrize("declared", [None, 900])
def test_a_memory_limit_changes_nothing_but_memory(case: Case, engine: str, k: int, declared: int | None) -> None:
    limit = 48 * len(case.features) * 2 + 800_000
    index = build_index(case.features, case.record_ids, engine=engine, memory_limit_bytes=limit, max_records=declared)
    _assert_equal(index.search(case.queries, k), nearest_by_definition(case.features, case.record_ids, case.queries, k))


@pytest.mark.parametrize("engine", ENGINES)
def test_blocks_of_a_few_records_give_the_same_neighbors(engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = CASES["many ties"]
    monkeypatch.setattr("feature_store.index.exact_index.rows_under_limit", lambda *_: 70)
    index = build_index(case.features, case.record_ids, engine=engine, memory_limit_bytes=10**7)
    assert isinstance(index, ExactIndex)
    assert not index.is_kept
    _assert_equal(
        index.search(case.queries, 20), nearest_by_definition(case.features, case.record_ids, case.queries, 20)
    )


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("limit", [None, 900_000])
@pytest.mark.parametrize("removed", [1, 63, 64, 65, 199, 200])
def test_after_deletion_the_removed_records_never_existed(engine: str, limit: int | None, removed: int) -> None:
    for name in ("many ties", "all equal"):
        case = CASES[name]
        gone = np.random.default_rng(removed).permutation(len(case.features))[:removed]
        index = build_index(case.features, case.record_ids, engine=engine, memory_limit_bytes=limit)
        assert index.remove(case.record_ids[gone]) == removed
        kept = np.setdiff1d(np.arange(len(case.features)), gone)
        assert len(index) == len(kept)
        expected = nearest_by_definition(case.features[kept], case.record_ids[kept], case.queries, 11)
        found = index.search(case.queries, 11)
        np.testing.assert_array_equal(found.record_ids, expected.record_ids)
        np.testing.assert_array_equal(found.similarities, expected.similarities)
        real = expected.rows >= 0
        np.testing.assert_array_equal(found.rows[real], kept[expected.rows[real]])
        assert (found.rows[~real] == NO_RECORD).all()


@pytest.mark.parametrize("engine", ENGINES)
def test_a_k_of_thousands_is_exact(engine: str) -> None:
    rng = np.random.default_rng(1)
    features = rng.integers(-3, 4, (5000, 6)).astype(np.int16)
    record_ids = rng.permutation(5000).astype(np.int64)
    queries = rng.integers(-3, 4, (7, 6)).astype(np.int16)
    index = build_index(features, record_ids, engine=engine)
    for k in (2047, 2048, 2049, 4000, 5001):
        _assert_equal(index.search(queries, k), nearest_by_definition(features, record_ids, queries, k))


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("more", [-1, 0, 1])
def test_ties_that_just_fit_the_window_of_faiss_and_just_do_not(engine: str, more: int) -> None:
    """Three records are nearer, and met last: for them FAISS drops tied records of the smallest ids."""
    features = np.random.default_rng(more + 1).integers(-9, 10, (90, 12)).astype(np.int16)
    features[:, 0] = 0
    features[: 2 + WINDOW + more, 0] = 900
    features[-3:, 0] = 1000
    queries = np.tile([[1] + 11 * [0]], (4, 1)).astype(np.int16)
    ids = np.arange(90)
    found = build_index(features, ids, engine=engine).search(queries, 5)
    _assert_equal(found, nearest_by_definition(features, ids, queries, 5))


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("tied", [0, 5, 250, 300, 900])
def test_however_many_queries_tie_neighbors_are_those_of_the_definition(engine: str, tied: int) -> None:
    """Of nine hundred, in pieces: once many have tied, FAISS is not asked about the rest."""
    rng = np.random.default_rng(tied)
    features = rng.integers(-1500, 1500, (120, 6)).astype(np.int16)
    features[:, 5] = np.where(np.arange(120) < 60, 0, -1)
    features[-2:, 5] = 1
    queries = rng.integers(-1500, 1500, (900, 6)).astype(np.int16)
    queries[:tied] = [0, 0, 0, 0, 0, 1]
    ids = np.arange(120)
    found = build_index(features, ids, engine=engine).search(queries, 3)
    _assert_equal(found, nearest_by_definition(features, ids, queries, 3))


@pytest.mark.parametrize("engine", ENGINES)
def test_without_records_or_queries_the_answer_is_empty(engine: str) -> None:
    nothing = build_index(np.empty((0, 4), dtype=np.int16), np.empty(0, dtype=np.int64), engine=engine)
    found = nothing.search(np.ones((3, 4), dtype=np.int16), 2)
    assert (found.record_ids == NO_RECORD).all()
    assert (found.rows == NO_RECORD).all()
    assert (found.similarities == NO_SIMILARITY).all()
    one = build_index(np.ones((1, 4), dtype=np.int16), np.array([5]), engine=engine)
    assert one.search(np.empty((0, 4), dtype=np.int16), 2).record_ids.shape == (0, 2)
    one.remove(np.array([5]))
    assert len(one) == 0
    assert (one.search(np.ones((3, 4), dtype=np.int16), 2).record_ids == NO_RECORD).all()


@pytest.mark.parametrize("engine", ENGINES)
def test_read_only_memory_maps_and_strided_arrays_are_searched_as_they_are(engine: str, tmp_path: object) -> None:
    case = CASES["real scale"]
    path = f"{tmp_path}/features.npy"
    np.save(path, case.features)
    mapped = np.load(path, mmap_mode="r")
    strided = np.asfortranarray(case.features)
    expected = nearest_by_definition(case.features, case.record_ids, case.queries, 20)
    for features in (mapped, strided, mapped[:, :]):
        for limit in (None, 1_500_000):
            index = build_index(features, case.record_ids, engine=engine, memory_limit_bytes=limit)
            _assert_equal(index.search(np.asfortranarray(case.queries), 20), expected)


@pytest.mark.parametrize("engine", ENGINES)
def test_the_largest_similarities_there_are_stay_exact(engine: str) -> None:
    """Sums of squares just below 2^24, both signs, and a difference of one in the last bit."""
    top = np.full((1, 4), 2047, dtype=np.int16)  # 4 * 2047^2 = 2^24 - 16380
    near = top.copy()
    near[0, 0] = 2046
    features = np.concatenate([near, top, -top, -near])
    found = build_index(features, np.array([1, 2, 3, 4]), engine=engine).search(top, 4)
    assert found.record_ids.tolist() == [[2, 1, 4, 3]]
    assert found.similarities.tolist() == [[4 * 2047**2, 4 * 2047**2 - 2047, 2047 - 4 * 2047**2, -4 * 2047**2]]
