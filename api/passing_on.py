"""A request passed on, as it is, to the coordinator that leads; its answer comes back as it is.

Nothing is checked here and nothing is believed: who leads does both. Where nobody leads at this moment, or it cannot be
reached, whoever asks is told to try again; requests that change something carry an Idempotency-Key or a number, so
asking again is safe.
"""

from __future__ import annotations

from collections.abc import AsyncIterator

import httpx2
from starlette.types import Receive, Scope, Send

from api.refusals import refusal
from labeler.errors import Unavailable

CONNECT_S = 2.0

_OF_ONE_CONNECTION = frozenset(
    (b"connection", b"keep-alive", b"proxy-connection", b"te", b"trailer", b"transfer-encoding", b"upgrade", b"expect")
)


class PassingOn:
    """ASGI application; see the module.

    Args:
        delta: at which refusals state epsilons.
    """

    def __init__(self, *, delta: float) -> None:
        self._delta = delta
        self._url: str | None = None
        # Answers may take as long as who leads lets them: parties wait for mail.
        timeout = httpx2.Timeout(None, connect=CONNECT_S)
        limits = httpx2.Limits(max_connections=None, max_keepalive_connections=64)
        self._client = httpx2.AsyncClient(timeout=timeout, limits=limits, trust_env=False, follow_redirects=False)

    def to(self, url: str | None) -> None:
        """Who leads now; None where nobody is known to."""
        self._url = None if url is None else url.rstrip("/")

    async def aclose(self) -> None:
        """Let go of every connection."""
        await self._client.aclose()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass one request on."""
        path = scope["path"]
        if self._url is None:
            error = Unavailable("no coordinator leads at this moment; one takes over soon. Ask again")
            await refusal(error, instance=path, delta=self._delta)(scope, receive, send)
            return
        query = scope["query_string"]
        raw = scope.get("raw_path") or path.encode()
        target = f"{self._url}{raw.decode('latin-1')}" + (f"?{query.decode('latin-1')}" if query else "")
        headers = [(name, value) for name, value in scope["headers"] if name not in _OF_ONE_CONNECTION | {b"host"}]
        if scope.get("client"):
            headers.append((b"x-forwarded-for", scope["client"][0].encode()))
        has_body = any(name in (b"content-length", b"transfer-encoding") for name, _ in scope["headers"])
        request = self._client.build_request(
            scope["method"], target, headers=headers, content=_body(receive) if has_body else None
        )
        try:
            answer = await self._client.send(request, stream=True)
        except httpx2.HTTPError:
            error = Unavailable("the coordinator that leads cannot be reached; another takes over soon. Ask again")
            await refusal(error, instance=path, delta=self._delta)(scope, receive, send)
            return
        try:
            kept = [(name.lower(), value) for name, value in answer.headers.raw]
            kept = [(name, value) for name, value in kept if name not in _OF_ONE_CONNECTION]
            await send({"type": "http.response.start", "status": answer.status_code, "headers": kept})
            async for piece in answer.aiter_raw():
                await send({"type": "http.response.body", "body": piece, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            await answer.aclose()


async def _body(receive: Receive) -> AsyncIterator[bytes]:
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise httpx2.ReadError("whoever asked has gone")
        yield message.get("body", b"")
        if not message.get("more_body", False):
            return
