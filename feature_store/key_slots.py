"""Secret keys in slots of one file: many are written with one sync, and each is overwritten where it lies.

    header   256 bytes: the format's name, then how often the file was written
    slot     256 bytes: length of the name, name, 32 bytes of key, 16 bytes of check; or zeros: it is free

A key is written into one slot of one file and nowhere else. Erasing it writes zeros over the whole slot, at the same
place of the same file, and syncs before it returns; the file is never copied, renamed or cut. So no byte of an erased
key is left in the file, whatever else was written into it before or after (what that means on a disk says
`feature_store.erasable`). A slot is used again only once it is zeros.

A slot lies within one sector of a disk, so writing it changes no other key, also where the power fails meanwhile. What
is half written then fails its check: it is nobody's key, because nobody was told that it was durable, and it is
overwritten before this file is next written. Who writes holds a lock on the file and looks at the header first, so that
two objects over one file never take one slot.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from feature_store.durable import sync_folder
from feature_store.faults import between
from labeler.errors import BadData, InvalidSetting
from labeler.randomness import KEY_BYTES

SLOT_BYTES: Final = 256
MAX_NAME_BYTES: Final = 100

_MARK: Final = b"labeler-key-slots/1\n"
_COUNT: Final = slice(len(_MARK), len(_MARK) + 8)
_CHECK_BYTES: Final = 16
_GROWTH: Final = 64
"""Slots that are added where none is free: the file is as long as most keys were ever kept at once."""

_FREE: Final = bytes(SLOT_BYTES)

# Of a file whose length does not change only the contents have to reach the disk.
_sync = getattr(os, "fdatasync", os.fsync)


class KeySlots:
    """The keys of one file; see the module.

    Args:
        path: the file; made, for its owner only, by the first key that is put into it. Its folder must exist.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._keys: dict[str, bytes] = {}
        self._places: dict[str, int] = {}
        self._free: list[int] = []
        self._written = -1
        self._is_writer = False
        self._doubtful: set[int] = set()
        """Places that were overwritten and whose sync failed: they read as zeros and may not be, so once more."""

    def get(self, name: str) -> bytes | None:
        """The key of a name, or None where there is none."""
        if name not in self._keys:
            self._look()
        return self._keys.get(name)

    def names(self) -> list[str]:
        """Every name that has a key."""
        self._look()
        return list(self._keys)

    def put(self, keys: Mapping[str, bytes]) -> dict[str, bytes]:
        """Keep keys of names that have none, durable together when this returns.

        Returns:
            The key of each of these names: the one it had before, where it had one.

        Raises:
            InvalidSetting: a name or a key of another length than fits.
            BadData: the file holds something else.
        """
        slots = {name: _slot(name, key) for name, key in keys.items() if name not in self._keys}
        if slots:
            with self._writing() as handle:
                self._fill(handle, {name: slot for name, slot in slots.items() if name not in self._keys}, keys)
        return {name: self._keys[name] for name in keys}

    def erase(self, names: Collection[str]) -> None:
        """Overwrite the keys of these names, durably when this returns; nothing happens where there are none."""
        if not self._doubtful and all(self.get(name) is None for name in names):
            return
        with self._writing() as handle:
            places = {name: self._places[name] for name in names if name in self._places}
            self._count(handle)
            self._overwrite(handle, places.values())
            for name, place in places.items():
                del self._keys[name], self._places[name]
                self._free.append(place)

    def _fill(self, handle: int, slots: Mapping[str, bytes], keys: Mapping[str, bytes]) -> None:
        if not slots:
            return
        self._count(handle)
        is_longer = len(slots) > len(self._free)
        if is_longer:
            self._grow(handle, len(slots) - len(self._free))
        places = self._free[-len(slots) :]
        for place, slot in zip(places, slots.values(), strict=True):
            os.pwrite(handle, slot, place * SLOT_BYTES)
        between("key")
        (os.fsync if is_longer else _sync)(handle)
        between("keys kept")
        del self._free[-len(slots) :]
        for place, name in zip(places, slots, strict=True):
            self._keys[name], self._places[name] = keys[name], place

    def _overwrite(self, handle: int, places: Collection[int]) -> None:
        """Write zeros over slots, durably; what a sync that fails leaves in doubt is overwritten by the next writer."""
        self._doubtful.update(places)
        for place in places:
            between("erase")
            os.pwrite(handle, _FREE, place * SLOT_BYTES)
        _sync(handle)
        self._doubtful.difference_update(places)

    @contextmanager
    def _writing(self) -> Iterator[int]:
        """The file, locked, and what is in memory as it is in the file."""
        handle = self._opened_to_write()
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
            if not self._is_writer or _count_of(os.pread(handle, SLOT_BYTES, 0)) != self._written:
                self._load(handle)
                self._clear_what_is_half_written(handle)
            if self._doubtful:
                # Where a key lies by now, that key was synced over what was there.
                self._doubtful.difference_update(self._places.values())
                self._overwrite(handle, tuple(self._doubtful))
            yield handle
        except BaseException:
            self._written = -1  # what is in memory may not be what is in the file: it is read before it is used again
            raise
        finally:
            os.close(handle)

    def _opened_to_write(self) -> int:
        flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
        try:
            return os.open(self._path, flags)
        except FileNotFoundError:
            handle = os.open(self._path, flags | os.O_CREAT, 0o600)
            os.fchmod(handle, 0o600)
            sync_folder(self._path.parent)
            return handle

    def _count(self, handle: int) -> None:
        """Note in the header, before anything else, that the file is written once more."""
        self._written += 1
        os.pwrite(handle, (_MARK + self._written.to_bytes(8, "big")).ljust(SLOT_BYTES, b"\0"), 0)

    def _grow(self, handle: int, needed: int) -> None:
        end = max(1, os.fstat(handle).st_size // SLOT_BYTES)
        added = max(_GROWTH, needed)
        os.pwrite(handle, bytes(added * SLOT_BYTES), end * SLOT_BYTES)
        self._free[:0] = range(end + added - 1, end - 1, -1)

    def _look(self) -> None:
        """Read the file where another object has written it."""
        try:
            handle = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except FileNotFoundError:
            return
        try:
            if _count_of(os.pread(handle, SLOT_BYTES, 0)) != self._written:
                is_whole = _nobody_writes(handle)
                self._load(handle)
                # In the midst of being written: what is there counts now, and is looked at again.
                self._written = self._written if is_whole else -1
        finally:
            os.close(handle)

    def _load(self, handle: int) -> None:
        data = os.pread(handle, os.fstat(handle).st_size, 0)
        self._written = _count_of(data[:SLOT_BYTES])
        self._keys, self._places, self._free = {}, {}, []
        for place in range(len(data) // SLOT_BYTES - 1, 0, -1):
            found = _read(data[place * SLOT_BYTES : (place + 1) * SLOT_BYTES])
            if found is None:
                self._free.append(place)
            else:
                name, self._keys[name] = found[0], found[1]
                self._places[name] = place

    def _clear_what_is_half_written(self, handle: int) -> None:
        """Done by who writes, once: of a process that died, nothing may be left that is not durable or not whole."""
        for place in self._free:
            if os.pread(handle, SLOT_BYTES, place * SLOT_BYTES) != _FREE:
                os.pwrite(handle, _FREE, place * SLOT_BYTES)
        os.fsync(handle)
        self._is_writer = True

    def __repr__(self) -> str:
        return f"KeySlots({self._path.name!r})"


def _nobody_writes(handle: int) -> bool:
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _slot(name: str, key: bytes) -> bytes:
    written = name.encode()
    if not 1 <= len(written) <= MAX_NAME_BYTES or len(key) != KEY_BYTES or not any(key):
        raise InvalidSetting(
            f"a slot holds a name of 1 to {MAX_NAME_BYTES} bytes and a key of {KEY_BYTES} that is not zero, found "
            f"{len(written)} and {len(key)} bytes"
        )
    about = bytes([len(written)]) + written.ljust(MAX_NAME_BYTES, b"\0") + key
    return (about + _check(about)).ljust(SLOT_BYTES, b"\0")


def _read(slot: bytes) -> tuple[str, bytes] | None:
    """Name and key of a slot; None where it holds none."""
    if not slot[0]:
        return None
    end = 1 + MAX_NAME_BYTES + KEY_BYTES
    if slot[0] > MAX_NAME_BYTES or slot[end : end + _CHECK_BYTES] != _check(slot[:end]):
        return None
    return slot[1 : 1 + slot[0]].decode(), slot[1 + MAX_NAME_BYTES : end]


def _check(about: bytes) -> bytes:
    """Tells a slot from one that is half written."""
    return hashlib.sha256(_MARK + about).digest()[:_CHECK_BYTES]


def _count_of(header: bytes) -> int:
    """How often a file was written; 0 of one that is empty."""
    if not header.strip(b"\0"):
        return 0
    if not header.startswith(_MARK):
        raise BadData(
            "the file of erasable keys holds something else; put the one back that belongs to this journal, or go on "
            "without it as after a restored backup: labeler journal accept-restored"
        )
    return int.from_bytes(header[_COUNT], "big")
