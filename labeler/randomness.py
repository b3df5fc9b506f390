"""The source of random bits: AES-256 in counter mode, keyed by the operating system.

Noise protects a record only while nobody can predict it. So every random bit of noise and of share masks comes from one
cryptographic stream. Its key is 32 bytes from the operating system, or is derived from such bytes, so that a retry
replays the same noise. numpy's and torch's generators are never used: their state follows from a few outputs. The
stream is indistinguishable from uniform bits up to n^2 / 2^129 for n blocks of 16 bytes drawn under one key, if AES-256
is a pseudo-random permutation. That part of the guarantee is computational, all others are information-theoretic.

A stream must not be used twice. A source therefore cannot be pickled or copied, refuses to draw in a
forked process, and gives two threads different stretches of its stream.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import threading
from typing import NoReturn, Protocol, SupportsIndex

import numpy as np
from numpy.typing import NDArray

from labeler.errors import InvalidSetting, PrivacyRefusal

KEY_BYTES = 32
"""Length of a key and of a mask seed: AES-256."""

_ZEROS = bytes(1 << 16)
_BLOCK_BYTES = 16


class ByteSource(Protocol):
    """A stream of uniform random bits.

    Attributes:
        is_seeded: True if somebody else may know the stream (tests, simulations). Everything
            released with such noise must say so.
    """

    @property
    def is_seeded(self) -> bool: ...

    def uint64(self, count: int) -> NDArray[np.uint64]:
        """Return the next `count` uniform 64-bit words of the stream, shape (count,)."""

    def bytes(self, count: int) -> bytes:
        """Return the next `count` bytes of the stream."""


class AesCtrSource:
    """The AES-256-CTR key stream of one key, from block zero; see `ByteSource`.

    The stream is one sequence of bytes: how it is cut into calls does not change it, and a 64-bit
    word is eight of its bytes, least significant first. Make one with `os_source`, `keyed_source` or
    `seeded_source`.
    """

    __slots__ = ("_encryptor", "_is_seeded", "_lock", "_process")

    def __init__(self, key: bytes, *, is_seeded: bool) -> None:
        if not isinstance(key, bytes) or len(key) != KEY_BYTES:
            raise InvalidSetting(f"the key of a random source must be {KEY_BYTES} bytes; derive_key makes one")
        # Here, because stating a price or looking at a job draws nothing.
        from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

        self._encryptor = Cipher(algorithms.AES(key), modes.CTR(bytes(_BLOCK_BYTES))).encryptor()
        self._is_seeded = is_seeded
        self._lock = threading.Lock()
        self._process = os.getpid()

    @property
    def is_seeded(self) -> bool:
        """Return True if somebody else may know the key."""
        return self._is_seeded

    def uint64(self, count: int) -> NDArray[np.uint64]:
        """Return the next `count` uniform 64-bit words, shape (count,).

        Raises:
            InvalidSetting: count is negative.
            PrivacyRefusal: this process is a fork of the one that made the source.
        """
        if count < 0:
            raise InvalidSetting(f"the number of random words must be at least 0, found {count}")
        # Two spare words: a cipher may ask for up to one block more room than it fills.
        words = np.empty(count + 2, dtype="<u8")
        self._fill(words.data.cast("B"), 8 * count)
        return words[:count].astype(np.uint64, copy=False)

    def bytes(self, count: int) -> bytes:
        """Return the next `count` bytes.

        Raises:
            InvalidSetting: count is negative.
            PrivacyRefusal: this process is a fork of the one that made the source.
        """
        if count < 0:
            raise InvalidSetting(f"the number of random bytes must be at least 0, found {count}")
        buffer = bytearray(count + _BLOCK_BYTES)
        self._fill(memoryview(buffer), count)
        return bytes(buffer[:count])

    def _fill(self, view: memoryview, count: int) -> None:
        if os.getpid() != self._process:
            raise PrivacyRefusal(
                "this random source was made before the process forked, so parent and child would draw the same noise; "
                "make a new source in the child"
            )
        zeros = memoryview(_ZEROS)
        with self._lock:
            for start in range(0, count, len(_ZEROS)):
                self._encryptor.update_into(zeros[: min(len(_ZEROS), count - start)], view[start:])

    def __repr__(self) -> str:
        return f"AesCtrSource(<key redacted>, is_seeded={self._is_seeded})"

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        raise PrivacyRefusal(
            "a random source cannot be copied or pickled: the copy would repeat the noise; "
            "derive a key of its own for each user with derive_key"
        )


def os_source() -> AesCtrSource:
    """Return a source keyed with fresh bytes of the operating system; its stream cannot be replayed."""
    return AesCtrSource(secrets.token_bytes(KEY_BYTES), is_seeded=False)


def keyed_source(key: bytes, *, is_seeded: bool) -> AesCtrSource:
    """Return the source of one key, which gives the same stream each time, so that a retry replays its noise.

    Noise from two uses of one key cancels out when subtracted. So derive a key per purpose (`derive_key`) and start
    its source once per attempt.

    Args:
        key: 32 bytes, secret and uniformly random.
        is_seeded: True if the key came from a known seed.

    Raises:
        InvalidSetting: the key has another length.
    """
    return AesCtrSource(key, is_seeded=is_seeded)


def seeded_source(seed: int | bytes) -> AesCtrSource:
    """Return a source that anybody who knows the seed can replay: for tests and simulations only.

    Its `is_seeded` is True, and every share and release made with it carries that.

    Args:
        seed: any non-negative integer, or any bytes.

    Raises:
        InvalidSetting: the seed is negative or of another type.
    """
    if isinstance(seed, bytes):
        tagged = b"bytes:" + seed
    elif isinstance(seed, int) and not isinstance(seed, bool) and seed >= 0:
        tagged = b"int:%x" % seed
    else:
        raise InvalidSetting("a seed must be a non-negative integer or bytes")
    return AesCtrSource(hashlib.sha256(b"labeler-seed/1\n" + tagged).digest(), is_seeded=True)


def permutation(source: ByteSource, count: int) -> NDArray[np.int64]:
    """Return a random order of `count` things, shape (count,); uniform up to count^2 / 2^65."""
    return np.argsort(source.uint64(count), kind="stable")


def derive_key(secret: bytes, *context: bytes) -> bytes:
    """Derive the 32-byte key of one purpose: HMAC-SHA256(secret, every context with its length before it).

    Different contexts give keys that are independent to anybody without the secret. Lengths are included so
    that (b"ab", b"c") and (b"a", b"bc") differ.

    Args:
        secret: at least 16 bytes from the operating system (or a derived key).
        context: the purpose of the key, for example the digests of task and batch.

    Raises:
        InvalidSetting: the secret is shorter than 16 bytes.
    """
    if len(secret) < 16:
        raise InvalidSetting(f"a secret to derive keys from needs at least 16 bytes, found {len(secret)}")
    framed = b"".join(len(part).to_bytes(8, "big") + part for part in context)
    return hmac.digest(secret, b"labeler-key/1\n" + framed, "sha256")
