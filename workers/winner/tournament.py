"""A tournament among three talliers: it checks rows, compares numbers and finds the winner of each query.

**The tournament** runs over the classes, for all queries at once.

    shares in    tallier 2 splits its part in two and leaves: s = x_0 + x_1 + x_2 = a + b modulo p.
    level        neighbors are compared, and the larger goes on with its number. One without a neighbor goes on.
                 A threshold is one more contestant, the last, whose number is -1. Classes are in order and left wins
                 ties, so the lowest class with the largest sum wins, or nobody.
                 Two classes without a threshold are one shared difference, compared with zero. Their price relies on
                 this: nothing but the difference is looked at, even out of range (labeler.accounting.winner).
    out          talliers 0 and 1 send tallier 2 their parts of the winner's number (16 bits), never of a value. Masks
                 hide the parts and cancel if every difference was in range. Tallier 2 adds the parts and tells both.

**From p to 2^64.** Shares come in the field of the round. Let W = highest - lowest. A sum less lowest lies in 0 .. W (a
difference plus W in 0 .. 2 W). Because a, b < p and a + b = s modulo p, over the integers a + b = s + p unless a <= s.
So a - p and b are parts of s modulo 2^64. Tallier 0 sees by itself whether a > W: a is uniform and says nothing of s.
Where a is not larger, all is done again with new masks (probability below 2^-41 for an entry). A sum outside its range
stays outside: no multiple of p, taken off, brings it into 0 .. W, nor does reduction modulo 2^64.

**Out, if in range.** If every difference of the job was in range, some values are equal at talliers 0 and 1
(`Comparison.residues`). Let h_0 and h_1 be keyed hashes of them. Tallier 0 makes the key for tallier 1 alone, new for
each computation. Each sends tallier 2 its h, and its part of the number under a mask. The mask is a stream that only
key, job and h give; one tallier adds it and the other takes it off. Where h_0 = h_1 the masks cancel. Tallier 2 then
sees a hash that says nothing without the key, a uniform word, and the number less that word: the winner, and nothing
else. Where the hashes differ, the two masks are independent and tallier 2 sees nothing at all; it tells both that the
round is void. (Assumed: HMAC-SHA256 and AES are pseudo-random functions, SHA-256 has no collisions.)

The dealer does not wait for the others' work; `Room` bounds how far it runs ahead. All three start chunks of queries in
one order, as many as there is room for. So the first unfinished chunk is under way at all three, and every chunk ends.

**One comparison** of shared sums left and right between two talliers gives the larger and its number, and opens no
more.

Talliers 0 and 1 hold values and numbers in two parts, values modulo 2^64 and numbers modulo 2^16. Capital letters are
public between the two; small ones have been dealt (workers.winner.engine). Let d = left - right + 2^l, and e the number
of right less that of left.

    1. open    Z = d + r,  Y = e + q
    2. open    X = mu xor (for each digit of Z mod 2^l: is it below that of r, is it equal)      by their one-hots
    3. open    B = rho xor [Z mod 2^l < r mod 2^l]                                               by the truth table at X
    no more    d has bit l unless right is larger.  With K = 1 xor (bit l of Z) xor B and b = rho xor (bit l of r),
               c = K xor b is 1 where right is larger, else 0.  As c = K + (1 - 2K) b,
                   larger   = left  + c (right - left)      right - left = 2^l - Z + r
                   number   = its number + c e              e = Y - q
               are sums of public numbers times parts of b, b r and b q.

Left wins ties. A comparison takes three waits, whatever is compared and however many at once.

**The view of each**, if it is dishonest but follows the protocol. Tallier 0 sees Z, Y, X and B. In each, tallier 1's
part of the mask (r, q, mu, rho) is uniform and comes from a stream that tallier 0 does not have. Nothing else that
tallier 0 sees depends on this part: other words of that stream hide what tallier 0 was dealt. So Z, Y, X and B are
uniform and independent of all that it holds, of every sum, and of each other. Tallier 1: the same with the masks of
tallier 0. Tallier 2: nothing. So uniform words, drawn without any sum, have the distribution of what a tallier sees.
This is a simulator with distance 0, except for telling AES in counter mode from random bits. Put otherwise, take what a
tallier saw and any other sums. Some masks of the other tallier, as likely as those drawn, would have shown it the same.
`tests/workers/winner/test_view.py` computes them and compares.

**Sums outside their range.** Nobody can see whether an agent's noise was in range, nor whether a tallier put in the sum
that it had computed. Where d lies outside [0, 2^(l + 1)), c is still 0 or 1, and a class is opened in the end, but
perhaps the wrong one. H = (d >> l) tells: it must be 0 or 1, and equal to 1 - c. So H - (1 - c) = 0, where

    H - (1 - c) = (Z >> l) - (r >> l) - [Z mod 2^l < r mod 2^l] - 1 + c      modulo 2^(64 - l)

is again a sum of public numbers and parts: tallier 0's part of it must equal the negative of tallier 1's.
`Comparison.residues` are these values; if they differ, no winner is opened.

**The row check** has three exchanges over the connections of a job, before anything is opened: commit, reveal, combine
and compare. labeler.tally holds the proof.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

from labeler.errors import Unavailable
from labeler.randomness import AesCtrSource, derive_key, keyed_source, os_source
from labeler.sharing import uniform_below
from labeler.tally import (
    NONCE_BYTES,
    check_commitment,
    coefficients,
    combine,
    commitment,
    misshapen,
    refuse_misshapen,
)
from workers.winner.engine import ABSTAINED, Correlation, Masks, Width, WinnerJob, Words, deal, draw_masks, part_of

DEALER: Final = 2
"""The tallier that deals, and sees nothing that is opened but the winners."""

CHUNK_COMPARISONS: Final = 1 << 15
"""Comparisons of the first level of a chunk: what bounds memory, about 20 MB."""

ROOM_COMPARISONS: Final = 1 << 17
"""Comparisons of all chunks that are under way."""

SEED_BYTES: Final = 32
HASH_BYTES: Final = 32


class Wire(Protocol):
    """The messages of one chunk to and from the two others, each of a size that both ends know."""

    def send(self, peer: int, data: bytes) -> None:
        """Send, without waiting."""
        ...

    async def receive(self, peer: int, size: int) -> bytes:
        """The next message of a peer.

        Raises:
            ProtocolViolation: it has another size.
        """
        ...


class Room:
    """A gate that lets chunks start in order, as many as there is room for; see the module."""

    def __init__(self, size: int = ROOM_COMPARISONS) -> None:
        self._left = self._size = size
        self._door = asyncio.Lock()
        self._freed = asyncio.Event()

    @asynccontextmanager
    async def of(self, weight: int) -> AsyncIterator[None]:
        """Hold room for a chunk; chunks get it in the order of these calls."""
        weight = min(weight, self._size)
        # The lock is fair, and the first in line holds it while it waits for room.
        async with self._door:
            while weight > self._left:
                self._freed.clear()
                await self._freed.wait()
            self._left -= weight
        try:
            yield
        finally:
            self._left += weight
            self._freed.set()


def queries_of_a_chunk(job: WinnerJob) -> int:
    """Return how many queries of a job are computed at once."""
    return max(1, CHUNK_COMPARISONS // levels(job)[0])


def levels(job: WinnerJob) -> list[int]:
    """Return the number of comparisons of a query at each level, with a threshold as one more contestant."""
    left, counts = job.num_classes + (job.threshold is not None), []
    while left > 1:
        counts.append(left // 2)
        left -= left // 2
    return counts


def stream_of(seed: bytes, job: WinnerJob, chunk: int) -> AesCtrSource:
    """Return the stream of a tallier for one chunk of one job."""
    return keyed_source(derive_key(seed, b"winner-chunk", job.digest.encode(), b"%d" % chunk), is_seeded=False)


async def deal_chunk(job: WinnerJob, share: Words, chunk: int, seeds: tuple[bytes, bytes], wire: Wire) -> None:
    """Do the dealer's part of a chunk: hand over its share, deal for every level, and wait until that was used.

    Args:
        share: the dealer's, of the queries of the chunk.
        seeds: of talliers 0 and 1.
    """
    share = _compared(job, share)
    first, second = (stream_of(seed, job, chunk) for seed in seeds)
    split = uniform_below(job.field.modulus, first, share.size)
    wire.send(1, job.field.subtract(share.reshape(-1), split).astype("<u8").tobytes())
    width = Width.of(job.comparison_bits)
    for per_query in levels(job):
        for party, dealt in enumerate(deal(width, per_query * len(share), first, second)):
            wire.send(party, dealt)
        # Between two levels its messages leave, and this process's other tasks get a turn.
        await asyncio.sleep(0)
    for party in (0, 1):
        await wire.receive(party, 0)


@dataclass(frozen=True, eq=False, repr=False)
class Finished:
    """One tallier's part of a chunk's winners: numbers (uint16, one per query), and a digest of each level's
    residues.
    """

    numbers: Numbers
    residues: tuple[bytes, ...]


async def find_chunk(job: WinnerJob, share: Words, chunk: int, seed: bytes, wire: Wire) -> Finished:
    """Do the part of tallier 0 or 1 in a chunk.

    Args:
        share: this tallier's, of the queries of the chunk.

    Raises:
        Unavailable: masks have to be drawn again; see the module.
    """
    party, stream = job.party, stream_of(seed, job, chunk)
    width = Width.of(job.comparison_bits)
    other = 1 - party

    async def exchange(data: bytes) -> bytes:
        wire.send(other, data)
        return await wire.receive(other, len(data))

    values, numbers = _contestants(job, await _two_parts(job, share, stream, wire))
    residues = []
    for _ in levels(job):
        even = values.shape[1] // 2 * 2
        shape = len(values), even // 2
        count = shape[0] * shape[1]
        masks = draw_masks(width, count, stream)

        async def dealt(count: int = count) -> Correlation:
            return part_of(party, width, count, stream, await wire.receive(DEALER, width.dealt_bytes(party, count)))

        pairs = Pairs(
            values[:, 0:even:2].reshape(-1),
            values[:, 1:even:2].reshape(-1),
            numbers[:, 0:even:2].reshape(-1),
            numbers[:, 1:even:2].reshape(-1),
        )
        result = await compare(party, width, pairs, masks, dealt, exchange)
        residues.append(hashlib.sha256(result.residues.astype("<u8", copy=False).data).digest())
        values = np.hstack((result.values.reshape(shape), values[:, even:]))
        numbers = np.hstack((result.numbers.reshape(shape), numbers[:, even:]))
    wire.send(DEALER, b"")
    return Finished(numbers[:, 0], tuple(residues))


def masked_answer(job: WinnerJob, chunks: Sequence[Finished], key: bytes) -> bytes:
    """Return what tallier 0 or 1 sends tallier 2 for a whole job: its hash, then its masked parts of the numbers."""
    mixed = hmac.new(key, b"labeler-winner-range/1 " + job.digest.encode(), "sha256")
    for chunk in chunks:
        mixed.update(b"".join(chunk.residues))
    found = mixed.digest()
    source = keyed_source(derive_key(key, b"winner-answer", job.digest.encode(), found), is_seeded=False)
    numbers = np.concatenate([chunk.numbers for chunk in chunks])
    mask = np.frombuffer(source.bytes(2 * len(numbers)), dtype="<u2").astype(np.uint16)
    masked = numbers + mask if job.party == 0 else numbers - mask
    return found + masked.astype("<u2").tobytes()


def answer_bytes(job: WinnerJob) -> int:
    """Return the length of a masked answer."""
    return HASH_BYTES + 2 * job.num_queries


def open_answers(one: bytes, other: bytes) -> NDArray[np.int16] | None:
    """Open the masked answers of talliers 0 and 1: the classes, or -1; None where a sum was out of range."""
    if one[:HASH_BYTES] != other[:HASH_BYTES]:
        return None
    parts = [np.frombuffer(part, dtype="<u2", offset=HASH_BYTES).astype(np.uint16) for part in (one, other)]
    return (parts[0] + parts[1]).view(np.int16)


async def _two_parts(job: WinnerJob, share: Words, stream: AesCtrSource, wire: Wire) -> Words:
    """Return this tallier's part, modulo 2^64, of each compared number, less the lowest that it can be."""
    share = _compared(job, share)
    field, shape = job.field, share.shape
    lowest, width = _range(job)
    own = share.reshape(-1)
    if job.party == 1:
        sent = np.frombuffer(await wire.receive(DEALER, 8 * own.size), dtype="<u8").astype(np.uint64, copy=False)
        field.check(sent, "what the dealer handed over")
        return field.add(own, sent).reshape(shape)
    own = field.add(own, uniform_below(field.modulus, stream, own.size))
    own = field.add(own, np.full_like(own, -lowest))
    if own.size and int(own.min()) <= width:
        raise Unavailable("masks of the winner job have to be drawn again; try again with the same shares")
    return (own - np.uint64(field.modulus % 2**64)).reshape(shape)


def _contestants(job: WinnerJob, values: Words) -> tuple[Words, Numbers]:
    """Return values and numbers of all contestants; tallier 0's part holds what is public, and tallier 1's is zero."""
    is_first = job.party == 0
    numbers = np.zeros(values.shape, dtype=np.uint16)
    if is_first:
        numbers += np.arange(values.shape[1], dtype=np.uint16)
    public, number = (0, 1) if job.is_duel else (job.clipped_threshold, ABSTAINED)
    if public is None:
        return values, numbers
    column = np.full((len(values), 1), public - _range(job)[0] if is_first else 0, dtype=np.uint64)
    named = np.full((len(values), 1), number % 2**16 if is_first else 0, dtype=np.uint16)
    return np.hstack((values, column)), np.hstack((numbers, named))


def _compared(job: WinnerJob, share: Words) -> Words:
    """Return a tallier's share of what is compared: the sums, or the difference of two."""
    return job.field.subtract(share[:, :1], share[:, 1:]) if job.is_duel else share


def _range(job: WinnerJob) -> tuple[int, int]:
    """Return the lowest number that is compared, and how far above it the highest lies."""
    width = job.highest - job.lowest
    return (-width, 2 * width) if job.is_duel else (job.lowest, width)


Exchange = Callable[[bytes], Awaitable[bytes]]
"""Sends bytes to the other of the two talliers, and returns equally many from it."""

Deal = Callable[[], Awaitable[Correlation]]
"""Waits for the dealt values."""

Numbers = NDArray[np.uint16]

_ONE = np.uint64(1)


@dataclass(frozen=True, eq=False, repr=False)
class Comparison:
    """One tallier's part of the result of comparisons, shape (n,).

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
    """Compute this tallier's part of the larger of each two; see the module.

    Args:
        party: 0 or 1.
        width: of the comparisons; a difference in range lies in [-2^l, 2^l).
        masks: this tallier's part, for this many comparisons, used for nothing else.
        deal: this tallier's part of the derived values; awaited when the first opening needs nothing more of this
            tallier.
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
    """Return 1 where a bit is 0, and -1 modulo 2^64 where it is 1."""
    return np.ones_like(bits) - bits - bits


def _looked_up(width: Width, z: Words, dealt: Correlation) -> NDArray[np.uint8]:
    """Return this tallier's part of two bits for each digit of Z: below that of r, and equal to it."""
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
    """Return bit `index` of each table."""
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


Share = Callable[[bytes], Awaitable[list[bytes]]]
"""Sends the same bytes to both others, and returns everybody's, equally long, in tallier order."""


async def check_rows(share: Share, job: WinnerJob, rows: NDArray[np.uint64]) -> None:
    """Compare, with the other talliers, what the rows of every contributor sum to.

    Args:
        share: with the two others, on the channel of the job.
        job: names the contributors, in the order of the rows.
        rows: this tallier's row sums, residues, shape (contributors, num_queries).

    Raises:
        ProtocolViolation: a tallier revealed another nonce than it had committed to, sent something else, or rows do
            not add up. In the last case the error names the agents.
    """
    field = job.field
    nonce = os_source().bytes(NONCE_BYTES)
    committed = await share(commitment(nonce, agreement=job.agreement, tallier=job.party))
    revealed = await share(nonce)
    for tallier, said in enumerate(committed):
        check_commitment(said, revealed[tallier], agreement=job.agreement, tallier=tallier)
    factors = coefficients(revealed, agreement=job.agreement, num_queries=job.num_queries, field=field)
    combinations = [
        np.frombuffer(data, dtype="<u8").astype(np.uint64)
        for data in await share(combine(rows, factors, field).astype("<u8").tobytes())
    ]
    for combination in combinations:
        field.check(combination, "a combination of row sums")
    refuse_misshapen(misshapen(combinations, job.contributors, field))
