"""Files that a person named: names that can be one, and files read whole, whatever stands under the name.

A name may be a device that never ends, or a picture of a gigabyte where a task file was meant: no more is read than
such a file can have.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Final

from labeler.errors import InvalidSetting

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
