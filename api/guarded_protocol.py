"""HTTP/1.1 with a time limit on everything a peer may draw out: headers, bodies, idling, taking the answer.

uvicorn limits only the idle time between requests. A connection is in one of these:

    headers     at most `headers_s` from the first byte of a request to the end of its headers; for the first request
                from the moment the connection was accepted (api.connections)
    body        at least `body_bytes` in every `body_window_s`, unless it is we who do not read, or told it to wait
    answer      what was written is taken within `stalled_s`, buffer by buffer
    idle        uvicorn's own `timeout_keep_alive`
    half closed the peer sends no more and may still read: what it has asked is answered within `half_closed_s`. It may
                as well be gone, which nothing tells before something is written

Two parsers are guarded in the same way: h11 here, and where it is installed httptools (`api.quick_protocol`), which is
several times as fast.
"""

from __future__ import annotations

import asyncio
import json
import logging
from dataclasses import dataclass
from typing import Any, Protocol, cast

import h11
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.h11_impl import H11Protocol

from api.connections import Crowd, Place
from api.problems import PROBLEMS, TYPE_PREFIX
from api.refusals import MEDIA_TYPE
from labeler.errors import Unavailable

log = logging.getLogger("labeler.connections")

HEALTH = ("/healthz", "/readyz")
"""What may be asked over the connections that are kept for it."""


def _problem(status: int, slug: str, title: str, detail: str) -> tuple[list[tuple[bytes, bytes]], bytes]:
    """Headers and body of what never reaches the application: a problem document as its refusals are."""
    body = json.dumps({"type": TYPE_PREFIX + slug, "title": title, "status": status, "detail": detail}).encode()
    length = str(len(body)).encode()
    head = [(b"content-type", MEDIA_TYPE.encode()), (b"content-length", length), (b"connection", b"close")]
    return head, body


def as_bytes(status: bytes, refusal: tuple[list[tuple[bytes, bytes]], bytes]) -> bytes:
    """A refusal as it is sent where no library spells it."""
    head, body = refusal
    return b"HTTP/1.1 " + status + b"\r\n" + b"".join(b"%s: %s\r\n" % one for one in head) + b"\r\n" + body


NO_REQUEST = _problem(400, "malformed-request", "What came is no request", "what came is no request of HTTP/1.1")
_TOO_LATE = _problem(408, "too-slow", "The request came too slowly", "the request came too slowly; send it again")
_CROWDED = _problem(
    *(PROBLEMS[Unavailable][0], Unavailable.problem_type, PROBLEMS[Unavailable][1]),
    "the service has no room for another connection now; try again in a moment",
)


@dataclass(frozen=True)
class Times:
    """How long a peer may take, in seconds, and how much of a body it sends meanwhile.

    Attributes:
        headers_s: of one request, from its first byte to the end of its headers.
        body_window_s, body_bytes: so many bytes of an unfinished body come in every window. 1 KiB/s by default.
        stalled_s: until a full buffer of an answer (64 KiB) was taken.
        half_closed_s: until an answer is complete whose peer has ended its own side.
        keep_alive_s: between an answer and the next request.
    """

    headers_s: float = 10.0
    body_window_s: float = 30.0
    body_bytes: int = 30 * 1024
    stalled_s: float = 60.0
    half_closed_s: float = 10.0
    keep_alive_s: int = 75


@dataclass(eq=False)
class Guard:
    """The clocks of one connection; its protocol tells it what happens, and what the peer owes.

    Attributes:
        place: its place in the crowd; None where it was given to another before the protocol began.
        received: bytes of the peer since the last look at its pace.
        is_half_closed: the peer has ended its side, and an answer is due.
    """

    crowd: Crowd
    times: Times
    loop: asyncio.AbstractEventLoop
    place: Place | None = None
    received: int = 0
    is_half_closed: bool = False
    _pace: asyncio.TimerHandle | None = None
    _stall: asyncio.TimerHandle | None = None
    _last: asyncio.TimerHandle | None = None

    def begin(self, protocol: Guarded) -> None:
        """Its connection was made: take its place, or let it go where it has none."""
        self.place = self.crowd.place_of(protocol.client)
        if self.place is None:
            protocol.transport.abort()
            return
        self.place.on_late = lambda: self.too_late(protocol)
        if self.place.is_reserved:
            protocol.app = HealthOnly(protocol.app)

    def end(self) -> None:
        """Its connection is lost: no clock runs any more."""
        for timer in (self._pace, self._stall, self._last):
            if timer is not None:
                timer.cancel()
        self._pace = self._stall = self._last = None

    def half_closed(self, protocol: Guarded) -> bool:
        """The peer sends no more: whether an answer is due, for which the connection stays a while."""
        cycle = protocol.cycle
        is_due = cycle is not None and not cycle.response_complete and not cycle.more_body
        if is_due and protocol.transport.get_extra_info("sslcontext") is None:  # TLS knows no such half
            self.is_half_closed = True
            self._last = self._last or self.loop.call_later(self.times.half_closed_s, protocol.transport.close)
        return self.is_half_closed

    def look(self, protocol: Guarded, *, in_body: bool, in_head: bool) -> None:
        """Start and stop clocks by what the peer owes us now.

        Args:
            in_body: of a request whose head is whole, more is to come.
            in_head: a head has begun to come and is not whole.
        """
        if self.place is None or protocol.transport.is_closing():
            return
        if in_body:
            if self._pace is None:
                self._keep_pace(protocol)
        elif self._pace is not None:
            self._pace.cancel()
            self._pace = None
        if protocol.cycle is not None and not protocol.cycle.response_complete:
            self.crowd.asked(self.place)
        elif in_head:
            self.crowd.waits(self.place, self.times.headers_s, self.loop)
        elif self.place.has_asked:
            self.crowd.rests(self.place, self.loop)

    def stalls(self, transport: asyncio.Transport) -> None:
        """What was written is not taken."""
        if self._stall is None:
            self._stall = self.loop.call_later(self.times.stalled_s, transport.abort)

    def goes_on(self) -> None:
        """What was written was taken."""
        if self._stall is not None:
            self._stall.cancel()
            self._stall = None

    def too_late(self, protocol: Guarded) -> None:
        """Close the connection of a peer whose time is up."""
        if protocol.transport.is_closing():
            return
        log.warning("a connection was closed: its request came too slowly")
        cycle = protocol.cycle
        if cycle is None or cycle.response_complete or not cycle.response_started:
            protocol.transport.write(as_bytes(b"408 Request Timeout", _TOO_LATE))
        protocol.transport.close()

    def _keep_pace(self, protocol: Guarded) -> None:
        self.received = 0
        self._pace = self.loop.call_later(self.times.body_window_s, self._check_pace, protocol)

    def _check_pace(self, protocol: Guarded) -> None:
        cycle = protocol.cycle
        is_ours = protocol.flow.read_paused or cycle.waiting_for_100_continue or bool(cycle.body)
        if is_ours or self.received >= self.times.body_bytes:
            self._keep_pace(protocol)
        else:
            self._pace = None
            self.too_late(protocol)


class Guarded(Protocol):
    """What a guard needs of a connection's protocol: what both of uvicorn's have."""

    app: Any
    client: tuple[str, int] | None
    cycle: Any
    flow: FlowControl
    transport: asyncio.Transport


class Watched(asyncio.Protocol):
    """What a connection tells its guard, whichever parser reads it; stands before uvicorn's class of that parser."""

    loop: asyncio.AbstractEventLoop
    transport: asyncio.Transport

    def __init__(self, *given: Any, crowd: Crowd, times: Times, **named: Any) -> None:
        super().__init__(*given, **named)
        self._guard = Guard(crowd, times, self.loop)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn's
        super().connection_made(transport)
        self._guard.begin(cast("Guarded", self))

    def connection_lost(self, exc: Exception | None) -> None:
        self._guard.end()
        super().connection_lost(exc)

    def eof_received(self) -> bool:
        return self._guard.half_closed(cast("Guarded", self))

    def close_if_half(self) -> None:
        """Every request of a peer that ended its side is answered."""
        cycle = cast("Guarded", self).cycle
        if self._guard.is_half_closed and cycle.response_complete:
            self.transport.close()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._guard.stalls(self.transport)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._guard.goes_on()


class GuardedProtocol(Watched, H11Protocol):  # type: ignore[misc]  # uvicorn never stays half open
    """One connection, read by h11; see the module."""

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self.conn = _OneLength(h11.SERVER)

    def data_received(self, data: bytes) -> None:
        self._guard.received += len(data)
        super().data_received(data)
        self._look()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._look()
        self.close_if_half()

    def send_400_response(self, msg: str) -> None:  # noqa: ARG002 - uvicorn's words, of which ours take the place
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            head, body = NO_REQUEST
            response = h11.Response(status_code=400, headers=head, reason=b"Bad Request")
            for event in (response, h11.Data(data=body), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    def _look(self) -> None:
        in_head = self.conn.their_state is h11.IDLE and bool(self.conn.trailing_data[0])
        self._guard.look(self, in_body=self.conn.their_state is h11.SEND_BODY, in_head=in_head)


class _OneLength(h11.Connection):
    """A request says in one way how long its body is: where it says it in two, whoever stands before us may have
    believed the other one, and what we take for the next request would be what it took for a body."""

    def next_event(self) -> Any:
        event = super().next_event()
        if isinstance(event, h11.Request):
            names = {name for name, _ in event.headers}
            if b"transfer-encoding" in names and (b"content-length" in names or event.http_version < b"1.1"):
                raise h11.RemoteProtocolError("a body of two lengths")
        return event


class HealthOnly:
    """An application of which only the health of the service can be asked, once a connection."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""

        async def once(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message.get("headers", ()), (b"connection", b"close")]}
            await send(message)

        if scope["type"] != "http" or scope["path"] in HEALTH:
            await self._app(scope, receive, once)
            return
        head, body = _CROWDED
        # Closing the connection is said for every answer (`once`).
        headers = [(b"retry-after", b"5"), *head[:-1]]
        await once({"type": "http.response.start", "status": 503, "headers": headers})
        await once({"type": "http.response.body", "body": body})
