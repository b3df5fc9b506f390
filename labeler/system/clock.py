"""What time it is: an argument of whatever asks, so that a test turns it."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime

Clock = Callable[[], datetime]
"""The time now, with its zone."""


def now_utc() -> datetime:
    """The system's clock."""
    return datetime.now(UTC)
