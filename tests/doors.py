"""Servers that have no address on the machine: a connection is a pair of sockets, made here and passed to both ends.

    socket.create_connection(("127.127.0.1", N))      keeps one end: the product's HTTP client, or a test
    -> door N hands the other one to its server       uvicorn as it is, in a thread named "door"

All of HTTP runs as it does over a network: connections, flow control, TLS, time limits. But nothing is bound, so no
port is picked or taken, and no other process can be met. What a door does not have is the backlog of a listener.
"""

from __future__ import annotations

import asyncio
import itertools
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Final

import uvicorn

HOST: Final = "127.127.0.1"
Accept = Callable[[socket.socket, tuple[str, int]], object]
"""Takes the server's end of a connection, and the address that it claims to come from."""

_numbers = itertools.count(1)
_doors: dict[int, Accept] = {}
_create_connection, _open_connection, _start_server = (
    socket.create_connection, asyncio.open_connection, asyncio.start_server,
)  # fmt: skip


class _End(socket.socket):
    """One end of a pair, which ignores what only TCP can be told."""

    def setsockopt(self, level: int, *more: Any) -> None:
        if level != socket.IPPROTO_TCP:
            super().setsockopt(level, *more)


def _connect(
    address: tuple[str, int], timeout: Any = 30.0, source_address: tuple[str, int] | None = None, **more: Any
) -> socket.socket:
    host, number = address
    if host != HOST:
        return _create_connection(address, timeout, source_address, **more)
    accept = _doors.get(number)
    if accept is None:
        raise ConnectionRefusedError(111, "Connection refused")
    ours, theirs = (_End(fileno=one.detach()) for one in socket.socketpair())
    accept(theirs, ((source_address or ("127.0.0.1", 0))[0], next(_numbers)))
    ours.settimeout(timeout)
    return ours


async def _open(host: str | None = None, port: Any = None, **more: Any) -> Any:
    if host != HOST:
        return await _open_connection(host, port, **more)
    return await _open_connection(sock=_connect((host, port)), **more)


class _Listening:
    """What `asyncio.start_server` returns."""

    def __init__(self, number: int, accept: Accept) -> None:
        if number in _doors:
            raise OSError(98, "Address already in use")
        _doors[number] = accept
        self.number = number

    def close(self) -> None:
        _doors.pop(self.number, None)


async def _start(connected: Any, host: Any = None, port: Any = None, *, limit: int = 2**16, **more: Any) -> Any:
    if host != HOST:
        return await _start_server(connected, host, port, limit=limit, **more)
    loop = asyncio.get_running_loop()

    def protocol() -> asyncio.StreamReaderProtocol:
        return asyncio.StreamReaderProtocol(asyncio.StreamReader(limit=limit, loop=loop), connected, loop=loop)

    return _Listening(port, lambda theirs, _: _hand(loop, protocol, theirs, more.get("ssl")))


def _hand(loop: asyncio.AbstractEventLoop, protocol: Callable[[], Any], theirs: socket.socket, tls: Any) -> None:
    """Give a loop, of this thread or another, the server's end of a connection."""

    async def take() -> None:
        with suppress(OSError):  # a handshake that failed
            await loop.connect_accepted_socket(protocol, theirs, ssl=tls)

    try:
        asyncio.run_coroutine_threadsafe(take(), loop)
    except RuntimeError:  # the loop has ended
        theirs.close()


socket.create_connection = _connect  # type: ignore[assignment]
asyncio.open_connection = _open
asyncio.start_server = _start


def number() -> int:
    """Return the number of a door that is not open yet."""
    return next(_numbers)


@contextmanager
def opened(accept: Accept, at: int | None = None) -> Iterator[int]:
    """Open a door until the block ends, at a number or at any; yield the number, the port of its address."""
    listening = _Listening(at or number(), accept)
    try:
        yield listening.number
    finally:
        listening.close()


def handle(kind: Callable[..., object], theirs: socket.socket, source: tuple[str, int]) -> None:
    """Have a handler of `http.server` answer a connection, in a thread."""

    def run() -> None:
        with theirs, suppress(OSError):  # whoever asked has gone
            kind(theirs, source, None)

    threading.Thread(target=run, name="door", daemon=True).start()


@contextmanager
def serving(server: uvicorn.Server, sockets: Sequence[socket.socket] = ()) -> Iterator[int]:
    """Run a server behind a door, and at these sockets, until the block ends; yield the door's number."""
    ready = threading.Event()
    loops: list[asyncio.AbstractEventLoop] = []
    start = server.startup

    async def startup(sockets: list[socket.socket] | None = None) -> None:
        await start(sockets)
        loops.append(asyncio.get_running_loop())
        ready.set()

    def run() -> None:
        try:
            server.run(sockets=list(sockets))
        finally:
            ready.set()

    def accept(theirs: socket.socket, source: tuple[str, int]) -> None:
        kind: Any = server.config.http_protocol_class

        class Connection(kind):  # type: ignore[misc]
            def connection_made(self, transport: Any) -> None:
                super().connection_made(transport)
                self.client = source

        def protocol() -> Any:
            return Connection(
                config=server.config, server_state=server.server_state, app_state=server.lifespan.state, _loop=loops[0]
            )

        _hand(loops[0], protocol, theirs, server.config.ssl)

    server.startup = startup  # type: ignore[method-assign]
    thread = threading.Thread(target=run, name="door")
    thread.start()
    try:
        assert ready.wait(240), "the server did not start"
        assert server.started, "the server ended at its start"
        with opened(accept) as door:
            yield door
    finally:
        server.should_exit = True
        thread.join(240)
        assert not thread.is_alive()
