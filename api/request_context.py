"""Middleware for every request: an id, headers that protect a browser, one log line, one count, no leaked traceback.

HEAD is answered here for all routes as GET without its body, so access, limits and refusals are those of GET. The rest
of a refused request is read and dropped before the answer is sent. Otherwise a client that is still sending would see a
broken connection and lose the answer (RFC 9112, section 9.6). Long polls and event streams end when the server stops.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import TYPE_CHECKING, TypeVar, cast

from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from api import problems
from api.logs import request_id
from api.metrics import Metrics

if TYPE_CHECKING:
    from labeler.ledger.tokens import TokenRecord

_log = logging.getLogger("labeler.access")
_ID = re.compile(r"[A-Za-z0-9._-]{8,64}")
_UNKNOWN_ROUTE = "(none)"
CLIENT_GONE = 499
"""Used only in log and metrics: the client disconnected before its request was complete."""
_METHODS = frozenset({"GET", "POST", "DELETE", "PUT", "PATCH", "HEAD", "OPTIONS"})

_AS_MANY_AS_ONE_LIKES = frozenset({405, 429})
"""Statuses that clients can cause without limit, as with unknown routes: after the first few a minute, log lines of
these are only counted (api.logs)."""

DISCARD_BYTES = 64 * 1024 * 1024
DISCARD_S = 5.0
"""Bounds on reading the rest of a refused request, in size and time."""

SECURITY_HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Content-Security-Policy": (
        "default-src 'self'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'; object-src 'none'"
    ),
}
_PROTECTING = tuple((name.lower().encode(), value.encode()) for name, value in SECURITY_HEADERS.items())


class RequestContext:
    """ASGI middleware; see the module."""

    def __init__(self, app: ASGIApp, *, metrics: Metrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        is_head = scope["method"] == "HEAD"
        if is_head:
            scope = {**scope, "method": "GET"}
        sent: dict[bytes, bytes] = dict(scope["headers"])
        asked = sent.get(b"x-request-id", b"").decode("latin-1")
        identity = asked if _ID.fullmatch(asked) else secrets.token_hex(8)
        reset = request_id.set(identity)
        started = time.perf_counter()
        status = 0
        is_read = b"transfer-encoding" not in sent and sent.get(b"content-length", b"0") == b"0"

        # A client that asked whether to send has sent nothing yet, and reading would tell it to start.
        is_waiting = b"expect" in sent

        async def counted() -> Message:
            nonlocal is_read, is_waiting
            is_waiting = False
            message = await receive()
            is_read = is_read or message["type"] != "http.request" or not message.get("more_body", False)
            return message

        async def stamped(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = list(message.get("headers", ()))
                if f"{scope['path']}/".startswith("/v1/"):
                    # Whatever an answer says, as those of event streams do.
                    headers = [header for header in headers if header[0].lower() != b"cache-control"]
                    headers.append((b"cache-control", b"no-store"))
                if status >= 400 and not is_read:
                    if not is_waiting:
                        await _discard(counted, lambda: is_read)
                    if not is_read:
                        # Otherwise the server would read the rest of an unwanted body, which may never end.
                        headers = [header for header in headers if header[0].lower() != b"connection"]
                        headers.append((b"connection", b"close"))
                # As bytes, because this runs for every answer; headers that the answer has already win.
                names = {name.lower() for name, _ in headers}
                headers.append((b"x-request-id", identity.encode()))
                headers += [header for header in _PROTECTING if header[0] not in names]
                message = {**message, "headers": headers}
                if is_head:
                    # The answer is complete; to a stream that continues, the client has gone.
                    await send(message)
                    message = {"type": "http.response.body", "body": b"", "more_body": False}
            elif is_head:
                return
            await send(message)

        try:
            await self._app(scope, counted, stamped)
        except ClientDisconnect:
            status = CLIENT_GONE
        except Exception as error:
            if status:
                # The answer has begun: only a broken connection can still show that it is incomplete.
                raise
            response = problems.unexpected(error, instance=scope["path"])
            await response(scope, receive, stamped)
        finally:
            self._note("HEAD" if is_head else scope["method"], scope, status, time.perf_counter() - started)
            request_id.reset(reset)

    def _note(self, method: str, scope: Scope, status: int, seconds: float) -> None:
        route = getattr(scope.get("route"), "path", _UNKNOWN_ROUTE)
        method = method if method in _METHODS else "OTHER"
        self._metrics.observe(method=method, route=route, status=status, seconds=seconds)
        token: TokenRecord | None = scope.get("state", {}).get("token")
        fields = {
            "method": method,
            "route": route,
            "status": status,
            "token_id": "" if token is None else token.token_id,
        }
        if status in _AS_MANY_AS_ONE_LIKES or route == _UNKNOWN_ROUTE:
            # Without the duration the lines are equal, so that a flood of them becomes a few lines and a count.
            _log.warning("request", extra=fields)
        else:
            _log.info("request", extra=fields | {"ms": round(1000 * seconds, 1)})


async def _discard(receive: Receive, is_read: Callable[[], bool]) -> None:
    size = 0
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(DISCARD_S):
            while not is_read() and size < DISCARD_BYTES:
                size += len((await receive()).get("body", b""))


T = TypeVar("T")


class Shutdown:
    """The server's stop signal for everything that waits; used on one event loop.

    Each wait stays in its own task and is ended by its timeout: a second task per wait would cost a poll more than its
    mail.
    """

    def __init__(self) -> None:
        self._has_begun = False
        self._limits: set[asyncio.Timeout] = set()

    def begin(self) -> None:
        """End every wait; a repeated call changes nothing."""
        if self._has_begun:
            return
        self._has_begun = True
        for limit in self._limits:
            limit.reschedule(asyncio.get_running_loop().time())

    async def unless(self, answer: Awaitable[T]) -> T | None:
        """Return the answer, or None when the server begins to stop first."""
        limit = asyncio.timeout(0 if self._has_begun else None)
        try:
            async with limit:
                self._limits.add(limit)
                try:
                    return await answer
                finally:
                    self._limits.discard(limit)
        except TimeoutError:
            if limit.expired():
                return None
            raise


async def unless_stopping(request: Request, answer: Awaitable[T]) -> T | None:
    """Return the answer, or None when the server begins to stop first."""
    shutdown: Shutdown = request.app.state.shutdown
    return await shutdown.unless(answer)


async def until_stopping(request: Request, items: AsyncIterator[T]) -> AsyncIterator[T]:
    """Yield a generator's items, until there are no more or the server begins to stop."""
    async with aclosing(cast("AsyncGenerator[T]", items)):
        while (item := await unless_stopping(request, anext(items, None))) is not None:
            yield item
