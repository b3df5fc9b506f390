"""What the columns of the stores hold: whole numbers, times in UTC, and JSON in one spelling.

Both databases get the same bytes: a time is a text that sorts as time does, JSON is a text with sorted keys. So an
equality in SQL is an equality in Python, and a copy from one database to the other changes nothing.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from datetime import datetime
from typing import Any

from sqlalchemy import BigInteger, Dialect, Integer, Text
from sqlalchemy.types import TypeDecorator

from feature_store.clock import now_utc as now_utc
from feature_store.journal.chain import canonical, time_of, time_text
from labeler.errors import InvalidSetting

WHOLE = BigInteger().with_variant(Integer, "sqlite")
"""64 bits in both databases; STRICT tables of SQLite know them as INTEGER."""


class Moment(TypeDecorator[datetime]):
    """A time with a zone, stored as UTC with microseconds."""

    impl = Text
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> str | None:  # noqa: ARG002  # SQLAlchemy's signature
        """To its text."""
        return None if value is None else time_text(value)

    def process_result_value(self, value: str | None, dialect: Dialect) -> datetime | None:  # noqa: ARG002  # as above
        """From its text."""
        return None if value is None else time_of(value)


class Json(TypeDecorator[Any]):
    """A list or an object, stored as canonical JSON; None is SQL's NULL."""

    impl = Text
    cache_ok = True

    def process_bind_param(self, value: Any, dialect: Dialect) -> str | None:  # noqa: ARG002  # SQLAlchemy's signature
        """To its text."""
        return None if value is None else json_text(value)

    def process_result_value(self, value: str | None, dialect: Dialect) -> Any:  # noqa: ARG002  # as above
        """From its text."""
        return None if value is None else json.loads(value)


def json_text(value: object) -> str:
    """The text under which a value is stored.

    Raises:
        InvalidSetting: it is not JSON, or holds NaN or infinity. The value is not repeated.
    """
    try:
        return canonical(value)
    except (TypeError, ValueError, RecursionError):
        raise InvalidSetting("only JSON is stored: texts, whole and finite numbers, lists, objects") from None


def check_moment(at: datetime) -> datetime:
    """A time that can be stored.

    Raises:
        InvalidSetting: it has no time zone.
    """
    time_text(at)
    return at


def one_of(column: str, values: Iterable[str]) -> str:
    """The condition of a CHECK that a column holds one of these words."""
    return f"{column} IN ({', '.join(repr(value) for value in sorted(values))})"
