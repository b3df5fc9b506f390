"""A request passed on, as it is, to the coordinator that leads; its answer comes back as it is.

Nothing is checked here and nothing is believed: who leads does both. Nothing that is asked for says where a request
goes, and what belongs to one requester (a cookie, an encoding it takes) is kept for no other. Where nobody leads at
this moment, or it cannot be reached, whoever asks is told to try again; requests that change something carry an
Idempotency-Key or a number, so asking again is safe.

What is passed on carries requesters' tokens and images, so it goes over TLS, or stays on this machine: an address in
plain HTTP of another machine is refused where it is given (`check_peer_url`), and one that stands in the journal all
the same, of an earlier version, is passed nothing.
"""

from __future__ import annotations

import logging
import ssl
from collections.abc import AsyncIterator

import httpx2
from starlette.types import Receive, Scope, Send

from api.client_http import is_loopback
from api.refusals import refusal
from labeler.errors import InvalidSetting, Unavailable

log = logging.getLogger(__name__)

CONNECT_S = 2.0

_OF_ONE_CONNECTION = frozenset(
    (b"connection", b"keep-alive", b"proxy-connection", b"te", b"trailer", b"transfer-encoding", b"upgrade", b"expect")
)
_SAID_ANEW = frozenset((b"host", b"x-forwarded-for", b"x-forwarded-proto"))
"""What the one before this process says; whoever comes without a proxy that is believed could say anything."""

_TIMES = httpx2.Timeout(None, connect=CONNECT_S).as_dict()
"""Answers may take as long as who leads lets them: parties wait for mail."""


class PassingOn:
    """ASGI application; see the module.

    Args:
        delta: at which refusals state epsilons.
        ca_file: of the authority that certified the coordinators' own addresses, PEM; the system's where None.

    Raises:
        InvalidSetting: that file cannot be read.
    """

    def __init__(self, *, delta: float, ca_file: str | None = None) -> None:
        self._delta = delta
        self._url: httpx2.URL | None = None
        self._in_clear = ""
        try:
            trusted = ssl.create_default_context(cafile=ca_file)
        except (OSError, ssl.SSLError):
            raise InvalidSetting("side_by_side.ca_file cannot be read, or holds no certificates (PEM)") from None
        # No client: that would keep cookies, follow redirects, and say what it takes for who says nothing.
        limits = httpx2.Limits(max_connections=None, max_keepalive_connections=64)
        self._transport = httpx2.AsyncHTTPTransport(verify=trusted, limits=limits, trust_env=False)

    def to(self, url: str | None) -> None:
        """Who leads now; None where nobody is known to."""
        try:
            self._url = None if url is None else httpx2.URL(check_peer_url(url))
            self._in_clear = ""
        except InvalidSetting as error:
            if not self._in_clear:  # said once: whoever looks at the lease comes here every second
                log.error("the coordinator that leads is passed nothing", extra={"reason": str(error)})
            self._url, self._in_clear = None, str(error)

    async def aclose(self) -> None:
        """Let go of every connection."""
        await self._transport.aclose()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass one request on."""
        path = scope["path"]
        if self._url is None:
            error = Unavailable(
                "the coordinator that leads is not reached over TLS, so nothing is passed on to it; its operator has "
                "to give it a --peer-url of https://"
                if self._in_clear
                else "no coordinator leads at this moment; one takes over soon. Ask again"
            )
            await refusal(error, instance=path, delta=self._delta)(scope, receive, send)
            return
        has_body = any(name in (b"content-length", b"transfer-encoding") for name, _ in scope["headers"])
        request = httpx2.Request(
            scope["method"],
            self._url,
            headers=_headers(scope),
            content=_body(receive) if has_body else None,
            # Beside the address, not joined to it: "@elsewhere/" is a target that HTTP lets anybody send.
            extensions={"timeout": _TIMES, "target": self._url.raw_path.rstrip(b"/") + _target(scope)},
        )
        try:
            answer = await self._transport.handle_async_request(request)
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


def check_peer_url(url: str) -> str:
    """Where other coordinators reach one, if tokens may be sent there.

    Raises:
        InvalidSetting: it is no URL, or in plain HTTP on another machine.
    """
    try:
        parsed = httpx2.URL(url)
    except (httpx2.InvalidURL, TypeError):
        raise InvalidSetting(
            "the address for other coordinators cannot be read; give --peer-url https://HOST"
        ) from None
    if parsed.scheme == "https" or (parsed.scheme == "http" and is_loopback(parsed.host)):
        return url
    raise InvalidSetting(
        f"other coordinators would send requesters' tokens to {parsed.host!r} in clear; serve with --tls-cert and "
        "--tls-key, or give --peer-url https://... (plain http:// is for loopback only)"
    )


def _target(scope: Scope) -> bytes:
    raw: bytes = scope.get("raw_path") or scope["path"].encode()
    query: bytes = scope["query_string"]
    return raw + b"?" + query if query else raw


def _headers(scope: Scope) -> list[tuple[bytes, bytes]]:
    headers = [(name, value) for name, value in scope["headers"] if name not in _OF_ONE_CONNECTION | _SAID_ANEW]
    if scope.get("client"):
        headers.append((b"x-forwarded-for", scope["client"][0].encode()))
    headers.append((b"x-forwarded-proto", scope["scheme"].encode()))
    return headers


async def _body(receive: Receive) -> AsyncIterator[bytes]:
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise httpx2.ReadError("whoever asked has gone")
        yield message.get("body", b"")
        if not message.get("more_body", False):
            return
