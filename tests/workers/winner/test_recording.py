"""All that one tallier receives in a round, recorded: no score and no ballot, by its list and by distribution.

Three real talliers find the winners of two electorates that differ in every ballot and in every score, but not in
one winner: a landslide, and ties broken by a single unit of noise. What each tallier gets of the agents and of the
two others is then compared. Every test for distribution raises a false alarm with probability ALARM; there are
fewer than 100 of them, so the file does with probability below 1e-4. The same tests find leaks that are planted.
(That no distribution could tell them apart, for a comparison, is in test_view.py.)
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy import stats

from labeler.randomness import os_source
from labeler.sharing import WinnerTerms
from labeler.tally import NONCE_BYTES, AggregateShare, BallotShare, InputShare, Round, split_ballots
from tests.one_round import tallied
from tests.workers.winner.conftest import Words
from workers.winner.engine import Width, WinnerJob, WinnerOrder
from workers.winner.session import SecureEngine

ALARM = 1e-6
AGENTS = ("a", "b", "c")
CLASSES, VOTES, SCALE = 4, 4, 10
TERMS = WinnerTerms(scale=SCALE, lowest=-3_000, highest=3_000, row_total=VOTES, threshold=None)
FIELD = TERMS.field
WIDTH = Width.of(13)
QUERIES = 2_000
LEVELS = (2, 1)
"""Comparisons of a query in each round of the tournament of four classes."""

WHOLE_JOB, SESSION, OPENING = 2**32 - 1, 2**32 - 3, 2**32 - 2
DONE = (2**32 - 1, 0)

MakeJobs = Callable[..., list[WinnerJob]]
Integers = NDArray[np.int64]
Channel = tuple[int, int]


@dataclass(frozen=True)
class Level:
    """The messages that one of the two that compute received for one level: by the other, then by the dealer."""

    z: Words
    y: NDArray[np.uint16]
    x: NDArray[np.uint8]
    b: NDArray[np.uint8]
    dealt: bytes


@dataclass(frozen=True)
class View:
    """The view of one tallier in one round.

    Attributes:
        inputs: the shares that agents sent it.
        messages: what the two others sent it, by sender and channel, in order.
        levels: the same of the tournament, taken apart; none for the dealer.
        aggregate: its own share of the sums.
    """

    inputs: tuple[BallotShare, ...]
    messages: dict[int, dict[Channel, list[bytes]]]
    levels: tuple[Level, ...]
    aggregate: AggregateShare

    def words(self) -> Words:
        """Every word of 64 bits that was received in the tournament, and every four numbers of 16 bits as one."""
        if not self.levels:
            parts = [np.frombuffer(self.messages[peer][0, WHOLE_JOB][-1], "<u2", offset=32) for peer in (0, 1)]
            return np.concatenate([part[: len(part) // 4 * 4] for part in parts]).view(np.uint64)
        found = [level.z for level in self.levels]
        for level in self.levels:
            dealt = level.dealt[: len(level.dealt) // 8 * 8]
            found += [np.frombuffer(dealt, dtype=np.uint64), level.y[: len(level.y) // 4 * 4].view(np.uint64)]
        return np.concatenate(found)


@dataclass(frozen=True)
class Recording:
    """One round: its secrets, and what each tallier saw of it."""

    ballots: Integers
    scores: Integers
    winners: NDArray[np.int16]
    views: tuple[View, ...]


def landslide(queries: int) -> tuple[Integers, Integers]:
    """Ballots and noise: every vote for the winner, class q mod 4, and no noise."""
    ballots = np.zeros((len(AGENTS), queries, CLASSES), dtype=np.int64)
    ballots[:, np.arange(queries), np.arange(queries) % CLASSES] = VOTES
    return ballots, np.zeros_like(ballots)


def near_tie(queries: int) -> tuple[Integers, Integers]:
    """Ballots and noise: as many votes for each class, and one unit of noise for the winner, class q mod 4."""
    ballots = np.ones((len(AGENTS), queries, CLASSES), dtype=np.int64)
    noise = np.zeros_like(ballots)
    noise[0, np.arange(queries), np.arange(queries) % CLASSES] = 1
    return ballots, noise


def input_shares(ballots: Integers, noise: Integers) -> list[tuple[BallotShare, ...]]:
    """Return each agent's shares for the three talliers."""
    return [
        split_ballots(votes, units, row_total=VOTES, num_talliers=3, source=os_source(), field=FIELD)
        for votes, units in zip(ballots, noise, strict=True)
    ]


def recorded(make_jobs: MakeJobs, electorate: tuple[Integers, Integers]) -> Recording:
    """Run a round with real shares and real connections, and keep everything that arrives anywhere."""
    ballots, noise = electorate
    queries = ballots.shape[1]
    round = Round("a" * 64, "b" * 64, queries, CLASSES, quorum=2, terms=TERMS)
    shares = input_shares(ballots, noise)
    aggregates = tallied(
        round,
        [
            [InputShare(agent, number, round.digest, share) for number, share in enumerate(sent)]
            for agent, sent in zip(AGENTS, shares, strict=True)
        ],
    )
    jobs = make_jobs(
        queries,
        CLASSES,
        lowest=TERMS.lowest,
        highest=TERMS.highest,
        agreement=aggregates[0].agreement,
        contributors=AGENTS,
        checks_rows=True,
    )
    received: list[dict[int, bytearray]] = [{peer: bytearray() for peer in range(3)} for _ in range(3)]

    def one(number: int) -> NDArray[np.int16]:
        def record(peer: int, data: bytes) -> None:
            received[number][peer] += data

        order = WinnerOrder(jobs[number], aggregates[number].words, aggregates[number].row_sums)
        outcome = SecureEngine(record=record).winners([order])[0]
        assert isinstance(outcome, np.ndarray), outcome
        return outcome

    with ThreadPoolExecutor(3) as pool:
        first, *others = pool.map(one, range(3))
    assert all(np.array_equal(first, other) for other in others)
    views = tuple(
        view_of(number, received[number], [sent[number] for sent in shares], aggregates[number]) for number in range(3)
    )
    return Recording(ballots, SCALE * ballots.sum(axis=0) + noise.sum(axis=0), first, views)


def view_of(
    number: int, received: dict[int, bytearray], inputs: Sequence[BallotShare], aggregate: AggregateShare
) -> View:
    messages = {peer: messages_of(bytes(received[peer])) for peer in range(3) if peer != number}
    if number == 2:
        return View(tuple(inputs), messages, (), aggregate)
    other, dealer = messages[1 - number][0, 0], messages[2][0, 0]
    # The other part of the dealer's own share comes first, to tallier 1 alone.
    dealt = dealer[number:]
    levels = []
    for place, per_query in enumerate(LEVELS):
        count = per_query * aggregate.round.num_queries
        words, x, b = other[3 * place : 3 * place + 3]
        levels.append(
            Level(
                np.frombuffer(words, dtype="<u8", count=count),
                np.frombuffer(words, dtype="<u2", offset=8 * count),
                np.frombuffer(x, dtype=np.uint8),
                np.unpackbits(np.frombuffer(b, dtype=np.uint8), count=count),
                dealt[place],
            )
        )
    return View(tuple(inputs), messages, tuple(levels), aggregate)


def messages_of(data: bytes) -> dict[Channel, list[bytes]]:
    """The messages of a stream behind its hello, by channel."""
    place, messages = 4 + int.from_bytes(data[:4], "little"), dict[Channel, list[bytes]]()
    # A hello is names, digests and numbers of the job: nothing of a share.
    hello = json.loads(data[4:place])
    assert set(hello) == {"jobs"}
    assert [job["contributors"] for job in hello["jobs"].values()] == [list(AGENTS)]
    while place < len(data):
        lane, chunk, size = np.frombuffer(data[place : place + 12], dtype="<u4").tolist()
        messages.setdefault((lane, chunk), []).append(data[place + 12 : place + 12 + size])
        place += 12 + size
    assert place == len(data)
    return messages


_KEPT: dict[str, Recording] = {}


@pytest.fixture
def rounds(make_jobs: MakeJobs) -> tuple[Recording, Recording]:
    """A landslide and a near tie, recorded once for all tests of this file."""
    for name, electorate in (("landslide", landslide(QUERIES)), ("near tie", near_tie(QUERIES))):
        if name not in _KEPT:
            _KEPT[name] = recorded(make_jobs, electorate)
    return _KEPT["landslide"], _KEPT["near tie"]


def p_values(one: Words, other: Words, modulus: int) -> list[float]:
    """Chi-square tests of words: each lot uniform, and both lots alike; by size, and modulo 97."""
    results = []
    for bucket in (lambda words: (words.astype(np.float64) / modulus * 97).astype(np.int64).clip(0, 96), modulo):
        counts = [np.bincount(bucket(words), minlength=97) for words in (one, other)]
        results += [float(stats.chisquare(count).pvalue) for count in counts]
        # One more in each bucket: a leak can leave some empty in both.
        results.append(float(stats.chi2_contingency(np.array(counts) + 1).pvalue))
    return results


def modulo(words: Words) -> Integers:
    return (words % np.uint64(97)).astype(np.int64)


def test_both_electorates_have_the_same_winners_and_no_score_in_common(rounds: tuple[Recording, Recording]) -> None:
    assert FIELD.bits == 56, "one of the smallest, so that p_values look at the very words that are sent"
    one, other = rounds
    np.testing.assert_array_equal(one.winners, np.arange(QUERIES) % CLASSES)
    np.testing.assert_array_equal(one.winners, other.winners)
    assert not (one.scores == other.scores).any()
    assert not (one.ballots == other.ballots).any()


def test_the_complete_list_of_what_talliers_send_one_another_has_nothing_beside_the_protocol(
    rounds: tuple[Recording, Recording],
) -> None:
    """Every message by its channel and length: seeds, row checks, a tournament, masked answers and winners."""
    rows = [32, NONCE_BYTES, 8 * len(AGENTS)]
    counts = [per_query * QUERIES for per_query in LEVELS]
    opened = [size for count in counts for size in (10 * count, count, -(-count // 8))]
    answer, winners = 32 + 2 * QUERIES, 2 * QUERIES
    expected = {
        (0, 1): {(0, WHOLE_JOB): rows, (SESSION, 0): [1], (OPENING, 0): [32], (0, 0): opened},
        (1, 0): {(0, WHOLE_JOB): rows, (SESSION, 0): [1], (0, 0): opened},
        (0, 2): {(0, WHOLE_JOB): [*rows, answer], (SESSION, 0): [1], (0, 0): [0]},
        (1, 2): {(0, WHOLE_JOB): [*rows, answer], (SESSION, 0): [1], (0, 0): [0]},
        (2, 0): {
            (0, WHOLE_JOB): [*rows, 1, winners],
            (SESSION, 0): [1],
            (OPENING, 0): [32],
            (0, 0): [WIDTH.dealt_bytes(0, count) for count in counts],
        },
        (2, 1): {
            (0, WHOLE_JOB): [*rows, 1, winners],
            (SESSION, 0): [1],
            (OPENING, 0): [32],
            (0, 0): [8 * QUERIES * CLASSES, *(WIDTH.dealt_bytes(1, count) for count in counts)],
        },
    }
    for recording in rounds:
        for (sender, receiver), channels in expected.items():
            found = recording.views[receiver].messages[sender]
            sizes = {channel: [len(one) for one in sent] for channel, sent in found.items()}
            # The last word of all may come after the last look.
            sizes.pop(DONE, None)
            assert sizes == channels, (sender, receiver)


def test_what_is_put_together_is_the_winners_and_nothing_else(rounds: tuple[Recording, Recording]) -> None:
    for recording in rounds:
        one, other = (recording.views[2].messages[peer][0, WHOLE_JOB][-1] for peer in (0, 1))
        # Equal hashes: every difference was in range. The two parts of the numbers, and their sum.
        assert one[:32] == other[:32]
        parts = [np.frombuffer(part, dtype="<u2", offset=32).astype(np.uint16) for part in (one, other)]
        np.testing.assert_array_equal((parts[0] + parts[1]).view(np.int16), recording.winners)
        for number in (0, 1):
            assert recording.views[number].messages[2][0, WHOLE_JOB][-1] == recording.winners.astype("<i2").tobytes()
        # The row check: z of all three add up to zero for each agent, and are not zero themselves.
        combinations = [
            np.frombuffer(recording.views[(sender + 1) % 3].messages[sender][0, WHOLE_JOB][2], dtype=np.uint64)
            for sender in range(3)
        ]
        assert all(sent.all() for sent in combinations)
        assert not FIELD.total(combinations).any()
    # The hash of one round says nothing of the other's: its key is new.
    assert len({recording.views[2].messages[0][0, WHOLE_JOB][-1][:32] for recording in rounds}) == 2


def test_what_is_opened_in_a_comparison_is_uniform_whatever_the_scores_are(
    rounds: tuple[Recording, Recording],
) -> None:
    """An opened value is the sum of what one of the two receives and its own part, so both parts are looked at."""
    one, other = rounds
    for number in (0, 1):
        for level in range(len(LEVELS)):
            lots = [recording.views[number].levels[level] for recording in (one, other)]
            words_of_lots = ([lot.z, lot.y.astype(np.uint64) << np.uint64(48)] for lot in lots)
            for first, second in zip(*words_of_lots, strict=True):
                assert stats.ks_2samp(first, second, method="asymp").pvalue > ALARM
                for words in (first, second):
                    assert stats.kstest(words / 2.0**64, "uniform").pvalue > ALARM
            for lot in lots:
                for bit in range(WIDTH.index_bits):
                    assert stats.binomtest(int((lot.x >> bit & 1).sum()), len(lot.x)).pvalue > ALARM
                assert (lot.x < 2**WIDTH.index_bits).all()
                assert stats.binomtest(int(lot.b.sum()), len(lot.b)).pvalue > ALARM


def test_what_talliers_send_one_another_is_the_same_noise_whatever_the_votes_are(
    rounds: tuple[Recording, Recording],
) -> None:
    for number in range(3):
        lots = [recording.views[number].words() for recording in rounds]
        assert len(lots[0]) == len(lots[1])
        assert len(lots[0]) >= 1_000
        assert min(p_values(lots[0], lots[1], 2**64)) > ALARM
    shares = [np.frombuffer(recording.views[1].messages[2][0, 0][0], dtype=np.uint64) for recording in rounds]
    assert min(p_values(shares[0], shares[1], FIELD.modulus)) > ALARM


@pytest.mark.parametrize("leak", ["one score in a hundred is not masked", "a mask is one bit short"])
def test_the_same_test_finds_a_leak_that_is_planted(rounds: tuple[Recording, Recording], leak: str) -> None:
    one, other = (recording.views[0].words() for recording in rounds)
    if leak.startswith("one"):
        # As if one word in a hundred were sent as it is.
        for words, recording in zip((one, other), rounds, strict=True):
            places = np.arange(0, len(words), 100)
            words[places] = np.resize(recording.scores.reshape(-1).astype(np.uint64), len(places))
    else:
        one, other = (lot % np.uint64(2**63) for lot in (one, other))
    assert min(p_values(one, other, 2**64)) < ALARM
