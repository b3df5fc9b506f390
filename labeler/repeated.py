"""Log lines that repeat are counted: the first few are written, the others become one line with their number.

What goes wrong can go wrong a thousand times a second, and whoever makes it do so would fill the disk. Only warnings
and errors are counted; two are the same where everything but their time is.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

WINDOW_S: Final = 60.0
FIRST: Final = 5
MOST_KINDS: Final = 1000

_STANDARD = frozenset(logging.makeLogRecord({}).__dict__) | {"message", "asctime", "request_id", "taskName"}


@dataclass
class _Seen:
    until: float
    last: logging.LogRecord
    count: int = 0


class CountRepeats(logging.Handler):
    """Passes records on to another handler, and counts those that repeat.

    Args:
        inner: what writes.
        clock: seconds that never go back.
        window_s: how long is counted before a line with the number is written.
        first: how many of a kind are written in a window.
    """

    def __init__(
        self, inner: logging.Handler, *, clock: Callable[[], float], window_s: float = WINDOW_S, first: int = FIRST
    ) -> None:
        super().__init__()
        self._inner = inner
        self._clock = clock
        self._window_s = window_s
        self._first = first
        self._seen: OrderedDict[tuple[object, ...], _Seen] = OrderedDict()

    def emit(self, record: logging.LogRecord) -> None:
        """Write a record, or count it."""
        now = self._clock()
        self._tell(lambda seen: seen.until <= now)
        if record.levelno < logging.WARNING:
            self._inner.handle(record)
            return
        kind = _kind(record)
        seen = self._seen.get(kind)
        if seen is None:
            if len(self._seen) >= MOST_KINDS:
                oldest = next(iter(self._seen.values()))
                self._tell(lambda one: one is oldest)
            seen = self._seen[kind] = _Seen(now + self._window_s, record)
        seen.last = record
        seen.count += 1
        if seen.count <= self._first:
            self._inner.handle(record)

    def close(self) -> None:
        """Tell what was counted and not told yet."""
        self._tell(lambda _: True)
        self._inner.close()
        super().close()

    def flush(self) -> None:
        """Write what is written already."""
        self._inner.flush()

    def _tell(self, is_over: Callable[[_Seen], bool]) -> None:
        # In order of their beginning, so those that are over stand first; looking stops at the first that is not.
        while self._seen:
            kind, seen = next(iter(self._seen.items()))
            if not is_over(seen):
                return
            del self._seen[kind]
            more = seen.count - self._first
            if more > 0:
                told = logging.makeLogRecord(seen.last.__dict__)
                told.exc_info, told.exc_text, told.stack_info = None, None, None
                words = seen.last.getMessage()
                told.msg, told.args = f"{words} ... happened {more} more times in {self._window_s:.0f} s", None
                self._inner.handle(told)


def _kind(record: logging.LogRecord) -> tuple[object, ...]:
    """What makes two records the same. Of an exception its type and place count: its text may hold anything."""
    fields = tuple(sorted((name, str(value)) for name, value in record.__dict__.items() if name not in _STANDARD))
    error = record.exc_info[1] if isinstance(record.exc_info, tuple) else None
    place = None if error is None or error.__traceback__ is None else error.__traceback__.tb_lineno
    return (record.name, record.levelno, record.getMessage(), type(error), place, fields)
