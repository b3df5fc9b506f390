"""Steps that stand alone or join a transaction which the caller has open, and lists read page by page."""

from __future__ import annotations

import base64
import json
from contextlib import AbstractContextManager, nullcontext
from datetime import datetime

from sqlalchemy import Column, ColumnElement, Connection, and_, or_

from feature_store.journal.chain import time_of, time_text
from feature_store.journal.database import Database
from labeler.errors import InvalidSetting

MAX_PAGE = 1000
_MAX_CURSOR = 1000


def writing(database: Database, connection: Connection | None) -> AbstractContextManager[Connection]:
    """The caller's write transaction, or one of our own."""
    return database.write() if connection is None else nullcontext(connection)


def reading(database: Database, connection: Connection | None) -> AbstractContextManager[Connection]:
    """The caller's transaction, whose own writes are then seen, or one of our own."""
    return database.read() if connection is None else nullcontext(connection)


def cursor_text(at: datetime, row_id: str) -> str:
    """Where a page ended, as an opaque text: the time and the id of its last row."""
    return base64.urlsafe_b64encode(json.dumps([time_text(at), row_id]).encode()).decode().rstrip("=")


def parse_cursor(cursor: str) -> tuple[datetime, str]:
    """Time and id that `cursor_text` wrote.

    Raises:
        InvalidSetting: it wrote no such text.
    """
    try:
        if not isinstance(cursor, str) or len(cursor) > _MAX_CURSOR:
            raise ValueError
        padded = cursor.encode("ascii") + b"=" * (-len(cursor) % 4)
        at, row_id = json.loads(base64.b64decode(padded, altchars=b"-_", validate=True))
        if type(at) is not str or type(row_id) is not str or "\0" in row_id:
            raise ValueError
        moment = time_of(at)
        row_id.encode()
    except (ValueError, TypeError, RecursionError):
        raise InvalidSetting(
            "after: not a position in this list; pass on `next` of the page before unchanged, or leave it out"
        ) from None
    return moment, row_id


def before(cursor: str, at: Column[datetime], row_id: Column[str]) -> ColumnElement[bool]:
    """The condition that a row comes after the cursor in a list that is newest first.

    Raises:
        InvalidSetting: see `parse_cursor`.
    """
    moment, last = parse_cursor(cursor)
    return or_(at < moment, and_(at == moment, row_id < last))


def check_limit(limit: int) -> int:
    """How many rows one page may have.

    Raises:
        InvalidSetting: fewer than 1 or more than MAX_PAGE.
    """
    if type(limit) is not int or not 1 <= limit <= MAX_PAGE:
        raise InvalidSetting(f"limit: a page has 1 to {MAX_PAGE} entries")
    return limit
