"""The desk's own server: one socket on a loopback address, until it is told to stop."""

from __future__ import annotations

import secrets
import socket
import threading
from collections.abc import Callable

import uvicorn

from api.desk.app import Site, create_desk
from api.desk.guard import is_loopback
from labeler.errors import InvalidSetting, Unavailable

_WATCH_S = 0.2
_GRACE_S = 2


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
    with _listen(host, port) as listening:
        config = uvicorn.Config(
            create_desk(site, token=token),
            loop="asyncio",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            ws="none",
            timeout_graceful_shutdown=_GRACE_S,
            timeout_keep_alive=30,
            limit_concurrency=64,
        )
        server = uvicorn.Server(config)
        running = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, name="desk", daemon=True)
        running.start()
        shown = f"[{host}]" if ":" in host else host
        on_ready(f"http://{shown}:{listening.getsockname()[1]}/#token={token}")
        while not stop.wait(_WATCH_S) and running.is_alive():
            pass
        server.should_exit = True
        running.join(_GRACE_S + 5)


def _listen(host: str, port: int) -> socket.socket:
    listening = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((host, port))
        listening.listen(64)
    except OSError as error:
        listening.close()
        raise Unavailable(f"cannot listen on {host} port {port}: {error.strerror}. Choose another port.") from None
    return listening
