"""The winners of some queries among three talliers: a tournament over the classes, all queries at once.

    shares in    tallier 2 splits its part in two and goes: s = x_0 + x_1 + x_2 = a + b modulo p
    level        neighbours are compared, the larger and its number go on (workers.winner.comparison); who has no
                 neighbour goes on as it is. A threshold is one more contestant, the last, whose number is -1: classes
                 are in order and left stays on ties, so the lowest class with the largest sum wins, or nobody.
                 Two classes without a threshold are one shared difference, compared with zero: their price counts on
                 it that nothing but the difference is looked at, out of range either (labeler.accounting.winner).
    out          talliers 0 and 1 send tallier 2 their parts of the winner's number, 16 bits, and of no value, behind
                 masks that cancel if every difference was in range; it adds them, and tells both

**From p to 2^64.** Shares come in the field of the round. With W = highest - lowest, a sum less lowest lies in 0 .. W
(a difference plus W in 0 .. 2 W), and a + b = s + p over the integers unless a <= s, because a, b < p and a + b = s
modulo p. So a - p and b are parts of s modulo 2^64. Whether a > W tallier 0 sees by itself: a is uniform and says
nothing of s, so where it is not, all is done again with new masks (probability below 2^-41 for an entry). A sum outside
its range stays outside: whichever multiple of p is taken off, what comes out is not in 0 .. W, modulo 2^64 neither.

**Out, if in range.** Let h_0 and h_1 be keyed hashes of what must be equal at talliers 0 and 1 if every difference of
the job was in range (`Comparison.residues`). The key is tallier 0's, for tallier 1 alone, new for each computation.
Each sends tallier 2 its h, and its part of the number masked by a stream that only key, job and h give, once added
and once taken off. Where h_0 = h_1 the masks cancel. What tallier 2 sees then is a hash that says nothing without the
key, a uniform word and the number less that word: the winner, and nothing else. Where they differ, the two
masks are independent, and it sees nothing at all; it tells both that the round is void. (HMAC-SHA256 and AES as
pseudo-random functions, SHA-256 without collisions.)

The dealer's work does not wait for the others', and is bounded by `Room`: chunks of queries are begun in one order
everywhere, as many as there is room for, so the first unfinished one is under way at all three, and every chunk ends.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

from labeler.errors import Unavailable
from labeler.randomness import AesCtrSource, derive_key, keyed_source
from labeler.sharing import uniform_below
from workers.winner.comparison import Numbers, Pairs, compare
from workers.winner.correlations import Correlation, Width, Words, deal, draw_masks, part_of
from workers.winner.engine import ABSTAINED, WinnerJob

DEALER: Final = 2
"""The tallier that deals, and sees nothing that is opened but the winners."""

CHUNK_COMPARISONS: Final = 1 << 15
"""Comparisons of the first level of a chunk: what bounds memory, about 20 MB."""

ROOM_COMPARISONS: Final = 1 << 17
"""Comparisons of all chunks that are under way."""

SEED_BYTES: Final = 32
HASH_BYTES: Final = 32


class Wire(Protocol):
    """Messages of one chunk to and from the two others, each of a size that both ends know."""

    def send(self, peer: int, data: bytes) -> None:
        """Send, without waiting."""
        ...

    async def receive(self, peer: int, size: int) -> bytes:
        """The next message of a peer.

        Raises:
            ProtocolViolation: it has another size.
        """
        ...


@dataclass(frozen=True, eq=False, repr=False)
class Finished:
    """One tallier's part of the winners of a chunk.

    Attributes:
        numbers: of the winners, uint16, one per query.
        residues: a digest for each level of what must be equal at talliers 0 and 1.
    """

    numbers: Numbers
    residues: tuple[bytes, ...]


class Room:
    """Lets chunks begin in order, as many as there is room for; see the module."""

    def __init__(self, size: int = ROOM_COMPARISONS) -> None:
        self._left = size
        self._size = size
        self._waiting: list[tuple[int, asyncio.Future[None]]] = []

    @asynccontextmanager
    async def of(self, weight: int) -> AsyncIterator[None]:
        """Room for a chunk; the chunks come in the order of these calls."""
        weight = min(weight, self._size)
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append((weight, turn))
        self._let_in()
        try:
            await turn
            yield
        finally:
            if turn.done() and not turn.cancelled():
                self._left += weight
            self._waiting = [entry for entry in self._waiting if entry[1] is not turn]
            self._let_in()

    def _let_in(self) -> None:
        while self._waiting and self._waiting[0][0] <= self._left:
            weight, turn = self._waiting.pop(0)
            if not turn.cancelled():
                self._left -= weight
                turn.set_result(None)


def queries_of_a_chunk(job: WinnerJob) -> int:
    """How many queries of a job are found at once."""
    return max(1, CHUNK_COMPARISONS // max(1, contestants(job) // 2))


def contestants(job: WinnerJob) -> int:
    """Classes, and the threshold where there is one."""
    return job.num_classes + (job.threshold is not None)


def levels(job: WinnerJob) -> list[int]:
    """Comparisons of a query at each level."""
    left, counts = contestants(job), []
    while left > 1:
        counts.append(left // 2)
        left -= left // 2
    return counts


def stream_of(seed: bytes, job: WinnerJob, chunk: int) -> AesCtrSource:
    """The stream of a tallier for one chunk of one job."""
    return keyed_source(derive_key(seed, b"winner-chunk", job.digest.encode(), b"%d" % chunk), is_seeded=False)


async def deal_chunk(job: WinnerJob, share: Words, chunk: int, seeds: tuple[bytes, bytes], wire: Wire) -> None:
    """The dealer's part of a chunk: hand its share over, deal for every level, and wait until it was used.

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
        # Its messages leave between two levels, and whatever else this process does has its turn.
        await asyncio.sleep(0)
    for party in (0, 1):
        await wire.receive(party, 0)


async def find_chunk(job: WinnerJob, share: Words, chunk: int, seed: bytes, wire: Wire) -> Finished:
    """The part of tallier 0 or 1 in a chunk.

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
    """What tallier 0 or 1 sends tallier 2 of a whole job: its hash, then its masked parts of the numbers."""
    mixed = hmac.new(key, b"labeler-winner-range/1 " + job.digest.encode(), "sha256")
    for chunk in chunks:
        for residues in chunk.residues:
            mixed.update(residues)
    found = mixed.digest()
    source = keyed_source(derive_key(key, b"winner-answer", job.digest.encode(), found), is_seeded=False)
    numbers = np.concatenate([chunk.numbers for chunk in chunks])
    mask = np.frombuffer(source.bytes(2 * len(numbers)), dtype="<u2").astype(np.uint16)
    masked = numbers + mask if job.party == 0 else numbers - mask
    return found + masked.astype("<u2").tobytes()


def answer_bytes(job: WinnerJob) -> int:
    """Length of a masked answer."""
    return HASH_BYTES + 2 * job.num_queries


def open_answers(one: bytes, other: bytes) -> NDArray[np.int16] | None:
    """The classes, or -1, of the masked answers of talliers 0 and 1; None where a sum was out of range."""
    if one[:HASH_BYTES] != other[:HASH_BYTES]:
        return None
    parts = [np.frombuffer(part, dtype="<u2", offset=HASH_BYTES).astype(np.uint16) for part in (one, other)]
    return (parts[0] + parts[1]).view(np.int16)


async def _two_parts(job: WinnerJob, share: Words, stream: AesCtrSource, wire: Wire) -> Words:
    """This tallier's part, modulo 2^64, of each number that is compared, less the lowest that it can be."""
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
    """Values and numbers of all contestants; what is public is tallier 0's part, and tallier 1's is zero."""
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
    """A tallier's share of what is compared: of the sums, or of the difference of two."""
    return job.field.subtract(share[:, :1], share[:, 1:]) if job.is_duel else share


def _range(job: WinnerJob) -> tuple[int, int]:
    """The lowest number that is compared, and how far above it the highest lies."""
    width = job.highest - job.lowest
    return (-width, 2 * width) if job.is_duel else (job.lowest, width)
