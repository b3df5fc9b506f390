"""What the talliers check: what fits a round, digests, the row check, and nothing secret in print.

Honest ballots always pass the row check, and a row that is off never does: a false pass has probability below 2^-43 by
the proof in labeler.tally, so no test here can see one. Who may be summed, and what becomes of duplicate, late and
missing shares, is the tallier's machine (tests/labeler/rounds/test_tallier.py).
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
from labeler.sharing import PrimeField, ShareVector, WinnerTerms, add_shares, field_for, split, unshard
from labeler.tally import (
    AggregateShare,
    BallotShare,
    InputShare,
    QueryBatch,
    Round,
    check_commitment,
    coefficients,
    combine,
    commitment,
    misfit_of,
    misshapen,
    refuse_misshapen,
    row_sums,
    split_ballots,
)
from labeler.tally import add_shares as add_up
from labeler.task import Task
from tests.labeler.tasks import make_task
from tests.one_round import tallied

ROUND = Round(task_digest="a" * 64, batch_digest="b" * 64, num_queries=2, num_classes=3, quorum=3)
TERMS = WinnerTerms(scale=10, lowest=-1000, highest=2000, row_total=5, threshold=None)
WINNER_ROUND = replace(ROUND, terms=TERMS)
TOGETHER_ROUND = replace(ROUND, terms=replace(TERMS, row_total=None))


def shares_of(value: int) -> tuple[ShareVector, ...]:
    return split(np.full((2, 3), value, dtype=np.int64), num_talliers=3, source=os_source())


def ballots_apart(agent: int) -> tuple[BallotShare, ...]:
    """Two votes for each of the classes 0 and 1, and noise of minus the agent's number."""
    ballots = np.tile(np.array([2, 2, 0], dtype=np.int64), (2, 1))
    noise = np.full((2, 3), -agent, dtype=np.int64)
    return split_ballots(ballots, noise, row_total=5, num_talliers=3, source=os_source(), field=TERMS.field)


def test_a_round_is_an_immutable_value_with_a_digest_of_every_field() -> None:
    assert replace(ROUND).digest == ROUND.digest
    swapped, shifted = Round("b" * 64, "a" * 64, 2, 3, 3), Round("a" * 64, "b" * 64, 3, 2, 3)
    others = [replace(ROUND, task_digest="c" * 64), replace(ROUND, batch_digest="c" * 64), replace(ROUND, quorum=2)]
    assert len({one.digest for one in (ROUND, swapped, shifted, *others)}) == 6


@pytest.mark.parametrize(
    "changes", [{"task_digest": "x"}, {"batch_digest": "A" * 64}, {"num_queries": 0}, {"num_classes": 0}, {"quorum": 0}]
)
def test_a_malformed_round_is_refused(changes: dict[str, object]) -> None:
    with pytest.raises(ProtocolViolation, match=next(iter(changes))):
        replace(ROUND, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize("agent_id", ["", "x" * 201])
def test_an_agent_without_a_sensible_name_is_refused(agent_id: str) -> None:
    with pytest.raises(ProtocolViolation, match="characters"):
        InputShare(agent_id, 0, ROUND.digest, shares_of(1)[0])


def test_nothing_of_a_share_or_a_sum_prints() -> None:
    share = shares_of(123_456)[2]
    word = str(int(share.expand()[0, 0]))
    shown = [repr(InputShare("agent-0", 2, ROUND.digest, share)), repr(add_up(2, ROUND, {"agent-0": share}))]
    assert not any(word in text or "array" in text for text in shown)


def test_agreements_differ_where_anything_differs() -> None:
    share = add_up(0, WINNER_ROUND, {f"agent-{agent}": ballots_apart(agent)[0] for agent in range(4)})
    others = [
        replace(share, contributors=frozenset({"other", *sorted(share.contributors)[1:]})),
        replace(share, sharings_digest="f" * 64),
        replace(share, round=replace(WINNER_ROUND, terms=replace(TERMS, threshold=1))),
        replace(share, round=replace(WINNER_ROUND, batch_digest="d" * 64)),
    ]
    assert len({other.agreement for other in [share, *others]}) == 5
    assert replace(share, tallier=1).agreement == share.agreement


def test_a_share_of_another_shape_kind_or_field_does_not_fit() -> None:
    values = np.ones((2, 3), dtype=np.int64)
    other = WinnerTerms(scale=10, lowest=-1000, highest=2_000_000, row_total=None, threshold=None)
    in_field, in_other, plain = (
        split(values, num_talliers=3, source=os_source(), field=field)[0] for field in (TERMS.field, other.field, None)
    )
    apart, wide = ballots_apart(1)[0], split(np.zeros((2, 4), np.int64), num_talliers=3, source=os_source())[0]
    wrong = [
        (ROUND, in_field, "modulo 2"), (ROUND, apart, "modulo 2"), (WINNER_ROUND, plain, "modulo 2"),
        (WINNER_ROUND, in_field, "apart"), (TOGETHER_ROUND, in_other, "modulo 2"), (TOGETHER_ROUND, apart, "apart"),
        (ROUND, wide, "shape"),
    ]  # fmt: skip
    for round, share, said in wrong:
        assert said in misfit_of(share, round)
    for round, share in ((ROUND, plain), (WINNER_ROUND, apart), (TOGETHER_ROUND, in_field)):
        assert misfit_of(share, round) == ""


FEATURES = np.arange(12, dtype=np.int16).reshape(3, 4)


def test_equal_batches_have_equal_digests_whatever_their_memory_layout() -> None:
    assert QueryBatch(FEATURES).digest == QueryBatch(np.asfortranarray(FEATURES)).digest


def test_bytes_shape_and_place_all_count() -> None:
    changed = FEATURES.copy()
    changed[0, 0] += 1
    batches = [
        QueryBatch(FEATURES),
        QueryBatch(changed),
        QueryBatch(FEATURES.reshape(4, 3)),
        QueryBatch(FEATURES, first_query=3),
    ]
    assert len({batch.digest for batch in batches}) == 4


def test_a_batch_cannot_be_changed_under_its_digest() -> None:
    features = FEATURES.copy()
    batch = QueryBatch(features)
    features[0, 0] += 1
    assert batch.features[0, 0] == FEATURES[0, 0]
    with pytest.raises(ValueError, match="read-only"):
        batch.features[0, 0] = 1


@pytest.mark.parametrize("features", [FEATURES.astype(np.float32), FEATURES[:0], FEATURES[0]])
def test_what_is_no_batch_of_quantised_features_is_refused(features: np.ndarray) -> None:
    with pytest.raises(InvalidSetting, match="int16 array"):
        QueryBatch(features)


# The row check.

CLASSES = ("a", "b", "c")
AGREEMENT = "a" * 64
SMALL, LARGE = field_for(0, 0), field_for(-(2**20), 2**20 - 2)


task_with = partial(make_task, classes=CLASSES, k=5, sigma_votes=10.0, release="winner")


TASK = task_with()
assert TASK.winner_terms is not None
FIELD = TASK.winner_terms.field


def _round_of(task: Task, num_queries: int) -> Round:
    return Round(task.digest, "b" * 64, num_queries, task.num_classes, task.quorum, task.winner_terms)


def ballots_of(seed: int, num_queries: int, *, k: int = 5) -> NDArray[np.int64]:
    """Any ballots of at most k votes a row."""
    rng = np.random.default_rng(seed)
    return rng.multinomial(k, np.ones(len(CLASSES) + 1) / (len(CLASSES) + 1), size=num_queries)[:, :-1]


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


@settings(max_examples=60)
@given(seeds=st.lists(st.integers(0, 2**32), min_size=3, max_size=3), num_queries=st.integers(1, 20))
def test_honest_ballots_always_pass(seeds: list[int], num_queries: int) -> None:
    round = _round_of(TASK, num_queries)
    aggregates = tallied(round, contributions(round, num_queries, seeds))
    assert checked(aggregates) == ()
    refuse_misshapen(checked(aggregates))


@settings(max_examples=100)
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
    round = _round_of(TASK, num_queries)
    sent = contributions(round, num_queries, [1, 2, 3])
    sent[cheater] = spoiled(sent[cheater], round, off)
    assert checked(tallied(round, sent)) == ((f"agent-{cheater}",) if any(totals) else ())


@settings(max_examples=40)
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
    round = _round_of(task, num_queries)
    sent = [
        input_shares(ballots_of(seed, num_queries), task, round, agent_id=f"agent-{number}", source=seeded_source(seed))
        for number, seed in enumerate(seeds)
    ]
    aggregates = tallied(round, sent)
    assert round.terms is not None
    together = unshard([share.words for share in aggregates], field=round.terms.field)
    alone = [contribution(ballots_of(seed, num_queries), task, source=seeded_source(seed)) for seed in seeds]
    np.testing.assert_array_equal(together, np.sum(alone, axis=0))
    assert together.min() >= round.terms.lowest
    assert together.max() <= round.terms.highest
    assert all((share.row_sums is None) == (method == "reverse-knn") for share in aggregates)


@settings(max_examples=60)
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
