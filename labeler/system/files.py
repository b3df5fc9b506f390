"""Files that exist whole or not at all, folders with one owner at a time, and storage that keeps what is written.

**Private folders.** Other users of a machine may not read a site's records. New private shards are written so
(feature_store.shard_writer). Those of earlier versions were readable by every user of the machine. They are narrowed
when their owner opens them, because only the owner was ever meant to read them. If that is impossible (another owner, a
read-only disk) the log says so at each opening and the shard is still used. Refusing would stop a site, and hide
nothing that is not readable already.

**Files that a person named.** The name is checked, and the file is read whole. A name may be a device that never ends,
or a picture of a gigabyte instead of a task file: no more is read than such a file can have. It may be a pipe into
which nobody writes: that reads as empty. Output paths are checked
before the work. Otherwise hours of work, or a charge, could end without a place for the result. A full disk means that
nothing is wrong with the request, and that it waits for room.

**Durable storage.** A charge that was acknowledged has to survive a power cut. File systems in memory keep nothing.
Network file systems answer before the data is on a disk, and their locks do not always work. Barriers can be switched
off. If the system reports any of these, the journal refuses the place, because a lost charge would be spent twice.
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
from typing import BinaryIO, Final

from labeler.errors import InvalidSetting, OutputInUse, StorageFull, UnsafeStorage
from labeler.system.faults import between


@contextmanager
def replacing(path: Path, *, mode: int = 0o644) -> Iterator[Path]:
    """Write to a temporary file next to `path`; on success rename it durably to `path`, else remove it.

    Args:
        path: the file to make or replace.
        mode: its permissions, regardless of the process's umask.
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
        # The error of a full disk has no name, or the temporary one; people know the target file.
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
            # Its last owner removed the file after we opened it: we hold the lock of a deleted file.
            raise OutputInUse(f"another process just left {what}; try again")
        yield


log = logging.getLogger("labeler.storage")

PRIVATE_FOLDER = 0o700
PRIVATE_FILE = 0o600
_OTHERS = stat.S_IRWXG | stat.S_IRWXO


def keep_private(folder: Path, names: Iterable[str]) -> bool:
    """Remove all permissions on a folder and its files except the owner's.

    Args:
        folder: of a private shard.
        names: its files; missing ones are skipped.

    Returns:
        Whether only the owner can access it now.
    """
    # The folder last: it shuts out everybody. Files come first in case the folder stays open.
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
"""Largest settings file: a task may name 32,000 classes."""


def named_path(path: str | os.PathLike[str], what: str) -> Path:
    """Return the path that a person gave.

    Args:
        what: the thing at the path, for people.

    Raises:
        InvalidSetting: it is empty, which would mean the current folder, or contains NUL, which no file name may.
    """
    text = os.fspath(path)
    if not text or "\0" in text:
        found = "a text with the character NUL in it" if text else "an empty one"
        raise InvalidSetting(f"{what} must be the path of a file or folder; found {found}")
    return Path(text)


def check_file(out: Path | None, option: str = "--out") -> None:
    """Refuse an output file that could not be written at the end.

    Args:
        out: the file; None if nothing is written.
        option: the option that named it.

    Raises:
        InvalidSetting: its folder is missing or not writable, or a folder has its name.
    """
    if out is None:
        return
    if not out.parent.is_dir():
        raise InvalidSetting(f"{option} names a file in {out.parent}, which is no folder; make it first")
    _check_writable(out.parent, f"{option} names a file in")
    if out.is_dir():
        raise InvalidSetting(f"{option} names a file to write, and {out} is a folder")


def check_folder(out: Path | None, option: str = "--out") -> None:
    """Refuse an output folder that could not be created or written to at the end; see `check_file`."""
    if out is None:
        return
    there = next(one for one in (out, *out.absolute().parents) if one.exists())
    if not there.is_dir():
        raise InvalidSetting(f"{option} names a folder to write, and {there} is a file")
    _check_writable(there, f"{option} names a folder in")


def _check_writable(folder: Path, what: str) -> None:
    if not os.access(folder, os.W_OK | os.X_OK):
        raise InvalidSetting(f"{what} {folder}, where this user cannot write")


def read_named(path: Path, *, most_bytes: int = MOST_SETTINGS_BYTES) -> bytes:
    """Return the bytes of a file.

    Raises:
        OSError: it cannot be read, or is longer; `strerror` says what was wrong.
    """
    with open(path, "rb", opener=_without_waiting) as file:
        os.set_blocking(file.fileno(), True)
        data = file.read(most_bytes + 1)
    if len(data) > most_bytes:
        raise OSError(errno.EFBIG, f"it has more than {most_bytes:,} bytes; is it the right file?", str(path))
    return data


def open_regular(path: Path) -> BinaryIO:
    """Open a file for reading; a link to one is followed.

    Raises:
        OSError: it cannot be opened, or is a folder, pipe, socket or device; `strerror` says what was wrong.
    """
    file = open(path, "rb", opener=_without_waiting)  # noqa: SIM115  # the caller's
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(errno.EINVAL, "it is a pipe, a socket or a device, and no file", str(path))
    return file


def _without_waiting(path: str, flags: int) -> int:
    """Open a file; do not wait until somebody writes into a pipe."""
    return os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC)


_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
"""No room, no quota, or the file size limit of this process."""


def is_full(error: OSError) -> bool:
    """Return whether a system error says that there is no room left."""
    return error.errno in _FULL


def storage_full(what: str) -> StorageFull:
    """Return the refusal for a full disk.

    Args:
        what: the thing that could not be stored, for people.
    """
    return StorageFull(
        f"{what} cannot be kept: the disk is full, or its quota is used up. Nothing of it was kept; the operator has "
        "to make room, then the same request goes through"
    )


@contextmanager
def making_room(what: str) -> Iterator[None]:
    """Raise StorageFull if the block runs out of room; every other error passes."""
    try:
        yield
    except OSError as error:
        if is_full(error):
            raise storage_full(what) from error
        raise


UNSYNCED = frozenset(
    {"tmpfs", "ramfs", "devtmpfs", "hugetlbfs", "nfs", "nfs4", "cifs", "smb3", "smbfs", "9p", "afs", "ceph",
     "vboxsf", "fuse.sshfs", "fuse.glusterfs", "fuse.s3fs", "fuse.rclone", "fuse.gcsfuse"}
)  # fmt: skip
"""File system types in memory or behind a network."""

UNSYNCED_OPTIONS = frozenset({"nobarrier", "barrier=0", "volatile"})
"""Mount options with which synced data may not be on the disk (`volatile`: overlay file systems)."""

MOUNTS = Path("/proc/self/mounts")


def check_synced(path: Path, *, mounts: Path = MOUNTS) -> None:
    """Refuse a place that is known to lose synced data; if the system gives no information, refuse nothing.

    Args:
        path: the file, existing or not; its folder must exist.
        mounts: the system's table of mounted file systems.

    Raises:
        UnsafeStorage: the place is in memory, behind a network, or mounted without barriers.
    """
    try:
        lines = mounts.read_text(errors="surrogateescape").splitlines()
    except OSError:
        return
    found = _mount_of(path.resolve(), lines)
    if found is None:
        return
    kind, options = found
    if kind in UNSYNCED:
        raise UnsafeStorage(
            f"{path.name} would lie on a file system of type {kind}, which loses or delays what was synced; charges "
            "could be forgotten after a crash. Move the home folder to a local disk, or use PostgreSQL"
        )
    if off := sorted(options & UNSYNCED_OPTIONS):
        raise UnsafeStorage(
            f"{path.name} would lie on a {kind} file system mounted with {', '.join(off)}: a finished sync is not on "
            "the disk. Mount it without that option"
        )


def check_private(path: Path) -> None:
    """Refuse a journal that others on the machine may read or write.

    Raises:
        UnsafeStorage: it is not a regular file, belongs to somebody else, or has permissions wider than 0600.
    """
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise UnsafeStorage(f"{path.name} is not a regular file; a journal is a file of its own")
    if status.st_uid != os.geteuid():
        raise UnsafeStorage(f"{path.name} belongs to user {status.st_uid}, and this process runs as {os.geteuid()}")
    if mode := stat.S_IMODE(status.st_mode) & 0o177:
        raise UnsafeStorage(
            f"{path.name} has permissions {stat.S_IMODE(status.st_mode):04o}, and {mode:04o} of them are too many: "
            f"others could read or rewrite the ledger. Run chmod 600 on it, after looking at who changed it"
        )


def create_private(path: Path) -> bool:
    """Create an empty file that only its owner may open; return True if it did not exist before."""
    try:
        handle = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except FileExistsError:
        return False
    os.close(handle)
    return True


def _mount_of(path: Path, lines: list[str]) -> tuple[str, frozenset[str]] | None:
    """Return type and options of the file system of a path: the longest mount point wins, the last of equals."""
    best: tuple[int, str, frozenset[str]] | None = None
    for line in lines:
        fields = line.split(" ")
        if len(fields) < 4:
            continue
        point = Path(_unescape(fields[1]))
        if path.is_relative_to(point) and (best is None or len(point.parts) >= best[0]):
            best = (len(point.parts), fields[2], frozenset(fields[3].split(",")))
    return None if best is None else best[1:]


def _unescape(text: str) -> str:
    """Decode the table's octal numbers for blanks, tabs, newlines and backslashes."""
    for code, character in (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")):
        text = text.replace(code, character)
    return text
