"""One comparison between two talliers, of shared sums left and right: the larger, and its number; no more is opened.

Talliers 0 and 1 hold values and numbers in two parts, values modulo 2^64, numbers modulo 2^16; capital letters are
public between the two; small ones have been dealt (workers.winner.correlations). With d = left - right + 2^l, and e the
number of right less that of left:

    1. open    Z = d + r,  Y = e + q
    2. open    X = mu xor (for each digit of Z mod 2^l: is it below that of r, is it equal)      by their one-hots
    3. open    B = rho xor [Z mod 2^l < r mod 2^l]                                               by the truth table at X
    no more    d has bit l unless right is larger: with K = 1 xor (bit l of Z) xor B and b = rho xor (bit l of r),
               c = K xor b is 1 where right is larger, else 0.  As c = K + (1 - 2K) b,
                   larger   = left  + c (right - left)      right - left = 2^l - Z + r
                   number   = its number + c e              e = Y - q
               are sums of public numbers times parts of b, b r and b q.

Left stays on ties. Three waits, whatever is compared and however many at once.

**What each sees**, if it is dishonest but follows the protocol. Tallier 0: Z, Y, X and B. In each, tallier 1's part of
the mask (r, q, mu, rho) is uniform, of a stream that tallier 0 does not have, and nothing else that tallier 0 sees
depends on it: what tallier 0 was dealt is hidden by other words of that stream. So Z, Y, X and B are uniform and
independent of all that it holds, of every sum, and of each other. Tallier 1: the same with the masks of tallier 0.
Tallier 2: nothing. So whoever draws uniform words has drawn what a tallier sees, without a sum: a simulator, whose
distance is 0, but for AES in counter mode being told from random bits. Put otherwise: for what a tallier saw, and any
other sums, there are masks of the other tallier, as likely as those that were drawn, with which it would have seen
the same; `tests/workers/winner/test_view.py` computes them, and looks.

**Sums outside their range.** Nobody can see whether an agent's noise was in range, nor whether a tallier put in what it
had added up. Where d lies outside [0, 2^(l + 1)), c is 0 or 1 still, and what is opened in the end a class; but perhaps
not the right one. H = (d >> l) tells: it must be 0 or 1, which is to say H - (1 - c) = 0, and

    H - (1 - c) = (Z >> l) - (r >> l) - [Z mod 2^l < r mod 2^l] - 1 + c      modulo 2^(64 - l)

is a sum of public numbers and parts again: what tallier 0 has of it must be what tallier 1 has of its negative.
`Comparison.residues` are these; if they differ, no winner is opened (workers.winner.tournament).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from workers.winner.correlations import Correlation, Masks, Width, Words

Exchange = Callable[[bytes], Awaitable[bytes]]
"""Sends bytes to the other of the two talliers, and gives as many back from it."""

Deal = Callable[[], Awaitable[Correlation]]
"""Waits for what was dealt."""

Numbers = NDArray[np.uint16]

_ONE = np.uint64(1)


@dataclass(frozen=True, eq=False, repr=False)
class Comparison:
    """One tallier's part of what came out, shape (n,).

    Attributes:
        values: of the larger of each two, uint64.
        numbers: of its number, uint16.
        residues: uint64; equal at both talliers where all differences were in range.
    """

    values: Words
    numbers: Numbers
    residues: Words


@dataclass(frozen=True, eq=False, repr=False)
class Pairs:
    """One tallier's parts of what is compared, each of shape (n,): values uint64, numbers uint16."""

    left: Words
    right: Words
    left_numbers: Numbers
    right_numbers: Numbers


async def compare(party: int, width: Width, pairs: Pairs, masks: Masks, deal: Deal, exchange: Exchange) -> Comparison:
    """The larger of each two; see the module.

    Args:
        party: 0 or 1.
        width: of the comparisons; a difference in range lies in [-2^l, 2^l).
        masks: this tallier's part, for this many comparisons, used for nothing else.
        deal: the like; waited for once the first opening needs no more of this tallier.
    """
    top = np.uint64(1 << width.bits)
    own_z = pairs.left - pairs.right + masks.r
    if party == 0:
        own_z += top
    own_y = pairs.right_numbers - pairs.left_numbers + masks.q
    z, y = await _open_words(own_z, own_y, exchange)
    dealt = await deal()
    x = await _open_bytes(_looked_up(width, z, dealt) ^ masks.mu, exchange)
    own_borrow = _entry(dealt.tables, x) ^ masks.rho
    borrow = await _open_bits(own_borrow, exchange)

    high = z >> np.uint64(width.bits)
    flip = _ONE ^ (high & _ONE) ^ borrow
    sign = _sign(flip)
    is_flipped = flip.astype(bool)
    values = np.where(is_flipped, pairs.right, pairs.left) + sign * ((top - z) * dealt.b + dealt.br)
    small_sign, small_b = sign.astype(np.uint16), dealt.b.astype(np.uint16)
    numbers = np.where(is_flipped, pairs.right_numbers, pairs.left_numbers) + small_sign * (y * small_b - dealt.bq)

    own = sign * dealt.b - _sign(borrow) * dealt.rho - dealt.high
    residues = own + high + flip - borrow - np.ones_like(own) if party == 0 else np.zeros_like(own) - own
    return Comparison(values, numbers, residues << np.uint64(width.bits))


def _sign(bits: Words) -> Words:
    """1 where a bit is 0, and -1 modulo 2^64 where it is 1."""
    return np.ones_like(bits) - bits - bits


def _looked_up(width: Width, z: Words, dealt: Correlation) -> NDArray[np.uint8]:
    """This tallier's part of the bits that digits of Z are below, and equal to, those of r."""
    found = np.zeros(len(z), dtype=np.uint8)
    for place in range(width.digits):
        above = dealt.one_hots[place] >> width.digit(z, place)
        is_below = np.bitwise_count(above >> _ONE) & np.uint8(1)
        if place == 0:
            found |= is_below
        else:
            found |= is_below << np.uint8(2 * place - 1)
            found |= (above & _ONE).astype(np.uint8) << np.uint8(2 * place)
    return found


def _entry(tables: Words, index: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Bit `index` of each table."""
    word = tables[0] if len(tables) == 1 else np.where(index < 64, tables[0], tables[1])
    found: NDArray[np.uint8] = ((word >> (index & np.uint8(63)).astype(np.uint64)) & _ONE).astype(np.uint8)
    return found


async def _open_words(own_z: Words, own_y: Numbers, exchange: Exchange) -> tuple[Words, Numbers]:
    theirs = await exchange(own_z.astype("<u8", copy=False).tobytes() + own_y.astype("<u2", copy=False).tobytes())
    count = len(own_z)
    z = own_z + np.frombuffer(theirs, dtype="<u8", count=count)
    return z, own_y + np.frombuffer(theirs, dtype="<u2", offset=8 * count)


async def _open_bytes(own: NDArray[np.uint8], exchange: Exchange) -> NDArray[np.uint8]:
    return own ^ np.frombuffer(await exchange(own.tobytes()), dtype=np.uint8)


async def _open_bits(own: NDArray[np.uint8], exchange: Exchange) -> Words:
    packed = np.packbits(own)
    theirs = np.frombuffer(await exchange(packed.tobytes()), dtype=np.uint8)
    return np.unpackbits(packed ^ theirs, count=len(own)).astype(np.uint64)
