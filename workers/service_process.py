"""A long-running process of ours: its log, and its message that it is ready.

A log has one JSON object a line on standard error, with ids, and never with a value. A traceback keeps types, files and
line numbers. The message of an unexpected exception is left out, because a library may have put a label or a feature
into it. Errors of this project (labeler.errors) hold nothing private. Repeats are counted (api.logs).

Readiness is one datagram, as systemd expects it (`Type=notify`, sd_notify(3)). Without a named socket, none is sent.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import sys
import time
from types import TracebackType

from pythonjsonlogger.json import JsonFormatter

from api.logs import CountRepeats, describe
from labeler.errors import LabelerError

_ExcInfo = tuple[type[BaseException], BaseException, TracebackType | None] | tuple[None, None, None]


def configure_logging() -> None:
    """Send every logger of this process to standard error; those of other packages log from WARNING up."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Lines())
    root = logging.getLogger()
    root.handlers[:] = [CountRepeats(handler, clock=time.monotonic)]
    root.setLevel("WARNING")
    logging.getLogger("labeler").setLevel("INFO")


def tell_ready() -> None:
    """Tell the parent of this process that it is ready; once, and only if a socket was named."""
    # Removed, so that processes started by this one do not send in its name.
    address = os.environ.pop("NOTIFY_SOCKET", "")
    if not address:
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as rope, contextlib.suppress(OSError):
        rope.setblocking(False)
        rope.sendto(
            f"READY=1\nMAINPID={os.getpid()}".encode(), f"\0{address[1:]}" if address.startswith("@") else address
        )


class _Lines(JsonFormatter):
    def __init__(self) -> None:
        super().__init__(
            ["levelname", "name", "message"], rename_fields={"levelname": "level", "name": "logger"}, timestamp="at"
        )

    def formatException(self, ei: _ExcInfo) -> str:
        return "" if ei[1] is None else describe(ei[1], lambda one: one if isinstance(one, LabelerError) else None)
