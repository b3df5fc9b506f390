"""Choosing questions: deterministic, public, and covering the public set."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from feature_store.query_selection import QuerySet, select_queries
from feature_store.rows import quantize
from labeler.errors import BadData, InvalidSetting


@pytest.fixture
def groups(rng: np.random.Generator) -> tuple[NDArray[np.int16], NDArray[np.int64]]:
    centres = rng.standard_normal((6, 40)) * 3
    truth = rng.integers(0, 6, 300)
    return quantize(centres[truth] + rng.standard_normal((300, 40))), truth


def test_all_asks_about_every_image_in_order(groups: tuple[NDArray[np.int16], NDArray[np.int64]]) -> None:
    features, _ = groups
    queries = select_queries(features, strategy="all")
    np.testing.assert_array_equal(queries.features, features)
    np.testing.assert_array_equal(queries.rows, np.arange(300))
    np.testing.assert_array_equal(queries.assignment, np.arange(300))


def similarities(features: NDArray[np.int16], queries: QuerySet) -> NDArray[np.float64]:
    """The cosine between each image and the question that stands for it."""
    one, other = features.astype(np.float64), queries.features[queries.assignment].astype(np.float64)
    return (one * other).sum(axis=1) / (np.linalg.norm(one, axis=1) * np.linalg.norm(other, axis=1))


def test_random_asks_about_different_real_images(groups: tuple[NDArray[np.int16], NDArray[np.int64]]) -> None:
    features, _ = groups
    queries = select_queries(features, strategy="random", count=20, seed=3)
    assert len(set(queries.rows.tolist())) == 20
    np.testing.assert_array_equal(queries.features, features[queries.rows])
    np.testing.assert_array_equal(queries.assignment[queries.rows], np.arange(20))


def test_clusters_find_groups_that_are_there(groups: tuple[NDArray[np.int16], NDArray[np.int64]]) -> None:
    features, truth = groups
    queries = select_queries(features, strategy="clustered", count=6, seed=0)
    table = np.zeros((6, 6), dtype=np.int64)
    np.add.at(table, (queries.assignment, truth), 1)
    assert table.max(axis=1).sum() == 300
    assert (queries.rows == -1).all()
    assert (np.bincount(queries.assignment, minlength=6) > 0).all()
    assert similarities(features, queries).min() > 0.5


def test_centres_are_quantised_unit_vectors(groups: tuple[NDArray[np.int16], NDArray[np.int64]]) -> None:
    queries = select_queries(groups[0], strategy="clustered", count=25)
    assert queries.features.dtype == np.int16
    norms = np.linalg.norm(queries.features.astype(np.float64), axis=1)
    assert np.abs(norms - 2048).max() < 5


@pytest.mark.parametrize("strategy", ["random", "clustered", "spectral"])
def test_same_public_seed_same_questions(groups: tuple[NDArray[np.int16], NDArray[np.int64]], strategy: str) -> None:
    first, again, other = (
        select_queries(groups[0], strategy=strategy, count=12, seed=seed)  # type: ignore[arg-type]
        for seed in (5, 5, 6)
    )
    np.testing.assert_array_equal(first.features, again.features)
    np.testing.assert_array_equal(first.assignment, again.assignment)
    assert not np.array_equal(first.features, other.features)


def test_identical_images_still_give_valid_questions() -> None:
    features = np.tile(quantize(np.ones((1, 8))), (10, 1))
    queries = select_queries(features, strategy="random", count=3)
    assert similarities(features, queries) == pytest.approx(1.0)
    assert set(queries.assignment.tolist()) == {0}


@pytest.mark.parametrize("count", [None, 0, -1, 301])
def test_impossible_counts_are_refused(groups: tuple[NDArray[np.int16], NDArray[np.int64]], count: int | None) -> None:
    with pytest.raises(InvalidSetting, match="300 public images"):
        select_queries(groups[0], strategy="clustered", count=count)


@pytest.mark.parametrize(
    "features",
    [np.ones((3, 4)), np.ones(4, dtype=np.int16), np.zeros((0, 4), dtype=np.int16), np.zeros((2, 4), dtype=np.int16)],
    ids=["floats", "vector", "empty", "zero rows"],
)
def test_features_that_are_not_quantised_images_are_refused(features: NDArray[np.int16]) -> None:
    with pytest.raises(BadData):
        select_queries(features, strategy="all")
