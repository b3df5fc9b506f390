"""Tests do not wait for a disk: what only a power cut could take, no test of it can see.

A kill takes nothing of what was handed to the system, synced or not, so tests of crashes see the same. A commit of
SQLite waits 3 ms for a disk, and tests make a hundred thousand of them: that was a third of their time. That the
product asks for its syncs is still checked: settings are read back before they are relaxed here, files are synced by
calls that are counted (`tests/labeler/system/test_erasable.py`), and a journal that `real_syncs` surrounds has what
the product has (`tests/labeler/ledger/test_database.py`). Programs that tests start as programs are not
reached: they sync.

Imported before anything of the product, by `tests/conftest.py` and by the server that federations are forked from
(`tests/forked_command.py`).
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_relaxed = [True]


def _at_once(handle: Any) -> None:
    os.fstat(handle if isinstance(handle, int) else handle.fileno())  # a closed file is refused as ever


os.fsync = _at_once
os.fdatasync = _at_once

from labeler.ledger import database  # noqa: E402  # modules may keep what `os` has when they are imported


def _prepare(connection: sqlite3.Connection, **about: Any) -> None:
    _asked_for(connection, **about)
    if _relaxed[0]:
        connection.execute("PRAGMA synchronous = OFF")


@contextmanager
def real_syncs() -> Iterator[None]:
    """Connections that are opened within sync as they do outside of tests."""
    _relaxed[0] = False
    try:
        yield
    finally:
        _relaxed[0] = True


_asked_for = database._prepare_sqlite
database._prepare_sqlite = _prepare
