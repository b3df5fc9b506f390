"""Files that are there whole or not at all, and folders with one owner at a time.

Folders that are their owner's alone: who else may sign in on a machine may not read a site's records.

New private shards are written so (feature_store.shard_writer). Those of earlier versions were readable by everybody on
the machine. They are narrowed when their owner opens them, because nobody else was ever meant to read them; where this
is not possible (another owner, a read-only disk) the log says so at each opening and the shard is used all the same:
refusing would stop a site, and hide nothing that is not readable already.

Files that a person named: names that can be one, and files read whole, whatever stands under the name.

A name may be a device that never ends, or a picture of a gigabyte where a task file was meant: no more is read than
such a file can have.

What a full disk means to whoever writes: nothing is wrong with the request, and it waits for room.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import stat
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from labeler.errors import InvalidSetting, OutputInUse, StorageFull
from labeler.system.faults import between


@contextmanager
def replacing(path: Path, *, mode: int = 0o644) -> Iterator[Path]:
    """Write to a temporary neighbour of `path`; on success it takes the name durably, else it is removed.

    Args:
        path: the file to make or replace.
        mode: its permissions, whatever the process's umask.
    """
    temporary: Path | None = None
    try:
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        os.close(handle)
        temporary = Path(name)
        yield temporary
        temporary.chmod(mode)
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        between("rename")
        temporary.replace(path)
        sync_folder(path.parent)
        between("renamed")
    except OSError as error:
        # A full disk is told without a name, or with the neighbour's: people know the file that was to be.
        if error.filename is None or Path(os.fsdecode(error.filename)).name.startswith(f".{path.name}."):
            error.filename = str(path)
        raise
    finally:
        if temporary is not None:
            temporary.unlink(missing_ok=True)


def replace_file(path: Path, data: bytes, *, mode: int = 0o644) -> None:
    """Write a file so that a crash leaves the old one or the new one, never half of either."""
    with replacing(path, mode=mode) as temporary:
        temporary.write_bytes(data)


def sync_folder(folder: Path) -> None:
    """Make renames inside a folder survive a power cut."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def exclusive(path: Path, what: str) -> Iterator[None]:
    """Hold a lock file while working; the system frees it if the process dies.

    Raises:
        OutputInUse: another process holds it.
    """
    with path.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise OutputInUse(f"another process works on {what}; wait for it, or choose another place") from None
        if not path.exists() or path.stat().st_ino != os.fstat(file.fileno()).st_ino:
            # Its last owner removed the file after we opened it: this lock is on a file that nobody else sees.
            raise OutputInUse(f"another process just left {what}; try again")
        yield


log = logging.getLogger("labeler.storage")

PRIVATE_FOLDER = 0o700
PRIVATE_FILE = 0o600
_OTHERS = stat.S_IRWXG | stat.S_IRWXO


def keep_private(folder: Path, names: Iterable[str]) -> bool:
    """Take from everybody but the owner what they may do with a folder and its files.

    Args:
        folder: of a private shard.
        names: its files; what is not there is passed over.

    Returns:
        Whether it is the owner's alone now.
    """
    # The folder last: it shuts out everybody, and files come first in case the folder stays open.
    paths = [path for name in names if (path := folder / name).exists()] + [folder]
    wide = [path for path in paths if stat.S_IMODE(path.stat().st_mode) & _OTHERS]
    try:
        for path in wide:
            path.chmod(stat.S_IMODE(path.stat().st_mode) & ~_OTHERS)
    except OSError as error:
        log.warning(
            "others on this machine may read a private shard; run chmod -R go= on its folder, as its owner",
            extra={"shard": folder.name, "reason": error.strerror},
        )
        return False
    if wide:
        log.warning("a private shard was readable by others; now it is its owner's alone", extra={"shard": folder.name})
    return True


MOST_SETTINGS_BYTES: Final = 16 * 1024 * 1024
"""Of a settings file: a task may name 32,000 classes."""


def named_path(path: str | os.PathLike[str], what: str) -> Path:
    """A path that somebody gave.

    Args:
        what: it is of, for people.

    Raises:
        InvalidSetting: it is empty, which would be the folder one is in, or has a NUL in it, as no name of a file has.
    """
    text = os.fspath(path)
    if not text or "\0" in text:
        found = "a text with the character NUL in it" if text else "an empty one"
        raise InvalidSetting(f"{what} must be the path of a file or folder; found {found}")
    return Path(text)


def read_named(path: Path, *, most_bytes: int = MOST_SETTINGS_BYTES) -> bytes:
    """The bytes of a file.

    Raises:
        OSError: it cannot be read, or is longer; `strerror` says what was wrong.
    """
    with path.open("rb") as file:
        data = file.read(most_bytes + 1)
    if len(data) > most_bytes:
        raise OSError(errno.EFBIG, f"it has more than {most_bytes:,} bytes; is it the right file?", str(path))
    return data


_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
"""No room, no quota, or the largest file that the system lets this process write."""


def is_full(error: OSError) -> bool:
    """Whether an error of the system says that there is no room left."""
    return error.errno in _FULL


def storage_full(what: str) -> StorageFull:
    """The refusal.

    Args:
        what: could not be kept, for people.
    """
    return StorageFull(
        f"{what} cannot be kept: the disk is full, or its quota is used up. Nothing of it was kept; the operator has "
        "to make room, then the same request goes through"
    )


@contextmanager
def making_room(what: str) -> Iterator[None]:
    """Raise StorageFull where the block runs out of room; every other error passes."""
    try:
        yield
    except OSError as error:
        if is_full(error):
            raise storage_full(what) from error
        raise
