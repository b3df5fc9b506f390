"""A site's key for digests, with which only that site recognizes the same person or image again.

Names of patients and images are easy to guess, so a plain hash of one hides nothing. A private shard therefore keeps
digests under a key of the site: BLAKE2b, keyed (RFC 7693), 128 bits. A holder of the key can compare digests for
equality; without the key a digest is a random number. Make all shards of a site with one key: then a person, or an
image that is embedded again, has the same digest in each of them.

The key is a file that only its owner can read. A person who has it and a shard can check guesses of names. A site that
loses it can embed everything again, under other digests.
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final, Literal, NoReturn, SupportsIndex

import numpy as np
from numpy.typing import NDArray

from labeler.errors import BadData, UnsafeStorage
from labeler.system.files import sync_folder

SITE_KEY_FILE: Final = "site.key"
"""Default file name: next to the shard, so in an agent's home."""

DIGEST_WORDS: Final = 2
"""A digest is two int64: 128 bits. Among 2^32 people two share one with a probability below 2^-64."""

KEY_BYTES: Final = 32

Kind = Literal["person", "image", "features", "file"]
Digests = NDArray[np.int64]


class SiteKey:
    """A key for digests. It does not print, and cannot be copied or pickled.

    Args:
        secret: 32 bytes.
    """

    __slots__ = ("_secret",)

    def __init__(self, secret: bytes) -> None:
        if len(secret) != KEY_BYTES:
            raise BadData(f"a site's key for digests is {KEY_BYTES} bytes long, found {len(secret)}")
        self._secret = secret

    def digests(self, kind: Kind, values: Sequence[bytes]) -> Digests:
        """Return one digest per value, int64, shape (n, 2). Kinds never collide: an image's name is no person's."""
        joined = b"".join(self.digest(kind, (value,)) for value in values)
        return as_digests(joined)

    def digest(self, kind: Kind, blocks: Iterable[bytes]) -> bytes:
        """Return the 16 bytes of one digest, of a value that arrives in blocks."""
        person = b"labeler-" + kind.encode()
        made = hashlib.blake2b(digest_size=8 * DIGEST_WORDS, key=self._secret, person=person)
        for block in blocks:
            made.update(block)
        return made.digest()

    @property
    def name(self) -> str:
        """Return a public name of the key: it shows only whether two shards were made with one key."""
        return hashlib.blake2b(b"", digest_size=8, key=self._secret, person=b"labeler-name").hexdigest()

    def __repr__(self) -> str:
        return "SiteKey(<secret>)"

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        raise TypeError("a site's key is neither copied nor pickled")


PUBLIC_KEY: Final = SiteKey(bytes(KEY_BYTES))
"""A key that everybody has, for digests of public images."""


def as_digests(joined: bytes) -> Digests:
    """Return concatenated digests as an array of shape (n, 2)."""
    return np.frombuffer(joined, dtype="<i8").astype(np.int64).reshape(-1, DIGEST_WORDS)


def site_key(path: Path) -> SiteKey:
    """Return the key in a file; if there is none, create one that only its owner can read.

    Two processes that make it at once end up with one key.

    Raises:
        UnsafeStorage: others may read the file.
        BadData: it holds no key.
    """
    if not path.exists():
        _make(path, os.urandom(KEY_BYTES))
    mode = stat.S_IMODE(path.stat().st_mode)
    if mode & 0o077:
        raise UnsafeStorage(
            f"the site's key {path.name!r} can be read by others (mode {mode:04o}); run chmod 600 on it, and make a "
            "new one and embed again if somebody may have read it"
        )
    try:
        return SiteKey(path.read_bytes())
    except BadData:
        raise BadData(
            f"{path.name!r} holds no key of a site ({KEY_BYTES} bytes); restore it from a backup, or name another file"
        ) from None


def _make(path: Path, secret: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(secret)
            file.flush()
            os.fsync(file.fileno())
        try:
            # Unlike a rename this does not replace a key that another process made meanwhile.
            os.link(temporary, path)
        except FileExistsError:
            return
        sync_folder(path.parent)
    finally:
        temporary.unlink(missing_ok=True)
