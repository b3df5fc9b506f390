"""The tally among parties that misbehave. Agents contribute powers of ten, so that double counting shows in the sum."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from labeler.errors import (
    DuplicateAgent,
    InvalidSetting,
    LateShare,
    PrivacyRefusal,
    ProtocolViolation,
    QuorumNotReached,
    WrongDigest,
)
from labeler.randomness import os_source, seeded_source
from labeler.sharing import ShareVector, WinnerTerms, split, unshard
from labeler.tally import AggregateShare, InputShare, Round, split_ballots
from tests.one_round import Tallier, agree_on_contributors

ROUND = Round(task_digest="a" * 64, batch_digest="b" * 64, num_queries=2, num_classes=3, quorum=3)


def send(agent: int | str, value: int, *, round: Round = ROUND, num_talliers: int = 3) -> list[InputShare]:
    """One agent's shares of a vector full of `value`."""
    values = np.full((round.num_queries, round.num_classes), value, dtype=np.int64)
    shares = split(values, num_talliers=num_talliers, source=os_source())
    return [InputShare(f"agent-{agent}", tallier, round.digest, share) for tallier, share in enumerate(shares)]


def make_talliers(count: int = 3, *, agents: int = 4, round: Round = ROUND) -> list[Tallier]:
    """Talliers that have received 10^i from agent i."""
    talliers = [Tallier(index, round) for index in range(count)]
    for agent in range(agents):
        deliver(talliers, send(agent, 10**agent, round=round, num_talliers=count))
    return talliers


def deliver(talliers: list[Tallier], shares: list[InputShare]) -> None:
    for tallier, share in zip(talliers, shares, strict=True):
        tallier.receive(share)


def opened(talliers: list[Tallier], contributors: frozenset[str]) -> int:
    sums = unshard([tallier.aggregate_share(contributors).words for tallier in talliers])
    assert (sums == sums[0, 0]).all()
    return int(sums[0, 0])


@pytest.mark.parametrize("count", [2, 3])
def test_the_sum_counts_every_agent_once(count: int) -> None:
    talliers = make_talliers(count)
    contributors = agree_on_contributors(talliers)
    assert contributors == {f"agent-{agent}" for agent in range(4)}
    assert opened(talliers, contributors) == 1111


def test_the_same_share_again_is_counted_once() -> None:
    talliers = make_talliers(agents=3)
    shares = send(3, 1000)
    for _ in range(3):
        deliver(talliers, shares)
    assert opened(talliers, agree_on_contributors(talliers)) == 1111


def test_the_same_share_again_after_the_sum_changes_nothing() -> None:
    talliers = make_talliers(agents=3)
    shares = send(3, 1000)
    deliver(talliers, shares)
    contributors = agree_on_contributors(talliers)
    assert opened(talliers, contributors) == 1111
    deliver(talliers, shares)
    assert agree_on_contributors(talliers) == contributors
    assert opened(talliers, contributors) == 1111


def test_an_agent_with_two_different_shares_is_excluded_everywhere() -> None:
    talliers = make_talliers()
    with pytest.raises(DuplicateAgent, match="agent-1"):
        talliers[0].receive(send(1, 10)[0])
    contributors = agree_on_contributors(talliers)
    assert contributors == {"agent-0", "agent-2", "agent-3"}
    assert opened(talliers, contributors) == 1101


def test_an_excluded_agent_stays_out_even_with_its_first_share() -> None:
    talliers = make_talliers(agents=3)
    first, second = send(3, 1000), send(3, 1000)
    deliver(talliers, first)
    for share in (second[1], first[1], second[1]):
        with pytest.raises(DuplicateAgent):
            talliers[1].receive(share)
    assert "agent-3" not in talliers[1].contributors
    assert opened(talliers, agree_on_contributors(talliers)) == 111


def test_a_different_share_after_the_sum_is_refused_and_the_sum_stays() -> None:
    talliers = make_talliers()
    contributors = agree_on_contributors(talliers)
    assert opened(talliers, contributors) == 1111
    with pytest.raises(DuplicateAgent):
        talliers[0].receive(send(1, 5)[0])
    assert opened(talliers, contributors) == 1111


def test_shares_of_two_splits_are_never_mixed() -> None:
    """A retry with new randomness reached some talliers only: each holds one share, and they do not belong together."""
    talliers = make_talliers(agents=3)
    first, second = send(3, 1000), send(3, 1000)
    deliver(talliers, [first[0], second[1], second[2]])
    contributors = agree_on_contributors(talliers)
    assert contributors == {"agent-0", "agent-1", "agent-2"}
    assert opened(talliers, contributors) == 111


def test_an_agent_missing_at_one_tallier_counts_at_none() -> None:
    talliers = make_talliers(agents=3)
    shares = send(3, 1000)
    talliers[0].receive(shares[0])
    talliers[2].receive(shares[2])
    contributors = agree_on_contributors(talliers)
    assert "agent-3" not in contributors
    assert opened(talliers, contributors) == 111


def test_a_late_agent_is_refused_and_not_counted() -> None:
    talliers = make_talliers(agents=3)
    contributors = agree_on_contributors(talliers)
    assert opened(talliers, contributors) == 111
    for tallier, share in zip(talliers, send(3, 1000), strict=True):
        with pytest.raises(LateShare, match="after the sum"):
            tallier.receive(share)
    assert opened(talliers, agree_on_contributors(talliers)) == 111


def test_an_agent_in_time_at_one_tallier_and_late_at_another_changes_no_sum() -> None:
    talliers = make_talliers(agents=3)
    contributors = agree_on_contributors(talliers)
    talliers[0].aggregate_share(contributors)
    shares = send(3, 1000)
    talliers[1].receive(shares[1])
    talliers[2].receive(shares[2])
    assert agree_on_contributors(talliers) == contributors
    assert opened(talliers, contributors) == 111


def test_agreeing_again_after_one_tallier_has_summed_finds_the_same_agents() -> None:
    """An agent's last share arrives after the first tallier has summed without that agent."""
    talliers = make_talliers(agents=3)
    shares = send(3, 1000)
    deliver(talliers[::2], shares[::2])
    contributors = agree_on_contributors(talliers)
    talliers[0].aggregate_share(contributors)
    talliers[1].receive(shares[1])
    assert agree_on_contributors(talliers) == contributors
    assert opened(talliers, contributors) == 111


def test_below_the_quorum_nothing_is_opened() -> None:
    talliers = make_talliers(agents=2)
    with pytest.raises(QuorumNotReached, match="quorum is 3"):
        agree_on_contributors(talliers)
    with pytest.raises(QuorumNotReached):
        talliers[0].aggregate_share({"agent-0", "agent-1"})
    deliver(talliers, send(2, 100))
    assert opened(talliers, agree_on_contributors(talliers)) == 111


def test_a_quorum_is_counted_over_agents_common_to_all_talliers() -> None:
    talliers = make_talliers(agents=2)
    talliers[0].receive(send(2, 100)[0])
    talliers[1].receive(send(3, 100)[1])
    talliers[2].receive(send(4, 100)[2])
    with pytest.raises(QuorumNotReached, match="2 agents"):
        agree_on_contributors(talliers)


def test_a_tallier_refuses_to_sum_an_agent_it_does_not_hold() -> None:
    talliers = make_talliers()
    with pytest.raises(ProtocolViolation, match="stranger"):
        talliers[0].aggregate_share({*talliers[0].contributors, "stranger"})
    assert opened(talliers, agree_on_contributors(talliers)) == 1111


def test_a_second_set_of_contributors_is_refused_for_ever() -> None:
    """The difference of two sums would be one agent's contribution in clear."""
    talliers = make_talliers()
    everybody = agree_on_contributors(talliers)
    assert opened(talliers, everybody) == 1111
    for fewer in (everybody - {"agent-3"}, everybody | {"agent-4"}, frozenset()):
        with pytest.raises(PrivacyRefusal, match="second is refused"):
            talliers[1].aggregate_share(fewer)
    assert opened(talliers, everybody) == 1111


def test_a_refused_request_does_not_close_the_round() -> None:
    talliers = make_talliers(agents=3)
    with pytest.raises(QuorumNotReached):
        talliers[0].aggregate_share(["agent-0"])
    with pytest.raises(ProtocolViolation):
        talliers[0].aggregate_share(["agent-0", "agent-1", "agent-9"])
    deliver(talliers, send(3, 1000))
    assert opened(talliers, agree_on_contributors(talliers)) == 1111


def test_the_same_request_again_gives_the_same_sum() -> None:
    tallier = make_talliers()[2]
    first = tallier.aggregate_share(tallier.contributors)
    assert tallier.aggregate_share(sorted(tallier.contributors)) is first


@pytest.mark.parametrize(
    "changes",
    [
        {"task_digest": "c" * 64},
        {"batch_digest": "c" * 64},
        {"num_queries": 3},
        {"num_classes": 2},
        {"quorum": 2},
    ],
)
def test_a_share_of_another_round_is_refused(changes: dict[str, object]) -> None:
    other = replace(ROUND, **changes)  # type: ignore[arg-type]
    assert other.digest != ROUND.digest
    tallier = Tallier(0, ROUND)
    with pytest.raises(WrongDigest, match="belongs to round"):
        tallier.receive(send(0, 1, round=other)[0])
    assert tallier.contributors == frozenset()


def test_a_share_for_another_tallier_is_refused() -> None:
    tallier = Tallier(0, ROUND)
    with pytest.raises(ProtocolViolation, match="for tallier 1 reached tallier 0"):
        tallier.receive(send(0, 1)[1])


def test_a_share_of_another_shape_is_refused() -> None:
    share = split(np.zeros((2, 4), dtype=np.int64), num_talliers=3, source=os_source())[0]
    with pytest.raises(ProtocolViolation, match="shape"):
        Tallier(0, ROUND).receive(InputShare("agent-0", 0, ROUND.digest, share))


@pytest.mark.parametrize("agent_id", ["", "x" * 201])
def test_an_agent_without_a_sensible_name_is_refused(agent_id: str) -> None:
    share = send(0, 1)[0].share
    with pytest.raises(ProtocolViolation, match="characters"):
        InputShare(agent_id, 0, ROUND.digest, share)


def test_agreement_needs_all_talliers_of_one_round_each_once() -> None:
    talliers = make_talliers()
    for wrong in ([], talliers[:1], talliers[1:], [talliers[0], talliers[0], talliers[1]]):
        with pytest.raises(ProtocolViolation, match="each once"):
            agree_on_contributors(wrong)
    with pytest.raises(WrongDigest):
        agree_on_contributors([*talliers[:2], Tallier(2, replace(ROUND, quorum=1))])
    assert agree_on_contributors(talliers[::-1]) == agree_on_contributors(talliers)


def test_one_seeded_contributor_marks_the_sum() -> None:
    tallier = Tallier(0, ROUND)
    for agent, source in enumerate((os_source(), seeded_source(1), os_source())):
        share = split(np.zeros((2, 3), dtype=np.int64), num_talliers=2, source=source)[0]
        tallier.receive(InputShare(f"agent-{agent}", 0, ROUND.digest, share))
    assert tallier.aggregate_share(tallier.contributors).is_seeded
    honest = make_talliers()[0]
    assert not honest.aggregate_share(honest.contributors).is_seeded


def test_a_round_is_an_immutable_value_with_a_digest_of_every_field() -> None:
    assert replace(ROUND).digest == ROUND.digest
    swapped = Round("b" * 64, "a" * 64, 2, 3, 3)
    shifted = Round("a" * 64, "b" * 64, 3, 2, 3)
    assert len({ROUND.digest, swapped.digest, shifted.digest}) == 3


@pytest.mark.parametrize(
    "changes", [{"task_digest": "x"}, {"batch_digest": "A" * 64}, {"num_queries": 0}, {"num_classes": 0}, {"quorum": 0}]
)
def test_a_malformed_round_is_refused(changes: dict[str, object]) -> None:
    with pytest.raises(ProtocolViolation, match=next(iter(changes))):
        replace(ROUND, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize("index", [-1, 3])
def test_a_tallier_has_an_index_from_0_to_2(index: int) -> None:
    with pytest.raises(InvalidSetting, match="index"):
        Tallier(index, ROUND)


def test_nothing_a_tallier_holds_prints() -> None:
    tallier = Tallier(2, ROUND)
    share = send(0, 123_456)[2]
    assert isinstance(share.share, ShareVector)
    word = str(int(share.share.expand()[0, 0]))
    tallier.receive(share)
    aggregate = Tallier(0, replace(ROUND, quorum=1))
    aggregate.receive(send(0, 1, round=aggregate.round)[0])
    shown = [repr(tallier), repr(share), repr(aggregate.aggregate_share({"agent-0"}))]
    assert not any(word in text or "array" in text for text in shown)
    assert isinstance(aggregate.aggregate_share({"agent-0"}), AggregateShare)


@settings(deadline=None, max_examples=60)
@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 2), st.booleans()), max_size=60))
def test_whatever_order_messages_come_in_an_agent_counts_once_or_not_at_all(
    messages: list[tuple[int, int, bool]],
) -> None:
    """Five agents, each with a true and a second split of its power of ten; any delivery, any repetition."""
    round = replace(ROUND, quorum=1)
    splits = {(agent, second): send(agent, 10**agent, round=round) for agent in range(5) for second in (False, True)}
    talliers = [Tallier(index, round) for index in range(3)]
    received: dict[tuple[int, int], set[bool]] = {}
    for agent, tallier, second in messages:
        received.setdefault((agent, tallier), set()).add(second)
        if len(received[agent, tallier]) == 2:
            with pytest.raises(DuplicateAgent):
                talliers[tallier].receive(splits[agent, second][tallier])
        else:
            talliers[tallier].receive(splits[agent, second][tallier])
    complete = [
        agent
        for agent in range(5)
        if [received.get((agent, tallier)) for tallier in range(3)] in ([{False}] * 3, [{True}] * 3)
    ]
    if not complete:
        with pytest.raises(QuorumNotReached):
            agree_on_contributors(talliers)
        return
    contributors = agree_on_contributors(talliers)
    assert contributors == {f"agent-{agent}" for agent in complete}
    assert opened(talliers, contributors) == sum(10**agent for agent in complete)


def answer(tallier: Tallier, share: InputShare) -> str:
    try:
        tallier.receive(share)
    except ProtocolViolation as error:
        return type(error).__name__
    return "taken"


def test_after_the_sum_a_late_share_is_late_and_a_retry_is_none() -> None:
    tallier = Tallier(0, ROUND)
    shares = [send(agent, 10**agent)[0] for agent in range(4)]
    for share in shares[:3]:
        tallier.receive(share)
    tallier.aggregate_share(tallier.contributors)
    assert [answer(tallier, share) for share in shares] == ["taken", "taken", "taken", "LateShare"]
    assert answer(tallier, send(1, 10)[0]) == "DuplicateAgent"


TERMS = WinnerTerms(scale=10, lowest=-1000, highest=2000, row_total=5, threshold=None)
WINNER_ROUND = replace(ROUND, terms=TERMS)
TOGETHER_ROUND = replace(ROUND, terms=replace(TERMS, row_total=None))


def send_apart(agent: int) -> list[InputShare]:
    """Two votes for each of the classes 0 and 1, and noise of minus the agent's number."""
    ballots = np.tile(np.array([2, 2, 0], dtype=np.int64), (2, 1))
    noise = np.full((2, 3), -agent, dtype=np.int64)
    shares = split_ballots(ballots, noise, row_total=5, num_talliers=3, source=os_source(), field=TERMS.field)
    return [InputShare(f"agent-{agent}", index, WINNER_ROUND.digest, share) for index, share in enumerate(shares)]


def test_a_winner_round_sums_scaled_ballots_and_noise_in_its_field() -> None:
    talliers = [Tallier(index, WINNER_ROUND) for index in range(3)]
    for agent in range(4):
        deliver(talliers, send_apart(agent))
    sums = [tallier.aggregate_share(agree_on_contributors(talliers)) for tallier in talliers]
    together = unshard([share.words for share in sums], field=TERMS.field)
    assert together.tolist() == [[74, 74, -6]] * 2
    rows = unshard([share.row_sums for share in sums if share.row_sums is not None], field=TERMS.field)
    assert rows.tolist() == [[0, 0]] * 4
    assert len({share.agreement for share in sums}) == 1


def test_agreements_differ_where_anything_differs() -> None:
    talliers = [Tallier(index, WINNER_ROUND) for index in range(3)]
    for agent in range(4):
        deliver(talliers, send_apart(agent))
    share = talliers[0].aggregate_share(agree_on_contributors(talliers))
    others = [
        replace(share, contributors=frozenset({"other", *sorted(share.contributors)[1:]})),
        replace(share, sharings_digest="f" * 64),
        replace(share, round=replace(WINNER_ROUND, terms=replace(TERMS, threshold=1))),
        replace(share, round=replace(WINNER_ROUND, batch_digest="d" * 64)),
    ]
    assert len({other.agreement for other in [share, *others]}) == 5
    assert replace(share, tallier=1).agreement == share.agreement


def test_a_share_of_another_kind_or_field_is_not_taken() -> None:
    values = np.ones((2, 3), dtype=np.int64)
    other = WinnerTerms(scale=10, lowest=-1000, highest=2_000_000, row_total=None, threshold=None)
    in_field, in_other, plain = (
        split(values, num_talliers=3, source=os_source(), field=field)[0] for field in (TERMS.field, other.field, None)
    )
    apart = send_apart(1)[0].share
    wrong = [
        (ROUND, in_field, "modulo 2"), (ROUND, apart, "modulo 2"), (WINNER_ROUND, plain, "modulo 2"),
        (WINNER_ROUND, in_field, "apart"), (TOGETHER_ROUND, in_other, "modulo 2"), (TOGETHER_ROUND, apart, "apart"),
    ]  # fmt: skip
    for round, share, said in wrong:
        tallier = Tallier(0, round)
        with pytest.raises(ProtocolViolation, match=said):
            tallier.receive(InputShare("agent-1", 0, round.digest, share))
        assert not tallier.contributors
    Tallier(0, TOGETHER_ROUND).receive(InputShare("agent-1", 0, TOGETHER_ROUND.digest, in_field))
