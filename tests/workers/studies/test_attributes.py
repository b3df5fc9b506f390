"""Votes on attributes: the bounds against brute force, and against learners trained on neighbouring sets."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy.stats import norm

from labeler.errors import BadData, InvalidSetting, PrivacyRefusal
from labeler.noise import DiscreteGaussian
from labeler.randomness import seeded_source
from workers.studies.attributes import (
    attribute_ballots,
    attributes_on,
    attributes_squared_sensitivity,
    check_attribute_ballots,
)


def _allowed_rows(attributes: int, most: int) -> list[NDArray[np.int64]]:
    return [np.array(row) for row in itertools.product((0, 1), repeat=attributes) if sum(row) <= most]


@pytest.mark.parametrize("attributes", [1, 2, 3, 5, 6])
@pytest.mark.parametrize("most", [1, 2, 3, 7])
def test_the_bounds_are_what_enumerating_all_pairs_of_rows_gives(attributes: int, most: int) -> None:
    rows = _allowed_rows(attributes, most)
    change = max(int(np.square(one - other).sum()) for one, other in itertools.product(rows, rows))
    gone = max(int(np.square(row).sum()) for row in rows)
    sizes = {"num_attributes": attributes, "most_positive": most}
    assert attributes_squared_sensitivity("instance", queries=1, **sizes) == change
    assert attributes_squared_sensitivity("agent", queries=1, **sizes) == gone
    assert attributes_squared_sensitivity("instance", queries=7, **sizes) == 7 * change
    assert attributes_squared_sensitivity("agent", queries=7, **sizes) == 7 * gone


def _nearest_centroid(records: NDArray[np.float64], truth: NDArray[np.bool_], queries: NDArray[np.float64]):  # type: ignore[no-untyped-def]
    """A learner whose every answer depends on every record: closeness to the mean of those with the attribute."""
    means = np.stack([records[has].mean(axis=0) if has.any() else np.zeros(records.shape[1]) for has in truth.T])
    distances = ((queries[:, None] - means[None]) ** 2).sum(axis=2)
    return np.exp(-distances)


@settings(max_examples=200, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    records=st.integers(1, 8),
    queries=st.integers(1, 5),
    attributes=st.integers(1, 9),
    most=st.integers(1, 6),
)
def test_training_without_one_record_changes_ballots_within_the_bound(
    seed: int, records: int, queries: int, attributes: int, most: int
) -> None:
    rng = np.random.default_rng(seed)
    features, asked = rng.normal(size=(records, 2)) * 3, rng.normal(size=(queries, 2)) * 3
    truth = rng.random((records, attributes)) < 0.5
    kept = np.arange(records) != rng.integers(records)
    ballots = [
        attribute_ballots(_nearest_centroid(features[rows], truth[rows], asked), most_positive=most, threshold=1e-3)
        for rows in (np.ones(records, bool), kept)
    ]
    sizes = {"queries": queries, "num_attributes": attributes, "most_positive": most}
    for ballot in ballots:
        check_attribute_ballots(ballot, num_attributes=attributes, most_positive=most)
        assert np.square(ballot).sum() <= attributes_squared_sensitivity("agent", **sizes)
    difference = ballots[0] - ballots[1]
    assert np.square(difference).sum() <= attributes_squared_sensitivity("instance", **sizes)
    assert np.abs(difference).max() <= 1


def test_one_record_can_really_turn_a_whole_set_of_attributes() -> None:
    """A learner that repeats the nearest record's attributes: without that record, two votes leave and two arrive."""
    truth = np.array([[0.9, 0.8, 0.1, 0.2], [0.1, 0.2, 0.9, 0.8]])
    with_it, without = attribute_ballots(truth[:1], most_positive=2), attribute_ballots(truth[1:], most_positive=2)
    bound = attributes_squared_sensitivity("instance", queries=1, num_attributes=4, most_positive=2)
    assert np.square(with_it - without).sum() == bound == 4


@settings(max_examples=200, deadline=None)
@given(
    levels=st.lists(st.lists(st.integers(0, 4), min_size=5, max_size=5), min_size=1, max_size=4),
    most=st.integers(1, 6),
)
def test_ballots_take_the_most_certain_and_among_equals_the_lowest_number(levels: list[list[int]], most: int) -> None:
    ballots = attribute_ballots(np.array(levels) / 4, most_positive=most, threshold=0.5)
    for row, votes in zip(levels, ballots, strict=True):
        certain = sorted((number for number in range(5) if row[number] > 2), key=lambda number: (-row[number], number))
        assert np.flatnonzero(votes).tolist() == sorted(certain[:most])


def test_an_attribute_is_on_from_half_of_the_answering_agents() -> None:
    sums = np.array([[49.9, 50.0, 50.1, -3.0]])
    assert attributes_on(sums, contributors=100).tolist() == [[False, True, True, False]]
    assert attributes_on(sums, contributors=101).tolist() == [[False, False, False, False]]


def test_the_noise_of_a_released_sum_is_what_was_asked_for() -> None:
    """Variance of 40,000 noisy sums of 30 shares against sigma; two-sided false-alarm rate 1e-6."""
    agents, scale, sigma, shape = 30, 500, 50.0, (1000, 40)
    share = DiscreteGaussian(sigma * scale / math.sqrt(agents))
    ballots = attribute_ballots(np.random.default_rng(0).random(shape), most_positive=4)
    total = sum(
        ballots * scale + share.sample(seeded_source(f"attributes {agent}".encode()), shape) for agent in range(agents)
    )
    noise = total / scale - agents * ballots
    deviations = noise.size * (noise.var() / sigma**2 - 1) / math.sqrt(2 * noise.size)
    assert abs(deviations) < norm.isf(0.5e-6)


@pytest.mark.parametrize(
    ("ballots", "problem"),
    [
        (np.array([[1, 1, 1, 0]]), PrivacyRefusal),
        (np.array([[2, 0, 0, 0]]), PrivacyRefusal),
        (np.array([[-1, 0, 0, 0]]), PrivacyRefusal),
        (np.array([[2**62, 2**62, 2**62, 2**62]]), PrivacyRefusal),
        (np.array([[1, 0, 0]]), InvalidSetting),
        (np.array([[1.0, 0, 0, 0]]), InvalidSetting),
        (np.zeros((0, 4), dtype=np.int64), InvalidSetting),
    ],
)
def test_ballots_beyond_the_price_are_refused(ballots: NDArray[np.int64], problem: type[Exception]) -> None:
    with pytest.raises(problem):
        check_attribute_ballots(ballots, num_attributes=4, most_positive=2)


def test_what_is_no_setting_is_refused() -> None:
    scores = np.full((2, 3), 0.7)
    with pytest.raises(InvalidSetting, match="tau at least 1"):
        attribute_ballots(scores, most_positive=0)
    with pytest.raises(InvalidSetting, match="threshold"):
        attribute_ballots(scores, most_positive=1, threshold=math.nan)
    with pytest.raises(BadData, match="finite"):
        attribute_ballots(np.array([[0.1, math.nan]]), most_positive=1)
    with pytest.raises(InvalidSetting, match="answered"):
        attributes_on(scores, contributors=0)
    with pytest.raises(InvalidSetting, match="at least one query"):
        attributes_squared_sensitivity("agent", queries=0, num_attributes=3, most_positive=1)
