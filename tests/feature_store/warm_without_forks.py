"""Loaded into a warm process: it cannot fork while a file is there, as where memory is short."""

import errno
import os
import sys
from pathlib import Path
from typing import Final

NO_MORE: Final = Path(__file__).with_name(".no_more_forks")
_fork = os.fork


def fork() -> int:
    """As the system's."""
    if NO_MORE.exists():
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
    return _fork()


if __name__ in sys.argv:
    os.fork = fork  # type: ignore[assignment]
