"""Secret sharing: prime fields, and words that add up to the shared vector.

**Fields.** Ballots, noise and sums are shared in a prime field if the winner of a query is to be computed. A noisy sum,
negative or not, is a residue modulo a prime p, and p leaves 43 bits of room.

    bits of p  =  bits of the widest difference of two sums  +  43.

So a sum is one of very few residues. Two talliers have parts that add up to it modulo p. Their sum as integers is p
more than the sum, except if a part is among those few residues. That has probability below 2^-42, and that tallier
notices it by itself (workers.winner.tournament).

All moduli stay below 2^64, so a residue is one 64-bit word.

A sum out of its range may be read as less by p (workers.winner.tournament). Modulo 2^64 neither p nor 2 p may look like
a small step back. A p below 2^62 is a jump out of every range, and p = 2^64 - 189 a step forward of 189. Twice a prime
of 63 bits would be 50 below 2^64, so 64 bits are taken instead of 63.

**Additive secret sharing**: one share per tallier, and only all shares together say anything. All shares but the last
are 32-byte seeds, each expanded by AES-256-CTR into a mask; the last share is the vector minus all masks. A mask is
uniform on all words, so it hides a value entirely instead of bounding it. Any set of shares that lacks one is
distributed as if the vector were zero (for anybody who cannot break AES). Addition commutes with sharing, so talliers
sum shares of many agents, and only the sum is ever combined.

Words are numbers modulo 2^64 for a histogram. For the winner they are numbers modulo a prime, and talliers find it by
computing in that field (labeler.sharing). A mask modulo the prime is drawn by rejection (`uniform_below`, with the
proof), never by reducing, so that it is uniform there too.

**Winners.** Talliers never see a task, only the round. In a winner round `WinnerTerms` are part of the round and of its
digest. So an agent that split its ballots for other terms, and a tallier that got others, are detected before anything
is added.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Final

import numpy as np
from numpy.typing import NDArray
from pydantic import SkipValidation

from labeler.errors import InvalidSetting, ProtocolViolation
from labeler.noise import MAX_COMPARISON_BITS, ROOM_BITS
from labeler.randomness import KEY_BYTES, ByteSource, derive_key, keyed_source
from labeler.untrusted import Contributors, Digest, Flag, strict, whole

BLUM_PRIME_OFFSETS: Final = {
    44: 17, 45: 69, 46: 21, 47: 297, 48: 65, 49: 81, 50: 113, 51: 129, 52: 173, 53: 145, 54: 33,
    55: 169, 56: 5, 57: 13, 58: 57, 59: 225, 60: 93, 61: 1, 62: 57, 64: 189,
}  # fmt: skip
"""b -> c such that 2^b - c is the largest prime below 2^b that is 3 modulo 4. None has 63 bits."""


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
                f"the modulus of a prime field must be one of the {len(_MODULI)} of labeler.sharing; "
                f"found {self.modulus}. field_for gives the one that fits."
            )

    @property
    def bits(self) -> int:
        """Return the length of the modulus in bits."""
        return self.modulus.bit_length()

    def encode(self, values: NDArray[np.int64]) -> NDArray[np.uint64]:
        """Return integers as residues; a negative one counts from the modulus down.

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
        """Return residues as the integers -p/2 .. p/2 nearest to zero."""
        is_negative = residues > np.uint64(self.modulus // 2)
        words = np.where(is_negative, residues - np.uint64(self.modulus), residues)
        return words.view(np.int64)

    def check(self, residues: NDArray[np.uint64], what: str) -> None:
        """Refuse words that are not residues.

        Raises:
            ProtocolViolation: another type, or a word not below the modulus.
        """
        if residues.dtype != np.uint64:
            raise ProtocolViolation(f"{what} must be uint64 words, found {residues.dtype}")
        if residues.size and int(residues.max()) >= self.modulus:
            raise ProtocolViolation(f"{what} holds a word that is no residue of the field of {self.bits} bits")

    def add(self, one: NDArray[np.uint64], other: NDArray[np.uint64]) -> NDArray[np.uint64]:
        """Return the sum of two arrays of residues."""
        total = one + other
        # With a modulus above 2^63 the sum of two words can exceed 64 bits; then it is smaller than either.
        wrapped = (total < one) | (total >= np.uint64(self.modulus))
        return np.where(wrapped, total - np.uint64(self.modulus), total)

    def subtract(self, one: NDArray[np.uint64], other: NDArray[np.uint64]) -> NDArray[np.uint64]:
        """Return the difference of two arrays of residues."""
        return np.where(one >= other, one - other, one - other + np.uint64(self.modulus))

    def times(self, residues: NDArray[np.uint64], factor: int) -> NDArray[np.uint64]:
        """Return residues times one public whole number of at least 0, by doubling and adding: products need no wider
        words.

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
        """Return the sum of one or more arrays of residues.

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
        """Return uniform residues, shape (count,): see `uniform_below`."""
        return uniform_below(self.modulus, source, count)


_MODULI: Final = frozenset(2**bits - offset for bits, offset in BLUM_PRIME_OFFSETS.items())


def uniform_below(bound: int, source: ByteSource, count: int) -> NDArray[np.uint64]:
    """Return uniform numbers in [0, bound) by rejection: no number is more likely than another, not even by 2^-64.

    Each 64-bit word of the source is cut to its lowest b bits, b the length of bound - 1; values of
    `bound` or more are dropped. A cut word X is uniform on [0, 2^b). So for every x < bound,
    P(X = x | X < bound) = 2^-b / (bound 2^-b) = 1 / bound. The words are independent, so the kept ones
    are. The result is the first `count` kept words of the stream: equal streams give equal numbers,
    however the count is cut into calls. At least half of all words are kept, for our primes nearly all.

    Args:
        bound: 1 to 2^64.
        source: the stream; it alone decides which words are dropped.
        count: how many numbers.

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
    """Return bits l such that every difference of two numbers in lowest .. highest + 1 lies in [-2^l, 2^l).

    The extra value above the highest is for a threshold that nothing reaches.

    Raises:
        InvalidSetting: lowest is above highest.
    """
    if lowest > highest:
        raise InvalidSetting(f"the lowest sum must not be above the highest, found {lowest} and {highest}")
    return (highest + 1 - lowest).bit_length()


def field_for(lowest: int, highest: int) -> PrimeField:
    """Return the smallest of our fields in which sums in lowest .. highest can be compared securely.

    Every such sum is also decoded correctly: p is more than 2^42 times the width of the range, and the
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


SHARING_ID_BYTES = 16


@dataclass(frozen=True, eq=False, repr=False)
class ShareVector:
    """One tallier's share of one vector: a seed, or the words themselves. Secret; does not print.

    Attributes:
        shape: of the shared vector, for example (num_queries, num_classes).
        sharing_id: 16 bytes, the same in all shares of one split and in no other. Shares of two splits
            add up to noise over the whole range, so talliers compare it before they add.
        is_seeded: True if the noise or the masks came from a known seed.
        seed: 32 bytes, or None.
        words: uint64 of that shape, read-only, or None.
        field: the field of addition; None for the numbers modulo 2^64.
    """

    shape: tuple[int, ...]
    sharing_id: bytes
    is_seeded: bool
    seed: bytes | None = None
    words: NDArray[np.uint64] | None = None
    field: PrimeField | None = None

    def __post_init__(self) -> None:
        if (self.seed is None) == (self.words is None):
            raise ProtocolViolation("a share holds either a seed or words")
        if len(self.sharing_id) != SHARING_ID_BYTES:
            raise ProtocolViolation(f"a sharing_id has {SHARING_ID_BYTES} bytes, found {len(self.sharing_id)}")
        if self.seed is not None and len(self.seed) != KEY_BYTES:
            raise ProtocolViolation(f"the seed of a share has {KEY_BYTES} bytes, found {len(self.seed)}")
        if self.words is not None:
            if self.words.dtype != np.uint64 or self.words.shape != self.shape:
                raise ProtocolViolation(
                    f"the words of a share must be uint64 of shape {self.shape}; "
                    f"found {self.words.dtype} of shape {self.words.shape}"
                )
            if self.field is not None:
                self.field.check(self.words, "a share")
            words = self.words.copy()
            words.setflags(write=False)
            object.__setattr__(self, "words", words)

    def expand(self) -> NDArray[np.uint64]:
        """Return the share as words: uint64 of `shape`."""
        if self.words is not None:
            return self.words
        if self.seed is None:
            raise ProtocolViolation("a share holds either a seed or words")
        count = int(np.prod(self.shape, dtype=np.int64))
        source = keyed_source(self.seed, is_seeded=self.is_seeded)
        words = source.uint64(count) if self.field is None else self.field.uniform(source, count)
        return words.reshape(self.shape)

    def fingerprint(self) -> bytes:
        """Return SHA-256 over everything in the share: equal for a replay of it, different for any other share."""
        content = self.seed if self.words is None else np.ascontiguousarray(self.words, dtype="<u8").tobytes()
        kind = ("words" if self.seed is None else "seed") + _modulus_tag(self.field)
        header = f"labeler-share/1 {kind} {self.shape} {self.sharing_id.hex()} {self.is_seeded}\n"
        return hashlib.sha256(header.encode() + (content or b"")).digest()

    def __repr__(self) -> str:
        return f"ShareVector(shape={self.shape}, <redacted>)"


def split(
    values: NDArray[np.int64],
    *,
    num_talliers: int,
    source: ByteSource,
    is_seeded: bool = False,
    field: PrimeField | None = None,
) -> tuple[ShareVector, ...]:
    """Split a vector into one share per tallier, adding up to it modulo 2^64 or in a prime field.

    Mask seeds depend on the source *and* on the values. Equal values from an equal source give equal
    shares, so a retry is recognized as one. Other values from a source replayed by mistake get fresh
    masks. If the masks were the same, the difference of two last shares would be the difference of
    the values in clear.

    Args:
        values: int64, any shape with at least one entry; noise already added.
        num_talliers: 2 or 3.
        source: secret source of the agent; 32 bytes are consumed.
        is_seeded: True if the values hold noise of a seeded source; a seeded `source` sets it anyway.
        field: the field of addition; None for modulo 2^64.

    Returns:
        One share per tallier, in tallier order; all but the last are seeds.

    Raises:
        InvalidSetting: values are not int64, empty or too large for the field, or the number of talliers is not 2 or 3.
    """
    if num_talliers not in (2, 3):
        raise InvalidSetting(f"a vector is shared among 2 or 3 talliers, found {num_talliers}")
    if values.dtype != np.int64 or not values.size:
        raise InvalidSetting(
            f"only int64 arrays with at least one entry can be shared; found {values.dtype} of shape {values.shape}"
        )
    is_seeded = is_seeded or source.is_seeded
    contiguous = np.ascontiguousarray(values)
    header = f"{values.shape}{_modulus_tag(field)}\n"
    binding = hashlib.sha256(header.encode() + contiguous.astype("<i8", copy=False).tobytes()).digest()
    root = source.bytes(KEY_BYTES)
    sharing_id = derive_key(root, b"sharing-id", binding)[:SHARING_ID_BYTES]
    seeds = [derive_key(root, b"mask", binding, bytes([tallier])) for tallier in range(num_talliers - 1)]
    shares = [ShareVector(values.shape, sharing_id, is_seeded, seed=seed, field=field) for seed in seeds]
    last = contiguous.view(np.uint64).copy() if field is None else field.encode(contiguous)
    for share in shares:
        last = last - share.expand() if field is None else field.subtract(last, share.expand())
    return (*shares, ShareVector(values.shape, sharing_id, is_seeded, words=last, field=field))


def add_shares(shares: Sequence[NDArray[np.uint64]], *, field: PrimeField | None = None) -> NDArray[np.uint64]:
    """Return the sum of shares as words: of many agents at one tallier, or of all talliers.

    Args:
        shares: one or more uint64 arrays of equal shape.
        field: the field of addition; None for modulo 2^64.

    Returns:
        uint64 of that shape, a new array.

    Raises:
        ProtocolViolation: there is none, shapes or types differ, or a word is not a residue of the field.
    """
    kinds = {(share.dtype.str, share.shape) for share in shares}
    if len(kinds) != 1 or shares[0].dtype != np.uint64:
        raise ProtocolViolation("shares of one vector must all be uint64 of one shape")
    total = shares[0].copy()
    if field is not None:
        field.check(total, "a share")
    for share in shares[1:]:
        if field is None:
            total += share
        else:
            field.check(share, "a share")
            total = field.add(total, share)
    return total


def unshard(shares: Sequence[NDArray[np.uint64]], *, field: PrimeField | None = None) -> NDArray[np.int64]:
    """Combine all shares of one vector: return their sum, as -2^63 .. 2^63 - 1, or as -p/2 .. p/2 in a field.

    Args:
        shares: one uint64 array per tallier, of equal shape.
        field: the field of addition; None for modulo 2^64.

    Returns:
        The shared vector, int64.

    Raises:
        ProtocolViolation: there are fewer than two shares, their shapes or types differ, or a word is not a residue.
    """
    if len(shares) < 2:
        raise ProtocolViolation(f"shares of at least 2 talliers are needed, found {len(shares)}")
    total = add_shares(shares, field=field)
    return total.view(np.int64) if field is None else field.decode(total)


def _modulus_tag(field: PrimeField | None) -> str:
    return "" if field is None else f" mod {field.modulus}"


ABSTAINED = -1
"""The answer to a query whose best noisy sum is below the threshold."""


_Term = Annotated[int, whole(-(2**62), 2**62)]


@strict("the terms of a round")
class WinnerTerms:
    """The rule for the winner of a query, given the shares of a round.

    Attributes:
        scale: grid units per vote.
        lowest: the smallest possible noisy sum, grid units; at most 0.
        highest: the largest possible noisy sum, grid units. The two fix the field of addition.
        row_total: sum of every row of an agent's ballots, "not voted" included, in votes. None if rows have no
            fixed sum: then ballots come with their noise added and no row can be checked.
        threshold: a query whose best noisy sum is below it gets the answer -1, grid units; None never abstains.

    Raises:
        InvalidSetting: a number is outside its bounds, or the sums are too wide for a field.
    """

    scale: _Term
    lowest: _Term
    highest: _Term
    row_total: _Term | None
    threshold: _Term | None

    def __post_init__(self) -> None:
        if self.scale < 1 or (self.row_total is not None and self.row_total < 1):
            raise InvalidSetting("scale and row_total of a winner round must be at least 1")
        if self.threshold is not None and self.threshold < 0:
            raise InvalidSetting(f"the threshold of a winner round must be at least 0, found {self.threshold}")
        if max(self.scale, self.row_total or 1) > self.highest:
            raise InvalidSetting("scale and row_total of a winner round cannot be above the highest sum")
        _ = self.field

    @cached_property
    def field(self) -> PrimeField:
        """Return the field in which the shares of this round add up."""
        return field_for(self.lowest, self.highest)


@strict("a winner", eq=False)
class Winner:
    """One tallier's answer to a round: the labels the three talliers opened together. All three answers are equal.

    Attributes:
        tallier: index of the tallier.
        contributors: the agents summed.
        sharings_digest: of the shares summed (labeler.tally.AggregateShare).
        labels: int16, shape (num_queries,), the winning class, or -1 if the talliers abstained; read-only.
        is_seeded: True if any contributor's noise or masks came from a known seed.

    Raises:
        ProtocolViolation: the labels are not int16 numbers of at least -1, one per query.
    """

    tallier: Annotated[int, whole(0, 2)]
    round_digest: Digest
    contributors: Contributors
    sharings_digest: Digest
    labels: SkipValidation[NDArray[np.int16]]
    is_seeded: Flag

    def __post_init__(self) -> None:
        if self.labels.dtype != np.int16 or self.labels.ndim != 1 or not self.labels.size:
            raise ProtocolViolation("the winners of a round are int16 numbers, one per query")
        if self.labels.min() < ABSTAINED:
            raise ProtocolViolation("a winner is the number of a class, or -1")
        labels = self.labels.copy()
        labels.setflags(write=False)
        object.__setattr__(self, "labels", labels)

    def __repr__(self) -> str:
        return f"Winner(tallier={self.tallier}, round={self.round_digest[:12]!r}, queries={len(self.labels)})"


def words_per_query(terms: WinnerTerms | None, *, num_classes: int, agents: int) -> int:
    """Return the most 64-bit words for one query in a message of a round, or in a tallier's stored sum.

    Args:
        terms: of the round; None for a histogram, whose sum or last share has one word per class.
        num_classes: classes of the task.
        agents: most agents that contribute.

    Returns:
        If rows are checked, an agent's last share holds ballots, votes not cast and noise, and a tallier's sum
        has one more word per agent: its row's sum.
    """
    if terms is None or terms.row_total is None:
        return num_classes
    return max(2 * num_classes + 1, num_classes + agents)


def winner_time_limit_s(num_queries: int, num_classes: int) -> float:
    """Return the time limit of talliers for the winners of a round; the coordinator waits as long before it asks again.

    A tallier that dies is noticed at once, by its connections; the limit ends other hangs.
    """
    return 60.0 + num_queries * num_classes / 500
