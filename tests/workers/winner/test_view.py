"""The view of a tallier in a comparison could have come of any other sums; the masks for which it would are computed.

For a view of tallier 0 of sums s, and other sums s', there is exactly one set of parts of tallier 1 with which it
sees, bit for bit, the same. All parts are uniform, so both views are equally likely: the view is independent of the
sums, exactly. The same the other way round. (That streams of AES look uniform is outside of this.)
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest
from numpy.typing import NDArray

from workers.winner.engine import Correlation, Masks, Width, deal, draw_masks, part_of
from workers.winner.tournament import Comparison, Pairs, compare

COUNT = 400
Words = NDArray[np.uint64]


class Scripted:
    """A stream that gives these words, and counts that nobody wants more."""

    is_seeded = True

    def __init__(self, words: Words) -> None:
        self._words = words
        self._place = 0

    def uint64(self, count: int) -> Words:
        self._place += count
        assert self._place <= len(self._words)
        return self._words[self._place - count : self._place].copy()

    def bytes(self, count: int) -> bytes:  # noqa: ARG002  # as in ByteSource
        raise AssertionError("a comparison draws words only")


@dataclass
class Held:
    """All that a tallier has, what it was sent by the dealer and by the other, and what came out of it."""

    masks: Masks
    correlation: Correlation
    dealt: bytes
    received: list[bytes]
    result: Comparison


def words_drawn(party: int, width: Width) -> int:
    """Words of a stream for one comparison."""
    return 2 + (width.digits + 1 if party == 0 else width.table_words + 4)


def run(width: Width, pairs: Sequence[Pairs], streams: Sequence[Words]) -> list[Held]:
    """One comparison at both talliers with these streams."""
    dealt = deal(width, COUNT, *(Scripted(stream) for stream in streams))
    queues: list[asyncio.Queue[bytes]] = [asyncio.Queue(), asyncio.Queue()]
    held = []
    for party, stream in enumerate(streams):
        source = Scripted(stream)
        masks = draw_masks(width, COUNT, source)
        held.append((masks, part_of(party, width, COUNT, source, dealt[party])))
    received: list[list[bytes]] = [[], []]

    async def one(party: int) -> Comparison:
        async def exchange(data: bytes) -> bytes:
            queues[1 - party].put_nowait(data)
            received[party].append(await queues[party].get())
            return received[party][-1]

        async def given() -> Correlation:
            return held[party][1]

        return await compare(party, width, pairs[party], held[party][0], given, exchange)

    async def both() -> list[Comparison]:
        return list(await asyncio.gather(one(0), one(1)))

    results = asyncio.run(both())
    return [Held(*held[party], dealt[party], received[party], results[party]) for party in range(2)]


def split_pairs(kept: Pairs, whole: Pairs) -> Pairs:
    """The other part of these sums."""
    return Pairs(
        whole.left - kept.left,
        whole.right - kept.right,
        whole.left_numbers - kept.left_numbers,
        whole.right_numbers - kept.right_numbers,
    )


def random_words(rng: np.random.Generator, shape: int | tuple[int, ...]) -> Words:
    return rng.integers(0, 2**64, shape, dtype=np.uint64)


def random_sums(rng: np.random.Generator, width: Width) -> Pairs:
    top = 2 ** (width.bits - 1)
    return Pairs(
        *(rng.integers(0, top, COUNT).astype(np.uint64) for _ in range(2)),
        *(rng.integers(0, 2**16, COUNT).astype(np.uint16) for _ in range(2)),
    )


def borrow_bits(width: Width, z: Words, r: Words) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """The bits that are looked up, and whether z is below r, in the low bits; from their definition."""
    bits = np.zeros(COUNT, dtype=np.uint8)
    for place in range(width.digits):
        one, other = width.digit(z, place), width.digit(r, place)
        if place == 0:
            bits |= (one < other).astype(np.uint8)
        else:
            bits |= (one < other).astype(np.uint8) << np.uint8(2 * place - 1)
            bits |= (one == other).astype(np.uint8) << np.uint8(2 * place)
    low = np.uint64(2**width.bits - 1)
    return bits, ((z & low) < (r & low)).astype(np.uint8)


def explained(party: int, width: Width, seen: list[Held], before: Pairs, after: Pairs) -> Words:
    """The stream of the other tallier with which `party` sees the same of other sums."""
    own, other = seen[party], seen[1 - party]
    r = own.masks.r + other.masks.r
    moved = (before.left - before.right) - (after.left - after.right)
    z = before.left - before.right + np.uint64(2**width.bits) + r
    new_r, new_q = r + moved, own.masks.q + other.masks.q
    new_q += (before.right_numbers - before.left_numbers) - (after.right_numbers - after.left_numbers)
    bits, is_below = borrow_bits(width, z, r)
    new_bits, new_is_below = borrow_bits(width, z, new_r)
    new_mu = other.masks.mu ^ bits ^ new_bits
    new_rho = other.masks.rho ^ is_below ^ new_is_below
    small = (new_q - own.masks.q).astype(np.uint64) | new_mu.astype(np.uint64) << np.uint64(16)
    small |= new_rho.astype(np.uint64) << np.uint64(32)
    # The values of what is derived now, of which the part that `party` holds is what it was.
    rho = (own.masks.rho ^ new_rho).astype(np.uint64)
    high = new_r >> np.uint64(width.bits)
    b = rho ^ (high & np.uint64(1))
    if party == 1:
        one_hots = [
            own.correlation.one_hots[place] ^ (np.uint64(1) << width.digit(new_r, place))
            for place in range(width.digits)
        ]
        bq = (b.astype(np.uint16) * new_q - own.correlation.bq).astype(np.uint64)
        drawn = [*one_hots, bq]
    else:
        drawn = list(own.correlation.tables ^ tables_of(width, own.masks.mu ^ new_mu))
        values = (high, rho, b, b * new_r)
        parts = (own.correlation.high, own.correlation.rho, own.correlation.b, own.correlation.br)
        drawn += [value - part for value, part in zip(values, parts, strict=True)]
    return np.concatenate([new_r - own.masks.r, small, *drawn])


def tables_of(width: Width, mu: NDArray[np.uint8]) -> Words:
    """The truth tables under these masks, from the definition of a borrow."""
    tables = np.zeros((width.table_words, COUNT), dtype=np.uint64)
    for index in range(2**width.index_bits):
        x = index ^ mu
        borrow = x & 1
        for place in range(1, width.digits):
            borrow = (x >> np.uint8(2 * place - 1) & 1) | (x >> np.uint8(2 * place) & 1 & borrow)
        tables[index // 64] |= borrow.astype(np.uint64) << np.uint64(index % 64)
    return tables


@pytest.mark.parametrize("party", [0, 1])
@pytest.mark.parametrize("bits", [1, 5, 6, 9, 13, 16, 18, 21])
def test_a_view_could_have_come_of_any_other_sums(rng: np.random.Generator, party: int, bits: int) -> None:
    width = Width.of(bits)
    streams = [random_words(rng, COUNT * words_drawn(number, width)) for number in range(2)]
    before, after = random_sums(rng, width), random_sums(rng, width)
    kept = Pairs(
        random_words(rng, COUNT),
        random_words(rng, COUNT),
        *(rng.integers(0, 2**16, COUNT).astype(np.uint16) for _ in range(2)),
    )

    def parts(sums: Pairs) -> list[Pairs]:
        other = split_pairs(kept, sums)
        return [kept, other] if party == 0 else [other, kept]

    seen = run(width, parts(before), streams)
    others = explained(party, width, seen, before, after)
    again = run(width, parts(after), [streams[0], others] if party == 0 else [others, streams[1]])

    one, other = seen[party], again[party]
    assert one.dealt == other.dealt
    assert one.received == other.received
    # So what it goes on with is the same; and the comparisons of both are right.
    for name in ("values", "numbers", "residues"):
        np.testing.assert_array_equal(getattr(one.result, name), getattr(other.result, name))
    for sums, held in ((before, seen), (after, again)):
        is_right = sums.right > sums.left
        np.testing.assert_array_equal(
            held[0].result.values + held[1].result.values, np.where(is_right, sums.right, sums.left)
        )
        np.testing.assert_array_equal(
            held[0].result.numbers + held[1].result.numbers,
            np.where(is_right, sums.right_numbers, sums.left_numbers),
        )
        np.testing.assert_array_equal(held[0].result.residues, held[1].result.residues)


@pytest.mark.parametrize("leak", ["a mask is used twice", "a mask is as short as a difference"])
def test_a_leak_that_is_planted_is_not_explained_away(rng: np.random.Generator, leak: str) -> None:
    """The masks that explain other sums are no longer among those that could have been drawn."""
    width = Width.of(16)
    streams = [random_words(rng, COUNT * words_drawn(number, width)) for number in range(2)]
    if leak.startswith("a mask is used"):
        streams[1][1:COUNT] = streams[1][0]
    else:
        streams[1][:COUNT] &= np.uint64(2**16 - 1)
    before, after = random_sums(rng, width), random_sums(rng, width)
    kept = random_sums(rng, width)
    seen = run(width, [kept, split_pairs(kept, before)], streams)
    r = explained(0, width, seen, before, after)[:COUNT]
    if leak.startswith("a mask is used"):
        assert len(set(r.tolist())) > 1
    else:
        assert (r >= np.uint64(2**16)).any()
