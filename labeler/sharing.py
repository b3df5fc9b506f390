"""Additive secret sharing: one share per tallier, and only all shares together say anything.

All shares but the last are 32-byte seeds, each expanded by AES-256-CTR into a mask; the last share
is the vector minus all masks. A mask is uniform on all words, so it hides a value entirely instead of
bounding it: any set of shares that lacks one is distributed (to anybody who cannot break AES) as if
the vector were zero. Addition commutes with sharing, so talliers sum shares of many agents and only
the sum is ever put together.

Words are numbers modulo 2^64 for a histogram, and modulo a prime for the winner, which talliers find
by computing in that field (labeler.field). A mask modulo the prime is drawn by rejection
(`uniform_below`, with the proof), never by reducing, so that it is uniform there too.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from labeler.errors import InvalidSetting, ProtocolViolation
from labeler.field import PrimeField
from labeler.randomness import KEY_BYTES, ByteSource, derive_key, keyed_source

SHARING_ID_BYTES = 16


@dataclass(frozen=True, eq=False, repr=False)
class ShareVector:
    """One tallier's share of one vector: a seed, or the words themselves. Secret; does not print.

    Attributes:
        shape: of the shared vector, for example (num_queries, num_classes).
        sharing_id: 16 bytes, the same in all shares of one split and in no other. Shares of two splits
            add up to noise over the whole range, so talliers compare it before they add.
        is_seeded: True where the noise or the masks came from a known seed.
        seed: 32 bytes, or None.
        words: uint64 of that shape, read-only, or None.
        field: what the words are added up in; None for the numbers modulo 2^64.
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
        """The share as words: uint64 of `shape`."""
        if self.words is not None:
            return self.words
        if self.seed is None:
            raise ProtocolViolation("a share holds either a seed or words")
        count = int(np.prod(self.shape, dtype=np.int64))
        source = keyed_source(self.seed, is_seeded=self.is_seeded)
        words = source.uint64(count) if self.field is None else self.field.uniform(source, count)
        return words.reshape(self.shape)

    def fingerprint(self) -> bytes:
        """SHA-256 over everything in the share: equal for a replay of it, different for any other share."""
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

    Mask seeds depend on the source *and* on the values: equal values from an equal source give equal
    shares (a retry is recognised as one), while other values from a source replayed by mistake get
    fresh masks. Were the masks the same, the difference of two last shares would be the difference of
    the values in clear.

    Args:
        values: int64, any shape with at least one entry; noise already added.
        num_talliers: 2 or 3.
        source: secret source of the agent; 32 bytes are consumed.
        is_seeded: True where the values hold noise of a seeded source; a seeded `source` says so by itself.
        field: where shares are added up; None for modulo 2^64.

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
    """The sum of shares as words: of many agents at one tallier, or of all talliers.

    Args:
        shares: one or more uint64 arrays of equal shape.
        field: where to add; None for modulo 2^64.

    Returns:
        uint64 of that shape, a new array.

    Raises:
        ProtocolViolation: there is none, shapes or types differ, or a word is no residue of the field.
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
    """Put all shares of one vector together: their sum, read as -2^63 .. 2^63 - 1, or as -p/2 .. p/2 in a field.

    Args:
        shares: one uint64 array per tallier, of equal shape.
        field: where they add up; None for modulo 2^64.

    Returns:
        The shared vector, int64.

    Raises:
        ProtocolViolation: there are fewer than two shares, their shapes or types differ, or a word is no residue.
    """
    if len(shares) < 2:
        raise ProtocolViolation(f"shares of at least 2 talliers are needed, found {len(shares)}")
    total = add_shares(shares, field=field)
    return total.view(np.int64) if field is None else field.decode(total)


def _modulus_tag(field: PrimeField | None) -> str:
    return "" if field is None else f" mod {field.modulus}"
