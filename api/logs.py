"""Logs as JSON lines: who asked for which route, how it ended, how long it took. Never a body, token, label or vote.

A line of the access log holds the template of a route ("/v1/jobs/{job_id}"), so that no identifier or search text of a
requester lands in it by itself. Tracebacks keep types, files and line numbers; messages of unexpected exceptions are
left out, because a library may put the offending value into them. What repeats is counted (labeler.repeated).
"""

from __future__ import annotations

import io
import logging
import os
import sys
import time
import traceback
from contextvars import ContextVar
from logging.handlers import RotatingFileHandler
from pathlib import Path
from types import TracebackType

from pythonjsonlogger.json import JsonFormatter

from labeler.repeated import CountRepeats

MAX_LOG_BYTES = 16 * 2**20
KEPT_LOGS = 3
"""A log file that is full is put aside; so many older ones are kept."""

request_id: ContextVar[str] = ContextVar("request_id", default="")
"""Id of the request that is being answered; also in its answer, as X-Request-ID."""

_ExcInfo = tuple[type[BaseException], BaseException, TracebackType | None] | tuple[None, None, None]
_QUIET = {"uvicorn": "WARNING", "uvicorn.error": "WARNING", "uvicorn.access": "CRITICAL"}


def configure_logging(*, file: Path | None = None) -> None:
    """Send every logger of this process to standard error or a file, one JSON object a line.

    Args:
        file: rotated by size, and only its owner may read it.

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
    """A log file, and the next after it, that only its owner may read."""

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


def describe(error: BaseException) -> str:
    """An exception as types and places, without its message; the error text of the system is kept for OSError."""
    lines: list[str] = []
    seen: BaseException | None = error
    while seen is not None and len(lines) < 200:
        reason = f" ({seen.strerror})" if isinstance(seen, OSError) and seen.strerror else ""
        lines.append(f"{type(seen).__module__}.{type(seen).__qualname__}{reason}")
        frames = traceback.extract_tb(seen.__traceback__)
        lines.extend(f"  {frame.filename}:{frame.lineno} in {frame.name}" for frame in frames)
        seen = seen.__cause__ or (None if seen.__suppress_context__ else seen.__context__)
        if seen is not None:
            lines.append("from")
    return "\n".join(lines)
