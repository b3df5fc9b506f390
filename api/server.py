"""One process that serves the coordinator over HTTP or HTTPS until it is told to stop.

Who may be connected, and how slowly, is bounded (api.connections, api.guarded_protocol). X-Forwarded-For is believed
from the proxies of the settings alone, and of its addresses the rightmost that is no such proxy counts: whatever
stands further left was written by whoever asked.

A stop is gentle: no new connection is taken, long polls and event streams end at once, requests under way have
`GRACE_S` to finish, and only then is the coordinator stopped.
"""

from __future__ import annotations

import asyncio
import logging
import resource
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import uvicorn
from starlette.types import ASGIApp

from api.app import create_app
from api.connections import BACKLOG, Accepting, ConnectionLimits, Crowd, Listener, networks
from api.guarded_protocol import Times
from api.wire import Wire
from labeler.errors import InvalidSetting, Unavailable

if TYPE_CHECKING:
    from api.coordinator.config import CoordinatorConfig
    from api.coordinator.service import Coordinator

log = logging.getLogger("labeler.server")

GRACE_S = 3
"""Less than whoever started this process waits before killing it: 5 s in `labeler up`, 10 s in most others."""

FILES_FOR_OURSELVES = 256
"""Descriptors that are kept for the journal, the mailbox, uploads and newcomers that are turned away."""

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Server(uvicorn.Server):
    """uvicorn, with four changes: it accepts what was counted, says when it listens, ends streams when it stops, and
    returns after a signal.

    uvicorn raises the signal again once it has stopped, which would end the process before the coordinator could.
    """

    def __init__(
        self, config: uvicorn.Config, *, on_ready: Callable[[], None], end_streams: Callable[[], None]
    ) -> None:
        super().__init__(config)
        self._end_streams = end_streams
        self._on_ready = on_ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup([])
        if not self.started:
            return
        config = self.config

        def protocol() -> asyncio.BaseProtocol:
            return cast(
                "asyncio.BaseProtocol",
                config.http_protocol_class(  # type: ignore[call-arg]  # as uvicorn calls it
                    config=config, server_state=self.server_state, app_state=self.lifespan.state
                ),
            )

        for one in sockets or ():
            self.servers.append(cast("Any", Accepting(cast("Listener", one), protocol, config.ssl)))
        self._on_ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._end_streams()
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


@dataclass(frozen=True)
class Door:
    """Where a coordinator listens, from before it can answer; whoever connects meanwhile waits in line.

    Attributes:
        listening: the socket; close it, or use the door as a context manager.
        tls_cert, tls_key: PEM files; both or neither. Without them put a TLS proxy in front, except on loopback.
    """

    listening: Listener
    crowd: Crowd
    times: Times
    host: str
    port: int
    tls_cert: Path | None = None
    tls_key: Path | None = None
    wire: Wire = field(default_factory=Wire.present)

    @property
    def url(self) -> str:
        """Where it is, as who stands before it calls it."""
        shown = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'http' if self.tls_cert is None else 'https'}://{shown}:{self.port}"

    def __enter__(self) -> Door:
        return self

    def __exit__(self, *_: object) -> None:
        self.listening.close()


def open_door(
    settings: CoordinatorConfig,
    *,
    host: str,
    port: int,
    tls_cert: Path | None = None,
    tls_key: Path | None = None,
    times: Times | None = None,
    wire: Wire | None = None,
) -> Door:
    """Listen for a coordinator that is about to be opened; port 0 takes a free one.

    Args:
        tls_cert, tls_key: see `Door`.
        wire: what speaks to them; the fastest that is installed where absent.

    Raises:
        InvalidSetting: only one of certificate and key was given.
        Unavailable: the address is taken.
    """
    if (tls_cert is None) != (tls_key is None):
        raise InvalidSetting("TLS needs both a certificate and a key; one was given")
    times = times or Times()
    crowd = Crowd(
        ConnectionLimits(
            total=_affordable(settings.limits.max_connections),
            per_address=settings.limits.max_connections_per_address,
            proxies=networks(settings.trusted_proxies),
            first_request_s=times.headers_s,
        )
    )
    listening = _listen(host, port, crowd)
    return Door(listening, crowd, times, host, listening.getsockname()[1], tls_cert, tls_key, wire or Wire.present())


def serve_at(
    door: Door,
    coordinator: Coordinator,
    *,
    on_ready: Callable[[str], None] = lambda _: None,
    on_server: Callable[[uvicorn.Server], None] = lambda _: None,
) -> None:
    """Serve until SIGINT, SIGTERM, or until `should_exit` of the server is set; then stop the coordinator.

    Args:
        coordinator: opened, not yet started.
        on_ready: called with the URL once requests are taken.
        on_server: called with the server before it runs, for whoever stops it from another thread.

    Raises:
        InvalidSetting: certificate or key cannot be read.
    """
    app = create_app(coordinator)
    serve_app(
        door,
        app,
        coordinator.config,
        start=coordinator.start,
        stop=coordinator.stop,
        end_streams=lambda: app.state.stopping.set(),
        on_ready=on_ready,
        on_server=on_server,
    )


def serve_app(
    door: Door,
    app: ASGIApp,
    settings: CoordinatorConfig,
    *,
    start: Callable[[], None],
    stop: Callable[[], None],
    end_streams: Callable[[], None],
    on_ready: Callable[[str], None] = lambda _: None,
    on_server: Callable[[uvicorn.Server], None] = lambda _: None,
) -> None:
    """Serve an application as `serve_at` does a coordinator's.

    Args:
        start, stop: called before the first and after the last request.
        end_streams: called when no new connection is taken any more.

    Raises:
        InvalidSetting: see `serve_at`.
    """
    times = door.times
    config = uvicorn.Config(
        app,
        http=cast("type[Any]", door.wire.protocol(door.crowd, times)),
        loop=door.wire.loop,
        backlog=BACKLOG,
        proxy_headers=bool(settings.trusted_proxies),
        forwarded_allow_ips=list(settings.trusted_proxies),
        log_config=None,
        access_log=False,
        server_header=False,
        lifespan="on",
        ws="none",
        timeout_graceful_shutdown=GRACE_S,
        timeout_keep_alive=times.keep_alive_s,
        ssl_certfile=door.tls_cert,
        ssl_keyfile=None if door.tls_key is None else str(door.tls_key),
    )
    try:
        config.load()
    except OSError as error:
        raise InvalidSetting(f"the TLS certificate or key cannot be used: {error.strerror or 'malformed'}") from None
    server = Server(config, on_ready=lambda: on_ready(door.url), end_streams=end_streams)
    on_server(server)
    start()
    try:
        server.run(sockets=[door.listening])
    finally:
        stop()


def _listen(host: str, port: int, crowd: Crowd) -> Listener:
    listening = Listener(socket.AF_INET6 if ":" in host else socket.AF_INET, crowd)
    try:
        # A port whose last owner has just gone is free; where two listen on one, the second is told.
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if listening.family == socket.AF_INET6:
            listening.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        listening.bind((host, port))
        listening.listen(BACKLOG)
    except OSError as error:
        listening.close()
        raise Unavailable(f"cannot listen on {host} port {port}: {error.strerror}. Choose another port.") from None
    return listening


def _affordable(wanted: int) -> int:
    """As many connections as there are file descriptors for; the process may have more of them where it is allowed."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = wanted + FILES_FOR_OURSELVES
    if soft != resource.RLIM_INFINITY and soft < needed:
        more = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (more, hard))
        soft = more
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return wanted
    taken = max(soft - FILES_FOR_OURSELVES, 16)
    log.warning("fewer connections are taken than the settings say: too few files may be open", extra={"taken": taken})
    return taken
