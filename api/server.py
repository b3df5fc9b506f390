"""One process that serves the coordinator over HTTP or HTTPS until it is told to stop.

A stop is gentle: no new connection is taken, long polls and event streams end at once, requests under way have
`GRACE_S` to finish, and only then is the coordinator stopped.
"""

from __future__ import annotations

import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import uvicorn
from fastapi import FastAPI

from api.app import create_app
from labeler.errors import InvalidSetting, Unavailable

if TYPE_CHECKING:
    from api.coordinator.service import Coordinator

GRACE_S = 10
KEEP_ALIVE_S = 75
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Server(uvicorn.Server):
    """uvicorn, with three changes: it says when it listens, ends streams when it stops, and returns after a signal.

    uvicorn raises the signal again once it has stopped, which would end the process before the coordinator could.
    """

    def __init__(self, app: FastAPI, config: uvicorn.Config, *, on_ready: Callable[[], None]) -> None:
        super().__init__(config)
        self._app = app
        self._on_ready = on_ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self._on_ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._app.state.stopping.set()
        await super().shutdown(sockets)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self.handle_exit) for number in _SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def serve(
    coordinator: Coordinator,
    *,
    host: str,
    port: int,
    tls_cert: Path | None = None,
    tls_key: Path | None = None,
    on_ready: Callable[[str], None] = lambda _: None,
    on_server: Callable[[uvicorn.Server], None] = lambda _: None,
) -> None:
    """Serve until SIGINT, SIGTERM, or until `should_exit` of the server is set; then stop the coordinator.

    Args:
        coordinator: opened, not yet started.
        host: address to listen on.
        port: 0 takes a free one.
        tls_cert, tls_key: PEM files; both or neither. Without them put a TLS proxy in front, except on loopback.
        on_ready: called with the URL once requests are taken.
        on_server: called with the server before it runs, for whoever stops it from another thread.

    Raises:
        InvalidSetting: only one of certificate and key was given, or they cannot be read.
        Unavailable: the address is taken.
    """
    if (tls_cert is None) != (tls_key is None):
        raise InvalidSetting("TLS needs both a certificate and a key; one was given")
    app = create_app(coordinator)
    config = uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        server_header=False,
        lifespan="on",
        ws="none",
        timeout_graceful_shutdown=GRACE_S,
        timeout_keep_alive=KEEP_ALIVE_S,
        ssl_certfile=tls_cert,
        ssl_keyfile=None if tls_key is None else str(tls_key),
    )
    try:
        config.load()
    except OSError as error:
        raise InvalidSetting(f"the TLS certificate or key cannot be used: {error.strerror or 'malformed'}") from None
    listening = _listen(host, port)
    scheme = "http" if tls_cert is None else "https"
    shown = f"[{host}]" if ":" in host else host
    url = f"{scheme}://{shown}:{listening.getsockname()[1]}"
    server = Server(app, config, on_ready=lambda: on_ready(url))
    on_server(server)
    with listening:
        coordinator.start()
        try:
            server.run(sockets=[listening])
        finally:
            coordinator.stop()


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=2048)
    except OSError as error:
        raise Unavailable(f"cannot listen on {host} port {port}: {error.strerror}. Choose another port.") from None
