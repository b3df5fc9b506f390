"""What a full disk means to whoever writes: nothing is wrong with the request, and it waits for room."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager

from labeler.errors import StorageFull

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
