"""Keys that can be erased, and with them whatever was encrypted under them, in every copy that was ever made of it.

A row that is deleted lives on in yesterday's backup, in a write-ahead log, on a replica. So what must not outlive its
round is kept encrypted under a key of its own, and the key lies in a slot of a file outside the journal, in a folder
that no backup copies (`workers.homes.journals`). Erasing the slot erases every copy of what its key opened.

    HOME/erasable/keys_1   every key in a slot of its own, which is overwritten with zeros and synced
                           (feature_store.key_slots)
    HOME/erasable/NAME     32 bytes, of a version that had a file for each key; overwritten, synced, then removed

What erasing means. ext4 and XFS in their usual modes write a changed block where it was, so the old bytes are
gone from the medium's addresses when `erase` returns. A file system that copies on write (btrfs, ZFS), a snapshot, or
the spare blocks of a flash disk may keep them: put the folder on a plain file system, take no snapshots of it, and
encrypt the disk, so that who finds old blocks finds nothing. Bytes in this process's memory go with the process.
"""

from __future__ import annotations

import hmac
import os
import re
import stat
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from feature_store.faults import between
from feature_store.key_slots import KeySlots
from feature_store.room import making_room
from labeler.errors import BadData, InvalidSetting, UnsafeStorage
from labeler.randomness import KEY_BYTES, derive_key

ERASABLE_FOLDER = "erasable"
"""Of a home; never part of a backup."""

SLOTS_FILE = "keys_1"
"""In that folder; the name of no key."""

_NONCE_BYTES = 12
_LENGTH_BYTES = 8
_MARK = b"labeler-erasable/1\n"
_NAME = re.compile(r"[0-9a-z][0-9a-z.-]{0,99}")


class ErasableKeys(Protocol):
    """Keys by name; `feature_store.erasable.KeyFolder`, and a twin in memory."""

    def draw(self, name: str) -> bytes:
        """The key of a name: 32 random bytes, durable before this returns; the same until it is erased.

        Raises:
            StorageFull: there is no room for it; there is none then.
        """

    def read(self, name: str) -> bytes | None:
        """The key of a name, or None where there is none, or none any more."""

    def draw_all(self, names: Collection[str]) -> None:
        """Draw several, durable together before this returns."""

    def erase(self, name: str) -> None:
        """Forget a key for good; nothing happens where there is none."""

    def erase_all(self, names: Collection[str]) -> None:
        """Forget several for good, all of them before this returns."""

    def names(self) -> list[str]:
        """Every key there is, sorted."""


class KeyFolder:
    """Keys in a folder of their own.

    Args:
        folder: made where it is missing, for its owner only.

    Raises:
        UnsafeStorage: others may look into the folder.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if stat.S_IMODE(folder.stat().st_mode) & 0o077:
            raise UnsafeStorage(
                f"the folder {folder.name!r} is open to others, who could read what is to be erased: chmod 700"
            )
        for left in folder.glob(".*"):
            # Of a process of an earlier version that died while it drew a key that nobody used.
            _overwrite(left)
        self._slots = KeySlots(folder / SLOTS_FILE)
        self._files = _files_of(folder)

    def draw(self, name: str) -> bytes:
        """See ErasableKeys."""
        return self._files.get(name) or self._drawn([name])[name]

    def draw_all(self, names: Collection[str]) -> None:
        """See ErasableKeys. However many there are, one file is synced once."""
        self._drawn(names)

    def _drawn(self, names: Collection[str]) -> dict[str, bytes]:
        wanted = [_checked(name) for name in names if name not in self._files]
        drawn = os.urandom(KEY_BYTES * len(wanted))
        with making_room("a key of a round"):
            return self._slots.put({name: drawn[KEY_BYTES * at :][:KEY_BYTES] for at, name in enumerate(wanted)})

    def read(self, name: str) -> bytes | None:
        """See ErasableKeys."""
        return self._slots.get(_checked(name)) or self._files.get(name)

    def erase(self, name: str) -> None:
        """See ErasableKeys."""
        self.erase_all([name])

    def erase_all(self, names: Collection[str]) -> None:
        """See ErasableKeys. However many there are, one file is synced once."""
        for name in names:
            if self._files.pop(_checked(name), None) is not None:
                _overwrite(self._folder / name)
        self._slots.erase(names)

    def names(self) -> list[str]:
        """See ErasableKeys."""
        return sorted({*self._slots.names(), *self._files})

    def __repr__(self) -> str:
        return f"KeyFolder({self._folder.name!r})"


class KeysInMemory:
    """The twin of KeyFolder for tests and simulations: kept as long as this object."""

    def __init__(self) -> None:
        self._keys: dict[str, bytes] = {}

    def draw(self, name: str) -> bytes:
        """See ErasableKeys."""
        return self._keys.setdefault(_checked(name), os.urandom(KEY_BYTES))

    def draw_all(self, names: Collection[str]) -> None:
        """See ErasableKeys."""
        for name in names:
            self.draw(name)

    def read(self, name: str) -> bytes | None:
        """See ErasableKeys."""
        return self._keys.get(_checked(name))

    def erase(self, name: str) -> None:
        """See ErasableKeys."""
        self._keys.pop(_checked(name), None)

    def erase_all(self, names: Collection[str]) -> None:
        """See ErasableKeys."""
        for name in names:
            self.erase(name)

    def names(self) -> list[str]:
        """See ErasableKeys."""
        return sorted(self._keys)

    def __repr__(self) -> str:
        return "KeysInMemory(<secret>)"


def lock_away(key: bytes, context: str, parts: tuple[bytes, ...]) -> bytes:
    """Encrypt some bytes so that only who has the key reads them, and nobody passes them off as something else.

    AES-256-GCM under a key derived for this use, with a random nonce; the context is authenticated.

    Args:
        key: 32 bytes, for example of `ErasableKeys.draw`.
        context: what they are, for example the digest of a round.
        parts: what to keep.
    """
    data = b"".join(len(part).to_bytes(_LENGTH_BYTES, "big") + part for part in parts)
    nonce = os.urandom(_NONCE_BYTES)
    return _MARK + nonce + AESGCM(derive_key(key, b"locked away")).encrypt(nonce, data, context.encode())


def take_out(key: bytes, context: str, data: bytes) -> tuple[bytes, ...]:
    """What `lock_away` was given.

    Raises:
        BadData: it was changed, belongs elsewhere, or was encrypted under another key.
    """
    body = data[len(_MARK) :]
    try:
        if not is_locked_away(data):
            raise InvalidTag
        plain = AESGCM(derive_key(key, b"locked away")).decrypt(
            body[:_NONCE_BYTES], body[_NONCE_BYTES:], context.encode()
        )
    except (InvalidTag, ValueError):
        raise BadData(
            "something that was kept for one round cannot be opened with that round's key; restore the home whole, or "
            "ask in a new task"
        ) from None
    parts = []
    while plain:
        end = _LENGTH_BYTES + int.from_bytes(plain[:_LENGTH_BYTES], "big")
        parts.append(plain[_LENGTH_BYTES:end])
        plain = plain[end:]
    return tuple(parts)


def is_locked_away(data: bytes) -> bool:
    """Whether bytes are such as `lock_away` writes; versions before it kept shares as they came."""
    return data.startswith(_MARK)


def check_value(key: bytes) -> str:
    """Tells one key from another and says nothing of either."""
    return hmac.digest(key, b"labeler-erasable-check/1", "sha256").hex()


def erase_file(path: Path) -> None:
    """Overwrite a small secret file where it lies, and remove it; nothing happens where there is none."""
    _overwrite(path)


def keys_in(folder: Path) -> dict[str, bytes]:
    """Every key of a folder by its name, for looking only: nothing is made, written or removed."""
    slots = KeySlots(folder / SLOTS_FILE)
    return _files_of(folder) | {name: slots.get(name) or b"" for name in slots.names()}


def _files_of(folder: Path) -> dict[str, bytes]:
    """Keys of a version that had a file for each."""
    found = {path.name: path.read_bytes() for path in folder.iterdir() if _NAME.fullmatch(path.name)}
    # Zeros: erased, and the process died before the file was removed.
    return {name: key for name, key in found.items() if len(key) == KEY_BYTES and any(key)}


def _overwrite(path: Path) -> None:
    between("erase")
    with suppress(FileNotFoundError):
        handle = os.open(path, os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            # In place: a file written anew would leave the old bytes in blocks that nobody owns.
            os.pwrite(handle, bytes(os.fstat(handle).st_size), 0)
            os.fsync(handle)
        finally:
            os.close(handle)
        path.unlink()


def _checked(name: str) -> str:
    if not _NAME.fullmatch(name):
        raise InvalidSetting("an erasable key is named by up to 100 lower-case letters, digits, dots and hyphens")
    return name
