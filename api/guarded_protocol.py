"""HTTP/1.1 with a time limit on everything a peer may draw out: headers, bodies, idling, taking the answer.

uvicorn limits only the idle time between requests. A connection is in one of these:

    headers     at most `headers_s` from the first byte of a request to the end of its headers; for the first request
                from the moment the connection was accepted (api.connections)
    body        at least `body_bytes` in every `body_window_s`, unless it is we who do not read, or told it to wait
    answer      what was written is taken within `stalled_s`, buffer by buffer
    idle        uvicorn's own `timeout_keep_alive`
"""

from __future__ import annotations

import asyncio
import json
import logging
from dataclasses import dataclass
from typing import Any

import h11
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn import Config
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

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


_NO_REQUEST = _problem(400, "malformed-request", "What came is no request", "what came is no request of HTTP/1.1")
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
        keep_alive_s: between an answer and the next request.
    """

    headers_s: float = 10.0
    body_window_s: float = 30.0
    body_bytes: int = 30 * 1024
    stalled_s: float = 60.0
    keep_alive_s: int = 75


class GuardedProtocol(H11Protocol):
    """One connection; see the module.

    Args:
        config, server_state, app_state, _loop: uvicorn's.
        crowd: where the connection is counted.
        times: its limits.
    """

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
        *,
        crowd: Crowd,
        times: Times,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._crowd = crowd
        self._times = times
        self._place: Place | None = None
        self._pace: asyncio.TimerHandle | None = None
        self._stall: asyncio.TimerHandle | None = None
        self._received = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn's
        super().connection_made(transport)
        self._place = self._crowd.place_of(self.client)
        if self._place is None:
            transport.abort()
            return
        self._place.on_late = self._too_late
        if self._place.is_reserved:
            self.app = HealthOnly(self.app)

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self._pace, self._stall):
            if timer is not None:
                timer.cancel()
        self._pace = self._stall = None
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._received += len(data)
        super().data_received(data)
        self._look()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._look()

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._stall is None:
            self._stall = self.loop.call_later(self._times.stalled_s, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._stall is not None:
            self._stall.cancel()
            self._stall = None

    def _look(self) -> None:
        """Start and stop clocks by what the peer owes us now."""
        if self._place is None or self.transport.is_closing():
            return
        if self.conn.their_state is h11.SEND_BODY:
            if self._pace is None:
                self._keep_pace()
        elif self._pace is not None:
            self._pace.cancel()
            self._pace = None
        if self.cycle is not None and not self.cycle.response_complete:
            self._crowd.asked(self._place)
        elif self.conn.their_state is h11.IDLE and self.conn.trailing_data[0]:
            self._crowd.waits(self._place, self._times.headers_s, self.loop)
        elif self._place.has_asked:
            self._crowd.rests(self._place, self.loop)

    def _keep_pace(self) -> None:
        self._received = 0
        self._pace = self.loop.call_later(self._times.body_window_s, self._check_pace)

    def _check_pace(self) -> None:
        is_ours = self.flow.read_paused or self.cycle.waiting_for_100_continue or bool(self.cycle.body)
        if is_ours or self._received >= self._times.body_bytes:
            self._keep_pace()
        else:
            self._pace = None
            self._too_late()

    def _too_late(self) -> None:
        if self.transport.is_closing():
            return
        log.warning("a connection was closed: its request came too slowly")
        if self.cycle is None or self.cycle.response_complete or not self.cycle.response_started:
            head, body = _TOO_LATE
            lines = b"".join(name + b": " + value + b"\r\n" for name, value in head)
            self.transport.write(b"HTTP/1.1 408 Request Timeout\r\n" + lines + b"\r\n" + body)
        self.transport.close()

    def send_400_response(self, msg: str) -> None:  # noqa: ARG002 - uvicorn's words, of which ours take the place
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            head, body = _NO_REQUEST
            response = h11.Response(status_code=400, headers=head, reason=b"Bad Request")
            for event in (response, h11.Data(data=body), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
        self.transport.close()


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
