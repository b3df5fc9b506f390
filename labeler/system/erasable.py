"""Erasable keys. Erasing a key erases everything encrypted under it, in every copy that was ever made.

A deleted row survives in yesterday's backup, in a write-ahead log, on a replica. So data that must not outlive its
round is encrypted under a separate key. The key lies in a file outside the journal, in a folder that no backup copies
(`workers.homes.journals`). Erasing the key erases every copy of what it opened.

    HOME/erasable/keys.json    every key by its name; rewritten, synced and renamed with each change

When `erase_all` returns, no file of the home holds the keys any more, also after a power cut. The blocks of the
earlier file are free, but their bytes stay on the medium until they are reused; snapshots and the spare blocks of a
flash disk may keep them longer. So take no snapshots of the folder, and encrypt the disk: old blocks then reveal
nothing. Bytes in this process's memory vanish with the process.
"""

from __future__ import annotations

import fcntl
import hmac
import json
import os
import re
import stat
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Protocol

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from labeler.errors import BadData, InvalidSetting, UnsafeStorage
from labeler.randomness import KEY_BYTES, derive_key
from labeler.system.faults import between
from labeler.system.files import making_room, replace_file

ERASABLE_FOLDER = "erasable"
"""Folder of a home; never part of a backup."""

KEYS_FILE = "keys.json"
"""File in that folder."""

_NONCE_BYTES = 12
_LENGTH_BYTES = 8
_MARK = b"labeler-erasable/1\n"
_NAME = re.compile(r"[0-9a-z][0-9a-z.-]{0,99}")


class ErasableKeys(Protocol):
    """Keys by name; `KeyFolder`, and a twin in memory."""

    def draw(self, name: str) -> bytes:
        """Return the key of a name: 32 random bytes, durable before this returns; the same until it is erased.

        Raises:
            StorageFull: there is no room for it, and so no key.
        """

    def read(self, name: str) -> bytes | None:
        """Return the key of a name; None if it was never drawn or is erased."""

    def draw_all(self, names: Collection[str]) -> None:
        """Draw several keys, durable together before this returns."""

    def erase_all(self, names: Collection[str]) -> None:
        """Erase keys permanently, all of them before this returns; a missing one changes nothing."""

    def names(self) -> list[str]:
        """Return the names of all keys, sorted."""


class KeysInMemory:
    """The twin of KeyFolder for tests and simulations: its keys live as long as this object."""

    def __init__(self) -> None:
        self._keys: dict[str, bytes] = {}

    def draw(self, name: str) -> bytes:
        """See ErasableKeys."""
        self.draw_all([name])
        return self._found()[name]

    def draw_all(self, names: Collection[str]) -> None:
        """See ErasableKeys."""
        wanted = {_checked(name) for name in names}

        def add(keys: dict[str, bytes]) -> dict[str, bytes]:
            return {name: os.urandom(KEY_BYTES) for name in sorted(wanted - keys.keys())} | keys

        self._change(add)

    def read(self, name: str) -> bytes | None:
        """See ErasableKeys."""
        return self._found().get(_checked(name))

    def erase_all(self, names: Collection[str]) -> None:
        """See ErasableKeys."""
        gone = {_checked(name) for name in names}
        self._change(lambda keys: {name: key for name, key in keys.items() if name not in gone})

    def names(self) -> list[str]:
        """See ErasableKeys."""
        return sorted(self._found())

    def _found(self) -> dict[str, bytes]:
        return self._keys

    def _change(self, changed: Callable[[dict[str, bytes]], dict[str, bytes]]) -> None:
        self._keys = changed(self._keys)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(<secret>)"


class KeyFolder(KeysInMemory):
    """Keys in a folder. The file is written once, however many keys are drawn or erased together.

    Several objects may use one folder, in one process or in several: a writer holds a lock on it, and every object
    reads the file again after a change.

    Args:
        folder: created if missing, for its owner only.

    Raises:
        UnsafeStorage: others may read the folder.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder
        self._version: tuple[int, int, int] | None = None
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if stat.S_IMODE(folder.stat().st_mode) & 0o077:
            raise UnsafeStorage(
                f"the folder {folder.name!r} is open to others, who could read what is to be erased: chmod 700"
            )

    def _found(self) -> dict[str, bytes]:
        """Return the keys in the file."""
        try:
            about = (self._folder / KEYS_FILE).stat()
        except FileNotFoundError:
            self._keys, self._version = {}, None
            return self._keys
        if self._version != (version := (about.st_ino, about.st_mtime_ns, about.st_size)):
            self._keys, self._version = keys_in(self._folder), version
        return self._keys

    def _change(self, changed: Callable[[dict[str, bytes]], dict[str, bytes]]) -> None:
        handle = os.open(self._folder, os.O_RDONLY | os.O_CLOEXEC)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
            self._version = None  # a stale copy would bring an erased key back
            keys = self._found()
            wanted = changed(keys)
            if wanted.keys() == keys.keys():
                return
            for left in self._folder.glob(f".{KEYS_FILE}.*"):
                left.unlink()  # left by a process that died while it wrote
            data = json.dumps({name: key.hex() for name, key in sorted(wanted.items())}).encode()
            between("keys")
            with making_room("a key of a round"):
                replace_file(self._folder / KEYS_FILE, data, mode=0o600)
            between("keys kept")
        finally:
            os.close(handle)


def lock_away(key: bytes, context: str, parts: tuple[bytes, ...]) -> bytes:
    """Encrypt some bytes so that only the key's holder can read them, and nobody can move them to another context.

    AES-256-GCM under a key derived for this use, with a random nonce; the context is authenticated.

    Args:
        key: 32 bytes, for example of `ErasableKeys.draw`.
        context: names the content, for example the digest of a round.
        parts: what to encrypt.
    """
    data = b"".join(len(part).to_bytes(_LENGTH_BYTES, "big") + part for part in parts)
    nonce = os.urandom(_NONCE_BYTES)
    return _MARK + nonce + AESGCM(derive_key(key, b"locked away")).encrypt(nonce, data, context.encode())


def take_out(key: bytes, context: str, data: bytes) -> tuple[bytes, ...]:
    """Return the parts that `lock_away` encrypted.

    Raises:
        BadData: the data was changed, belongs to another context, or was encrypted under another key.
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
    """Return whether bytes have the form that `lock_away` writes."""
    return data.startswith(_MARK)


def check_value(key: bytes) -> str:
    """Return a value that distinguishes keys and reveals nothing of them."""
    return hmac.digest(key, b"labeler-erasable-check/1", "sha256").hex()


def keys_in(folder: Path) -> dict[str, bytes]:
    """Return every key of a folder by its name, read-only: nothing is made, written or removed.

    Raises:
        BadData: the file holds something else.
    """
    try:
        found = json.loads((folder / KEYS_FILE).read_bytes())
        return {_checked(name): bytes.fromhex(key) for name, key in found.items()}
    except FileNotFoundError:
        return {}
    except (ValueError, AttributeError, TypeError, InvalidSetting):
        raise BadData(
            "the file of erasable keys holds something else; put the one back that belongs to this journal, or go on "
            "without it as after a restored backup: labeler journal accept-restored"
        ) from None


def _checked(name: str) -> str:
    if not _NAME.fullmatch(name):
        raise InvalidSetting("an erasable key is named by up to 100 lower-case letters, digits, dots and hyphens")
    return name
