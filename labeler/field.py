"""The prime fields in which ballots, noise and sums are shared where the winner of a query is to be computed.

A noisy sum, negative or not, is a residue modulo a prime p, and p leaves 43 bits of room:

    bits of p  =  bits of the widest difference of two sums  +  43

So a sum is one of very few residues. Two talliers whose parts add up to it modulo p have parts whose sum as integers
is p more than the sum, but where a part is among those few: with probability below 2^-42, which that tallier sees by
itself (workers.winner.tournament). Earlier versions opened differences behind masks of 41 bits in the same fields.

All moduli stay below 2^64, so a residue is one 64-bit word.

A sum out of its range may be read as less by p (workers.winner.tournament). Modulo 2^64 neither p nor 2 p may look like
a small step back: p below 2^62 is a jump out of every range, and p = 2^64 - 189 a step forward of 189. Twice a prime of
63 bits would be 50 below 2^64, so where 63 bits would do, 64 are taken.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from labeler.errors import InvalidSetting, ProtocolViolation
from labeler.grid import MAX_COMPARISON_BITS, ROOM_BITS
from labeler.randomness import ByteSource

BLUM_PRIME_OFFSETS: Final = {
    44: 17, 45: 69, 46: 21, 47: 297, 48: 65, 49: 81, 50: 113, 51: 129, 52: 173, 53: 145, 54: 33,
    55: 169, 56: 5, 57: 13, 58: 57, 59: 225, 60: 93, 61: 1, 62: 57, 64: 189,
}  # fmt: skip
"""b -> c such that 2^b - c is the largest prime below 2^b that leaves 3 when divided by 4. None has 63 bits."""


@dataclass(frozen=True)
class PrimeField:
    """The integers modulo one of our primes; a residue is a uint64 word below it.

    Attributes:
        modulus: 2^b - BLUM_PRIME_OFFSETS[b] for a b of that table.

    Raises:
        InvalidSetting: the modulus is another number.
    """

    modulus: int

    def __post_init__(self) -> None:
        if self.modulus not in _MODULI:
            raise InvalidSetting(
                f"the modulus of a prime field must be one of the {len(_MODULI)} of labeler.field; "
                f"found {self.modulus}. field_for gives the one that fits."
            )

    @property
    def bits(self) -> int:
        """Length of the modulus in bits."""
        return self.modulus.bit_length()

    def encode(self, values: NDArray[np.int64]) -> NDArray[np.uint64]:
        """Integers as residues; a negative one counts from the modulus down.

        Raises:
            InvalidSetting: a value lies outside -p/2 .. p/2, where it could not be read back.
        """
        half = self.modulus // 2
        if values.dtype != np.int64:
            raise InvalidSetting(f"only int64 values have residues here; found {values.dtype}")
        if values.size and (values.min() < -half or values.max() > half):
            raise InvalidSetting(f"a value lies outside -{half} .. {half}, the range of a field of {self.bits} bits")
        words = values.astype(np.uint64)
        return np.where(values < 0, words + np.uint64(self.modulus), words)

    def decode(self, residues: NDArray[np.uint64]) -> NDArray[np.int64]:
        """Residues as the integers -p/2 .. p/2 nearest to zero."""
        is_negative = residues > np.uint64(self.modulus // 2)
        words = np.where(is_negative, residues - np.uint64(self.modulus), residues)
        return words.view(np.int64)

    def check(self, residues: NDArray[np.uint64], what: str) -> None:
        """Refuse words that are no residues.

        Raises:
            ProtocolViolation: another type, or a word not below the modulus.
        """
        if residues.dtype != np.uint64:
            raise ProtocolViolation(f"{what} must be uint64 words, found {residues.dtype}")
        if residues.size and int(residues.max()) >= self.modulus:
            raise ProtocolViolation(f"{what} holds a word that is no residue of the field of {self.bits} bits")

    def add(self, one: NDArray[np.uint64], other: NDArray[np.uint64]) -> NDArray[np.uint64]:
        """The sum of two arrays of residues."""
        total = one + other
        # Above 2^63 the sum of two words can leave 64 bits; then it came out smaller than either.
        wrapped = (total < one) | (total >= np.uint64(self.modulus))
        return np.where(wrapped, total - np.uint64(self.modulus), total)

    def subtract(self, one: NDArray[np.uint64], other: NDArray[np.uint64]) -> NDArray[np.uint64]:
        """The difference of two arrays of residues."""
        return np.where(one >= other, one - other, one - other + np.uint64(self.modulus))

    def times(self, residues: NDArray[np.uint64], factor: int) -> NDArray[np.uint64]:
        """Residues times one public whole number of at least 0, by doubling and adding: products need no wider words.

        Raises:
            InvalidSetting: the factor is negative.
        """
        if factor < 0:
            raise InvalidSetting(f"residues are multiplied by whole numbers of at least 0 here, found {factor}")
        total = np.zeros_like(residues)
        for bit in bin(factor)[2:]:
            total = self.add(total, total)
            if bit == "1":
                total = self.add(total, residues)
        return total

    def total(self, parts: Sequence[NDArray[np.uint64]]) -> NDArray[np.uint64]:
        """The sum of one or more arrays of residues.

        Raises:
            InvalidSetting: there is none.
        """
        if not parts:
            raise InvalidSetting("a sum needs at least one array of residues")
        total = parts[0]
        for part in parts[1:]:
            total = self.add(total, part)
        return total

    def uniform(self, source: ByteSource, count: int) -> NDArray[np.uint64]:
        """Uniform residues, shape (count,): see `uniform_below`."""
        return uniform_below(self.modulus, source, count)


_MODULI: Final = frozenset(2**bits - offset for bits, offset in BLUM_PRIME_OFFSETS.items())


def uniform_below(bound: int, source: ByteSource, count: int) -> NDArray[np.uint64]:
    """Uniform numbers in [0, bound) by rejection: no number is more likely than another, not even by 2^-64.

    Each 64-bit word of the source is cut to its lowest b bits, b the length of bound - 1; what is
    `bound` or more is thrown away. A cut word X is uniform on [0, 2^b), so for every x < bound,
    P(X = x | X < bound) = 2^-b / (bound 2^-b) = 1 / bound; the words are independent, so the kept ones
    are. The result is the first `count` kept words of the stream: equal streams give equal numbers,
    however the count is cut into calls. At least half of all words are kept, of our primes nearly all.

    Args:
        bound: 1 to 2^64.
        source: the stream; which words are thrown away depends on nothing else.
        count: how many.

    Raises:
        InvalidSetting: the bound is outside 1 .. 2^64, or the count negative.
    """
    if not 1 <= bound <= 2**64:
        raise InvalidSetting(f"uniform words lie below a bound of 1 to 2^64, found {bound}")
    mask = np.uint64((1 << (bound - 1).bit_length()) - 1)
    largest = np.uint64(bound - 1)
    words = source.uint64(count) & mask
    kept = words[words <= largest] if bound - 1 != int(mask) else words
    while len(kept) < count:
        words = source.uint64(count - len(kept)) & mask
        kept = np.concatenate([kept, words[words <= largest]])
    return kept


def comparison_bits(lowest: int, highest: int) -> int:
    """Bits l such that every difference of two numbers in lowest .. highest + 1 lies in [-2^l, 2^l).

    The one above the highest is there for a threshold that nothing reaches.

    Raises:
        InvalidSetting: lowest is above highest.
    """
    if lowest > highest:
        raise InvalidSetting(f"the lowest sum must not be above the highest, found {lowest} and {highest}")
    return (highest + 1 - lowest).bit_length()


def field_for(lowest: int, highest: int) -> PrimeField:
    """The smallest of our fields in which sums in lowest .. highest can be compared securely.

    Every such sum is also read back rightly: p is more than 2^42 times the width of the range, and the
    range must contain zero.

    Args:
        lowest: the smallest a sum can be, at most 0.
        highest: the largest a sum can be, at least 0.

    Raises:
        InvalidSetting: the range does not contain zero, or is too wide for a field of 64 bits.
    """
    if not lowest <= 0 <= highest:
        raise InvalidSetting(f"the range of a sum must contain zero, found {lowest} .. {highest}")
    bits = comparison_bits(lowest, highest)
    if bits > MAX_COMPARISON_BITS:
        raise InvalidSetting(
            f"noisy sums from {lowest} to {highest} grid units differ by up to {bits} bits; the winner of a query can "
            f"be computed securely up to {MAX_COMPARISON_BITS} bits. Use a smaller grid_scale, k, sigma_votes, "
            "ballot_radius or max_agent_records, fewer agents, or release the histogram."
        )
    size = bits + ROOM_BITS
    if size not in BLUM_PRIME_OFFSETS:
        size += 1
    return PrimeField(2**size - BLUM_PRIME_OFFSETS[size])
