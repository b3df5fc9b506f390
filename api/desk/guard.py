"""Who may speak to the desk: this machine, by a name of this machine, with the token, from the desk's own page.

connection   from a loopback address; the server listens on none but one
Host         a loopback address or localhost: a page of somebody whose name was pointed at 127.0.0.1 (DNS rebinding)
             sends its own name and is refused before anything is looked at
Origin       of what changes something: none (no browser), or this very address
token        256 bits, made at each start, told in the fragment of the address, which no browser sends to any server;
             compared in constant time
"""

from __future__ import annotations

import hmac
import json
from collections.abc import Iterable
from urllib.parse import urlsplit

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from api.desk import HEADERS
from feature_store.certificates import is_loopback

MAX_BODY_BYTES = 16 * 1024


class Guard:
    """Checks every request before the application sees it, and puts the headers on every answer.

    Args:
        token: what a request under /v1 has to show.
    """

    def __init__(self, app: ASGIApp, *, token: str) -> None:
        self._app = app
        self._expected = f"Bearer {token}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                known = [pair for pair in message.get("headers", ()) if pair[0].lower() not in _OURS]
                message = {**message, "headers": [*known, *_HEADERS]}
            await send(message)

        status, sentence = self._objection(scope)
        if status:
            await _refuse(status, sentence, with_headers)
            return
        await self._app(scope, receive, with_headers)

    def _objection(self, scope: Scope) -> tuple[int, str]:
        """Why a request is not taken; (0, "") where it is."""
        client = scope.get("client")
        if client is None or not is_loopback(client[0]):
            return 403, "the desk answers this machine alone"
        host = _one(scope, b"host")
        if host is None or not is_loopback(_hostname(host)):
            return 421, "the desk is reached as 127.0.0.1 or localhost and by no other name"
        if not scope["path"].startswith("/v1/"):
            return 0, ""
        shown = _one(scope, b"authorization")
        if shown is None or not hmac.compare_digest(shown.encode("latin-1"), self._expected):
            return 401, "open the desk by the whole address that `labeler agent desk` printed, with what follows the #"
        if scope["method"] != "GET":
            origin = _one(scope, b"origin")
            if (b"origin" in dict(scope["headers"])) and (origin is None or urlsplit(origin).netloc != host):
                return 403, "the desk takes decisions from its own page alone"
            length = _one(scope, b"content-length") or ""
            if not length.isdecimal() or int(length) > MAX_BODY_BYTES:
                return 413, f"a decision has at most {MAX_BODY_BYTES} bytes, and says how many"
        return 0, ""


def _hostname(host: str) -> str:
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""


def _one(scope: Scope, name: bytes) -> str | None:
    """The value of a header that came exactly once."""
    found = [value for key, value in scope["headers"] if key == name]
    return found[0].decode("latin-1") if len(found) == 1 else None


async def _refuse(status: int, sentence: str, send: Send) -> None:
    body = json.dumps({"detail": sentence}).encode()
    headers: Iterable[tuple[bytes, bytes]] = (
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
    )
    await send({"type": "http.response.start", "status": status, "headers": list(headers)})
    await send({"type": "http.response.body", "body": body})


_HEADERS = [(name.lower().encode(), value.encode()) for name, value in HEADERS.items()]
_OURS = frozenset(name for name, _ in _HEADERS)
