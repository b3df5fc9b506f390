"""The arithmetic of three talliers against numpy, without connections: widths, ties, thresholds, ends of ranges."""

from __future__ import annotations

import asyncio
import os
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from labeler.errors import Unavailable
from labeler.randomness import os_source
from tests.workers.winner.conftest import shares_of
from workers.winner.engine import WinnerJob
from workers.winner.tournament import Finished, Room, deal_chunk, find_chunk, masked_answer, open_answers

MakeJobs = Callable[..., list[WinnerJob]]
Integers = NDArray[np.int64]
KEY = bytes(range(32))


Net = defaultdict[tuple[int, int], asyncio.Queue[bytes]]
"""Messages between three talliers in one loop, by sender and receiver."""


class OnNet:
    """The wire of one tallier on a `Net`."""

    def __init__(self, net: Net, party: int) -> None:
        self._net = net
        self._party = party

    def send(self, peer: int, data: bytes) -> None:
        self._net[self._party, peer].put_nowait(data)

    async def receive(self, peer: int, size: int) -> bytes:
        data = await self._net[peer, self._party].get()
        assert len(data) == size
        return data


def computed(jobs: list[WinnerJob], shares: list[NDArray[np.uint64]]) -> NDArray[np.int16] | None:
    """One chunk of all three."""
    net, seeds = Net(asyncio.Queue), (os.urandom(32), os.urandom(32))

    async def run() -> tuple[Finished, Finished]:
        one, other, _ = await asyncio.gather(
            find_chunk(jobs[0], shares[0], 0, seeds[0], OnNet(net, 0)),
            find_chunk(jobs[1], shares[1], 0, seeds[1], OnNet(net, 1)),
            deal_chunk(jobs[2], shares[2], 0, seeds, OnNet(net, 2)),
        )
        return one, other

    finished = asyncio.run(run())
    answers = [masked_answer(job, [part], KEY) for job, part in zip(jobs, finished, strict=False)]
    return open_answers(answers[0], answers[1])


def expected(sums: Integers, threshold: int | None) -> NDArray[np.int16]:
    winners = np.argmax(sums, axis=1).astype(np.int16)
    if threshold is not None:
        winners[sums.max(axis=1) < threshold] = -1
    return winners


def check(make_jobs: MakeJobs, sums: Integers, lowest: int, highest: int, threshold: int | None = None) -> None:
    jobs = make_jobs(*sums.shape, lowest=lowest, highest=highest, threshold=threshold)
    winners = computed(jobs, shares_of(sums, jobs[0]))
    assert winners is not None
    np.testing.assert_array_equal(winners, expected(sums, threshold))


RANGES = [(0, 1), (-3, 3), (-40, 60), (-3_000, 3_000), (-15_150, 19_350), (-(2**18), 1), (-(2**20) + 2, 2**20 - 1)]
"""Differences of 1, 3, 7, 13, 16, 19 and 21 bits: one to four digits, and both sizes of truth tables. The field of the
last one is as wide as a word."""


@given(
    st.sampled_from(RANGES),
    st.integers(1, 60),
    st.integers(2, 100),
    st.sampled_from(["random", "tied", "negative", "ends", "one unit"]),
    st.sampled_from([None, "lowest", "zero", "highest", "above", "far below", "far above", "inside"]),
    st.integers(0, 2**32 - 1),
)
# The fixture only makes jobs; nothing is left in it from one example to the next.
@settings(max_examples=120, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
def test_winners_are_numpys_argmax_whatever_the_sums_and_the_threshold_are(
    make_jobs: MakeJobs, bounds: tuple[int, int], queries: int, classes: int, kind: str, asked: str | None, seed: int
) -> None:
    lowest, highest = bounds
    rng = np.random.default_rng(seed)
    shape = queries, classes
    sums = {
        "random": lambda: rng.integers(lowest, highest + 1, shape),
        "tied": lambda: np.repeat(rng.integers(lowest, highest + 1, (queries, 1)), classes, axis=1),
        "negative": lambda: rng.integers(lowest, 1, shape),
        "ends": lambda: rng.choice([lowest, highest], shape),
        "one unit": lambda: rng.integers(highest - 1, highest + 1, shape),
    }[kind]()
    threshold = {
        None: None,
        "lowest": lowest,
        "zero": 0,
        "highest": highest,
        "above": highest + 1,
        "far below": lowest - 10**12,
        "far above": 10**12,
        "inside": int(rng.integers(lowest, highest + 1)),
    }[asked]
    check(make_jobs, sums, lowest, highest, threshold)


FEW = {*range(2, 18), 31, 32, 33, 64, 65, 99, 100}
"""Whose tournaments have every shape: full, one short of it, one beyond it."""


@pytest.mark.parametrize(
    "classes", [pytest.param(n, marks=[] if n in FEW else pytest.mark.long) for n in range(2, 101)]
)
def test_every_number_of_classes_has_its_tournament(make_jobs: MakeJobs, classes: int) -> None:
    """Each class wins one query, by one unit or as the lowest of two."""
    sums = np.zeros((2 * classes, classes), dtype=np.int64)
    sums[np.arange(classes), np.arange(classes)] = 1
    sums[classes + np.arange(classes), np.arange(classes)] = 1
    sums[classes + np.arange(classes), -1] = 1
    check(make_jobs, sums, -3, 3)
    check(make_jobs, sums, -3, 3, 1)


@pytest.mark.parametrize("bounds", RANGES)
@pytest.mark.parametrize("away", ["one too many", "far", "half of the field", "everything"])
def test_a_sum_outside_its_range_opens_nothing(
    make_jobs: MakeJobs, rng: np.random.Generator, bounds: tuple[int, int], away: str
) -> None:
    """One entry of 200 is off, as by an agent's noise or a tallier's share: nothing is opened of any query."""
    lowest, highest = bounds
    jobs = make_jobs(20, 10, lowest=lowest, highest=highest)
    modulus, bits = jobs[0].field.modulus, jobs[0].comparison_bits
    sums = rng.integers(lowest, highest + 1, (20, 10))
    off = {
        # Differences are bounded by a power of two, so this is the first that must be seen.
        "one too many": lowest + 2 ** (bits + 1),
        "far": 2 ** (bits + 5),
        "half of the field": modulus // 2,
        "everything": 0,
    }[away]
    shares = shares_of(sums, jobs[0])
    place = rng.integers(0, 20), rng.integers(0, 10)
    entry = int(sums[place])
    if away == "everything":
        shares[1] = jobs[0].field.uniform(os_source(), 200).reshape(20, 10)
    else:
        shares[1][place] = (int(shares[1][place]) + off - entry) % modulus
    assert computed(jobs, shares) is None


def test_masks_that_do_not_fit_are_drawn_again(make_jobs: MakeJobs, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tallier 0 alone finds it, from its own part, which is uniform: one of 2^41 entries."""
    job = make_jobs(1, 2)[0]
    share = np.full((1, 2), job.lowest % job.field.modulus, dtype=np.uint64)
    monkeypatch.setattr(
        "workers.winner.tournament.uniform_below", lambda _bound, _source, count: np.zeros(count, dtype=np.uint64)
    )
    with pytest.raises(Unavailable, match="drawn again"):
        asyncio.run(find_chunk(job, share, 0, bytes(32), OnNet(Net(asyncio.Queue), 0)))


def test_answers_cancel_where_ranges_hold_and_hide_everything_where_they_do_not(make_jobs: MakeJobs) -> None:
    jobs = make_jobs(1_000, 2)
    parts = [np.full(1_000, 7, dtype=np.uint16), np.full(1_000, 65_536 - 6, dtype=np.uint16)]
    one, same = (masked_answer(job, [Finished(part, (b"equal",))], KEY) for job, part in zip(jobs, parts, strict=False))
    opened = open_answers(one, same)
    assert opened is not None
    assert set(opened.tolist()) == {1}
    other = masked_answer(jobs[1], [Finished(parts[1], (b"not equal",))], KEY)
    assert open_answers(one, other) is None
    # The sum that the dealer could take all the same is as good as random: about as many values as there are.
    taken = sum(np.frombuffer(part, dtype="<u2", offset=32).astype(np.uint16) for part in (one, other))
    assert len(set(np.asarray(taken).tolist())) > 950
    # Another job, or another key, has other masks and hashes.
    assert masked_answer(replace(jobs[0], job_id="b"), [Finished(parts[0], (b"equal",))], KEY)[:32] != one[:32]
    assert masked_answer(jobs[0], [Finished(parts[0], (b"equal",))], bytes(32))[:32] != one[:32]


def test_chunks_begin_in_order_and_as_many_as_there_is_room_for() -> None:
    async def run() -> list[str]:
        room, events = Room(10), list[str]()
        gates = {name: asyncio.Event() for name in "abcd"}

        async def chunk(name: str, weight: int) -> None:
            async with room.of(weight):
                events.append(name)
                await gates[name].wait()

        work = [asyncio.ensure_future(chunk(name, weight)) for name, weight in zip("abcd", (6, 6, 3, 99), strict=True)]
        for name in "abcd":
            for _ in range(20):  # turns of the loop, in which everything goes as far as it can
                await asyncio.sleep(0)
            events.append(f"end {name}")
            gates[name].set()
        await asyncio.gather(*work)
        return events

    # c would fit beside a, and waits for b: all three talliers begin in one order. d is larger than the room.
    assert asyncio.run(run()) == ["a", "end a", "b", "c", "end b", "end c", "d", "end d"]
