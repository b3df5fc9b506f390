"""The release: what an agent sends, what is opened, and what refuses to be sent or opened.

The statistical test has fixed seeds; it would reject a right release for one seed in a million.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray
from scipy import stats

from labeler.errors import InvalidSetting, PrivacyRefusal, ProtocolViolation, QuorumNotReached, WrongDigest
from labeler.methods.reverse_knn import reverse_knn_ballots
from labeler.methods.sensitivity import squared_sensitivity
from labeler.noise import DiscreteGaussian, noise_share
from labeler.randomness import ByteSource, os_source, seeded_source
from labeler.release import (
    Release,
    agree_on_winners,
    arrays_from_bytes,
    check_ballots,
    contribution,
    input_shares,
    largest_sum,
    on_grid,
    open_histogram,
    open_winner,
)
from labeler.sharing import ShareVector, Winner, split, unshard
from labeler.tally import AggregateShare, BallotShare, InputShare, Round, split_ballots
from labeler.task import Task
from tests.labeler.tasks import make_task
from tests.one_round import tallied

QUERIES = 6


task_with = partial(make_task, k=5, sigma_votes=10.0, max_queries=50000, max_dropouts=1)


def make_round(task: Task, *, batch: str = "b", num_queries: int = QUERIES) -> Round:
    return Round(task.digest, batch * 64, num_queries, task.num_classes, task.quorum, task.winner_terms)


def ballots_of(task: Task, agent: int, num_queries: int = QUERIES) -> NDArray[np.int64]:
    """k votes for class (agent number modulo C) at every query."""
    ballots = np.zeros((num_queries, task.num_classes), dtype=np.int64)
    ballots[:, agent % task.num_classes] = task.k
    return ballots


def aggregate(
    task: Task, *, round: Round | None = None, sources: Sequence[ByteSource] | None = None, agents: int = 3
) -> list[AggregateShare]:
    """Agents of whom each casts k votes for its own class, through sharing and tally."""
    round = round or make_round(task)
    sources = sources or [seeded_source(agent) for agent in range(agents)]
    return tallied(
        round,
        [
            input_shares(
                ballots_of(task, agent, round.num_queries), task, round, agent_id=f"agent-{agent}", source=source
            )
            for agent, source in enumerate(sources)
        ],
    )


def exact_sums(task: Task, agents: int = 3) -> NDArray[np.int64]:
    """What an observer of everything would add up: scaled ballots and noise, without any sharing."""
    parts = [contribution(ballots_of(task, agent), task, source=seeded_source(agent)) for agent in range(agents)]
    total: NDArray[np.int64] = np.add.reduce(parts)
    return total


def aggregate_of(values: NDArray[np.int64], task: Task) -> list[AggregateShare]:
    """Aggregate shares whose sum is exactly `values`: all of it noise of the first agent, zeros for the others."""
    round = make_round(task, num_queries=len(values))
    sent = []
    for agent in range(task.quorum):
        vector = values if agent == 0 else np.zeros_like(values)
        shares: Sequence[ShareVector | BallotShare]
        if round.terms is None:
            shares = split(vector, num_talliers=task.talliers, source=os_source())
        else:
            shares = split_ballots(
                np.zeros_like(values), vector, row_total=task.k, num_talliers=3, source=os_source(),
                field=round.terms.field,
            )  # fmt: skip
        sent.append([InputShare(f"agent-{agent}", at, round.digest, share) for at, share in enumerate(shares)])
    return tallied(round, sent)


@pytest.mark.parametrize(("talliers", "agents"), [(2, 3), (3, 3), (3, 2)])
def test_the_histogram_is_the_exact_sum_over_the_scale(talliers: int, agents: int) -> None:
    """Also where one of three agents, as many as the task allows, is missing."""
    task = task_with(talliers=talliers)
    release = open_histogram(aggregate(task, agents=agents), task)
    sums = exact_sums(task, agents)
    assert release.kind == "histogram"
    assert release.noisy_votes is not None
    assert release.noisy_votes.dtype == np.float64
    np.testing.assert_array_equal(release.noisy_votes, sums / task.scale)
    np.testing.assert_array_equal(release.labels, sums.argmax(axis=1))
    assert release.labels.dtype == np.int16
    assert release.contributors == {f"agent-{agent}" for agent in range(agents)}


@pytest.mark.parametrize("method", ["knn", "reverse-knn"])
def test_the_winner_is_that_of_the_histogram_and_carries_no_votes(method: str) -> None:
    """Modulo 2^64 and in the field, with ballots and noise together or apart: the same sums, so the same winners."""
    histogram, winner = task_with(method=method), task_with(method=method, release="winner")
    release = open_winner(aggregate(winner), winner)
    assert release.kind == "winner"
    assert release.noisy_votes is None
    np.testing.assert_array_equal(release.labels, open_histogram(aggregate(histogram), histogram).labels)


def test_below_the_threshold_a_query_stays_without_an_answer() -> None:
    task = task_with(release="winner", abstain_below=3)
    limit = 3 * task.scale
    values = [[limit, 0, 0], [limit - 1, 0, 0], [0, limit - 1, limit], [-1, -1, -1], [limit - 1] * 3]
    release = open_winner(aggregate_of(np.array(values, dtype=np.int64), task), task)
    assert release.labels.tolist() == [0, -1, 2, -1, -1]


def test_rows_that_do_not_add_up_are_found_before_anything_is_opened() -> None:
    task = task_with(release="winner")
    shares = aggregate(task)
    assert shares[1].row_sums is not None
    rows = shares[1].row_sums.copy()
    rows[1, 2] += np.uint64(1)

    class NeverAsked:
        def winners(self, *_: object) -> NDArray[np.int16]:
            raise AssertionError("a round with a row that is off must not be computed")

    with pytest.raises(ProtocolViolation, match="1 agents do not sum to what their task allows: 'agent-1'"):
        open_winner([shares[0], replace(shares[1], row_sums=rows), shares[2]], task, engine=NeverAsked())
    for missing in (None, rows[:2]):
        with pytest.raises(ProtocolViolation, match="row"):
            open_winner([shares[0], replace(shares[1], row_sums=missing), shares[2]], task)


_PLAIN = {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}


@pytest.mark.parametrize(
    "header",
    [
        {"a": _PLAIN, "b": _PLAIN | {"data_offsets": [8, 24]}},
        {"a": _PLAIN, "b": _PLAIN | {"data_offsets": [48, 64]}},
        {"a": _PLAIN | {"shape": [2**38], "data_offsets": [0, 2**40]}},
        {"a": _PLAIN | {"data_offsets": [16, 0]}},
        {"a": _PLAIN | {"shape": [2**62, 2**62], "data_offsets": [0, 64]}},
        {"a": {"dtype": "F8_E4M3", "shape": [64], "data_offsets": [0, 64]}},
        {"a": {"dtype": "Q9", "shape": [64], "data_offsets": [0, 64]}},
        {"a": _PLAIN, "__metadata__": 5},
        {"a": 5},
        [1],
    ],
)
def test_arrays_that_overlap_or_lie_out_of_their_file_are_refused(header: object) -> None:
    text = json.dumps(header).encode()
    with pytest.raises(ValueError, match="no arrays"):
        arrays_from_bytes(len(text).to_bytes(8, "little") + text + bytes(64))


def test_ties_go_to_the_lowest_class() -> None:
    values = np.array([[7, 7, 7], [-3, 5, 5], [0, -1, 0], [-9, -9, -8]], dtype=np.int64)
    for kind, opening in (("histogram", open_histogram), ("winner", open_winner)):
        task = task_with(release=kind)
        assert opening(aggregate_of(values, task), task).labels.tolist() == [0, 1, 0, 2]


def test_the_winner_is_decided_on_integers() -> None:
    """2^53 + 1 against 2^53: one grid unit that float64 cannot hold."""
    task = task_with(method="reverse-knn", max_agent_records=2**40, k=1, grid_scale=2**13)
    values = np.array([[2**53, 2**53 + 1, 0]], dtype=np.int64)
    assert open_histogram(aggregate_of(values, task), task).labels.tolist() == [1]


def test_the_noise_of_a_release_has_the_promised_standard_deviation() -> None:
    task = task_with(colluding_agents=1)
    release = open_histogram(aggregate(task, round=make_round(task, num_queries=20_000)), task)
    assert release.noisy_votes is not None
    noise = release.noisy_votes - task.k
    limit = stats.norm.isf(5e-7)
    assert abs(noise.mean()) < limit * task.total_sigma_votes / math.sqrt(noise.size)
    assert noise.var() == pytest.approx(task.total_sigma_votes**2, rel=limit * math.sqrt(2 / noise.size))


def test_one_seeded_agent_marks_the_release() -> None:
    task = task_with()
    assert open_histogram(aggregate(task, sources=[os_source(), seeded_source(1), os_source()]), task).is_seeded
    assert not open_histogram(aggregate(task, sources=[os_source() for _ in range(3)]), task).is_seeded
    winner = task_with(release="winner")
    assert open_winner(aggregate(winner), winner).is_seeded


def test_only_the_release_agreed_to_is_opened() -> None:
    histogram, winner = task_with(), task_with(release="winner")
    with pytest.raises(PrivacyRefusal, match="not agreed"):
        open_winner(aggregate(histogram), histogram)
    with pytest.raises(PrivacyRefusal, match="not agreed"):
        open_histogram(aggregate(winner), winner)


@pytest.mark.parametrize("kind", ["histogram", "winner"])
def test_talliers_that_summed_other_agents_are_not_combined(kind: str) -> None:
    """Each sum is valid by itself; over different agents they must never be put together."""
    task = task_with(release=kind)
    opening = open_histogram if kind == "histogram" else open_winner
    everybody, fewer = aggregate(task), aggregate(task, agents=2)
    with pytest.raises(ProtocolViolation, match="different agents"):
        opening([*everybody[:2], fewer[2]], task)


def test_sums_of_different_splits_are_not_combined() -> None:
    task = task_with()
    first = aggregate(task, sources=[os_source() for _ in range(3)])
    second = aggregate(task, sources=[os_source() for _ in range(3)])
    with pytest.raises(ProtocolViolation, match="different splits"):
        open_histogram([first[0], first[1], second[2]], task)


def test_a_missing_or_repeated_tallier_is_refused() -> None:
    task = task_with()
    shares = aggregate(task)
    for wrong in ([], shares[:2], [*shares, shares[0]], [shares[0], shares[0], shares[1]]):
        with pytest.raises(ProtocolViolation, match="all 3 talliers"):
            open_histogram(wrong, task)


def test_a_sum_of_another_round_or_task_is_refused() -> None:
    task = task_with()
    shares = aggregate(task)
    other_batch = aggregate(task, round=make_round(task, batch="c"))
    with pytest.raises(WrongDigest, match="different rounds"):
        open_histogram([*shares[:2], other_batch[2]], task)
    with pytest.raises(WrongDigest, match="the round is of task"):
        open_histogram(shares, task_with(nonce="other"))
    weaker = replace(shares[0].round, quorum=1)
    with pytest.raises(WrongDigest, match="quorum 1"):
        open_histogram([replace(share, round=weaker) for share in shares], task)


def test_too_few_or_too_many_contributors_are_refused() -> None:
    task = task_with()
    shares = aggregate(task)
    with pytest.raises(QuorumNotReached):
        open_histogram([replace(share, contributors=frozenset({"agent-0"})) for share in shares], task)
    with pytest.raises(ProtocolViolation, match="the task has 3"):
        open_histogram(aggregate(task, agents=4), task)


@pytest.mark.parametrize("kind", ["histogram", "winner"])
def test_a_damaged_share_voids_the_round(kind: str) -> None:
    task = task_with(release=kind)
    opening = open_histogram if kind == "histogram" else open_winner
    shares = aggregate(task)
    terms = task.winner_terms
    if terms is None:
        flipped = shares[1].words ^ np.uint64(1 << 62)
    else:
        flipped = terms.field.add(shares[1].words, np.full_like(shares[1].words, 1 << 40))
    with pytest.raises(ProtocolViolation, match="void"):
        opening([shares[0], replace(shares[1], words=flipped), shares[2]], task)
    with pytest.raises(ProtocolViolation, match="shape"):
        opening([shares[0], replace(shares[1], words=flipped[:2]), shares[2]], task)


def answers(task: Task) -> tuple[Round, list[Winner]]:
    """What three talliers answer to one round: all the same."""
    shares = aggregate(task)
    labels = open_winner(shares, task).labels
    assert len({share.agreement for share in shares}) == 1
    return shares[0].round, [share.winner(labels) for share in shares]


def test_three_equal_answers_make_the_release() -> None:
    task = task_with(release="winner")
    round, winners = answers(task)
    release = agree_on_winners(winners[::-1], round, task)
    np.testing.assert_array_equal(release.labels, open_winner(aggregate(task), task).labels)
    assert (release.kind, release.noisy_votes, release.is_seeded) == ("winner", None, True)
    assert release.contributors == {"agent-0", "agent-1", "agent-2"}


def test_an_answer_that_differs_voids_the_round_and_says_whose_it_is() -> None:
    task = task_with(release="winner")
    round, winners = answers(task)
    flipped = (winners[1].labels + 1) % 3
    for change in (
        {"labels": flipped.astype(np.int16)},
        {"contributors": frozenset({"agent-0", "agent-1"})},
        {"sharings_digest": "d" * 64},
    ):
        odd = replace(winners[1], **change)
        with pytest.raises(
            ProtocolViolation, match="tallier 1 answered differently from the others; the round is void"
        ):
            agree_on_winners([winners[0], odd, winners[2]], round, task)
    all_different = [replace(one, sharings_digest=digit * 64) for one, digit in zip(winners, "abc", strict=True)]
    with pytest.raises(ProtocolViolation, match="no two talliers agree"):
        agree_on_winners(all_different, round, task)


def test_answers_of_another_round_or_of_too_few_talliers_are_refused() -> None:
    task = task_with(release="winner")
    round, winners = answers(task)
    for wrong in ([], winners[:2], [winners[0], winners[0], winners[2]]):
        with pytest.raises(ProtocolViolation, match="all 3 talliers"):
            agree_on_winners(wrong, round, task)
    with pytest.raises(WrongDigest, match="another round"):
        agree_on_winners([replace(one, round_digest="e" * 64) for one in winners], round, task)
    with pytest.raises(WrongDigest):
        agree_on_winners(winners, round, task_with(release="winner", nonce="other"))
    with pytest.raises(QuorumNotReached):
        agree_on_winners([replace(one, contributors=frozenset({"agent-0"})) for one in winners], round, task)
    with pytest.raises(PrivacyRefusal, match="not agreed"):
        agree_on_winners(winners, round, task_with())
    for labels in ([3] * QUERIES, [-1] * QUERIES, [0] * (QUERIES - 1)):
        nonsense = [replace(one, labels=np.array(labels, dtype=np.int16)) for one in winners]
        with pytest.raises(ProtocolViolation, match="one class of the task per query"):
            agree_on_winners(nonsense, round, task)


def test_a_winner_release_cannot_carry_votes() -> None:
    labels = np.zeros(1, dtype=np.int16)
    with pytest.raises(PrivacyRefusal, match="winner release none"):
        Release("winner", labels, np.zeros((1, 3)), frozenset(), False)
    with pytest.raises(PrivacyRefusal, match="carries noisy votes"):
        Release("histogram", labels, None, frozenset(), False)


# A contribution: nothing larger than the task allows leaves, and nothing leaves without noise.


asked = partial(make_task, k=5, sigma_votes=10.0, max_queries=4)


KNN = asked()
ONE_HOT = asked(method="ensemble", k=1)
REVERSE = asked(method="reverse-knn", k=2, max_agent_records=10)
REVERSE_UNBOUNDED = asked(method="reverse-knn", k=2)


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


CLIPPED = asked(method="reverse-knn", k=2, release="winner", agents=100, sigma_votes=3.0)
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
    for task in (KNN, ONE_HOT, REVERSE, REVERSE_UNBOUNDED, asked(release="winner")):
        assert task.vote_clip is None
        assert (on_grid(full, task) == full * task.scale).all()


def test_a_clipped_count_is_cut_before_noise_is_added() -> None:
    ballots = np.full((2, 3), 10**9, dtype=np.int64)
    values = contribution(ballots, CLIPPED, source=seeded_source(1))
    noise = noise_share(CLIPPED, seeded_source(1), 2)
    np.testing.assert_array_equal(values - noise, (CLIPPED.vote_clip or 0) * CLIPPED.scale)


def test_a_round_with_other_terms_than_the_task_gets_nothing() -> None:
    task = asked(release="winner")
    for terms in (None, asked(release="winner", abstain_below=1).winner_terms):
        with pytest.raises(WrongDigest, match="other terms"):
            input_shares(
                votes((5, 0, 0)), task, Round(task.digest, "b" * 64, 1, 3, 3, terms), agent_id="x", source=os_source()
            )
