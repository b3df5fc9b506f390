"""The row check: honest ballots always pass, and a row that is off never does.

A false pass has probability below 2^-43 by the proof in labeler.tally, so no test here can see one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from labeler.errors import InvalidSetting, ProtocolViolation
from labeler.noise import noise_share
from labeler.randomness import os_source, seeded_source
from labeler.release import contribution, input_shares
from labeler.sharing import PrimeField, add_shares, field_for, split, unshard
from labeler.tally import (
    AggregateShare,
    BallotShare,
    InputShare,
    Round,
    check_commitment,
    coefficients,
    combine,
    commitment,
    misshapen,
    refuse_misshapen,
    row_sums,
    split_ballots,
)
from labeler.task import Task
from tests.labeler.tasks import make_task
from tests.one_round import Tallier, agree_on_contributors

CLASSES = ("a", "b", "c")
AGREEMENT = "a" * 64
SMALL, LARGE = field_for(0, 0), field_for(-(2**20), 2**20 - 2)


task_with = partial(make_task, classes=CLASSES, k=5, sigma_votes=10.0, release="winner")


TASK = task_with()
assert TASK.winner_terms is not None
FIELD = TASK.winner_terms.field


def round_of(task: Task, num_queries: int) -> Round:
    return Round(task.digest, "b" * 64, num_queries, task.num_classes, task.quorum, task.winner_terms)


def ballots_of(seed: int, num_queries: int, *, k: int = 5) -> NDArray[np.int64]:
    """Any ballots of at most k votes a row."""
    rng = np.random.default_rng(seed)
    return rng.multinomial(k, np.ones(len(CLASSES) + 1) / (len(CLASSES) + 1), size=num_queries)[:, :-1]


def tallied(shares: Sequence[Sequence[InputShare]], round: Round) -> list[AggregateShare]:
    talliers = [Tallier(index, round) for index in range(3)]
    for sent in shares:
        for tallier, share in zip(talliers, sent, strict=True):
            tallier.receive(share)
    contributors = agree_on_contributors(talliers)
    return [tallier.aggregate_share(contributors) for tallier in talliers]


def checked(aggregates: Sequence[AggregateShare]) -> tuple[str, ...]:
    """The whole check, as three talliers do it."""
    terms, agreement = aggregates[0].round.terms, aggregates[0].agreement
    assert terms is not None
    nonces = [os_source().bytes(32) for _ in aggregates]
    factors = coefficients(nonces, agreement=agreement, num_queries=aggregates[0].round.num_queries, field=terms.field)
    parts = [combine(share.row_sums, factors, terms.field) for share in aggregates if share.row_sums is not None]
    return misshapen(parts, sorted(aggregates[0].contributors), terms.field)


def spoiled(sent: Sequence[InputShare], round: Round, off: NDArray[np.int64]) -> list[InputShare]:
    """The same contribution, but for what a dishonest agent adds to its ballots, "not voted" included."""
    terms = round.terms
    assert terms is not None
    extra = split(off, num_talliers=3, source=os_source(), field=terms.field)
    changed = []
    for share, more in zip(sent, extra, strict=True):
        assert isinstance(share.share, BallotShare)
        words = terms.field.add(share.share.ballots.expand(), more.expand())
        ballots = replace(share.share.ballots, seed=None, words=words)
        changed.append(replace(share, share=BallotShare(ballots, share.share.noise)))
    return changed


def contributions(round: Round, num_queries: int, seeds: Sequence[int], task: Task = TASK) -> list[list[InputShare]]:
    return [
        list(input_shares(ballots_of(seed, num_queries), task, round, agent_id=f"agent-{number}", source=os_source()))
        for number, seed in enumerate(seeds)
    ]


@settings(deadline=None, max_examples=60)
@given(seeds=st.lists(st.integers(0, 2**32), min_size=3, max_size=3), num_queries=st.integers(1, 20))
def test_honest_ballots_always_pass(seeds: list[int], num_queries: int) -> None:
    round = round_of(TASK, num_queries)
    aggregates = tallied(contributions(round, num_queries, seeds), round)
    assert checked(aggregates) == ()
    refuse_misshapen(checked(aggregates))


@settings(deadline=None, max_examples=100)
@given(data=st.data(), num_queries=st.integers(1, 8), cheater=st.integers(0, 2))
def test_any_row_that_is_off_is_caught_and_its_agent_named(data: st.DataObject, num_queries: int, cheater: int) -> None:
    """Also rows that are off by opposite amounts, which a plain sum over the queries would not find."""
    half = FIELD.modulus // 2
    cell = st.integers(-half, half)
    off = np.array(
        data.draw(st.lists(st.lists(cell, min_size=4, max_size=4), min_size=num_queries, max_size=num_queries)),
        dtype=np.int64,
    )
    totals = [sum(row) % FIELD.modulus for row in off.tolist()]
    round = round_of(TASK, num_queries)
    sent = contributions(round, num_queries, [1, 2, 3])
    sent[cheater] = spoiled(sent[cheater], round, off)
    assert checked(tallied(sent, round)) == ((f"agent-{cheater}",) if any(totals) else ())


@settings(deadline=None, max_examples=40)
@given(
    seeds=st.lists(st.integers(0, 2**32), min_size=1, max_size=5),
    num_queries=st.integers(1, 9),
    method=st.sampled_from(["knn", "reverse-knn"]),
)
def test_sums_in_the_field_are_exactly_those_of_the_contributions(
    seeds: list[int], num_queries: int, method: str
) -> None:
    """Shared apart or together, with the same source the sum is S * ballots + noise, to the last unit."""
    task = task_with(method=method, agents=len(seeds))
    round = round_of(task, num_queries)
    sent = [
        input_shares(ballots_of(seed, num_queries), task, round, agent_id=f"agent-{number}", source=seeded_source(seed))
        for number, seed in enumerate(seeds)
    ]
    aggregates = tallied(sent, round)
    assert round.terms is not None
    together = unshard([share.words for share in aggregates], field=round.terms.field)
    alone = [contribution(ballots_of(seed, num_queries), task, source=seeded_source(seed)) for seed in seeds]
    np.testing.assert_array_equal(together, np.sum(alone, axis=0))
    assert together.min() >= round.terms.lowest
    assert together.max() <= round.terms.highest
    assert all((share.row_sums is None) == (method == "reverse-knn") for share in aggregates)


@settings(deadline=None, max_examples=60)
@given(data=st.data(), field=st.sampled_from([SMALL, LARGE]), shape=st.tuples(st.integers(1, 4), st.integers(1, 6)))
def test_combinations_and_row_sums_are_exact(data: st.DataObject, field: PrimeField, shape: tuple[int, int]) -> None:
    residue = st.integers(0, field.modulus - 1) | st.just(field.modulus - 1)
    agents, queries = shape
    sums = np.array(
        data.draw(st.lists(st.lists(residue, min_size=queries, max_size=queries), min_size=agents, max_size=agents)),
        dtype=np.uint64,
    )
    factors = np.array(data.draw(st.lists(residue, min_size=queries, max_size=queries)), dtype=np.uint64)
    expected = [sum(x * r for x, r in zip(row, factors.tolist(), strict=True)) % field.modulus for row in sums.tolist()]
    assert combine(sums, factors, field).tolist() == expected
    assert row_sums(sums, field).tolist() == [sum(row) % field.modulus for row in sums.tolist()]


@given(value=st.integers(0, LARGE.modulus - 1), factor=st.integers(0, 2**64))
def test_a_residue_times_a_number_is_exact(value: int, factor: int) -> None:
    assert LARGE.times(np.array([value], dtype=np.uint64), factor).tolist() == [value * factor % LARGE.modulus]


def test_the_combination_depends_on_every_nonce_and_on_the_agreement() -> None:
    nonces = [bytes([number]) * 32 for number in range(3)]

    def drawn(changed: Sequence[bytes], agreement: str = AGREEMENT) -> list[int]:
        return list(map(int, coefficients(changed, agreement=agreement, num_queries=5, field=FIELD)))

    assert drawn(nonces) == drawn(nonces)
    for place in range(3):
        assert drawn([*nonces[:place], b"x" * 32, *nonces[place + 1 :]]) != drawn(nonces)
    assert drawn(nonces, "b" * 64) != drawn(nonces)
    assert max(drawn(nonces)) < FIELD.modulus


def test_a_nonce_other_than_the_one_committed_to_is_refused() -> None:
    nonce, other = os_source().bytes(32), os_source().bytes(32)
    committed = commitment(nonce, agreement=AGREEMENT, tallier=1)
    check_commitment(committed, nonce, agreement=AGREEMENT, tallier=1)
    for revealed, agreement, tallier in ((other, AGREEMENT, 1), (nonce, AGREEMENT, 2), (nonce, "b" * 64, 1)):
        with pytest.raises(ProtocolViolation, match="another nonce"):
            check_commitment(committed, revealed, agreement=agreement, tallier=tallier)
    with pytest.raises(ProtocolViolation, match="32 bytes"):
        commitment(nonce[:31], agreement=AGREEMENT, tallier=0)
    with pytest.raises(ProtocolViolation, match="32 bytes"):
        coefficients([nonce, b"short"], agreement=AGREEMENT, num_queries=1, field=FIELD)
    with pytest.raises(ProtocolViolation, match="all talliers"):
        coefficients([nonce], agreement=AGREEMENT, num_queries=1, field=FIELD)


def test_sums_that_do_not_belong_together_are_refused() -> None:
    sums, factors = np.zeros((2, 3), dtype=np.uint64), np.zeros(3, dtype=np.uint64)
    with pytest.raises(ProtocolViolation, match="do not go with"):
        combine(sums, factors[:2], FIELD)
    with pytest.raises(ProtocolViolation, match="no residue"):
        combine(sums + np.uint64(FIELD.modulus), factors, FIELD)
    with pytest.raises(ProtocolViolation, match="one number per agent"):
        misshapen([factors, factors[:2]], ["a", "b", "c"], FIELD)
    with pytest.raises(ProtocolViolation, match="one number per agent"):
        misshapen([factors], ["a", "b", "c"], FIELD)


def test_a_replay_is_recognised_and_any_other_share_is_not() -> None:
    ballots, noise = ballots_of(1, 4), noise_share(TASK, seeded_source(9), 4)

    def shares(own: NDArray[np.int64]) -> tuple[BallotShare, ...]:
        return split_ballots(own, noise, row_total=5, num_talliers=3, source=seeded_source(2), field=FIELD)

    first, again, other = shares(ballots), shares(ballots), shares(ballots_of(2, 4))
    assert [one.fingerprint() for one in first] == [one.fingerprint() for one in again]
    assert len({one.sharing_id for one in first}) == 1
    assert first[0].sharing_id != other[0].sharing_id
    assert first[2].fingerprint() != other[2].fingerprint()
    assert "redacted" in repr(first[0])
    assert first[0].is_seeded
    opened = unshard([one.ballots.expand() for one in first], field=FIELD)
    np.testing.assert_array_equal(opened[:, :-1], ballots)
    assert (opened.sum(axis=1) == 5).all()
    assert (add_shares([one.noise.expand() for one in first], field=FIELD) == FIELD.encode(noise)).all()


def test_ballots_and_noise_that_do_not_belong_together_are_refused() -> None:
    noise = np.zeros((2, 3), dtype=np.int64)
    with pytest.raises(InvalidSetting, match="at most 5 votes"):
        split_ballots(noise + 2, noise, row_total=5, num_talliers=3, source=os_source(), field=FIELD)
    with pytest.raises(InvalidSetting, match="one shape"):
        split_ballots(noise, noise[:1], row_total=5, num_talliers=3, source=os_source(), field=FIELD)
    good = split_ballots(noise, noise, row_total=5, num_talliers=3, source=os_source(), field=FIELD)[0]
    with pytest.raises(ProtocolViolation, match="one column more"):
        BallotShare(good.noise, good.noise)
    with pytest.raises(ProtocolViolation, match="one prime field"):
        BallotShare(replace(good.ballots, field=None), replace(good.noise, field=None))
    with pytest.raises(ProtocolViolation, match="ids of their own"):
        BallotShare(replace(good.ballots, sharing_id=good.noise.sharing_id), good.noise)
