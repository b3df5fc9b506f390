"""One connection that speaks as little HTTP/1.1 as a load needs, so that what is measured is the service.

A general client takes one to two milliseconds of CPU a request. Fifty of them in one process hold its interpreter's
lock in turns, and what each calls latency holds its waiting for the others; where they share cores with what they
measure, they take those too. Here a request is one write, an answer is cut by its Content-Length, and its time is that
from the write to the last byte. The heads are those that `api.client` sends.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final
from urllib.parse import urlsplit

from labeler.errors import BadData, Unavailable

MOST_HEAD_BYTES: Final = 64 * 1024


@dataclass(frozen=True)
class Answer:
    """What came back.

    Attributes:
        status: of HTTP.
        body: all of it.
        seconds: from the moment the request was written until the last byte of the answer was there.
    """

    status: int
    body: bytes
    seconds: float


class PlainConnection(asyncio.Protocol):
    """A connection to one service, for one request at a time; it is made at the first, and again where it was closed.

    Args:
        url: http://HOST:PORT of the service.
        token: sent with every request.
        quiet_s: longest that one answer may take.
    """

    def __init__(self, url: str, token: str, *, quiet_s: float) -> None:
        parts = urlsplit(url)
        if parts.scheme != "http" or parts.hostname is None or parts.port is None:
            raise BadData(f"a load is put on http://HOST:PORT, found {parts.scheme}://{parts.netloc}")
        self._host, self._port, self._quiet_s = parts.hostname, parts.port, quiet_s
        self._fields = (
            f"Host: {parts.netloc}\r\nAccept: */*\r\nAccept-Encoding: gzip, deflate\r\nConnection: keep-alive\r\n"
            f"User-Agent: private-labeler\r\nAuthorization: Bearer {token}\r\n"
        )
        self._transport: asyncio.Transport | None = None
        self._received = bytearray()
        self._ends_at = -1
        self._body_at = 0
        self._status = 0
        self._asked_s = 0.0
        self._answer: asyncio.Future[Answer] | None = None

    async def ask(
        self, method: str, path: str, body: bytes | None = None, headers: Mapping[str, str] | None = None
    ) -> Answer:
        """Send one request, once, and wait for its answer.

        Args:
            method, path: of it.
            body: JSON; None for none.
            headers: further ones.

        Raises:
            Unavailable: the connection broke, or no answer came in time.
            BadData: the answer cannot be read.
        """
        loop = asyncio.get_running_loop()
        fields = self._fields + "".join(f"{name}: {value}\r\n" for name, value in (headers or {}).items())
        if body is not None:
            fields += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
        request = f"{method} {path} HTTP/1.1\r\n{fields}\r\n".encode() + (body or b"")
        try:
            transport = self._transport
            if transport is None or transport.is_closing():
                transport, _ = await loop.create_connection(lambda: self, self._host, self._port)
                self._transport = transport
            self._received, self._ends_at, self._answer = bytearray(), -1, loop.create_future()
            self._asked_s = time.perf_counter()
            transport.write(request)
            async with asyncio.timeout(self._quiet_s):
                return await self._answer
        except (OSError, TimeoutError) as error:
            self.close()
            raise Unavailable(f"{method} {path}: no answer ({type(error).__name__})") from None

    def close(self) -> None:
        """Let go of the connection."""
        if self._transport is not None:
            self._transport.abort()
            self._transport = None

    def data_received(self, data: bytes) -> None:
        self._received += data
        if self._answer is None or self._answer.done():
            return
        if self._ends_at < 0:
            self._read_head()
        if 0 <= self._ends_at <= len(self._received) and not self._answer.done():
            took_s = time.perf_counter() - self._asked_s
            self._answer.set_result(Answer(self._status, bytes(self._received[self._body_at : self._ends_at]), took_s))

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(exc or ConnectionResetError("closed before the answer was whole"))

    def _read_head(self) -> None:
        end = self._received.find(b"\r\n\r\n")
        if end < 0:
            if len(self._received) > MOST_HEAD_BYTES:
                self._fail("a head without an end")
            return
        first, *lines = bytes(self._received[:end]).lower().split(b"\r\n")
        length = next((line[15:] for line in lines if line.startswith(b"content-length:")), b"")
        try:
            self._status, self._body_at = int(first.split(b" ", 2)[1]), end + 4
            self._ends_at = self._body_at + int(length)
        except (IndexError, ValueError):
            self._fail(f"no status or no Content-Length in {first[:60]!r}")

    def _fail(self, why: str) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(BadData(f"an answer cannot be read: {why}"))
