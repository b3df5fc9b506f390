"""Whether the place a journal lies on keeps what is written there.

A charge that was acknowledged has to survive a power cut. File systems in memory keep nothing; network file systems
answer before the data is on a disk, and their locks do not always lock; barriers can be switched off. Where the
system tells us so, the journal refuses to live there, because a lost charge is spent twice.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from labeler.errors import UnsafeStorage

UNSYNCED = frozenset(
    {"tmpfs", "ramfs", "devtmpfs", "hugetlbfs", "nfs", "nfs4", "cifs", "smb3", "smbfs", "9p", "afs", "ceph",
     "vboxsf", "fuse.sshfs", "fuse.glusterfs", "fuse.s3fs", "fuse.rclone", "fuse.gcsfuse"}
)  # fmt: skip
"""File system types that live in memory or behind a network."""

UNSYNCED_OPTIONS = frozenset({"nobarrier", "barrier=0", "volatile"})
"""Mount options under which a finished sync is not on the disk (`volatile`: overlay file systems)."""

MOUNTS = Path("/proc/self/mounts")


def check_synced(path: Path, *, mounts: Path = MOUNTS) -> None:
    """Refuse a place that is known not to keep what was synced; where the system tells nothing, nothing is refused.

    Args:
        path: the file, whether it exists or not; its folder must exist.
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
        UnsafeStorage: it is no regular file, belongs to somebody else, or its permissions are wider than 0600.
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
    """Make an empty file that only its owner may open; True if it was not there before."""
    try:
        handle = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except FileExistsError:
        return False
    os.close(handle)
    return True


def _mount_of(path: Path, lines: list[str]) -> tuple[str, frozenset[str]] | None:
    """Type and options of the file system a path lies on: the longest mount point wins, the last of equals."""
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
    """The table writes blanks, tabs, newlines and backslashes as octal numbers."""
    for code, character in (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")):
        text = text.replace(code, character)
    return text
