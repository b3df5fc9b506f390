"""What the dealer deals for a comparison, and what of it is whose: random, and independent of every ballot.

Tallier 2 deals, talliers 0 and 1 compute. Everything is drawn before anything is compared, and follows from nothing
but the number and the width of the comparisons; the dealer sees nothing that the two others open
(workers.winner.comparison).

For a comparison of l bits. Sums are modulo 2^64 (q: 2^16), tables and bits are shared by exclusive or:

    free      r, q, mu, rho          uniform; the sum of a part of each tallier's own stream
    derived   one-hot of each digit of r mod 2^l, six bits to a digit            2^6 bits each
              a truth table of "z mod 2^l < r mod 2^l" from masked bits           2^(2 digits - 1) bits
              r >> l,   rho,   b = rho xor (bit l of r),   b r                    words
              b q                                                                 16 bits

**Whose.** Each of the two has a seed of the dealer's, and expands from it its parts of all free values, and of derived
ones: tallier 0 of the one-hots and of b q, tallier 1 of all others. The other tallier's part of these is sent to it:
the value less the part that was expanded. That is a word of its own of a stream that this one does not have, so what a
tallier is sent is uniform and independent of all values, and of all that it has otherwise. Two ways, so that both
connections carry about as much.

The bits of a digit's one-hot say both "equal" (bit z) and "below" (parity of the bits above z), so one table does for
both: a one-time truth table, as in Ishai, Kushilevitz, Meldgaard, Orlandi and Paskin-Cherniavsky, TCC 2013, section 3.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from labeler.randomness import ByteSource

DIGIT_BITS: Final = 6
"""Bits of a digit: the one-hot of a digit is one word."""

Words = NDArray[np.uint64]
_ONE = np.uint64(1)
_NUMBER_MASK = np.uint64(0xFFFF)
_WORD: Final = np.dtype("<u8")
_NUM_SUMMED: Final = 4
"""Derived words that are shared by sums: r >> l, rho, b and b r."""


@dataclass(frozen=True)
class Width:
    """How a comparison of l bits is cut.

    Attributes:
        bits: l.
        digits: of the low l bits.
        index_bits: bits that are opened to look up the truth table.
        table_words: 64-bit words of that table.
    """

    bits: int
    digits: int
    index_bits: int
    table_words: int

    @classmethod
    def of(cls, bits: int) -> Width:
        """The one for l bits, 1 to 24."""
        digits = -(-bits // DIGIT_BITS)
        index_bits = 2 * digits - 1
        return cls(bits, digits, index_bits, max(1, 2**index_bits // 64))

    @cached_property
    def one_hot_types(self) -> tuple[np.dtype[Any], ...]:
        """How the one-hot of each digit is written: as few bytes as it has values, divided by 8."""
        return tuple(_type_of(2 ** self.digit_bits(place)) for place in range(self.digits))

    @cached_property
    def table_type(self) -> np.dtype[Any]:
        """How a word of a truth table is written."""
        return _type_of(2**self.index_bits)

    def dealt_bytes(self, party: int, count: int) -> int:
        """Bytes that a tallier is sent for so many comparisons."""
        if party == 1:
            return count * (sum(one.itemsize for one in self.one_hot_types) + 2)
        return count * (self.table_words * self.table_type.itemsize + 8 * _NUM_SUMMED)

    def digit_bits(self, place: int) -> int:
        """Bits of a digit."""
        return min(DIGIT_BITS, self.bits - DIGIT_BITS * place)

    def digit(self, words: Words, place: int) -> Words:
        """A digit of the low l bits of each word, the lowest at place 0."""
        return (words >> np.uint64(DIGIT_BITS * place)) & np.uint64((1 << self.digit_bits(place)) - 1)


@dataclass(frozen=True, eq=False, repr=False)
class Masks:
    """One tallier's parts of the free values for n comparisons, each of shape (n,). Secret, used once.

    Attributes:
        r: uint64; of the mask of a difference.
        q: uint16; of the mask of a difference of numbers.
        mu: uint8; of the mask of the bits that are looked up.
        rho: uint8; of the mask of a borrow, a bit.
    """

    r: Words
    q: NDArray[np.uint16]
    mu: NDArray[np.uint8]
    rho: NDArray[np.uint8]


@dataclass(frozen=True, eq=False, repr=False)
class Correlation:
    """One tallier's parts of the derived values for n comparisons; see the module. Secret, used once.

    Attributes:
        one_hots: uint64, shape (digits, n).
        tables: uint64, shape (table_words, n).
        high, rho, b, br: uint64, shape (n,); of r >> l, rho, b and b r.
        bq: uint16, shape (n,).
    """

    one_hots: Words
    tables: Words
    high: Words
    rho: Words
    b: Words
    br: Words
    bq: NDArray[np.uint16]


def draw_masks(width: Width, count: int, stream: ByteSource) -> Masks:
    """A tallier's parts of the free values, which are the first in its stream."""
    r, small = stream.uint64(count), stream.uint64(count)
    mu = (small >> np.uint64(16)).astype(np.uint8) & np.uint8((1 << width.index_bits) - 1)
    rho = ((small >> np.uint64(32)) & _ONE).astype(np.uint8)
    return Masks(r, (small & _NUMBER_MASK).astype(np.uint16), mu, rho)


def part_of(party: int, width: Width, count: int, stream: ByteSource, dealt: bytes) -> Correlation:
    """A tallier's parts of the derived values, from its stream behind the masks and what the dealer has sent it.

    Args:
        party: 0 or 1.
        dealt: `width.dealt_bytes(party, count)` bytes of `deal`.
    """
    if party == 0:
        one_hots, bq = _drawn_one_hots(width, count, stream)
        size = width.table_words * count
        tables = _read(dealt, 0, width.table_type, size).reshape(width.table_words, count)
        words = _read(dealt, size * width.table_type.itemsize, _WORD, _NUM_SUMMED * count).reshape(_NUM_SUMMED, count)
    else:
        tables, words = _drawn_words(width, count, stream)
        one_hots = np.empty((width.digits, count), dtype=np.uint64)
        place = 0
        for row, kind in zip(one_hots, width.one_hot_types, strict=True):
            row[:] = _read(dealt, place, kind, count)
            place += kind.itemsize * count
        bq = np.frombuffer(dealt, dtype="<u2", offset=place).astype(np.uint16, copy=False)
    high, rho, b, br = words
    return Correlation(one_hots, tables, high, rho, b, br, bq)


def deal(width: Width, count: int, stream_0: ByteSource, stream_1: ByteSource) -> tuple[bytes, bytes]:
    """What talliers 0 and 1 are sent for the next comparisons of their streams.

    Args:
        stream_0: the stream of tallier 0.
        stream_1: the stream of tallier 1.
    """
    first, (one_hots, bq) = draw_masks(width, count, stream_0), _drawn_one_hots(width, count, stream_0)
    second, (tables, words) = draw_masks(width, count, stream_1), _drawn_words(width, count, stream_1)
    r, q, rho = first.r + second.r, first.q + second.q, (first.rho ^ second.rho).astype(np.uint64)
    high = r >> np.uint64(width.bits)
    b = rho ^ (high & _ONE)
    # What the other one's parts leave of each value.
    tables ^= _masked_tables(width)[:, first.mu ^ second.mu]
    for row, value in zip(words, (high, rho, b, b * r), strict=True):
        np.subtract(value, row, out=row)
    to_1 = []
    for place, kind in enumerate(width.one_hot_types):
        to_1.append((one_hots[place] ^ (_ONE << width.digit(r, place))).astype(kind))
    to_1.append((b.astype(np.uint16) * q - bq).astype("<u2", copy=False))
    to_0 = tables.astype(width.table_type), words.astype("<u8", copy=False)
    return b"".join(array.tobytes() for array in to_0), b"".join(array.tobytes() for array in to_1)


def _type_of(bits: int) -> np.dtype[Any]:
    """The narrowest word with so many bits, or of as many as fit."""
    return np.dtype(f"<u{min(8, max(1, bits // 8))}")


def _read(data: bytes, offset: int, kind: np.dtype[Any], count: int) -> Words:
    return np.frombuffer(data, dtype=kind, count=count, offset=offset).astype(np.uint64, copy=False)


def _drawn_one_hots(width: Width, count: int, stream: ByteSource) -> tuple[Words, NDArray[np.uint16]]:
    """Tallier 0's parts of the one-hots and of b q."""
    one_hots = stream.uint64(width.digits * count).reshape(width.digits, count)
    for row, kind in zip(one_hots, width.one_hot_types, strict=True):
        row &= np.uint64(2 ** (8 * kind.itemsize) - 1)
    return one_hots, (stream.uint64(count) & _NUMBER_MASK).astype(np.uint16)


def _drawn_words(width: Width, count: int, stream: ByteSource) -> tuple[Words, Words]:
    """Tallier 1's parts of the truth tables, and of r >> l, rho, b and b r."""
    tables = stream.uint64(width.table_words * count).reshape(width.table_words, count)
    return tables, stream.uint64(_NUM_SUMMED * count).reshape(_NUM_SUMMED, count)


@cache
def _masked_tables(width: Width) -> Words:
    """The truth table of the borrow under every mask, shape (table_words, 2^index_bits).

    Bit x of the table for mu is the borrow that follows from the bits x xor mu: bit 0 says that the lowest digit of z
    is below that of r, bits 2j - 1 and 2j that digit j is below, and equal.
    """
    size = 2**width.index_bits
    x = np.arange(size)
    borrow = x & 1
    for place in range(1, width.digits):
        borrow = (x >> (2 * place - 1) & 1) | (x >> (2 * place) & 1 & borrow)
    tables = np.zeros((width.table_words, size), dtype=np.uint64)
    for mu in range(size):
        for index in np.flatnonzero(borrow[x ^ mu]):
            tables[index // 64, mu] |= _ONE << np.uint64(index % 64)
    return tables
