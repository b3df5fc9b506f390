"""Who may be connected at once: bounded for one address and for all, with room kept for health checks.

Connections are counted where they are accepted, before TLS and before a byte is read, and until their socket is
closed. Whoever is full gets room again in this order:

    1. of a full address, or of all where everything is full, the connection that has waited longest without a request
       under way is closed in favour of the newcomer: first those that never sent a whole request, then idle ones
    2. where every connection has a request under way, `reserved` more are taken, which may only ask about health
    3. beyond that the newcomer is turned away

So connections that never finish their headers cost each other, and nobody else. Where file descriptors run out all
the same, newcomers are accepted with a spare one and closed: the listening socket would otherwise stay readable, and
the event loop would report it again and again.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import ipaddress
import logging
import os
import socket
import ssl
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

log = logging.getLogger("labeler.connections")

BACKLOG = 128
"""Connections that the system has made and nobody has accepted yet."""

_OUT_OF_FILES = (errno.EMFILE, errno.ENFILE)
_TURNED_AWAY = b"HTTP/1.1 503 Service Unavailable\r\nConnection: close\r\nRetry-After: 5\r\nContent-Length: 0\r\n\r\n"

Network = ipaddress.IPv4Network | ipaddress.IPv6Network


@dataclass(frozen=True)
class ConnectionLimits:
    """How many connections are open at once.

    Attributes:
        total: of everybody.
        per_address: of one client address (see `address_group`).
        reserved: more than `total`, which may only ask about health.
        proxies: networks whose connections are of many people, so that they are not counted by address.
        first_request_s: from the moment of acceptance until the first request's headers are whole, TLS included.
    """

    total: int = 1000
    per_address: int = 256
    reserved: int = 16
    proxies: tuple[Network, ...] = ()
    first_request_s: float = 10.0


@lru_cache(maxsize=4096)
def address_group(host: str) -> str:
    """What counts as one address: an IPv4 address, or the /64 of an IPv6 address, all of which one host may use."""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host[:64]
    if isinstance(address, ipaddress.IPv4Address):
        return str(address)
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(ipaddress.ip_network((address, 64), strict=False))


@dataclass(eq=False)
class Place:
    """One accepted connection.

    Attributes:
        group: its address, as it is counted.
        is_reserved: whether it may only ask about health.
        on_late: what its protocol does when its time is up; its socket is shut down where there is none.
    """

    group: str
    is_reserved: bool
    connection: socket.socket
    idle_since: float | None
    has_asked: bool = False
    on_late: Callable[[], None] | None = None
    timer: asyncio.TimerHandle | None = None


class Crowd:
    """All connections of one server; used on its event loop.

    Args:
        limits: how many there may be.
    """

    def __init__(self, limits: ConnectionLimits) -> None:
        self._limits = limits
        self._places: dict[tuple[Any, ...], Place] = {}
        self._held: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._places)

    def enter(self, connection: socket.socket, peer: tuple[Any, ...], loop: asyncio.AbstractEventLoop) -> bool:
        """Count a connection that was just accepted; False where there is no room for it."""
        group, limits = address_group(str(peer[0])), self._limits
        is_crowded = self._held[group] >= limits.per_address and not self._is_proxy(str(peer[0]))
        if is_crowded and not self._make_room(group):
            log.warning("a connection was turned away: one address holds as many as it may")
            return False
        is_full = len(self._places) >= limits.total and not self._make_room(None)
        if is_full and len(self._places) >= limits.total + limits.reserved:
            log.warning("a connection was turned away: as many are open as are taken")
            return False
        place = Place(group, is_full, connection, loop.time())
        place.timer = loop.call_later(limits.first_request_s, self._late, place)
        self._places[peer] = place
        self._held[group] += 1
        return True

    def leave(self, peer: tuple[Any, ...], connection: socket.socket) -> None:
        """Forget a connection whose socket is closed; a second time changes nothing."""
        place = self._places.get(peer)
        if place is not None and place.connection is connection:
            self._forget(peer, place)

    def place_of(self, peer: tuple[Any, ...] | None) -> Place | None:
        """The place of a connection; None where it was given to another meanwhile."""
        return None if peer is None else self._places.get(peer)

    def asked(self, place: Place) -> None:
        """A request has arrived: its headers are whole."""
        place.has_asked, place.idle_since = True, None
        self._stop_clock(place)

    def waits(self, place: Place, seconds: float, loop: asyncio.AbstractEventLoop) -> None:
        """Headers have begun to come, and have this long to become whole."""
        if place.timer is None:
            place.timer = loop.call_later(seconds, self._late, place)
        self.rests(place, loop)

    def rests(self, place: Place, loop: asyncio.AbstractEventLoop) -> None:
        """No request is under way."""
        if place.idle_since is None:
            place.idle_since = loop.time()

    def _is_proxy(self, host: str) -> bool:
        return any(ipaddress.ip_address(host.partition("%")[0]) in network for network in self._limits.proxies)

    def _make_room(self, group: str | None) -> bool:
        idle = [
            (place.has_asked, place.idle_since, peer)
            for peer, place in self._places.items()
            if place.idle_since is not None and group in (None, place.group)
        ]
        if not idle:
            return False
        peer = min(idle, key=lambda one: one[:2])[2]
        place = self._places[peer]
        self._forget(peer, place)
        _shut(place.connection)
        log.warning("a connection without a request under way was closed to make room")
        return True

    def _forget(self, peer: tuple[Any, ...], place: Place) -> None:
        del self._places[peer]
        self._stop_clock(place)
        self._held[place.group] -= 1
        if not self._held[place.group]:
            del self._held[place.group]

    def _stop_clock(self, place: Place) -> None:
        if place.timer is not None:
            place.timer.cancel()
            place.timer = None

    def _late(self, place: Place) -> None:
        place.timer = None
        if place.on_late is not None:
            place.on_late()
        else:
            _shut(place.connection)


class Listener(socket.socket):
    """A listening TCP socket that counts what it accepts; an event loop sees a connection only where it has room.

    It is made with its protocol named, because asyncio switches Nagle's algorithm off (TCP_NODELAY) only where a
    socket says that it is TCP; a small answer would else wait for the peer's delayed acknowledgement, 40 ms.
    """

    def __init__(self, family: socket.AddressFamily, crowd: Crowd) -> None:
        super().__init__(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        self._crowd = crowd
        self._spare: int | None = os.open(os.devnull, os.O_RDONLY)

    def accept(self) -> tuple[socket.socket, Any]:
        """The next connection for which there is room.

        Raises:
            BlockingIOError: there is none now.
        """
        while True:
            connection, peer = self._next()
            if self._crowd.enter(connection, peer[:2], asyncio.get_running_loop()):
                return connection, peer
            with contextlib.suppress(OSError):
                connection.send(_TURNED_AWAY, socket.MSG_DONTWAIT)
            connection.close()

    def close(self) -> None:
        """Stop listening."""
        super().close()
        if self._spare is not None:
            os.close(self._spare)
            self._spare = None

    def _next(self) -> tuple[_Counted, Any]:
        try:
            taken, peer = super().accept()
        except OSError as error:
            if error.errno not in _OUT_OF_FILES:
                raise
            self._shed()
            raise BlockingIOError from None
        counted = _Counted(taken.family, taken.type, taken.proto, fileno=taken.detach())
        counted.crowd, counted.peer = self._crowd, peer[:2]
        return counted, peer

    def _shed(self) -> None:
        """Accept one connection with the spare descriptor, and close it."""
        log.error("file descriptors have run out; a connection was closed. Raise the limit of open files (ulimit -n)")
        if self._spare is not None:
            os.close(self._spare)
            self._spare = None
        with contextlib.suppress(OSError):
            super().accept()[0].close()
        with contextlib.suppress(OSError):
            self._spare = os.open(os.devnull, os.O_RDONLY)


class _Counted(socket.socket):
    """An accepted connection that counts until it is closed."""

    crowd: Crowd | None = None
    peer: tuple[Any, ...] = ()

    def close(self) -> None:
        super().close()
        if self.crowd is not None:
            self.crowd.leave(self.peer, self)

    def detach(self) -> int:
        """As `close`: uvloop closes the descriptor by itself, and says so with this."""
        if self.crowd is not None:
            self.crowd.leave(self.peer, self)
        return super().detach()


class Accepting:
    """Accepts for a server of uvicorn, which asks of it what it asks of asyncio's own servers.

    An event loop's own server accepts by itself, uvloop's without asking the socket. Here the loop only says that
    somebody waits, and is handed connections that were counted, which every loop can.

    Args:
        listening: where they come.
        protocol: makes the protocol of one.
        tls: None where it is spoken in clear.
    """

    def __init__(
        self, listening: Listener, protocol: Callable[[], asyncio.BaseProtocol], tls: ssl.SSLContext | None
    ) -> None:
        self._listening = listening
        self._protocol = protocol
        self._tls = tls
        self._loop = asyncio.get_running_loop()
        self._begun: set[asyncio.Task[None]] = set()
        listening.setblocking(False)
        self._loop.add_reader(listening.fileno(), self._accept)
        self._is_open = True

    def close(self) -> None:
        """Accept nobody any more; may be called twice."""
        if self._is_open:
            self._is_open = False
            self._loop.remove_reader(self._listening.fileno())

    async def wait_closed(self) -> None:
        """Whoever was accepted goes on; there is nothing to wait for."""

    def _accept(self) -> None:
        for _ in range(BACKLOG):
            try:
                connection, _ = self._listening.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            task = self._loop.create_task(self._begin(connection))
            self._begun.add(task)
            task.add_done_callback(self._begun.discard)

    async def _begin(self, connection: socket.socket) -> None:
        try:
            await self._loop.connect_accepted_socket(self._protocol, connection, ssl=self._tls)
        except (OSError, TimeoutError):
            connection.close()  # went away, or never spoke TLS
        except BaseException:
            connection.close()
            raise


def networks(written: Sequence[str]) -> tuple[Network, ...]:
    """Networks as they stand in settings; a single address is a network of one.

    Raises:
        ValueError: one is no network.
    """
    return tuple(ipaddress.ip_network(one) for one in written)


def _shut(connection: socket.socket) -> None:
    """End a connection from outside its transport, which then sees its end and closes it."""
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
