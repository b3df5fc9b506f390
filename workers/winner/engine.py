"""Jobs, engines and correlated randomness of the winner computation among three talliers.

**The function.** For each query q, let s_c be the noisy sum of class c: the sum of all contributors' contributions.
Only the three talliers together hold it.

    winner(q) = the lowest c with s_c = max s,    or -1 where a threshold T is given and max s < T.

The rule for ties is part of the mechanism. The winner is a function of the noisy sums alone, so their price covers it.
It covers abstaining too: the comparison with T is one more function of the same noisy sums, and only the value above is
opened (post-processing, Dwork and Roth 2014, Prop. 2.1).

**The adversary.** At most one of the three talliers is dishonest. It reads everything that reaches it but follows the
protocol. It learns the winners and nothing else: what it sees is uniform and independent of every sum
(workers.winner.tournament). Two talliers that pool what they hold learn the noisy sums; the job states that price too
(`histogram_epsilon`). One of the three deals the randomness of the two others and sees nothing that they open. The
choice of dealer does not change the trust: any two of the three could open everything, with a dealer or without, and no
single one could.

**Attempts.** An engine is deterministic: the same shares give the same winners. A failed job is tried again with the
very same shares, and only with those. Each attempt draws new masks, so repeating it shows no more than one. Attempts
are still counted and limited (workers.tallier.winners), because a tallier that breaks the protocol can put in other
shares at each attempt. From the winners it then sees how the noisy sums compare with what it added. With enough
attempts it learns the noisy sums, as two talliers that pool what they hold do. That costs no more than the price stated
for them, and is one more reason to count.

**Dealt randomness.** Tallier 2 deals, talliers 0 and 1 compute. Everything dealt is random and independent of every
ballot. It is drawn before anything is compared, and depends only on the number and width of the comparisons. The dealer
sees nothing that the two others open (workers.winner.tournament).

For a comparison of l bits, sums are modulo 2^64 (q: 2^16). Tables and bits are shared by exclusive or.

    free      r, q, mu, rho          uniform; the sum of one part from each tallier's own stream
    derived   one-hot of each digit of r mod 2^l, six bits to a digit            2^6 bits each
              a truth table of "z mod 2^l < r mod 2^l" from masked bits           2^(2 digits - 1) bits
              r >> l,   rho,   b = rho xor (bit l of r),   b r                    words
              b q                                                                 16 bits

**Parts.** Talliers 0 and 1 each have a seed from the dealer. Each expands from it its parts of all free values and of
some derived values: tallier 0 of the one-hots and of b q, tallier 1 of all others. The other tallier is sent its part
of these: the value less the expanded part. The expanded part is used once and comes from a stream that the receiver
does not have. So what a tallier is sent is uniform, and independent of all values and of all else that it has. The
split between the two makes both connections carry about as much.

The bits of a digit's one-hot give both "equal" (bit z) and "below" (parity of the bits above z). So one table serves
both: a one-time truth table, as in Ishai, Kushilevitz, Meldgaard, Orlandi and Paskin-Cherniavsky, TCC 2013, section 3.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from labeler.errors import InvalidSetting, LabelerError
from labeler.randomness import ByteSource
from labeler.sharing import PrimeField, comparison_bits, field_for
from labeler.task import MOST_CLASSES
from workers.winner.certificates import fingerprint

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
    """The digits and tables into which a comparison of l bits is cut.

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
        """Return the width for l bits, 1 to 24."""
        digits = -(-bits // DIGIT_BITS)
        index_bits = 2 * digits - 1
        return cls(bits, digits, index_bits, max(1, 2**index_bits // 64))

    @cached_property
    def one_hot_types(self) -> tuple[np.dtype[Any], ...]:
        """The type in which the one-hot of each digit is written: as few bytes as it has values, divided by 8."""
        return tuple(_type_of(2 ** self.digit_bits(place)) for place in range(self.digits))

    @cached_property
    def table_type(self) -> np.dtype[Any]:
        """The type in which a word of a truth table is written."""
        return _type_of(2**self.index_bits)

    def dealt_bytes(self, party: int, count: int) -> int:
        """Return the number of bytes that a tallier is sent for `count` comparisons."""
        if party == 1:
            return count * (sum(one.itemsize for one in self.one_hot_types) + 2)
        return count * (self.table_words * self.table_type.itemsize + 8 * _NUM_SUMMED)

    def digit_bits(self, place: int) -> int:
        """Return the number of bits of a digit."""
        return min(DIGIT_BITS, self.bits - DIGIT_BITS * place)

    def digit(self, words: Words, place: int) -> Words:
        """Return one digit of the low l bits of each word; place 0 is the lowest."""
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
    """Draw a tallier's parts of the free values, which come first in its stream."""
    r, small = stream.uint64(count), stream.uint64(count)
    mu = (small >> np.uint64(16)).astype(np.uint8) & np.uint8((1 << width.index_bits) - 1)
    rho = ((small >> np.uint64(32)) & _ONE).astype(np.uint8)
    return Masks(r, (small & _NUMBER_MASK).astype(np.uint16), mu, rho)


def part_of(party: int, width: Width, count: int, stream: ByteSource, dealt: bytes) -> Correlation:
    """Return a tallier's parts of the derived values, from its stream after the masks and from the dealer's bytes.

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
    """Return what the dealer sends talliers 0 and 1 for the next comparisons of their streams.

    Args:
        stream_0: the stream of tallier 0.
        stream_1: the stream of tallier 1.
    """
    first, (one_hots, bq) = draw_masks(width, count, stream_0), _drawn_one_hots(width, count, stream_0)
    second, (tables, words) = draw_masks(width, count, stream_1), _drawn_words(width, count, stream_1)
    r, q, rho = first.r + second.r, first.q + second.q, (first.rho ^ second.rho).astype(np.uint64)
    high = r >> np.uint64(width.bits)
    b = rho ^ (high & _ONE)
    # Each value less the part that the other tallier expands.
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
    """Return the narrowest type that holds this many bits, at most 64."""
    return np.dtype(f"<u{min(8, max(1, bits // 8))}")


def _read(data: bytes, offset: int, kind: np.dtype[Any], count: int) -> Words:
    return np.frombuffer(data, dtype=kind, count=count, offset=offset).astype(np.uint64, copy=False)


def _drawn_one_hots(width: Width, count: int, stream: ByteSource) -> tuple[Words, NDArray[np.uint16]]:
    """Draw tallier 0's parts of the one-hots and of b q."""
    one_hots = stream.uint64(width.digits * count).reshape(width.digits, count)
    for row, kind in zip(one_hots, width.one_hot_types, strict=True):
        row &= np.uint64(2 ** (8 * kind.itemsize) - 1)
    return one_hots, (stream.uint64(count) & _NUMBER_MASK).astype(np.uint16)


def _drawn_words(width: Width, count: int, stream: ByteSource) -> tuple[Words, Words]:
    """Draw tallier 1's parts of the truth tables, and of r >> l, rho, b and b r."""
    tables = stream.uint64(width.table_words * count).reshape(width.table_words, count)
    return tables, stream.uint64(_NUM_SUMMED * count).reshape(_NUM_SUMMED, count)


@cache
def _masked_tables(width: Width) -> Words:
    """Return the truth table of the borrow under every mask, shape (table_words, 2^index_bits).

    Bit x of the table for mu is the borrow that follows from the bits x xor mu. Bit 0 says that the lowest digit of z
    is below that of r. Bits 2j - 1 and 2j say that digit j is below, and that it is equal.
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


NUM_PARTIES: Final = 3
"""Talliers of a winner job. With two, one dishonest tallier would be a majority, and nothing stays secret."""

ABSTAINED: Final = -1
"""The answer where the best noisy sum is below the threshold."""

PROTOCOL_VERSION: Final = "labeler-winner/3"

_MAX_ENTRIES = 2**31


@dataclass(frozen=True)
class Address:
    """An address at which a tallier listens for the two others during a job."""

    host: str
    port: int

    def __post_init__(self) -> None:
        if not self.host or self.host in ("0.0.0.0", "::", "*"):
            raise InvalidSetting("a tallier listens on one configured address, never on all of them; name the host")
        if not 1 <= self.port <= 65_535:
            raise InvalidSetting(f"a port lies between 1 and 65535, found {self.port}")


@dataclass(frozen=True)
class WinnerJob:
    """One job at one of its three talliers. Nothing in it is secret: `WinnerOrder` adds the share.

    Attributes:
        job_id: the same at all three, of no other job; at most 200 characters.
        agreement: SHA-256 in hexadecimal over everything else the talliers must agree on: the round, its contributors
            and their sharings. Shares of different sets add up to noise, and are not added.
        party: which tallier this is, 0 to 2.
        addresses: where the talliers listen, in tallier order (tallier 0 only connects).
        certificates: of the talliers, PEM, in tallier order: no other certificate is accepted.
        identity_path: key and certificate of this tallier, as `issue_certificate` wrote them.
        num_queries: rows of the shares.
        num_classes: columns of the shares, at least 2.
        lowest: the smallest a noisy sum can be, in grid units; at most 0. Fixes the field with `highest`.
        highest: the largest a noisy sum can be, in grid units.
        threshold: abstain where the best noisy sum is below it, in grid units; None never abstains.
        contributors: agents whose shares were added, sorted. Compared in full, so that an error can name the
            difference.
        checks_rows: whether the rows of each contributor are checked before anything is opened (labeler.tally).
        verify_keys: Ed25519 keys of the talliers, in tallier order, with which each has signed `digest`; empty asks for
            no signatures.
        signature: this tallier's own over `digest`, in hexadecimal (`WinnerJob.statement`).
        time_limit_s: the job ends after this long, whatever happens.
        meeting_limit_s: the job ends after this long unless all talliers have come to it.

    Raises:
        InvalidSetting: a number is outside its bounds, or the sums are too wide for a field.
    """

    job_id: str
    agreement: str
    party: int
    addresses: tuple[Address, ...]
    certificates: tuple[str, ...]
    identity_path: Path
    num_queries: int
    num_classes: int
    lowest: int
    highest: int
    threshold: int | None = None
    contributors: tuple[str, ...] = ()
    checks_rows: bool = False
    verify_keys: tuple[str, ...] = ()
    signature: str = ""
    time_limit_s: float = 120.0
    meeting_limit_s: float = 120.0

    def __post_init__(self) -> None:
        if not len(self.addresses) == len(self.certificates) == NUM_PARTIES:
            raise InvalidSetting(
                f"a winner is computed by {NUM_PARTIES} talliers, found {len(self.addresses)} addresses and "
                f"{len(self.certificates)} certificates; with two talliers one alone could open everything"
            )
        if len(set(self.fingerprints)) != NUM_PARTIES:
            raise InvalidSetting("two talliers have the same certificate; each needs one of its own")
        if not 2 <= self.num_classes <= MOST_CLASSES or self.num_queries < 1:
            raise InvalidSetting(
                f"a winner job has at least 1 query and 2 to {MOST_CLASSES} classes; "
                f"found {self.num_queries} and {self.num_classes}"
            )
        if self.num_queries * self.num_classes > _MAX_ENTRIES:
            raise InvalidSetting(f"a winner job has at most {_MAX_ENTRIES} entries; ask in smaller batches")
        _ = self.field

    @cached_property
    def field(self) -> PrimeField:
        """The field in which the shares are added; agents split in it too."""
        return field_for(self.lowest, self.highest)

    @property
    def comparison_bits(self) -> int:
        """l: every difference compared lies in [-2^l, 2^l)."""
        return comparison_bits(self.lowest, self.highest)

    @property
    def is_duel(self) -> bool:
        """True where the sign of one difference is the winner: two classes and no threshold."""
        return self.num_classes == 2 and self.threshold is None

    @property
    def clipped_threshold(self) -> int | None:
        """The threshold; one outside the range of the sums moves next to it, which leaves the answers the same."""
        return None if self.threshold is None else min(max(self.threshold, self.lowest), self.highest + 1)

    @cached_property
    def fingerprints(self) -> tuple[str, ...]:
        """SHA-256 of each pinned certificate, in tallier order."""
        return tuple(fingerprint(certificate) for certificate in self.certificates)

    @cached_property
    def parameters(self) -> dict[str, Any]:
        """Return all that must be equal at the three talliers; it is compared before anything else is sent."""
        return {
            "version": PROTOCOL_VERSION,
            "job_id": self.job_id,
            "agreement": self.agreement,
            "num_queries": self.num_queries,
            "num_classes": self.num_classes,
            "lowest": self.lowest,
            "highest": self.highest,
            "modulus": self.field.modulus,
            "threshold": self.threshold,
            "certificates": list(self.fingerprints),
            "contributors": list(self.contributors),
            "checks_rows": self.checks_rows,
        }

    @cached_property
    def digest(self) -> str:
        """SHA-256 over the parameters, in hexadecimal."""
        canonical = json.dumps(self.parameters, sort_keys=True, separators=(",", ":"), allow_nan=False)
        return hashlib.sha256(canonical.encode()).hexdigest()

    @property
    def statement(self) -> bytes:
        """Return what a tallier signs: that it was given exactly this job, over exactly these contributors."""
        return f"labeler-winner-job/1 {self.digest}".encode()


@dataclass(frozen=True, eq=False, repr=False)
class WinnerOrder:
    """A job and what this tallier brings to it. Secret; does not print.

    Attributes:
        job: equal at all three except for `party`, `identity_path`, `signature` and the limits.
        share: this tallier's share of the noisy sums, residues of `job.field`, shape (num_queries, num_classes).
        rows: what this tallier's share of each contributor's rows sums to (`AggregateShare.row_sums`), where the
            job checks rows.

    Raises:
        InvalidSetting: a shape is not that of the job.
        ProtocolViolation: not uint64, or a word that is no residue of the job's field.
    """

    job: WinnerJob
    share: NDArray[np.uint64]
    rows: NDArray[np.uint64] | None = None

    def __post_init__(self) -> None:
        job, shape = self.job, (self.job.num_queries, self.job.num_classes)
        if self.share.shape != shape:
            raise InvalidSetting(f"the share has shape {self.share.shape}, the job's is {shape}")
        job.field.check(self.share, "a summed share")
        if (self.rows is not None) != job.checks_rows:
            raise InvalidSetting("row sums come with a winner job that checks rows, and with no other")
        if self.rows is not None:
            shape = (len(job.contributors), job.num_queries)
            if self.rows.shape != shape:
                raise InvalidSetting(f"row sums have shape {self.rows.shape}, the job's is {shape}")
            job.field.check(self.rows, "a row sum")


Outcome = NDArray[np.int16] | LabelerError
"""The winner of each query (or -1), shape (num_queries,), equal at all three talliers; or an error."""


class TallierWinnerEngine(Protocol):
    """An engine that computes the winners of jobs together with the engines of the two other talliers."""

    def winners(
        self,
        orders: Sequence[WinnerOrder],
        stop: threading.Event | None = None,
        *,
        met: threading.Event | None = None,
    ) -> list[Outcome]:
        """Take part in one computation; the same call runs at the two other talliers at the same time.

        Only jobs that all three were given, alike, are computed; one that fails spoils no other.

        Args:
            orders: one or more, of different jobs of the same talliers.
            met: set once all three are there; which jobs are computed is decided then.

        Returns:
            The outcome of each order: its winners or an error.
            `Unavailable`: another tallier cannot be reached, died or was too slow, or the job was stopped. It may be
                tried again with the same share.
            `WrongDigest`: another tallier was not given it, or not yet.
            `ProtocolViolation`: the talliers were given different jobs, or one sent what the protocol does not allow.
                Also the rows of an agent do not sum to what they must, or a sum is out of its range.
        """
        ...
