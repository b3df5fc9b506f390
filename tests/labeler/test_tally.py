"""Adding up shares: every agent once, what fits a round, digests, and nothing secret in print.

Agents contribute powers of ten, so that double counting shows in the sum. Who may be summed, and what becomes of
duplicate, late and missing shares, is the tallier's machine (tests/labeler/rounds/test_tallier.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from labeler.errors import InvalidSetting, ProtocolViolation
from labeler.randomness import os_source, seeded_source
from labeler.sharing import ShareVector, WinnerTerms, split, unshard
from labeler.tally import (
    AggregateShare,
    BallotShare,
    InputShare,
    QueryBatch,
    Round,
    add_shares,
    misfit_of,
    split_ballots,
)

ROUND = Round(task_digest="a" * 64, batch_digest="b" * 64, num_queries=2, num_classes=3, quorum=3)
TERMS = WinnerTerms(scale=10, lowest=-1000, highest=2000, row_total=5, threshold=None)
WINNER_ROUND = replace(ROUND, terms=TERMS)
TOGETHER_ROUND = replace(ROUND, terms=replace(TERMS, row_total=None))


def shares_of(value: int, *, num_talliers: int = 3) -> tuple[ShareVector, ...]:
    return split(np.full((2, 3), value, dtype=np.int64), num_talliers=num_talliers, source=os_source())


def ballots_apart(agent: int) -> tuple[BallotShare, ...]:
    """Two votes for each of the classes 0 and 1, and noise of minus the agent's number."""
    ballots = np.tile(np.array([2, 2, 0], dtype=np.int64), (2, 1))
    noise = np.full((2, 3), -agent, dtype=np.int64)
    return split_ballots(ballots, noise, row_total=5, num_talliers=3, source=os_source(), field=TERMS.field)


def sums_of(round: Round, shares: Sequence[Sequence[ShareVector | BallotShare]]) -> list[AggregateShare]:
    """What each tallier makes of one sequence of shares per agent."""
    return [
        add_shares(index, round, {f"agent-{agent}": held for agent, held in enumerate(column)})
        for index, column in enumerate(zip(*shares, strict=True))
    ]


@pytest.mark.parametrize("count", [2, 3])
def test_the_sum_counts_every_agent_once(count: int) -> None:
    sums = sums_of(ROUND, [shares_of(10**agent, num_talliers=count) for agent in range(4)])
    assert (unshard([share.words for share in sums]) == 1111).all()
    assert {share.contributors for share in sums} == {frozenset(f"agent-{agent}" for agent in range(4))}
    assert len({share.sharings_digest for share in sums}) == 1


def test_sums_over_shares_of_two_splits_have_different_digests() -> None:
    """A retry with new randomness reached some talliers only: what they summed does not belong together."""
    first, second = shares_of(1000), shares_of(1000)
    one, other = (add_shares(0, ROUND, {"agent-0": shares[0]}) for shares in (first, second))
    assert one.sharings_digest != other.sharings_digest


def test_one_seeded_contributor_marks_the_sum() -> None:
    zeros = np.zeros((2, 3), dtype=np.int64)
    for sources, is_seeded in (([os_source(), seeded_source(1)], True), ([os_source(), os_source()], False)):
        shares = {f"agent-{n}": split(zeros, num_talliers=2, source=one)[0] for n, one in enumerate(sources)}
        assert add_shares(0, ROUND, shares).is_seeded == is_seeded


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
    shown = [repr(InputShare("agent-0", 2, ROUND.digest, share)), repr(add_shares(2, ROUND, {"agent-0": share}))]
    assert not any(word in text or "array" in text for text in shown)


def test_a_winner_round_sums_scaled_ballots_and_noise_in_its_field() -> None:
    sums = sums_of(WINNER_ROUND, [ballots_apart(agent) for agent in range(4)])
    together = unshard([share.words for share in sums], field=TERMS.field)
    assert together.tolist() == [[74, 74, -6]] * 2
    rows = unshard([share.row_sums for share in sums if share.row_sums is not None], field=TERMS.field)
    assert rows.tolist() == [[0, 0]] * 4
    assert len({share.agreement for share in sums}) == 1


def test_agreements_differ_where_anything_differs() -> None:
    share = sums_of(WINNER_ROUND, [ballots_apart(agent) for agent in range(4)])[0]
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
