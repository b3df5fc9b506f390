"""The desk's own server: one socket on a loopback address, until it is told to stop."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable

from api.desk.app import Site, create_desk
from api.server import GRACE_S, Server, listen, url_of
from feature_store.certificates import is_loopback
from labeler.errors import InvalidSetting

MOST_IDLE = 64
"""Connections without a request under way; beyond them the longest idle ones are closed."""
_WATCH_S = 0.2


def serve_desk(
    site: Site, *, host: str, port: int, stop: threading.Event, on_ready: Callable[[str], None] = lambda _: None
) -> None:
    """Serve a site's desk to this machine.

    Args:
        host: a loopback address.
        port: 0 takes a free one.
        on_ready: called with the whole address, token and all, once it listens.

    Raises:
        InvalidSetting: the address is reached from other machines.
        Unavailable: it is taken.
    """
    if not is_loopback(host):
        raise InvalidSetting(
            f"the desk is for the machine that its agent runs on, and {host!r} is reached from others: leave --host "
            "away, and forward the port from elsewhere (ssh -L 8600:127.0.0.1:8600 HOST)"
        )
    token = secrets.token_urlsafe(32)
    with listen(host, port) as listening:
        server = Server(create_desk(site, token=token), most_idle=MOST_IDLE, proxy_headers=False)
        running = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, name="desk", daemon=True)
        running.start()
        on_ready(f"{url_of(listening)}/#token={token}")
        while not stop.wait(_WATCH_S) and running.is_alive():
            pass
        server.should_exit = True
        running.join(GRACE_S + 5)
