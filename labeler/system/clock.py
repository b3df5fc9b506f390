"""The clock: an argument of every function that asks for the time, so that a test can set it."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime

Clock = Callable[[], datetime]
"""The time now, with its zone."""


def now_utc() -> datetime:
    """Return the system's time."""
    return datetime.now(UTC)
