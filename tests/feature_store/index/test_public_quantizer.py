"""Inverted lists around public centroids: what they return, and that a record depends on itself alone.

That one record moves at most one vote through them is in test_one_record_one_vote.
"""

from __future__ import annotations

import numpy as np
import pytest

from feature_store.index import PublicQuantizer, build_index, nearest_by_definition, train_public_quantizer
from labeler.errors import BadData, InvalidSetting, UnsafeIndex

ENGINES = ["numpy", "faiss", "torch", pytest.param("faiss-gpu", marks=pytest.mark.gpu)]


def _features(rng: np.random.Generator, count: int, dimension: int = 32) -> np.ndarray:
    centers = np.random.default_rng(5).standard_normal((12, dimension))
    x = centers[rng.integers(0, 12, count)] + 0.4 * rng.standard_normal((count, dimension))
    return np.rint(2048 * x / np.linalg.norm(x, axis=1, keepdims=True)).astype(np.int16)


@pytest.fixture(scope="module")
def quantizer() -> PublicQuantizer:
    return train_public_quantizer(
        _features(np.random.default_rng(1), 2000), num_lists=16, provenance="synthetic public features"
    )


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("limit", [None, 900_000])
@pytest.mark.parametrize("probes", [1, 3, 16, 99])
def test_neighbors_are_the_first_of_the_probed_lists(
    engine: str, limit: int | None, probes: int, quantizer: PublicQuantizer, rng: np.random.Generator
) -> None:
    features, queries = _features(rng, 1500), _features(rng, 60)
    features[500:700] = features[:200]
    ids = rng.permutation(1500).astype(np.int64)
    index = build_index(features, ids, engine=engine, quantizer=quantizer, probes=probes, memory_limit_bytes=limit)
    index.remove(ids[:30])
    found = index.search(queries, 40)

    centroids = quantizer.centroids
    numbers = np.arange(len(centroids))
    list_of = nearest_by_definition(centroids, numbers, features, 1).rows[:, 0]
    probed = nearest_by_definition(centroids, numbers, queries, min(probes, len(centroids))).rows
    for query in range(len(queries)):
        seen = np.flatnonzero(np.isin(list_of, probed[query]) & (np.arange(1500) >= 30))
        expected = nearest_by_definition(features[seen], ids[seen], queries[query : query + 1], 40)
        np.testing.assert_array_equal(found.record_ids[query], expected.record_ids[0])
        np.testing.assert_array_equal(found.similarities[query], expected.similarities[0])


def test_with_all_lists_probed_the_search_is_exact(quantizer: PublicQuantizer, rng: np.random.Generator) -> None:
    features, queries, ids = _features(rng, 800), _features(rng, 50), rng.permutation(800).astype(np.int64)
    found = build_index(features, ids, engine="faiss", quantizer=quantizer, probes=16).search(queries, 25)
    np.testing.assert_array_equal(found.record_ids, nearest_by_definition(features, ids, queries, 25).record_ids)


def test_a_few_lists_find_most_neighbors(quantizer: PublicQuantizer, rng: np.random.Generator) -> None:
    features, queries, ids = _features(rng, 3000), _features(rng, 100), rng.permutation(3000).astype(np.int64)
    found = build_index(features, ids, engine="faiss", quantizer=quantizer, probes=4).search(queries, 20)
    exact = nearest_by_definition(features, ids, queries, 20)
    shared = [len(np.intersect1d(*pair)) for pair in zip(found.record_ids, exact.record_ids, strict=True)]
    assert np.mean(shared) > 0.9 * 20


def test_the_list_of_a_record_depends_on_itself_alone(quantizer: PublicQuantizer, rng: np.random.Generator) -> None:
    features = _features(rng, 500)
    together = quantizer.assign(features)
    order = rng.permutation(500)
    np.testing.assert_array_equal(quantizer.assign(features[order]), together[order])
    np.testing.assert_array_equal([quantizer.assign(features[row : row + 1])[0] for row in range(40)], together[:40])


def test_the_lists_of_a_query_depend_on_itself_alone(quantizer: PublicQuantizer, rng: np.random.Generator) -> None:
    queries = _features(rng, 80)
    together = quantizer.probe(queries, 3)
    for query in range(0, 80, 9):
        alone = quantizer.probe(queries[query : query + 1], 3)
        np.testing.assert_array_equal(alone.lists, together.lists[together.order == query])


def test_centroids_are_valid_features_and_cannot_change(quantizer: PublicQuantizer) -> None:
    assert quantizer.centroids.dtype == np.int16
    norms = np.linalg.norm(quantizer.centroids.astype(float), axis=1)
    assert (np.abs(norms - 2048) < 4).all()
    with pytest.raises(ValueError, match="read-only"):
        quantizer.centroids[0, 0] = 1
    mine = np.ones((2, 3), dtype=np.int16)
    PublicQuantizer(mine, "by hand")
    mine[0, 0] = 2


def test_indexing_the_training_data_is_refused(rng: np.random.Generator) -> None:
    features = _features(rng, 100)
    quantizer = train_public_quantizer(features, num_lists=4, provenance="said to be public")
    with pytest.raises(UnsafeIndex, match="trained on the features it is to index"):
        build_index(features, np.arange(100), engine="numpy", quantizer=quantizer)


def test_bad_quantizers_are_refused(quantizer: PublicQuantizer, rng: np.random.Generator) -> None:
    features = _features(rng, 20)
    with pytest.raises(BadData, match="centroids must be int16"):
        PublicQuantizer(features.astype(np.float32), "public")  # type: ignore[arg-type]
    with pytest.raises(BadData, match="at least one centroid"):
        PublicQuantizer(features[:0], "public")
    with pytest.raises(BadData, match="dimension 8, the quantizer 32"):
        build_index(features[:, :8], np.arange(20), engine="numpy", quantizer=quantizer)
    for lists in (0, 21):
        with pytest.raises(InvalidSetting, match="num_lists"):
            train_public_quantizer(features, num_lists=lists, provenance="public")
    with pytest.raises(InvalidSetting, match="probes must be"):
        build_index(features, np.arange(20), engine="numpy", quantizer=quantizer, probes=0)
    with pytest.raises(UnsafeIndex, match="provenance"):
        train_public_quantizer(features, num_lists=2, provenance="")
