"""Files that are there whole or not at all, and folders with one owner at a time."""

from __future__ import annotations

import fcntl
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from feature_store.faults import between
from labeler.errors import OutputInUse


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
