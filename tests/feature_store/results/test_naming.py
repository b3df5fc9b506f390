"""After which image a question is named: one rule for the service and for `labeler run`."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from feature_store.results.pseudo_labels import query_rows


def test_of_equally_similar_images_the_first_names_its_cluster() -> None:
    images = np.array([[0, 5], [7, 0], [7, 0], [7, 0], [0, 9]], np.int16)
    centres = np.array([[2048, 0], [0, 2048]], np.int16)
    found = query_rows(np.array([-1, -1]), np.array([1, 0, 0, 0, 1]), centres=centres, images=images)
    assert found.tolist() == [1, 0]


def test_where_the_images_are_gone_the_first_of_a_cluster_names_it() -> None:
    centres = np.zeros((2, 1), np.int16)
    assert query_rows(np.array([-1, -1]), np.array([1, 0, 1]), centres=centres, images=None).tolist() == [1, 0]


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 30), st.integers(1, 4))
def test_the_rule_is_the_one_that_a_loop_in_whole_numbers_finds(seed: int, images: int, clusters: int) -> None:
    random = np.random.default_rng(seed)
    features = random.integers(-3, 4, (images, 3)).astype(np.int16)
    features[~features.any(axis=1)] = 1
    centres = random.integers(-3, 4, (clusters, 3)).astype(np.int16)
    assignment = random.integers(0, clusters, images)
    found = query_rows(np.full(clusters, -1), assignment, centres=centres, images=features)
    for cluster in range(clusters):
        members = np.flatnonzero(assignment == cluster)
        if not len(members):
            continue
        # The square of a cosine with its sign, as a fraction: no rounding.
        products = (features[members].astype(int) @ centres[cluster].astype(int)).tolist()
        squares = np.square(features[members].astype(int)).sum(axis=1).tolist()
        cosines = [Fraction(p * abs(p), s) for p, s in zip(products, squares, strict=True)]
        assert cosines[members.tolist().index(found[cluster])] == max(cosines)
        # Among images of the same numbers nothing but their place can decide.
        assert all((features[row] != features[found[cluster]]).any() for row in members if row < found[cluster])
