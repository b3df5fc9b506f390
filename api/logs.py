"""Logs as JSON lines: caller, route, outcome and duration of each request. Never a body, token, label or vote.

A line of the access log holds the template of a route ("/v1/jobs/{job_id}"), so that no identifier or search text of a
requester enters it. Tracebacks keep types, files and line numbers; messages of unexpected exceptions are left out,
because a library may put the offending value into them.

Repeated lines are counted: the first few are written, the others become one line with their number. Otherwise a client
that causes a thousand errors a second could fill the disk. Only warnings and errors are counted; two are the same if
they differ only in time.
"""

from __future__ import annotations

import io
import logging
import os
import sys
import time
import traceback
from collections import OrderedDict
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from logging.handlers import RotatingFileHandler
from pathlib import Path
from types import TracebackType
from typing import Final

from pythonjsonlogger.json import JsonFormatter

MAX_LOG_BYTES = 16 * 2**20
KEPT_LOGS = 3
"""Rotated log files to keep."""

request_id: ContextVar[str] = ContextVar("request_id", default="")
"""Id of the current request; its answer carries it as X-Request-ID."""

_ExcInfo = tuple[type[BaseException], BaseException, TracebackType | None] | tuple[None, None, None]
_QUIET = {"uvicorn": "WARNING", "uvicorn.error": "WARNING", "uvicorn.access": "CRITICAL"}


def configure_logging(*, file: Path | None = None) -> None:
    """Send every logger of this process to standard error or a file, one JSON object a line.

    Args:
        file: rotated by size and readable only by its owner.

    Raises:
        OSError: the file cannot be written.
    """
    writer: logging.Handler = logging.StreamHandler(sys.stderr)
    if file is not None:
        writer = _PrivateFile(file, maxBytes=MAX_LOG_BYTES, backupCount=KEPT_LOGS, encoding="utf-8")
    writer.setFormatter(LogFormatter())
    handler = CountRepeats(writer, clock=time.monotonic)
    handler.addFilter(_stamp)
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel("WARNING")
    logging.getLogger("labeler").setLevel("INFO")
    for name, quiet in _QUIET.items():
        logger = logging.getLogger(name)
        logger.handlers.clear()
        logger.propagate = True
        logger.setLevel(quiet)


class _PrivateFile(RotatingFileHandler):
    """A rotating log file that only its owner may read."""

    def _open(self) -> io.TextIOWrapper:
        made = os.open(self.baseFilename, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        return io.TextIOWrapper(io.FileIO(made, "ab"), encoding=self.encoding, write_through=True)


def _stamp(record: logging.LogRecord) -> bool:
    if not hasattr(record, "request_id"):
        record.request_id = request_id.get()
    return True


class LogFormatter(JsonFormatter):
    """One record as one JSON line; tracebacks without values."""

    def __init__(self) -> None:
        super().__init__(
            ["levelname", "name", "message", "request_id"],
            rename_fields={"levelname": "level", "name": "logger"},
            timestamp="at",
        )

    def formatException(self, ei: _ExcInfo) -> str:
        return "" if ei[1] is None else describe(ei[1])


def words_of_the_system(error: BaseException) -> object:
    """Return the system's error text of an OSError."""
    return error.strerror if isinstance(error, OSError) else None


def describe(error: BaseException, words_of: Callable[[BaseException], object] = words_of_the_system) -> str:
    """Describe an exception by types and places, without its message.

    Args:
        words_of: returns what may be told of one exception in the chain of causes; None for nothing.
    """
    lines: list[str] = []
    seen: BaseException | None = error
    while seen is not None and len(lines) < 200:
        words = words_of(seen)
        lines.append(f"{type(seen).__module__}.{type(seen).__qualname__}{f' ({words})' if words else ''}")
        frames = traceback.extract_tb(seen.__traceback__)
        lines.extend(f"  {frame.filename}:{frame.lineno} in {frame.name}" for frame in frames)
        seen = seen.__cause__ or (None if seen.__suppress_context__ else seen.__context__)
        if seen is not None:
            lines.append("from")
    return "\n".join(lines)


WINDOW_S: Final = 60.0
"""How long repeats are counted until a line with their number is written."""
FIRST: Final = 5
"""How many of a kind are written in a window."""
MOST_KINDS: Final = 1000

_STANDARD = frozenset(logging.makeLogRecord({}).__dict__) | {"message", "asctime", "request_id", "taskName"}


@dataclass
class _Seen:
    until_s: float
    last: logging.LogRecord
    count: int = 0


class CountRepeats(logging.Handler):
    """Passes records on to another handler, and counts those that repeat.

    Args:
        inner: the handler that writes.
        clock: seconds that never run backwards.
    """

    def __init__(self, inner: logging.Handler, *, clock: Callable[[], float]) -> None:
        super().__init__()
        self._inner = inner
        self._clock = clock
        self._seen: OrderedDict[tuple[object, ...], _Seen] = OrderedDict()

    def emit(self, record: logging.LogRecord) -> None:
        """Write a record, or count it."""
        now_s = self._clock()
        # Ordered by start, so finished windows come first.
        while self._seen and next(iter(self._seen.values())).until_s <= now_s:
            self._tell()
        if record.levelno < logging.WARNING:
            self._inner.handle(record)
            return
        kind = _kind(record)
        seen = self._seen.get(kind)
        if seen is None:
            if len(self._seen) >= MOST_KINDS:
                self._tell()
            seen = self._seen[kind] = _Seen(now_s + WINDOW_S, record)
        seen.last = record
        seen.count += 1
        if seen.count <= FIRST:
            self._inner.handle(record)

    def close(self) -> None:
        """Write the counts that are still pending."""
        while self._seen:
            self._tell()
        self._inner.close()
        super().close()

    def flush(self) -> None:
        """Flush the inner handler."""
        self._inner.flush()

    def _tell(self) -> None:
        """End the oldest window, and write how many records of its kind were only counted."""
        _, seen = self._seen.popitem(last=False)
        more = seen.count - FIRST
        if more > 0:
            told = logging.makeLogRecord(seen.last.__dict__)
            told.exc_info, told.exc_text, told.stack_info = None, None, None
            words = seen.last.getMessage()
            told.msg, told.args = f"{words} ... happened {more} more times in {WINDOW_S:.0f} s", None
            self._inner.handle(told)


def _kind(record: logging.LogRecord) -> tuple[object, ...]:
    """Return the identity of a record. Only type and place of an exception count: its text may hold anything."""
    fields = tuple(sorted((name, str(value)) for name, value in record.__dict__.items() if name not in _STANDARD))
    error = record.exc_info[1] if isinstance(record.exc_info, tuple) else None
    place = None if error is None or error.__traceback__ is None else error.__traceback__.tb_lineno
    return (record.name, record.levelno, record.getMessage(), type(error), place, fields)
