"""The error of SQLite on a full disk."""

from __future__ import annotations

import sqlite3

from sqlalchemy.exc import DBAPIError


def no_room() -> DBAPIError:
    """Return the error of a commit; with a write-ahead log nothing needs room before it."""
    error = sqlite3.OperationalError("database or disk is full")
    error.sqlite_errorcode, error.sqlite_errorname = sqlite3.SQLITE_FULL, "SQLITE_FULL"
    return DBAPIError("COMMIT", None, error)
