"""The commands of `labeler`, one module per room: each reads options, calls one function, and renders.

A room is loaded when one of its commands is invoked (`workers.commands.catalog`), and heavy libraries are imported
inside commands, so that `labeler --help`, `labeler status` and `labeler plan` answer at once.

This file only handles Ctrl-C, because that comes first. While `labeler` starts or ends, no work is in progress, so the
process says so and exits. By default Python raises KeyboardInterrupt inside the import that is running, where nothing
catches it, or where a library takes it for a missing part. A running command gets Python's usual interrupt, because it
has to clean up.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

TRY_AGAIN = 75
"""`labeler.errors.Interrupted.exit_code`, repeated here to avoid the import."""


def _end(*_: object) -> None:
    os.write(2, b"labeler: interrupted\n")
    os._exit(TRY_AGAIN)


@contextmanager
def ended_at_once() -> Iterator[None]:
    """End the process on Ctrl-C, unless the signal is ignored or has another handler."""
    with _handled_by(_end, where=signal.default_int_handler):
        yield


@contextmanager
def interruptible() -> Iterator[None]:
    """Raise KeyboardInterrupt on Ctrl-C, within `ended_at_once`."""
    with _handled_by(signal.default_int_handler, where=_end):
        yield


@contextmanager
def _handled_by(handler: Callable[..., Any], *, where: Callable[..., Any]) -> Iterator[None]:
    is_ours = signal.getsignal(signal.SIGINT) is where and threading.current_thread() is threading.main_thread()
    if is_ours:
        signal.signal(signal.SIGINT, handler)
    try:
        yield
    finally:
        if is_ours and signal.getsignal(signal.SIGINT) is handler:
            signal.signal(signal.SIGINT, where)
