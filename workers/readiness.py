"""How a process tells whoever started it that it is ready: one datagram, as systemd expects it (sd_notify(3)).

Whoever starts processes binds a socket (`Bell`) and names it in NOTIFY_SOCKET; a process that is ready writes
READY=1 and its number there (`tell_ready`). The word is a hint to look now, not later: what counts is what the
coordinator then says of everybody (`workers.federation.requests`), so a stranger who rang would win a look and no more.
Where nobody named a socket, nothing is told. Under systemd `Type=notify` works the same way.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import socket
import sys
import tempfile
from pathlib import Path
from typing import Final

NOTIFY: Final = "NOTIFY_SOCKET"

_MOST_BYTES = 4096


def tell_ready() -> None:
    """Tell whoever started this process that it is ready; once, and only where somebody asked to be told."""
    # Taken out, so that what this process starts itself does not ring in its name.
    address = os.environ.pop(NOTIFY, "")
    if not address:
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as rope, contextlib.suppress(OSError):
        rope.setblocking(False)
        rope.sendto(f"READY=1\nMAINPID={os.getpid()}".encode(), _native(address))


class Bell:
    """Hears which processes are ready; close it, or use it as a context manager.

    Attributes:
        address: what NOTIFY_SOCKET is set to for a process that should ring.
    """

    def __init__(self) -> None:
        self._folder: str | None = None
        if sys.platform.startswith("linux"):
            # A name of no file: nothing is left behind, and no path is too long for it.
            self.address = f"@labeler-{secrets.token_hex(16)}"
        else:
            self._folder = tempfile.mkdtemp(prefix="labeler-")
            self.address = str(Path(self._folder) / "bell")
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.setblocking(False)
        self._socket.bind(_native(self.address))

    def __enter__(self) -> Bell:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Hear nothing more."""
        self._socket.close()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def rung(self) -> set[int]:
        """The numbers of the processes that have rung since the last look; does not wait."""
        pids = set()
        with contextlib.suppress(BlockingIOError):
            while True:
                told = dict(line.split("=", 1) for line in self._words().splitlines() if "=" in line)
                if told.get("READY") == "1" and told.get("MAINPID", "").isdecimal():
                    pids.add(int(told["MAINPID"]))
        return pids

    def _words(self) -> str:
        return self._socket.recv(_MOST_BYTES).decode("ascii", errors="replace")


def _native(address: str) -> str:
    return f"\0{address[1:]}" if address.startswith("@") else address
