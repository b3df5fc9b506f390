"""A refusal reaches whoever is still sending: the rest of a request is read and dropped before the answer goes out.

A server that answers in the middle of a request and closes makes the sender's system report a broken connection, and
the answer, with its reason, is lost (RFC 9112, section 9.6). How much is dropped, and for how long, is bounded.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress

from starlette.types import ASGIApp, Message, Receive, Scope, Send

MAX_DROPPED_BYTES = 64 * 1024 * 1024
"""Most that is read of a request that is refused already."""

MAX_LINGER_S = 5.0
"""Longest time spent on it."""


class Lingering:
    """ASGI middleware; see the module."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        # Who asked whether to send at all has sent nothing, and reading would tell it to begin.
        is_waiting = any(name == b"expect" and b"100-continue" in value.lower() for name, value in scope["headers"])
        is_read = False

        async def watched() -> Message:
            nonlocal is_read, is_waiting
            is_waiting = False
            message = await receive()
            is_read = is_read or not message.get("more_body", False)
            return message

        async def drop() -> None:
            dropped = 0
            while not is_read and dropped < MAX_DROPPED_BYTES:
                dropped += len((await watched()).get("body", b""))

        async def answer(message: Message) -> None:
            is_refusal = message["type"] == "http.response.start" and message["status"] >= 400
            if is_refusal and not is_read and not is_waiting:
                with suppress(TimeoutError):
                    await asyncio.wait_for(drop(), MAX_LINGER_S)
            await send(message)

        await self._app(scope, watched, answer)
