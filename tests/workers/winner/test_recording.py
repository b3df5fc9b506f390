"""All that one tallier receives in a round, recorded: no score and no ballot, by inspection and by distribution.

Three real processes find the winners of two electorates that differ in every ballot and in every score, but not in
one winner: a landslide, and ties broken by a single unit of noise. What each tallier gets of the agents and of the
two others is then compared. Every test for distribution raises a false alarm with probability ALARM; there are
fewer than 100 of them, so the file does with probability below 1e-4. The same tests find leaks that are planted.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy import stats

from labeler.errors import ProtocolViolation
from labeler.field import MASK_BITS, PrimeField
from labeler.randomness import os_source
from labeler.tally import AggregateShare, InputShare, Round
from labeler.wellformed import BallotShare, split_ballots
from labeler.winner import WinnerTerms
from tests.workers.winner.conftest import Words
from workers.studies.plain_tallier import Tallier
from workers.winner.child import MpycEngine
from workers.winner.engine import WinnerJob
from workers.winner.row_check import _COMBINATION, _COMMITMENT, _NONCE

ALARM = 1e-6
AGENTS = ("a", "b", "c")
CLASSES, VOTES, SCALE = 4, 4, 10
TERMS = WinnerTerms(scale=SCALE, lowest=-3_000, highest=3_000, row_total=VOTES, threshold=None)
FIELD = TERMS.field
QUERIES = 150
LEVELS = (2, 1)
"""Comparisons of a query in each round of the tournament of four classes."""

MakeJobs = Callable[..., list[WinnerJob]]
Integers = NDArray[np.int64]

RECORDING = """
import json, os, sys
from workers.winner import mpyc_party, party
folder, planted = sys.argv[1], {planted!r}
true = mpyc_party.start_runtime
def start(number, field, *, bits):
    # MPyC reads it with every square root; the party cleared it, because MPyC is loaded early here.
    os.environ["MPYC_MAXWORKERS"] = "0"
    runtime = true(number, field, bits=bits)
    output, randoms = runtime.output, runtime._np_randoms
    opened = open(f"{{folder}}/opened-{{number}}", "w", buffering=1)
    def recorded(x, receivers=None, threshold=None):
        answer = output(x, receivers, threshold)
        def keep(done):
            values = getattr(done.result(), "value", done.result())
            opened.write(json.dumps([threshold or 1, [int(value) for value in values.reshape(-1)]]) + "\\n")
        answer.add_done_callback(keep)
        return answer
    runtime.output = recorded
    if planted:
        def short(sftype, n, bound=None):
            return randoms(sftype, n, bound) * (0 if bound else 1)
        runtime._np_randoms = short
    return runtime
mpyc_party.start_runtime = start
files = {{}}
def record(peer, data):
    if peer not in files:
        files[peer] = open(f"{{folder}}/received-{{{number}}}-{{peer}}", "wb", buffering=0)
    files[peer].write(data)
party.main(record=record)
"""


@dataclass(frozen=True)
class View:
    """What one tallier saw of one round.

    Attributes:
        inputs: the shares that agents sent it.
        words: what the two others sent it, without commitments and nonces.
        combinations: what they sent it for the row check.
        opened: (degree, values) of everything that was put together.
        aggregate: its own share of the sums.
    """

    inputs: tuple[BallotShare, ...]
    words: Words
    combinations: tuple[Words, ...]
    opened: tuple[tuple[int, list[int]], ...]
    aggregate: AggregateShare


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
    """What each agent sends to the three talliers."""
    return [
        split_ballots(votes, units, row_total=VOTES, num_talliers=3, source=os_source(), field=FIELD)
        for votes, units in zip(ballots, noise, strict=True)
    ]


def recorded(
    make_jobs: MakeJobs, folder: Path, electorate: tuple[Integers, Integers], *, planted: bool = False
) -> Recording:
    """Run a round with real shares and real processes, and keep everything that arrives anywhere."""
    ballots, noise = electorate
    queries = ballots.shape[1]
    round = Round("a" * 64, "b" * 64, queries, CLASSES, quorum=2, terms=TERMS)
    shares = input_shares(ballots, noise)
    talliers = [Tallier(number, round) for number in range(3)]
    for agent, sent in zip(AGENTS, shares, strict=True):
        for tallier, share in zip(talliers, sent, strict=True):
            tallier.receive(InputShare(agent, tallier.index, round.digest, share))
    aggregates = [tallier.aggregate_share(AGENTS) for tallier in talliers]
    jobs = make_jobs(
        queries,
        CLASSES,
        lowest=TERMS.lowest,
        highest=TERMS.highest,
        agreement=aggregates[0].agreement,
        contributors=AGENTS,
        checks_rows=True,
    )
    folder.mkdir()

    def one(number: int) -> NDArray[np.int16]:
        code = RECORDING.format(number=number, planted=planted)
        engine = MpycEngine(command=(sys.executable, "-P", "-c", code, str(folder)))
        return engine.winners(jobs[number], aggregates[number].words, rows=aggregates[number].row_sums)

    with ThreadPoolExecutor(3) as pool:
        first, *others = pool.map(one, range(3))
    assert all(np.array_equal(first, other) for other in others)
    views = tuple(view_of(folder, number, [sent[number] for sent in shares], aggregates[number]) for number in range(3))
    return Recording(ballots, SCALE * ballots.sum(axis=0) + noise.sum(axis=0), first, views)


def view_of(folder: Path, number: int, inputs: Sequence[BallotShare], aggregate: AggregateShare) -> View:
    words, combinations = [], []
    for peer in range(3):
        if peer == number:
            continue
        for label, sent in messages_of((folder / f"received-{number}-{peer}").read_bytes(), has_key=peer < number):
            if label == _COMBINATION:
                combinations.append(sent)
            if label not in (_COMMITMENT, _NONCE):
                words.append(sent)
    lines = (folder / f"opened-{number}").read_text().splitlines()
    opened = tuple((int(degree), values) for degree, values in map(json.loads, lines))
    return View(tuple(inputs), np.concatenate(words), tuple(combinations), opened, aggregate)


def messages_of(data: bytes, *, has_key: bool) -> list[tuple[int, Words]]:
    """Labels and residues of the messages in a stream, behind its hello and the key of a lower number."""
    place, messages = 4 + int.from_bytes(data[:4], "little"), []
    # A hello is names, digests and numbers of the job: nothing of a share.
    assert json.loads(data[4:place])["contributors"] == list(AGENTS)
    place += 16 if has_key else 0
    while place < len(data):
        label, size = (
            int.from_bytes(data[place : place + 8], "little", signed=True),
            int.from_bytes(data[place + 8 : place + 12], "little"),
        )
        messages.append((label, np.frombuffer(data[place + 12 : place + 12 + size], dtype="<u8").astype(np.uint64)))
        place += 12 + size
    assert place == len(data)
    return messages


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("recordings")


_KEPT: dict[str, Recording] = {}


@pytest.fixture
def rounds(make_jobs: MakeJobs, folder: Path) -> tuple[Recording, Recording]:
    """A landslide and a near tie, recorded once for all tests of this file."""
    for name, electorate in (("landslide", landslide(QUERIES)), ("near tie", near_tie(QUERIES))):
        if name not in _KEPT:
            _KEPT[name] = recorded(make_jobs, folder / name, electorate)
    return _KEPT["landslide"], _KEPT["near tie"]


def p_values(one: Words, other: Words) -> list[float]:
    """Chi-square tests of residues: each lot uniform, and both lots alike; by size, and modulo 97."""
    results = []
    for bucket in (by_size, modulo):
        counts = [np.bincount(bucket(words), minlength=97) for words in (one, other)]
        results += [float(stats.chisquare(count).pvalue) for count in counts]
        # One more in each bucket: a leak can leave some empty in both.
        results.append(float(stats.chi2_contingency(np.array(counts) + 1).pvalue))
    return results


def by_size(words: Words) -> Integers:
    """Which hundredth of the field; never more than 99."""
    return (words.astype(np.float64) / FIELD.modulus * 100).astype(np.int64).clip(0, 99)


def modulo(words: Words) -> Integers:
    return (words % np.uint64(97)).astype(np.int64)


def words_of(inputs: Sequence[BallotShare]) -> Words:
    return np.concatenate(
        [part.expand().reshape(-1) for share in inputs for part in (share.ballots, share.noise)], dtype=np.uint64
    )


def openings(view: View, degree: int, size: int) -> list[list[int]]:
    """What was put together of polynomials of this degree, so many at a time. MPyC opens things as early as it can."""
    return [values for of, values in view.opened if (of, len(values)) == (degree, size)]


def comparisons(view: View, level: int) -> list[int]:
    """The masked differences opened in one round of the tournament."""
    return openings(view, 1, LEVELS[level] * view.aggregate.round.num_queries)[0]


def test_both_electorates_have_the_same_winners_and_no_score_in_common(rounds: tuple[Recording, Recording]) -> None:
    one, other = rounds
    np.testing.assert_array_equal(one.winners, np.arange(QUERIES) % CLASSES)
    np.testing.assert_array_equal(one.winners, other.winners)
    assert not (one.scores == other.scores).any()
    assert not (one.ballots == other.ballots).any()


def test_nothing_is_opened_but_winners_masked_differences_and_values_that_are_zero_or_uniform(
    rounds: tuple[Recording, Recording],
) -> None:
    """The complete list of what is put together, and nothing beside it."""
    bits = TERMS.field.bits - MASK_BITS - 2
    for recording in rounds:
        for number, view in enumerate(recording.views):
            expected = []
            for per_query in LEVELS:
                compared = per_query * QUERIES
                # Squares of random numbers for the mask's bits; the masked differences; zero tests times a random one.
                expected += [(2, (bits + 1) * compared), (1, compared), (2, compared)]
            expected += [(2, 1), (1, QUERIES)]
            assert sorted((degree, len(values)) for degree, values in view.opened) == sorted(expected)
            # That every comparison gave 0 or 1, and then the winners.
            assert view.opened[-2][1] == [0]
            assert view.opened[-1][1] == recording.winners.tolist()
            # The row check: z of all three add up to zero for each agent, and are not zero themselves.
            assert [len(sent) for sent in view.combinations] == [len(AGENTS)] * 2
            assert all(sent.all() for sent in view.combinations)
            assert sorted(view.opened) == sorted(recording.views[(number + 1) % 3].opened)
        sums = FIELD.total([recording.views[1].combinations[0], *recording.views[0].combinations])
        assert not sums.any()


def test_opened_differences_say_nothing_of_the_scores(rounds: tuple[Recording, Recording]) -> None:
    """The low bits are uniform, the high ones are the mask's; a zero test comes out as a fair coin."""
    bits = TERMS.field.bits - MASK_BITS - 2
    one, other = (recording.views[0] for recording in rounds)
    for level in range(len(LEVELS)):
        low = [np.array(comparisons(view, level), dtype=np.uint64) % np.uint64(2**bits) for view in (one, other)]
        high = [np.array(comparisons(view, level), dtype=np.uint64) >> np.uint64(bits) for view in (one, other)]
        assert stats.ks_2samp(*low).pvalue > ALARM
        assert stats.ks_2samp(*high).pvalue > ALARM
        for part in low:
            assert stats.kstest(part / 2**bits, "uniform").pvalue > ALARM
        for view in (one, other):
            tested = openings(view, 2, LEVELS[level] * QUERIES)[0]
            assert stats.binomtest(sum(value == 0 for value in tested), len(tested)).pvalue > ALARM


def test_no_word_and_no_sum_or_difference_of_two_is_a_score_a_ballot_or_a_difference_of_scores(
    make_jobs: MakeJobs, folder: Path
) -> None:
    """All pairs of all words a tallier holds. By chance one of 10^7 pairs would do with probability below 1e-3."""
    recording = recorded(make_jobs, folder / "small", near_tie(10))
    # Every ballot entry and score, and every difference of scores, lies between these.
    widest = int(np.ptp(recording.scores).item() + np.abs(recording.scores).max() + VOTES * SCALE)
    for view in recording.views:
        words = np.concatenate([view.words, words_of(view.inputs), view.aggregate.words.reshape(-1)])
        assert closest_to_zero(words) > widest
        assert len(words) ** 2 * 4 * widest / FIELD.modulus < 1e-3
        assert closest_pair(words) > widest


def closest_to_zero(words: Words) -> int:
    return int(np.abs(FIELD.decode(words)).min())


def closest_pair(words: Words) -> int:
    """The smallest absolute value of a sum or difference of two of the words (at different places)."""
    signed = np.sort(FIELD.decode(words))
    both = np.concatenate([signed, -signed])
    owner = np.concatenate([np.arange(len(signed))] * 2)
    order = np.argsort(both, kind="stable")
    gaps, same = np.diff(both[order]), owner[order][1:] == owner[order][:-1]
    return int(gaps[~same].min())


def test_what_agents_send_one_tallier_is_the_same_noise_whatever_they_vote() -> None:
    """11,000 words per agent: each tallier's are uniform, and those of two electorates alike."""
    queries = 1_000
    one, other = (input_shares(*electorate(queries)) for electorate in (landslide, near_tie))
    for number in range(3):
        lots = [words_of([sent[number] for sent in shares]) for shares in (one, other)]
        assert min(p_values(lots[0], lots[1])) > ALARM


def test_what_talliers_send_one_another_is_the_same_noise_whatever_the_votes_are(
    rounds: tuple[Recording, Recording],
) -> None:
    one, other = rounds
    for number in range(3):
        lots = [recording.views[number].words for recording in (one, other)]
        # But for squares and zeros nothing depends on chance in length.
        assert abs(len(lots[0]) - len(lots[1])) < 20
        assert len(lots[0]) > 10_000
        assert min(p_values(lots[0], lots[1])) > ALARM


@pytest.mark.parametrize("leak", ["one score in a hundred is not masked", "a mask is one bit short"])
def test_the_same_test_finds_a_leak_that_is_planted(rounds: tuple[Recording, Recording], leak: str) -> None:
    one, other = (recording.views[0].words.copy() for recording in rounds)
    if leak.startswith("one"):
        # As if one word in a hundred were sent as it is.
        for words, recording in zip((one, other), rounds, strict=True):
            places = np.arange(0, len(words), 100)
            words[places] = np.resize(FIELD.encode(recording.scores.reshape(-1)), len(places))
    else:
        masks = [np.array(lot % np.uint64(2 ** (FIELD.bits - 1)), dtype=np.uint64) for lot in (one, other)]
        one, other = (FIELD.subtract(np.full(len(mask), 3, dtype=np.uint64), mask) for mask in masks)
    assert min(p_values(one, other)) < ALARM


def test_inspection_finds_a_comparison_whose_mask_is_missing(make_jobs: MakeJobs, folder: Path) -> None:
    """Every word sent is uniform still, and the winners are right: only what is opened shows it."""
    recording = recorded(make_jobs, folder / "planted", landslide(60), planted=True)
    np.testing.assert_array_equal(recording.winners, np.arange(60) % CLASSES)
    bits = TERMS.field.bits - MASK_BITS - 2
    opened = np.array(comparisons(recording.views[0], 0), dtype=np.float64) / 2 ** (bits + MASK_BITS)
    assert opened.max() < 1e-9
    assert stats.kstest(opened, stats.irwinhall(3).cdf).pvalue < ALARM


def test_a_mask_has_the_distribution_that_its_proof_assumes(rounds: tuple[Recording, Recording]) -> None:
    """A sum of three uniform numbers of 41 bits."""
    bits = TERMS.field.bits - MASK_BITS - 2
    for recording in rounds:
        for level in range(len(LEVELS)):
            opened = np.array(comparisons(recording.views[0], level), dtype=np.float64) / 2 ** (bits + MASK_BITS)
            assert stats.kstest(opened, stats.irwinhall(3).cdf).pvalue > ALARM


@pytest.mark.parametrize("offset", [2**14, 2 ** (FIELD.bits - 3), 2 ** (FIELD.bits - 1)])
def test_sums_outside_their_range_open_nothing(make_jobs: MakeJobs, folder: Path, offset: int) -> None:
    """What a dishonest agent's noise, or a tallier's share, can do: nobody sees it, so the comparisons check it.

    Without the check, what is opened in place of a winner is the difference of two scores, cut to its high bits, or an
    element of the field that depends on the mask as well.
    """
    jobs = make_jobs(8, CLASSES, lowest=TERMS.lowest, highest=TERMS.highest)
    shares = [FIELD.uniform(os_source(), 8 * CLASSES).reshape(8, CLASSES) for _ in range(2)]
    values = np.zeros((8, CLASSES), dtype=np.uint64)
    values[:, 1] = offset
    shares.append(FIELD.subtract(values, FIELD.add(*shares)))
    where = folder / f"offset-{offset}"
    where.mkdir()

    def one(number: int) -> str:
        code = RECORDING.format(number=number, planted=False)
        engine = MpycEngine(command=(sys.executable, "-P", "-c", code, str(where)))
        with pytest.raises(ProtocolViolation) as raised:
            engine.winners(jobs[number], shares[number])
        return str(raised.value)

    with ThreadPoolExecutor(3) as pool:
        for sentence in pool.map(one, range(3)):
            assert "outside the range" in sentence
    for number in range(3):
        degree, values_opened = json.loads((where / f"opened-{number}").read_text().splitlines()[-1])
        assert (degree, len(values_opened)) == (2, 1)
        assert values_opened != [0]


def test_the_field_of_these_tests_is_one_of_the_smallest() -> None:
    """So that p_values look at the very words that are sent."""
    assert isinstance(FIELD, PrimeField)
    assert FIELD.bits == 56
