"""An agent's contribution: nothing larger than the task allows leaves, and nothing leaves without noise."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray

from labeler.errors import InvalidSetting, PrivacyRefusal, WrongDigest
from labeler.methods.reverse_knn import reverse_knn_ballots
from labeler.methods.sensitivity import most_votes_per_cell, squared_sensitivity
from labeler.noise import DiscreteGaussian, noise_share
from labeler.randomness import os_source, seeded_source
from labeler.release import (
    check_ballots,
    contribution,
    input_shares,
    largest_sum,
    on_grid,
)
from labeler.sharing import ShareVector, unshard
from labeler.tally import Round
from labeler.task import Task
from tests.labeler.tasks import make_task

task_with = partial(make_task, k=5, sigma_votes=10.0, max_queries=4)


KNN = task_with()
ONE_HOT = task_with(method="ensemble", k=1)
REVERSE = task_with(method="reverse-knn", k=2, max_agent_records=10)
REVERSE_UNBOUNDED = task_with(method="reverse-knn", k=2)


def votes(*rows: tuple[int, ...]) -> NDArray[np.int64]:
    return np.array(rows, dtype=np.int64)


@pytest.mark.parametrize(
    ("task", "ballots"),
    [
        (KNN, votes((5, 0, 0), (2, 2, 1), (0, 0, 0))),
        (ONE_HOT, votes((1, 0, 0), (0, 0, 0), (0, 0, 1))),
        (REVERSE, votes((10, 0, 0), (3, 3, 4))),
        (REVERSE_UNBOUNDED, votes((10**6, 10**9, 0))),
    ],
)
def test_ballots_within_the_task_are_accepted(task: Task, ballots: NDArray[np.int64]) -> None:
    check_ballots(ballots, task)


@pytest.mark.parametrize(
    ("task", "ballots"),
    [
        (KNN, votes((6, 0, 0))),
        (KNN, votes((3, 3, 0))),
        (KNN, votes((5, -1, 0))),
        (KNN, votes((5, 0, 0), (0, 0, 2**62))),
        (KNN, votes((2**63 - 1, 2**63 - 1, 2))),
        (KNN, votes((-(2**63), 0, 0))),
        (ONE_HOT, votes((1, 1, 0))),
        (ONE_HOT, votes((2, 0, 0))),
        (REVERSE, votes((11, 0, 0))),
        (REVERSE, votes((4, 4, 4))),
        (REVERSE, votes((10, 0, 0), (10, 0, 0), (1, 0, 0))),
        (REVERSE_UNBOUNDED, votes((0, 0, -1))),
        (REVERSE_UNBOUNDED, votes((2**40, 1, 0))),
    ],
)
def test_ballots_beyond_the_task_never_leave(task: Task, ballots: NDArray[np.int64]) -> None:
    with pytest.raises(PrivacyRefusal, match=r"votes|count"):
        contribution(ballots, task, source=os_source())


@pytest.mark.parametrize(
    "ballots",
    [
        np.zeros((2, 3)),
        np.zeros((2, 3), dtype=np.int32),
        np.zeros((2, 3), dtype=np.uint64),
        np.zeros((2, 4), dtype=np.int64),
        np.zeros(3, dtype=np.int64),
        np.zeros((0, 3), dtype=np.int64),
        np.zeros((5, 3), dtype=np.int64),
    ],
)
def test_ballots_of_another_type_or_shape_are_refused(ballots: NDArray[np.int64]) -> None:
    with pytest.raises(InvalidSetting, match=r"ballots|queries"):
        check_ballots(ballots, KNN)


def test_a_contribution_is_scaled_ballots_plus_the_noise_share() -> None:
    ballots = votes((5, 0, 0), (1, 2, 2))
    values = contribution(ballots, KNN, source=seeded_source(1))
    np.testing.assert_array_equal(values - noise_share(KNN, seeded_source(1), 2), KNN.scale * ballots)
    assert values.dtype == np.int64


def test_an_empty_ballot_gets_noise_like_any_other() -> None:
    empty = contribution(np.zeros((4, 3), dtype=np.int64), KNN, source=seeded_source(2))
    full = contribution(np.full((4, 3), 1, dtype=np.int64), KNN, source=seeded_source(2))
    assert (empty != 0).all()
    np.testing.assert_array_equal(full - empty, KNN.scale)


def test_input_shares_open_to_the_contribution_and_replay_exactly() -> None:
    round = Round(KNN.digest, "b" * 64, 2, 3, KNN.quorum)
    ballots = votes((5, 0, 0), (1, 2, 2))
    first, again = (input_shares(ballots, KNN, round, agent_id="x", source=seeded_source(3)) for _ in range(2))
    assert [share.share.fingerprint() for share in first] == [share.share.fingerprint() for share in again]
    assert [share.tallier for share in first] == [0, 1, 2]
    assert all(share.share.is_seeded for share in first)
    together = unshard([share.share.expand() for share in first if isinstance(share.share, ShareVector)])
    np.testing.assert_array_equal(together, contribution(ballots, KNN, source=seeded_source(3)))


@pytest.mark.parametrize(
    "round",
    [
        Round("c" * 64, "b" * 64, 2, 3, 3),
        Round(KNN.digest, "b" * 64, 2, 4, 3),
        Round(KNN.digest, "b" * 64, 2, 3, 2),
        Round(KNN.digest, "b" * 64, 3, 3, 3),
    ],
)
def test_a_round_of_another_task_gets_nothing(round: Round) -> None:
    with pytest.raises(WrongDigest):
        input_shares(np.zeros((2, 3), dtype=np.int64), KNN, round, agent_id="x", source=os_source())


def test_the_largest_sum_is_that_of_the_largest_contributions() -> None:
    reach = DiscreteGaussian(KNN.share_sigma_grid).reach
    assert largest_sum(KNN, 3) == 3 * (5 * KNN.scale + reach)
    assert [most_votes_per_cell(task) for task in (KNN, ONE_HOT, REVERSE, REVERSE_UNBOUNDED)] == [5, 1, 10, 2**40]


CLIPPED = task_with(method="reverse-knn", k=2, release="winner", agents=100, sigma_votes=3.0)
assert CLIPPED.vote_clip is not None
COUNTS = hnp.arrays(np.int64, (4, 3), elements=st.integers(0, 2 * CLIPPED.vote_clip) | st.integers(0, 2**40 // 3))


@given(one=COUNTS, other=COUNTS)
def test_clipping_never_makes_two_ballots_differ_more(one: NDArray[np.int64], other: NDArray[np.int64]) -> None:
    """Cell by cell, hence in any norm: what the price of a neighboring data set rests on."""
    clipped = on_grid(one, CLIPPED) // CLIPPED.scale
    after = np.abs(on_grid(one, CLIPPED) - on_grid(other, CLIPPED)) // CLIPPED.scale
    assert (after <= np.abs(one - other)).all()
    assert clipped.max() <= (CLIPPED.vote_clip or 0)
    assert (clipped <= one).all()


@given(
    labels=st.lists(st.integers(0, 2), min_size=1, max_size=40),
    nearest=st.data(),
    gone=st.integers(0, 39),
)
def test_a_record_more_or_less_changes_clipped_ballots_by_no_more_than_it_is_charged(
    labels: list[int], nearest: st.DataObject, gone: int
) -> None:
    """Neighbouring data sets, from records to clipped ballots: squared change at most k (no cap on records)."""
    rows = nearest.draw(st.lists(st.permutations(range(4)), min_size=len(labels), max_size=len(labels)))
    places = np.array([row[: CLIPPED.k] for row in rows])
    kept = np.arange(len(labels)) != gone % len(labels)
    tight = CLIPPED.model_copy(update={"agents": 400, "sigma_votes": 2.0})
    assert tight.vote_clip is not None
    assert tight.vote_clip < 12

    def ballots(chosen: NDArray[np.bool_]) -> NDArray[np.int64]:
        counted = reverse_knn_ballots(places[chosen], np.array(labels)[chosen], num_queries=4, num_classes=3)
        return on_grid(counted, tight) // tight.scale

    change = ballots(np.ones(len(labels), dtype=bool)) - ballots(kept)
    assert np.square(change).sum() <= (squared_sensitivity(tight, "instance", 4) or 0)


def test_only_a_winner_of_reverse_knn_is_clipped() -> None:
    full = np.full((1, 3), 5, dtype=np.int64)
    for task in (KNN, ONE_HOT, REVERSE, REVERSE_UNBOUNDED, task_with(release="winner")):
        assert task.vote_clip is None
        assert (on_grid(full, task) == full * task.scale).all()


def test_a_clipped_count_is_cut_before_noise_is_added() -> None:
    ballots = np.full((2, 3), 10**9, dtype=np.int64)
    values = contribution(ballots, CLIPPED, source=seeded_source(1))
    noise = noise_share(CLIPPED, seeded_source(1), 2)
    np.testing.assert_array_equal(values - noise, (CLIPPED.vote_clip or 0) * CLIPPED.scale)


def test_a_round_with_other_terms_than_the_task_gets_nothing() -> None:
    task = task_with(release="winner")
    for terms in (None, task_with(release="winner", abstain_below=1).winner_terms):
        with pytest.raises(WrongDigest, match="other terms"):
            input_shares(
                votes((5, 0, 0)), task, Round(task.digest, "b" * 64, 1, 3, 3, terms), agent_id="x", source=os_source()
            )
