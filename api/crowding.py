"""One client has a bounded number of requests under way at once, also where a proxy brings those of many clients.

Connections are counted by the address they come from (api.connections), which behind a proxy is the proxy's. Here
requests are counted by the address that a trusted proxy says they come from; without one it is the same address.
"""

from __future__ import annotations

from collections import Counter

from starlette.types import ASGIApp, Receive, Scope, Send

from api import refusals
from api.connections import address_group
from api.guarded_protocol import HEALTH
from api.rate_limit import SLOT_WAIT_S, TooManyRequests


class PerClient:
    """ASGI middleware; see the module."""

    def __init__(self, app: ASGIApp, *, most: int) -> None:
        self._app = app
        self._most = most
        self._held: Counter[str] = Counter()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http" or scope["path"] in HEALTH:
            await self._app(scope, receive, send)
            return
        client = address_group((scope.get("client") or ("", 0))[0])
        if self._held[client] >= self._most:
            error = TooManyRequests(
                f"one address may have {self._most} requests under way at once; wait until one has ended",
                retry_after_s=SLOT_WAIT_S,
            )
            await refusals.refusal(error, instance=scope["path"])(scope, receive, send)
            return
        self._held[client] += 1
        try:
            await self._app(scope, receive, send)
        finally:
            self._held[client] -= 1
            if not self._held[client]:
                del self._held[client]
