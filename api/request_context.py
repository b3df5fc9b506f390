"""Around every request: an id, headers that protect a browser, one log line, one count, and no leaked traceback."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import secrets
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from api import refusals
from api.head import Head
from api.logs import request_id
from api.metrics import Metrics

if TYPE_CHECKING:
    from feature_store.journal.tokens import TokenRecord

_log = logging.getLogger("labeler.access")
_ID = re.compile(r"[A-Za-z0-9._-]{8,64}")
_UNKNOWN_ROUTE = "(none)"
CLIENT_GONE = 499
"""In the log and the metrics only: whoever asked went away before the request was whole."""
_METHODS = frozenset({"GET", "POST", "DELETE", "PUT", "PATCH", "HEAD", "OPTIONS"})

_AS_MANY_AS_ONE_LIKES = frozenset({405, 429})
"""No limit holds for these, nor for what leads nowhere: beyond a minute's few they are counted (labeler.repeated)."""

DISCARD_BYTES = 4 * 1024 * 1024
DISCARD_S = 2.0

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
        self._head = Head(app)
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        sent: dict[bytes, bytes] = dict(scope["headers"])
        asked = sent.get(b"x-request-id", b"").decode("latin-1")
        identity = asked if _ID.fullmatch(asked) else secrets.token_hex(8)
        reset = request_id.set(identity)
        started = time.perf_counter()
        status = 0
        is_read = b"transfer-encoding" not in sent and sent.get(b"content-length", b"0") == b"0"

        async def counted() -> Message:
            nonlocal is_read
            message = await receive()
            is_read = is_read or message["type"] != "http.request" or not message.get("more_body", False)
            return message

        async def stamped(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                # Of an answer that was passed on, the id is another coordinator's.
                headers = [header for header in message.get("headers", ()) if header[0].lower() != b"x-request-id"]
                if status >= 400 and not is_read:
                    await _discard(scope, counted, lambda: is_read)
                    if not is_read:
                        # Else the rest of a body nobody wants would be taken to its end, if it has one.
                        headers = [header for header in headers if header[0].lower() != b"connection"]
                        headers.append((b"connection", b"close"))
                # As bytes, since this is done for every answer; what the answer says itself stays as it is.
                names = {name.lower() for name, _ in headers}
                headers.append((b"x-request-id", identity.encode()))
                headers += [header for header in _PROTECTING if header[0] not in names]
                if scope["path"].startswith("/v1/") and b"cache-control" not in names:
                    headers.append((b"cache-control", b"no-store"))
                message = {**message, "headers": headers}
            await send(message)

        try:
            await (self._app if scope["method"] != "HEAD" else self._head)(scope, counted, stamped)
        except ClientDisconnect:
            status = CLIENT_GONE
        except Exception as error:
            if status:
                # The answer has begun: only a broken connection can still say that it is not whole.
                raise
            response = refusals.unexpected(error, instance=scope["path"])
            await response(scope, receive, stamped)
        finally:
            self._note(scope, status, time.perf_counter() - started)
            request_id.reset(reset)

    def _note(self, scope: Scope, status: int, seconds: float) -> None:
        route = getattr(scope.get("route"), "path", _UNKNOWN_ROUTE)
        method = scope["method"] if scope["method"] in _METHODS else "OTHER"
        self._metrics.observe(method=method, route=route, status=status, seconds=seconds)
        token: TokenRecord | None = scope.get("state", {}).get("token")
        fields = {
            "method": method,
            "route": route,
            "status": status,
            "token_id": "" if token is None else token.token_id,
        }
        if status in _AS_MANY_AS_ONE_LIKES or route == _UNKNOWN_ROUTE:
            # Alike without their time, so that of a flood of them a few lines and a number are written.
            _log.warning("request", extra=fields)
        else:
            _log.info("request", extra=fields | {"ms": round(1000 * seconds, 1)})


async def _discard(scope: Scope, receive: Receive, is_read: Callable[[], bool]) -> None:
    """Take a little of a body that was refused, so that closing the connection does not cut the answer off.

    Whoever waits for "100 Continue" has sent nothing yet, and is not asked to.
    """
    if "expect" in Headers(scope=scope):
        return
    size = 0
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(DISCARD_S):
            while not is_read() and size < DISCARD_BYTES:
                size += len((await receive()).get("body", b""))
