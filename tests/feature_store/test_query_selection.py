"""Choosing questions: deterministic, public, covering the public set; groups along nearest neighbours."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from feature_store import query_selection as module
from feature_store.query_selection import QuerySet, neighbors, select_queries, spectral_groups
from feature_store.rows import quantize
from labeler.errors import BadData, InvalidSetting
from labeler.rounds.effects import MOST_SPECTRAL_GROUPS


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


def test_clusters_find_groups_that_are_there_and_ask_about_quantised_unit_vectors(
    groups: tuple[NDArray[np.int16], NDArray[np.int64]],
) -> None:
    features, truth = groups
    queries = select_queries(features, strategy="clustered", count=6, seed=0)
    table = np.zeros((6, 6), dtype=np.int64)
    np.add.at(table, (queries.assignment, truth), 1)
    assert table.max(axis=1).sum() == 300
    assert (queries.rows == -1).all()
    assert (np.bincount(queries.assignment, minlength=6) > 0).all()
    assert similarities(features, queries).min() > 0.5
    assert queries.features.dtype == np.int16
    assert np.abs(np.linalg.norm(queries.features.astype(np.float64), axis=1) - 2048).max() < 5


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


def bent(rng: np.random.Generator, images: int) -> tuple[NDArray[np.int16], NDArray[np.int64]]:
    """Two rings of directions, one inside the other: no plane parts them."""
    truth = rng.integers(0, 2, images)
    angle, length = rng.uniform(0, 2 * np.pi, images), np.where(truth == 0, 0.25, 1.0)
    plane = length[:, None] * np.stack([np.cos(angle), np.sin(angle)], axis=1)
    rows = np.hstack([plane, np.ones((images, 1))]) + 0.02 * rng.standard_normal((images, 3))
    return quantize(rows), truth


def islands(rng: np.random.Generator, count: int, images: int) -> tuple[NDArray[np.int16], NDArray[np.int64]]:
    centres = 5 * np.eye(count, 40)
    truth = np.arange(images) % count
    return quantize(centres[truth] + 0.2 * rng.standard_normal((images, 40))), truth


def share_alike(groups: NDArray[np.int64], truth: NDArray[np.int64]) -> float:
    table = np.zeros((int(groups.max()) + 1, int(truth.max()) + 1))
    np.add.at(table, (groups, truth), 1)
    return float(table.max(axis=1).sum() / len(truth))


def unit(features: NDArray[np.int16]) -> NDArray[np.float64]:
    rows = features.astype(np.float64)
    return np.asarray(rows / np.linalg.norm(rows, axis=1, keepdims=True))


def test_rings_that_no_plane_parts_are_parted(rng: np.random.Generator) -> None:
    features, truth = bent(rng, 900)
    mean = unit(features) - unit(features).mean(axis=0)
    assert share_alike(spectral_groups(mean, 2, seed=0), truth) == 1.0
    assert share_alike(select_queries(features, strategy="clustered", count=2).assignment, truth) < 0.9


def test_islands_are_told_apart_whether_as_many_as_groups_or_more_or_fewer(rng: np.random.Generator) -> None:
    features, truth = islands(rng, 6, 300)
    same = select_queries(features, strategy="spectral", count=6)
    assert share_alike(same.assignment, truth) == 1.0
    assert (np.bincount(same.assignment, minlength=6) > 0).all()
    for fewer_or_more in (3, 9):
        found = select_queries(features, strategy="spectral", count=fewer_or_more)
        assert len(set(found.assignment.tolist())) == fewer_or_more
        joined = [len(set(found.assignment[truth == island].tolist())) for island in range(6)]
        assert max(joined) == 1 if fewer_or_more == 3 else sum(joined) == 9


@pytest.mark.parametrize("count", [1, 2, 5, 19])
def test_copies_of_an_image_share_its_group_however_many_groups_are_asked_for(
    rng: np.random.Generator, count: int
) -> None:
    features = np.repeat(quantize(rng.standard_normal((4, 8))), 5, axis=0)
    queries = select_queries(features, strategy="spectral", count=count)
    assert len(queries) == count
    assert queries.features.any(axis=1).all()
    assert all(len(set(queries.assignment[start : start + 5].tolist())) == 1 for start in range(0, 20, 5))


def test_more_groups_than_images_or_than_are_offered_are_refused(rng: np.random.Generator) -> None:
    features = quantize(rng.standard_normal((MOST_SPECTRAL_GROUPS + 10, 8)))
    with pytest.raises(InvalidSetting, match=f"{len(features)} public images"):
        select_queries(features, strategy="spectral", count=len(features) + 1)
    with pytest.raises(InvalidSetting, match=f"1 to {MOST_SPECTRAL_GROUPS} groups, found {MOST_SPECTRAL_GROUPS + 1}"):
        select_queries(features, strategy="spectral", count=MOST_SPECTRAL_GROUPS + 1)


def test_a_large_set_is_grouped_by_its_landmarks(rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    features, truth = bent(rng, 1500)
    mean = unit(features) - unit(features).mean(axis=0)
    monkeypatch.setattr(module, "MOST_LANDMARKS", 600)
    first, again = (spectral_groups(mean, 2, seed=3) for _ in range(2))
    np.testing.assert_array_equal(first, again)
    assert len(first) == 1500
    assert share_alike(first, truth) == 1.0


def test_the_neighbours_follow_from_how_many_images_there_are_for_each_group() -> None:
    of_images = {30: 0, 119: 0, 120: 4, 199: 4, 200: 5, 500: 8, 700: 10, 100_000: 10}
    assert {images: neighbors(images, 10) for images in of_images} == of_images
    assert neighbors(1000, 100) == 0, "it is the images of a group that count, and not those of the set"


def test_where_groups_hold_few_images_the_images_themselves_are_grouped(rng: np.random.Generator) -> None:
    """Ten kinds of eight images: ten neighbors of each would be two of other kinds at least."""
    kinds = np.repeat(np.arange(10), 8)
    features = quantize(rng.normal(size=(10, 16))[kinds] + 0.3 * rng.normal(size=(80, 16)))
    groups = spectral_groups(unit(features), 10, seed=1)
    assert share_alike(groups, kinds) == 1
    assert len(set(groups)) == 10


def test_a_small_set_is_asked_as_clustered_asks_it(rng: np.random.Generator) -> None:
    features = quantize(rng.normal(size=(110, 24)))
    asked = [select_queries(features, strategy=way, count=10, seed=3) for way in ("spectral", "clustered")]
    assert np.array_equal(asked[0].assignment, asked[1].assignment)
    assert np.array_equal(asked[0].features, asked[1].features)


def test_of_a_large_set_clusters_are_found_in_batches_and_progress_is_told(
    rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    truth = np.arange(1200) % 6
    features = quantize(np.eye(32)[truth] + 0.05 * rng.normal(size=(1200, 32)))
    monkeypatch.setattr(module, "MOST_LANDMARKS", 200)
    told: list[tuple[int, int]] = []
    first, again = (
        select_queries(features, count=6, seed=3, progress=lambda _, done, total: told.append((done, total)))
        for _ in range(2)
    )
    assert np.array_equal(first.features, again.features)
    assert np.array_equal(first.assignment, again.assignment)
    assert share_alike(first.assignment, truth) == 1.0
    assert told[0] == (0, 4)
    assert told[-1] == (4, 4)
