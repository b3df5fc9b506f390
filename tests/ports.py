"""A port that stays free for the server that a test starts later."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def kept_port(port: int = 0) -> Iterator[int]:
    """Yield a port of loopback, this one or any free one, that no other program is given while the block runs.

    The port stays bound here and nobody listens at it, so a connection is refused. On Linux a server that is told the
    number can listen there, because both ends set SO_REUSEADDR. A program that asks for any free port gets another one.
    """
    with socket.socket() as kept:
        kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        kept.bind(("127.0.0.1", port))
        yield int(kept.getsockname()[1])
