"""A uvicorn server, which serves the coordinator on this machine or behind a proxy until it gets a stop signal.

`api.limits` bounds requests and bodies; the edge (`workers.serve`) or another proxy handles slow heads and encryption.
This server ensures that idle connections, and those whose client does not read, never shut out others. X-Forwarded-For
is believed only from the proxies in the settings. Of its addresses, the rightmost that is not such a proxy counts: the
client may have written any address further left.

A stop is graceful: no new connection is taken, long polls and event streams end at once, requests in progress have
`GRACE_S` to finish, and only then is the coordinator stopped.
"""

from __future__ import annotations

import asyncio
import logging
import resource
import signal
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Final, cast

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from api import limits
from api.app import create_app
from labeler.errors import Unavailable

if TYPE_CHECKING:
    from asyncio import BaseTransport, TimerHandle

    from starlette.types import ASGIApp, Message, Receive, Scope, Send
    from uvicorn._types import ASGI3Application

    from api.coordinator.service import Coordinator

log = logging.getLogger("labeler.server")

GRACE_S: Final = 3
"""Less than the parent process waits before it kills this one: 5 s in `labeler up`, 10 s in most others."""
KEEP_ALIVE_S: Final = 75
"""Longest pause between an answer and the next request; above the edge's own timeout for us (`workers.serve`)."""
FIRST_REQUEST_S: Final = 10.0
"""Longest time until the head of a connection's first request is complete."""
BACKLOG: Final = 512
BURST: Final = 4
"""New connections are refused (503) once this many times the idle limit are open."""
FILES_FOR_OURSELVES: Final = 256
"""File descriptors reserved for the journal, the mailbox and uploads."""

_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)


UNSENT_BYTES: Final = 128 * 1024
"""Most bytes of a connection that the system keeps before it has sent them, so that it is soon seen what leaves."""
PIECE_BYTES: Final = 64 * 1024
_RESET: Final = struct.pack("ii", 1, 0)


class HttpConnection(HttpToolsProtocol):
    """An HTTP connection that is aborted if its client does not take what is sent to it.

    A clock runs while the system takes no more bytes of the connection. It does not matter what they are: an answer,
    one of several that were asked for at once, an event, a refusal, the rest before a close. A client may let it run
    for `ANSWER_S`, and gets back a second for every `LEAST_BYTES_PER_S` that it took. A stream without events runs no
    clock. Answers leave in pieces, so a request is in progress, and counted, until nearly all of its answer is taken.
    """

    def connection_made(self, transport: BaseTransport) -> None:
        super().connection_made(transport)  # type: ignore[arg-type]  # uvicorn narrows it, too
        self.transport.set_write_buffer_limits(high=0)
        self._patience_s = limits.ANSWER_S
        self._taken = 0
        self._end: TimerHandle | None = None
        self._running: RequestResponseCycle | None = None
        self.app = cast("ASGI3Application", partial(self._answer, self.app))

    def pause_writing(self) -> None:
        """Start the clock: some bytes have to wait."""
        super().pause_writing()
        self._since_s = self.loop.time()
        self._end = self.loop.call_later(self._patience_s, self.abort)

    def resume_writing(self) -> None:
        """Stop the clock: all bytes left."""
        super().resume_writing()
        self._stop_clock()
        left_s = self._patience_s - (self.loop.time() - self._since_s)
        self._patience_s = min(limits.ANSWER_S, left_s + self._taken / limits.LEAST_BYTES_PER_S)
        self._taken = 0

    def abort(self) -> None:
        """Close at once, and have the system drop what it has not sent."""
        self.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        self.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_clock()
        # uvicorn tells only the newest of several requests that were sent at once.
        if self._running is not None and not self._running.response_complete:
            self._running.disconnected = True
            self._running.message_event.set()
        super().connection_lost(exc)

    async def _answer(self, app: Any, scope: Scope, receive: Receive, send: Send) -> None:
        self._running = cast("Any", send).__self__  # a method of the request's cycle, in every version of uvicorn

        async def send_in_pieces(message: Message) -> None:
            whole = memoryview(message.get("body", b""))
            while len(whole) > PIECE_BYTES:
                await send({**message, "body": whole[:PIECE_BYTES], "more_body": True})
                self._taken += PIECE_BYTES
                whole = whole[PIECE_BYTES:]
            await send({**message, "body": whole} if whole else message)
            self._taken += len(whole)

        await app(scope, receive, send_in_pieces)

    def _stop_clock(self) -> None:
        if self._end is not None:
            self._end.cancel()


class Server(uvicorn.Server):
    """A uvicorn server that reports when it listens, ends streams on a stop, and closes idle connections.

    It also returns after a signal. Stock uvicorn raises the signal again once it has stopped, which would end the
    process before the coordinator could stop.

    Args:
        most_idle: most connections without a request in progress; beyond it those idle longest are closed. uvicorn's
            own `limit_concurrency` refuses new connections instead, even if idle ones fill the limit.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        most_idle: int,
        on_ready: Callable[[], None] = lambda: None,
        on_stop: Callable[[], None] = lambda: None,
        **settings: Any,
    ) -> None:
        config = uvicorn.Config(
            app,
            backlog=BACKLOG,
            log_config=None,
            access_log=False,
            server_header=False,
            http=HttpConnection,
            loop="auto",
            ws="none",
            timeout_graceful_shutdown=GRACE_S,
            timeout_keep_alive=KEEP_ALIVE_S,
            limit_concurrency=BURST * most_idle,
            **settings,
        )
        super().__init__(config)
        self._most_idle, self._on_ready, self._on_stop = most_idle, on_ready, on_stop
        self._idle: dict[Any, tuple[float, Any]] = {}

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self._on_ready()

    async def on_tick(self, counter: int) -> bool:
        """Close connections that are idle too long or too many; uvicorn calls this ten times a second."""
        connections: set[Any] = self.server_state.connections
        if counter % 10 == 0 or len(connections) > self._most_idle:
            now_s = asyncio.get_running_loop().time()
            idle: list[tuple[float, Any]] = []
            for one in connections:
                if one.cycle is not None and not one.cycle.response_complete:
                    continue
                # Every request has its own cycle, so one that came and went between two checks is noticed.
                since_s, cycle = self._idle.get(one, (now_s, one.cycle))
                idle.append((since_s if cycle is one.cycle else now_s, one))
            self._idle = {one: (since_s, one.cycle) for since_s, one in idle}
            idle.sort(key=lambda pair: pair[0])
            for number, (since_s, one) in enumerate(idle):
                patience_s = FIRST_REQUEST_S if one.cycle is None else KEEP_ALIVE_S + FIRST_REQUEST_S
                # A connection first seen in this check is spared: its request may be in transit; ties have no order.
                is_too_many = number < len(idle) - self._most_idle and since_s < now_s
                if is_too_many or now_s - since_s > patience_s:
                    one.transport.close()
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._on_stop()
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


def listen(host: str, port: int) -> socket.socket:
    """Listen at an address; port 0 takes a free one. Connections made before the server runs wait in the backlog.

    Raises:
        Unavailable: the address is taken.
    """
    # The protocol is named because asyncio sets TCP_NODELAY only on a socket that says it is TCP. Otherwise a small
    # answer would wait 40 ms for the peer's delayed acknowledgement (Nagle's algorithm).
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        # A port whose last owner just ended can be reused; a second listener on a busy port still gets an error.
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            listening.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        listening.bind((host, port))
        # Connections inherit it. Beyond the send buffer of megabytes, a slow reader would look like none for a minute.
        listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, UNSENT_BYTES)
        listening.listen(BACKLOG)
    except OSError as error:
        listening.close()
        raise Unavailable(f"cannot listen on {host} port {port}: {error.strerror}. Choose another port.") from None
    return listening


def url_of(listening: socket.socket) -> str:
    """Return the URL of a listening socket, as a proxy in front of it uses it."""
    host, port = listening.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


def serve_at(
    listening: socket.socket,
    coordinator: Coordinator,
    *,
    on_ready: Callable[[str], None] = lambda _: None,
    on_server: Callable[[uvicorn.Server], None] = lambda _: None,
) -> None:
    """Serve until SIGINT, SIGTERM, or until `should_exit` of the server is set; then stop the coordinator.

    Args:
        coordinator: opened, not yet started.
        on_ready: called with the URL once requests are taken.
        on_server: called with the server before it runs, so that another thread can stop it.
    """
    server = server_of(coordinator, on_ready=lambda: on_ready(url_of(listening)))
    on_server(server)
    coordinator.start()
    try:
        server.run(sockets=[listening])
    finally:
        coordinator.stop()


def server_of(coordinator: Coordinator, *, on_ready: Callable[[], None] = lambda: None) -> Server:
    """Return the server of a coordinator, with the limits and proxies of its settings."""
    app = create_app(coordinator)
    proxies = list(coordinator.config.trusted_proxies)
    return Server(
        app,
        most_idle=_affordable(coordinator.config.limits.max_connections),
        on_ready=on_ready,
        on_stop=lambda: app.state.shutdown.begin(),
        proxy_headers=bool(proxies),
        forwarded_allow_ips=proxies,
        lifespan="on",
    )


def _affordable(wanted: int) -> int:
    """Return the idle limit: `wanted`, but at most a `BURST`-th of the available file descriptors.

    The process first raises its descriptor limit as far as it may.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = BURST * wanted + FILES_FOR_OURSELVES
    if soft != resource.RLIM_INFINITY and soft < needed:
        soft = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return wanted
    taken = max((soft - FILES_FOR_OURSELVES) // BURST, 16)
    log.warning("fewer connections are taken than the settings say: too few files may be open", extra={"taken": taken})
    return taken
