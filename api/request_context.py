"""Around every request: an id, headers that protect a browser, one log line, one count, and no leaked traceback."""

from __future__ import annotations

import logging
import re
import secrets
import time
from typing import TYPE_CHECKING

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from api import refusals
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

SECURITY_HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Content-Security-Policy": (
        "default-src 'self'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'; object-src 'none'"
    ),
}


class RequestContext:
    """ASGI middleware; see the module."""

    def __init__(self, app: ASGIApp, *, metrics: Metrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        asked = Headers(scope=scope).get("x-request-id", "")
        identity = asked if _ID.fullmatch(asked) else secrets.token_hex(8)
        reset = request_id.set(identity)
        started = time.perf_counter()
        status = 0

        async def stamped(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = MutableHeaders(scope=message)
                headers["X-Request-ID"] = identity
                for name, value in SECURITY_HEADERS.items():
                    headers.setdefault(name, value)
                if scope["path"].startswith("/v1/"):
                    headers.setdefault("Cache-Control", "no-store")
            await send(message)

        try:
            await self._app(scope, receive, stamped)
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
            "ms": round(1000 * seconds, 1),
            "token_id": "" if token is None else token.token_id,
        }
        _log.info("request", extra=fields)
