"""What a database's own errors mean to whoever asked, in the tree of `labeler.errors`.

Only trouble with the storage is translated: full, unreadable, locked, out of reach, damaged. A broken constraint is a
mistake of the caller and passes through, without the rows: PostgreSQL quotes what it refused ("Failing row contains",
"Key (...)=(...)"), which may be a share.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager

from sqlalchemy.exc import DBAPIError, IntegrityError
from sqlalchemy.exc import TimeoutError as PoolTimeout

from labeler.errors import JournalBroken, LabelerError, StorageFull, Unavailable

_KEPT = "Nothing of this step was kept; it can be repeated"
_IN_DOUBT = "Whether this step was kept is not known; repeat it, twice equals once"


@contextmanager
def translating(what: str) -> Iterator[None]:
    """Raise Unavailable or JournalBroken where the database reports trouble with its storage.

    Args:
        what: the journal in words, without a password.
    """
    try:
        yield
    except DBAPIError as error:
        translated = translate(error, what)
        if translated is None:
            forget_rows(error)
            raise
        raise translated from error
    except PoolTimeout as error:
        raise Unavailable(f"{what}: every connection is busy. {_KEPT} later") from error


def no_room() -> DBAPIError:
    """What SQLite says at a commit on a full disk, for a simulation: with a write-ahead log nothing needs room before
    it."""
    error = sqlite3.OperationalError("database or disk is full")
    error.sqlite_errorcode, error.sqlite_errorname = sqlite3.SQLITE_FULL, "SQLITE_FULL"
    return DBAPIError("COMMIT", None, error)


def forget_rows(error: DBAPIError) -> None:
    """Leave in an error of PostgreSQL what was broken and where, and nothing of what a row held."""
    diagnosis = getattr(error.orig, "diag", None)
    if error.orig is None or diagnosis is None:
        return
    state = diagnosis.sqlstate or "no code"
    # The primary message of class 22 quotes the value that does not fit.
    said = "a value that the column cannot hold" if state.startswith("22") else diagnosis.message_primary
    place = ", ".join(name for name in (diagnosis.table_name, diagnosis.constraint_name) if name)
    sentence = f"{said or type(error.orig).__name__} ({state}{f'; {place}' if place else ''})"
    # The original keeps its result, in which the row stands, in an attribute; a text of a traceback never shows that.
    error.orig.args = (sentence,)
    error.args = (f"({type(error.orig).__module__}.{type(error.orig).__qualname__}) {sentence}",)


def translate(error: DBAPIError, what: str) -> LabelerError | None:
    """The error of this project that a database's error stands for; None where it is about the statement itself."""
    if isinstance(error, IntegrityError):
        return None
    if isinstance(error.orig, sqlite3.Error):
        return _of_sqlite(error.orig, what)
    return _of_postgresql(error, what)


def _of_sqlite(error: sqlite3.Error, what: str) -> LabelerError | None:
    code = getattr(error, "sqlite_errorcode", None)
    primary = None if code is None else code & 0xFF
    name = getattr(error, "sqlite_errorname", "")
    if primary == sqlite3.SQLITE_FULL:
        return StorageFull(f"{what}: the disk is full. {_KEPT} once there is room")
    if primary in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
        return Unavailable(f"{what}: another connection holds it locked. {_KEPT} when that one is done")
    if primary == sqlite3.SQLITE_IOERR:
        return Unavailable(f"{what}: the disk does not read or write ({name}). {_IN_DOUBT} after looking at the disk")
    if primary in (sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_PERM, sqlite3.SQLITE_READONLY):
        return Unavailable(f"{what}: it cannot be opened or written ({name}). {_KEPT} once its permissions allow it")
    if primary in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
        return JournalBroken(f"{what}: the file is damaged ({name}). Restore the newest backup")
    return None


def _of_postgresql(error: DBAPIError, what: str) -> LabelerError | None:
    state = getattr(error.orig, "sqlstate", None) or ""
    if error.connection_invalidated or state.startswith(("08", "57P")):
        return Unavailable(f"{what}: the connection to PostgreSQL was lost. {_IN_DOUBT}")
    if state == "53100":
        return StorageFull(f"{what}: the disk of PostgreSQL is full. {_KEPT} once there is room")
    if state.startswith("53"):
        return Unavailable(f"{what}: PostgreSQL is out of memory or connections ({state}). {_KEPT} later")
    if state in ("55P03", "57014", "40001", "40P01"):
        return Unavailable(f"{what}: another connection holds it locked ({state}). {_KEPT} when that one is done")
    if state.startswith("58"):
        return Unavailable(f"{what}: the disk of PostgreSQL does not read or write ({state}). {_IN_DOUBT}")
    if state in ("XX001", "XX002"):
        return JournalBroken(f"{what}: PostgreSQL reports damaged data ({state}). Restore the newest backup")
    if not state and type(error.orig).__name__ == "OperationalError":
        return Unavailable(f"{what}: PostgreSQL cannot be reached or refused the login")
    return None
