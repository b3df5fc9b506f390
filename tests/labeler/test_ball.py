"""Ballots on a ball: exact against a definition in fractions, bounds against brute force, neighbors by chance."""

from __future__ import annotations

import itertools
from fractions import Fraction
from functools import partial
from math import isqrt

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from labeler.methods.reverse_knn import largest_distance, project, reverse_knn_ballots, squared_distance
from labeler.methods.sensitivity import largest_change, squared_sensitivity
from labeler.noise import noise_share
from labeler.planning import has_finite_price, price
from labeler.randomness import seeded_source
from labeler.release import contribution, largest_sum, on_grid
from labeler.solving import solve_sigma
from labeler.task import Level
from tests.labeler.tasks import check_change, make_task

CLASSES = 3
Ballots = NDArray[np.int64]


task_of = partial(make_task, method="reverse-knn", max_queries=4, ballot_radius=2)


def _by_definition(ballots: Ballots, radius: int, scale: int) -> Ballots:
    """The whole number of largest magnitude that the drawn, centered ballot contains, by counting up in fractions."""
    rows = [[Fraction(count) - Fraction(sum(row), len(row)) for count in row] for row in ballots.tolist()]
    squares = sum(count**2 for row in rows for count in row)
    found = []
    for count in itertools.chain.from_iterable(rows):
        # A square of the entry: of S b inside the ball, of S b R / |b| elsewhere.
        square = (scale * count) ** 2 if squares <= radius**2 else (scale * count * radius) ** 2 / squares
        whole = 0
        while (whole + 1) ** 2 <= square:
            whole += 1
        found.append(whole if count > 0 else -whole)
    return np.array(found, dtype=np.int64).reshape(ballots.shape)


@given(
    ballots=st.lists(st.tuples(*[st.integers(0, 9)] * CLASSES), min_size=1, max_size=3).map(
        lambda rows: np.array(rows, dtype=np.int64)
    ),
    radius=st.integers(1, 12),
    scale=st.integers(1, 40),
)
def test_it_is_the_point_of_the_ball_next_to_the_centred_ballot_without_its_fraction(
    ballots: Ballots, radius: int, scale: int
) -> None:
    drawn = project(ballots, radius=radius, scale=scale)
    np.testing.assert_array_equal(drawn, _by_definition(ballots, radius, scale))
    assert drawn.dtype == np.int64
    assert (drawn**2).sum() <= (radius * scale) ** 2


def test_a_ballot_whose_length_is_whole_lands_on_the_sphere_itself_where_a_float_could_fall_short() -> None:
    """Twelve rows of (3, -1, -1, -1): squares of 12 in each, 144 in all, a length of 12."""
    ballots = np.zeros((12, 4), dtype=np.int64)
    ballots[:, 0] = 7**11
    drawn = project(ballots, radius=12, scale=10**15)
    assert (drawn == np.array([3, -1, -1, -1]) * 10**15).all()


def test_counts_as_large_as_a_task_can_have_do_not_overflow() -> None:
    ballots = np.zeros((3, 5), dtype=np.int64)
    ballots[:, 0] = 2**40
    drawn = project(ballots, radius=2**20, scale=2**20)
    assert (drawn[:, 0] == isqrt(2**80 * 16 // 60)).all()
    assert (drawn[:, 1:] == -isqrt(2**80 // 60)).all()


def _all_ballots(entries: int, most: int) -> list[Ballots]:
    return [np.array([row], dtype=np.int64) for row in itertools.product(range(most + 1), repeat=entries)]


@pytest.mark.parametrize(("radius", "scale"), [(1, 1), (1, 7), (2, 1), (2, 5), (3, 2), (3, 11), (20, 3)])
@pytest.mark.parametrize("moved", [1, 2, 3])
def test_no_pair_of_small_ballots_is_moved_further_apart_than_the_bound(radius: int, scale: int, moved: int) -> None:
    """All pairs of ballots of three entries up to 6 that differ by `moved` ones: their square, and one entry."""
    entries, checked = 3, 0
    bound = squared_distance(moved, radius=radius, scale=scale, entries=entries) * scale**2
    one_entry = largest_distance(moved, radius=radius) * scale
    steps = [s for s in itertools.product((-1, 0, 1), repeat=entries) if sum(map(abs, s)) == moved]
    drawn = {
        tuple(ballot[0].tolist()): project(ballot, radius=radius, scale=scale) for ballot in _all_ballots(entries, 7)
    }
    assert all((one**2).sum() <= (radius * scale) ** 2 for one in drawn.values())
    for ballot in itertools.product(range(7), repeat=entries):
        others = [tuple(one + by for one, by in zip(ballot, step, strict=True)) for step in steps]
        changes = [drawn[ballot] - drawn[other] for other in others if min(other) >= 0]
        assert max((change**2).sum() for change in changes) <= bound
        assert max(np.abs(change).max() for change in changes) <= one_entry
        checked += len(changes)
    assert checked > 300


@settings(max_examples=150)
@given(
    seed=st.integers(0, 2**32 - 1),
    records=st.integers(1, 14),
    k=st.integers(1, 4),
    radius=st.integers(1, 12),
    scale=st.sampled_from([None, 1, 3]),
    cap=st.none() | st.integers(1, 14),
    per_person=st.none() | st.integers(1, 3),
    release=st.sampled_from(["histogram", "winner"]),
)
def test_no_record_no_person_and_no_agent_changes_more_on_the_ball_than_is_charged(
    seed: int,
    records: int,
    k: int,
    radius: int,
    scale: int | None,
    cap: int | None,
    per_person: int | None,
    release: str,
) -> None:
    random = np.random.default_rng(seed)
    task = task_of(
        k=k, ballot_radius=radius, max_agent_records=cap, records_per_person=per_person, release=release,
        sigma_votes=2000.0 if scale else 5.0, grid_scale=scale,
    )  # fmt: skip
    similarities, labels = random.integers(0, 4, (records, 4)), random.integers(0, CLASSES, records)
    persons = random.integers(0, 4, records)

    def answer(left: NDArray[np.bool_]) -> Ballots:
        rows = np.flatnonzero(left)
        if per_person is not None:
            rows = np.array(
                [row for row in rows if (persons[rows[rows < row]] == persons[row]).sum() < per_person], int
            )
        rows = rows[:cap]
        nearest = np.argsort(-similarities[rows], axis=1, kind="stable")[:, :k]
        return on_grid(reverse_knn_ballots(nearest, labels[rows], num_queries=4, num_classes=CLASSES), task)

    everybody = np.ones(records, dtype=bool)
    whole = answer(everybody)
    check_change(task, "agent", 4, whole, scale=task.scale)
    for record in range(records):
        check_change(task, "instance", 4, whole - answer(everybody & (np.arange(records) != record)), scale=task.scale)
    if per_person is not None:
        for person in range(4):
            check_change(task, "person", 4, whole - answer(everybody & (persons != person)), scale=task.scale)


def test_an_agent_costs_the_radius_whatever_it_holds_and_a_record_what_it_moves() -> None:
    task = task_of(ballot_radius=60, sigma_votes=280.0, max_queries=20, agents=100, colluding_agents=1, delta=1e-3)
    assert (squared_sensitivity(task, "agent", 20), largest_change(task, "agent")) == (3600, 60)
    squared = squared_sensitivity(task, "instance", 20)
    assert squared == squared_distance(1, radius=60, scale=task.scale, entries=60)
    assert 1 < float(squared) < 1.02, "rounding adds a hundredth at most on the grid that a task chooses"
    assert largest_change(task, "instance") == 1
    # A cap of the same federation, 600 records each: ten times the noise for the same price.
    capped = task_of(
        ballot_radius=None, max_agent_records=600, sigma_votes=2800.0, max_queries=20, agents=100, colluding_agents=1,
        delta=1e-3,
    )  # fmt: skip
    assert price(capped).agent.epsilon == pytest.approx(price(task).agent.epsilon, rel=1e-3)


@pytest.mark.parametrize("level", ["instance", "agent"])
@pytest.mark.parametrize("sigma", [1e-2, 5.0, 1e4])
def test_the_noise_for_a_price_is_found_whatever_noise_the_task_had(level: Level, sigma: float) -> None:
    """What rounding adds hangs on the grid, which hangs on the noise: the answer must not hang on where one starts."""
    task = task_of(sigma_votes=sigma)
    found = solve_sigma(task, 1.0, level=level)
    assert found == solve_sigma(task_of(sigma_votes=found), 1.0, level=level)
    assert price(task_of(sigma_votes=found)).statement(level).epsilon <= 1.0
    assert price(task_of(sigma_votes=found * (1 - 1e-5))).statement(level).epsilon > 1.0


def test_a_ball_makes_the_agent_level_finite() -> None:
    assert has_finite_price(task_of(), "agent")
    assert not has_finite_price(task_of(ballot_radius=None), "agent")


def test_what_leaves_is_the_drawn_ballot_and_the_noise_share() -> None:
    task = task_of()
    ballots = np.array([[300, 0, 0], [0, 400, 0], [0, 0, 0], [0, 0, 0]], dtype=np.int64)
    values = contribution(ballots, task, source=seeded_source(1)) - noise_share(task, seeded_source(1), 4)
    np.testing.assert_array_equal(values, project(ballots, radius=2, scale=task.scale))
    assert (values[2:] == 0).all()
    reach = task.noise_reach
    assert largest_sum(task, 3) == 3 * (2 * task.scale + reach)


def test_a_winner_of_ballots_on_a_ball_needs_room_for_the_radius_alone() -> None:
    task = task_of(release="winner", ballot_radius=7)
    assert task.vote_clip == 7
    terms = task.winner_terms
    assert terms is not None
    assert terms.highest == 3 * (7 * task.scale + task.noise_reach)
    assert terms.lowest == -terms.highest, "centred sums lie on both sides"
    crowded = task_of(release="winner", ballot_radius=10**6, agents=100)
    assert crowded.vote_clip is not None
    assert crowded.vote_clip < 10**6
    drawn = on_grid(np.array([[10**9, 0, 0]] * 4, dtype=np.int64), crowded)
    assert drawn.max() == crowded.vote_clip * crowded.scale
    assert crowded.winner_terms is not None
    assert -crowded.winner_terms.lowest >= 100 * (-int(drawn.min()) + crowded.noise_reach)


def test_the_class_with_most_votes_of_a_question_stays_it() -> None:
    rng = np.random.default_rng(0)
    for _ in range(200):
        ballots = rng.integers(0, 30, (4, CLASSES))
        drawn = project(ballots, radius=20, scale=10**4)
        for counts, left in zip(ballots, drawn, strict=True):
            assert left[counts.argmax()] == left.max()


@given(scale=st.integers(1, 10**6), squared=st.integers(1, 10**9), entries=st.integers(1, 10**6))
def test_the_bound_is_no_smaller_than_its_square_root_formula(scale: int, squared: int, entries: int) -> None:
    found = squared_distance(squared, radius=10**9, scale=scale, entries=entries)
    assume(found < 2 * 10**18)
    rest = found * scale**2 - scale**2 * squared - entries
    assert rest.denominator == 1
    assert (int(rest) - 1) ** 2 < 4 * scale**2 * squared * entries <= int(rest) ** 2
