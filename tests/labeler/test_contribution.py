"""An agent's contribution: nothing larger than the task allows leaves, and nothing leaves without noise."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from labeler.contribution import check_ballots, contribution, input_shares, largest_sum, most_votes_per_cell
from labeler.errors import InvalidSetting, PrivacyRefusal, WrongDigest
from labeler.noise import DiscreteGaussian, noise_share
from labeler.randomness import os_source, seeded_source
from labeler.sharing import unshard
from labeler.tally import Round
from labeler.task import Task


def make_task(**changes: object) -> Task:
    fields: dict[str, object] = {
        "name": "t", "classes": ("a", "b", "c"), "k": 5, "sigma_votes": 10.0, "delta": 1e-4, "max_queries": 4,
        "agents": 3,
    }  # fmt: skip
    return Task.model_validate(fields | changes)


KNN = make_task()
ONE_HOT = make_task(method="one-hot", k=1)
REVERSE = make_task(method="reverse-knn", k=2, max_agent_records=10)
REVERSE_UNBOUNDED = make_task(method="reverse-knn", k=2)


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


def test_a_refusal_does_not_repeat_the_votes() -> None:
    with pytest.raises(PrivacyRefusal) as refusal:
        check_ballots(votes((987_654, 0, 0)), KNN)
    assert "987" not in str(refusal.value)


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
    together = unshard([share.share.expand() for share in first])
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
