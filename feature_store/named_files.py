"""Files that a person named, read whole, whatever stands under the name: no more is read than such a file can have.

A name may be a device that never ends, or a picture of a gigabyte where a task file was meant.
"""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Final

MOST_SETTINGS_BYTES: Final = 16 * 1024 * 1024
"""Of a settings file: a task may name 32,000 classes."""


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
