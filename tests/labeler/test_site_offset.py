"""A site's own offset: rows against a definition in whole numbers, the price by hand, noise, and what is subtracted."""

from __future__ import annotations

from fractions import Fraction
from functools import partial
from math import isqrt, sqrt
from typing import Any

import mpmath
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from numpy.typing import NDArray

from feature_store.index.definition import check_features
from labeler.errors import InvalidTask
from labeler.expectation import MOST_SHARE, offset_for
from labeler.methods.sensitivity import integer_event, squared_sensitivity
from labeler.methods.site_offset import (
    COUNT,
    CUT,
    axes_of_questions,
    finer,
    longest_row,
    noise_of_mean,
    noise_of_offset,
    offset_of,
    own_offset,
    rows_of_records,
    without,
)
from labeler.planning import price
from labeler.randomness import seeded_source
from labeler.records import PublicAxes, Records
from labeler.solving import WantedTask, solve_sigma
from labeler.task import Task
from tests.labeler.tasks import make_task

Features = NDArray[np.int16]


def task_of(**changes: Any) -> Task:
    return make_task(**{"method": "reverse-knn", "max_queries": 20, "offset_share": 0.15} | changes)


def features_of(count: int, dimension: int, *, seed: int, center: NDArray[np.float64] | float = 0.0) -> Features:
    found = np.random.default_rng(seed).normal(size=(count, dimension)) * 0.4 + center
    return np.rint(2048 * found / np.linalg.norm(found, axis=1, keepdims=True)).astype(np.int16)


def records_of(features: Features) -> Records:
    count = len(features)
    return Records(features, np.arange(count), np.zeros(count, np.int16), "version")


@given(
    features=arrays(np.int16, (6, 5), elements=st.integers(-1500, 1500)),
    questions=arrays(np.int16, (7, 5), elements=st.integers(-1500, 1500)),
    share=st.sampled_from([1e-300, 0.001, 0.05, 0.15, 0.3, 0.5]),
    k=st.integers(1, 9),
    agents=st.sampled_from([2, 3, 70]),
    release=st.sampled_from(["histogram", "winner"]),
)
def test_no_row_with_its_count_is_longer_than_the_price_and_each_is_that_of_its_record_alone(
    features: Features, questions: Features, share: float, k: int, agents: int, release: str
) -> None:
    """ "reverse-knn": every record, by whole numbers of Python; the bound is that of the task's event."""
    task = task_of(offset_share=share, k=k, agents=agents, release=release)
    axes, longest = axes_of_questions(questions), longest_row(task, len(questions))
    rows = rows_of_records(features, axes, longest)
    paid = squared_sensitivity(task, "instance", len(questions))
    votes = squared_sensitivity(task_of(k=k, offset_share=0), "instance", len(questions))
    assert paid is not None
    assert votes is not None
    most = (paid - votes) * (finer(task) * task.scale) ** 2
    count = longest // COUNT
    bound = max(0.0, longest - sqrt(axes.count) / 2 - 1)
    for feature, row in zip(features.tolist(), rows.tolist(), strict=True):
        assert sum(one * one for one in row) + count * count <= most
        along = [
            sum((x - m) * a for x, m, a in zip(feature, axes.rows[-1].tolist(), axis, strict=True))
            for axis in axes.rows[:-1].tolist()
        ]
        length = max(mpmath.sqrt(sum(one * one for one in along)), mpmath.mpf(CUT))
        for one, found in zip(along, row, strict=True):
            assert abs(found - bound * one / length) < 0.5001
    for number in range(len(features)):
        alone = rows_of_records(features[number : number + 1], axes, longest)
        np.testing.assert_array_equal(alone[0], rows[number])


@pytest.mark.parametrize(
    ("changes", "level", "expected"),
    [
        ({}, "instance", Fraction(1) / (1 - Fraction(3, 20))),
        ({"k": 3}, "instance", Fraction(3) / (1 - Fraction(3, 20))),
        ({"k": 30}, "instance", Fraction(20) / (1 - Fraction(3, 20))),
        ({"max_agent_records": 50}, "instance", 2 + 4 * Fraction(3, 17)),
        ({"records_per_person": 4}, "instance", 2 + 4 * Fraction(3, 17)),
        ({"records_per_person": 4}, "person", 16 * (1 + Fraction(3, 17))),
        ({"records_per_person": 4, "max_agent_records": 3}, "person", 9 * (2 + 4 * Fraction(3, 17))),
        ({"max_agent_records": 50}, "agent", 2500),
        ({"ballot_radius": 9}, "agent", 81),
        ({}, "agent", None),
    ],
)
def test_squared_changes_of_votes_and_offset_add_up(changes: dict[str, Any], level: Any, expected: Any) -> None:
    task = task_of(max_queries=100, **changes)
    assert squared_sensitivity(task, level, 20) == expected


def test_a_share_of_the_price_costs_the_votes_as_much_noise_and_no_more() -> None:
    plain, shared = task_of(offset_share=None, max_queries=60), task_of(offset_share=0.2, max_queries=60)
    ratio = solve_sigma(shared, 0.5) / solve_sigma(plain, 0.5)
    assert ratio == pytest.approx(1 / sqrt(0.8), rel=1e-4)
    event = integer_event(shared, "instance", 60)
    assert event is not None
    assert event.coordinates == 60 * 3 + finer(shared) ** 2 * 60
    assert price(shared).instance.epsilon > price(plain).instance.epsilon


@pytest.mark.parametrize("agents", [2, 5, 65])
def test_the_noise_is_that_of_all_parties_drawn_by_the_agent_alone_and_the_same_on_a_retry(agents: int) -> None:
    task = task_of(agents=agents, colluding_agents=0)
    noise = noise_of_offset(task, 4000, seeded_source(b"noise"))
    sigma = finer(task) * task.scale * task.sigma_votes
    assert np.std(noise) == pytest.approx(sigma, rel=0.05)
    assert abs(noise.mean()) < 5 * sigma / sqrt(4000)
    np.testing.assert_array_equal(noise, noise_of_offset(task, 4000, seeded_source(b"noise")))


def test_an_agent_finds_how_far_its_records_lie_from_the_questions_and_takes_it_off() -> None:
    center = np.zeros(12)
    center[0] = 0.8
    questions = features_of(20, 12, seed=1)
    off = features_of(3000, 12, seed=2, center=center)
    task = task_of(sigma_votes=1.0)
    offset = own_offset(task, questions, records_of(off), lambda: seeded_source(b"a"))
    assert offset is not None
    true = off.astype(float).mean(axis=0) - questions.astype(float).mean(axis=0)
    before, after = np.linalg.norm(true), np.linalg.norm(true - offset)
    assert after < 0.6 * before  # rows are cut, so the mean is shortened
    moved = without(offset, off)
    assert moved.dtype == np.int16
    np.testing.assert_array_equal(moved[7:9], without(offset, off[7:9]))
    assert np.abs(moved).max() <= 2048


def test_few_records_under_much_noise_keep_their_place() -> None:
    questions, few = features_of(20, 12, seed=1), features_of(5, 12, seed=2, center=0.5)
    zero = np.zeros(12, dtype=np.int64)
    for number in range(40):
        offset = own_offset(
            task_of(sigma_votes=80.0), questions, records_of(few), partial(seeded_source, b"%d" % number)
        )
        assert offset is not None
        assert np.linalg.norm(offset) <= 2048 / 2
    # A count of nothing tells nothing, and neither does a mean no longer than its noise.
    task, axes = task_of(sigma_votes=80.0), axes_of_questions(questions)
    nothing = np.zeros(axes.count + 1, dtype=np.int64)
    np.testing.assert_array_equal(offset_of(task, axes, nothing, 20), zero)
    nothing[-1] = 10**9
    np.testing.assert_array_equal(offset_of(task, axes, nothing, 20), zero)


def test_questions_without_a_direction_and_a_single_question_have_no_offset() -> None:
    same = np.repeat(features_of(1, 12, seed=1), 20, axis=0)
    records = records_of(features_of(500, 12, seed=2, center=0.5))
    offset = own_offset(task_of(sigma_votes=1.0), same, records, lambda: seeded_source(b"a"))
    np.testing.assert_array_equal(offset, np.zeros(12))
    assert own_offset(task_of(), same[:1], records, lambda: seeded_source(b"a")) is None
    assert own_offset(task_of(offset_share=None), same, records, lambda: seeded_source(b"a")) is None


@given(
    seed=st.integers(0, 999),
    questions=st.integers(2, 90),
    dimension=st.integers(1, 30),
)
def test_axes_are_unit_vectors_at_right_angles_or_zero(seed: int, questions: int, dimension: int) -> None:
    found = axes_of_questions(features_of(questions, dimension, seed=seed)).rows[:-1] / 2048.0
    products = found @ found.T
    assert np.abs(products - np.diag(np.diag(products))).max(initial=0) < 0.02
    lengths = np.diag(products)
    assert (np.isclose(lengths, 1, atol=0.02) | (lengths == 0)).all()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"method": "knn"}, "offset_share only means something for method reverse-knn"),
        ({"offset_share": 0.6}, "offset_share"),
        ({"offset_share": -0.1}, "offset_share"),
        ({"offset_share": float("nan")}, "offset_share"),
        (
            {"lifetime_budget": {"budget_nano": 10**9, "least_similarity": 0.1}},
            "lifetime_budget does not go with offset_share",
        ),
    ],
)
def test_what_it_does_not_go_with_is_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidTask, match=said):
        task_of(**changes)


def test_a_task_without_it_is_written_as_ever_and_zero_is_without_it() -> None:
    plain = make_task(method="reverse-knn", max_queries=20)
    assert task_of(offset_share=0) == plain
    assert "offset_share" not in plain.model_dump()
    assert task_of().digest != plain.digest
    assert WantedTask(name="t", epsilon=0.5, offset_share=0).offset_share == 0


def test_public_facts_choose_the_share() -> None:
    """The length of the noise is 0.5 sigma sqrt(A) / (row n), by hand; the share is the least that keeps it short."""
    asked = task_of(offset_share=None, sigma_votes=8.0, max_queries=41, agents=4)
    by_hand = 0.5 * 8.0 * sqrt(40) / sqrt(16 / 17)
    assert noise_of_mean(8.0, 1, 41) == pytest.approx(by_hand)
    shares = [offset_for(asked, records=records) for records in (200, 1000, 2800, 4000, 8000, 10**6)]
    assert shares[:2] == [None, None]
    assert shares[2] == MOST_SHARE == 0.15
    assert shares[-1] == 0.05
    found = [one for one in shares if one is not None]
    assert found == sorted(found, reverse=True)
    assert offset_for(task_of(offset_share=None, max_queries=1)) is None
    assert offset_for(make_task(method="knn")) is None


def test_longest_rows_stay_within_the_share_exactly() -> None:
    for share in (0.001, 0.07, 0.15, 0.5):
        task = task_of(offset_share=share)
        longest, exact = longest_row(task, 20), Fraction(str(share)) / (1 - Fraction(str(share)))
        room = exact * (finer(task) * task.scale) ** 2
        assert longest**2 + Fraction(longest**2, COUNT**2) <= room
        assert longest == isqrt(int(room * COUNT**2 / (COUNT**2 + 1)))


@given(
    seed=st.integers(0, 999),
    questions=st.integers(2, 70),
    dimension=st.integers(2, 200),
    noisy=st.lists(st.integers(-(10**6), 10**6), min_size=70, max_size=70),
)
def test_whatever_the_noisy_sums_no_record_is_moved_out_of_the_range_of_an_exact_index(
    seed: int, questions: int, dimension: int, noisy: list[int]
) -> None:
    """The record that lies opposite to the offset, as long as a feature can be."""
    axes = axes_of_questions(features_of(questions, dimension, seed=seed))
    sums = np.array([*noisy[: axes.count], 10**6])
    offset = offset_of(task_of(sigma_votes=0.01), axes, sums, questions)
    length = np.linalg.norm(offset)
    assert length <= 1024
    opposite = np.rint(-2048 * offset / max(length, 1)).astype(np.int16)[None]
    check_features(without(offset, opposite), what="records")


def test_sums_stay_whole_where_noise_is_so_fine_that_rows_could_be_of_any_length() -> None:
    """A review's input: before, 2^24 records left 63 bits, and a warning told that there were as many."""
    task = task_of(
        sigma_votes=1e-6, grid_scale=10**11, ballot_radius=1, agents=1, k=20, max_queries=20, offset_share=0.5
    )
    assert longest_row(task, 20) == 2**30
    assert (2**30 // COUNT) * 2**32 < 2**63


def test_axes_are_those_of_no_more_questions_than_fit() -> None:
    many = features_of(5000, 6, seed=3)
    found = axes_of_questions(many).rows[:-1] / 2048.0
    _, _, leading = np.linalg.svd(many - many.mean(axis=0), full_matrices=False)
    assert abs(found[-1] @ leading[0]) > 0.8
    assert axes_of_questions(many).count == 6


def test_an_offset_is_no_longer_than_half_a_feature_however_axes_are_rounded() -> None:
    """Four times the same axis: without the bound, four means of length one half add up to twice as much."""
    same = np.zeros((5, 6), dtype=np.int16)
    same[:4, 0] = 2048
    task = task_of(sigma_votes=0.01)
    longest = longest_row(task, 20)
    offset = offset_of(task, PublicAxes(same), np.array([longest * 10**5] * 4 + [longest // COUNT * 10**5]), 20)
    assert offset.tolist() == [1024, 0, 0, 0, 0, 0]
