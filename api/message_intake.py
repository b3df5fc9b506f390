"""Messages as they arrive: who signed the first header is checked before a body is read, and all bodies are bounded.

A signature covers the header, and the header binds the body by its digest, so a stranger is refused after a few
hundred bytes. What enrolled parties send at once is bounded too: together, and for each by one message of the largest
size, so that one party that sends slowly or often cannot keep the others from being heard.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

from fastapi import Request

from api.form_parts import chunks, refuse_length
from labeler.errors import ProtocolViolation, Unavailable
from labeler.messages import FRAME_HEAD_BYTES, MAX_MESSAGE_BYTES, SIGNATURE_BYTES, Header, frame_sizes

MAX_BYTES_IN_FLIGHT = 256 * 1024 * 1024
"""Of all bodies that are being received or handled."""

HEADER_S = 30.0
LEAST_BYTES_PER_S = 64 * 1024
"""A body has this long, and `HEADER_S` more; whoever is slower holds memory for nothing."""

RETRY_AFTER_S = 2


class Crowded(Unavailable):
    """As many bytes as are taken at once are under way; `retry_after_s` says when to send again."""

    retry_after_s = RETRY_AFTER_S


class MessageIntake:
    """Receives the frames of parties; used on one event loop.

    Args:
        check_sender: checks who signed a header; raises Forged or NotEnrolled.
    """

    def __init__(
        self, check_sender: Callable[[Header, bytes], None], *, max_bytes_in_flight: int = MAX_BYTES_IN_FLIGHT
    ) -> None:
        self._check_sender = check_sender
        self._most = max_bytes_in_flight
        self._in_flight: Counter[str] = Counter()

    @property
    def bytes_in_flight(self) -> int:
        """What is being received or handled now."""
        return self._in_flight.total()

    @asynccontextmanager
    async def receive(self, request: Request, *, max_bytes: int) -> AsyncIterator[bytes]:
        """The frames of one request, whole; they count as under way until the block ends.

        Args:
            request: its body is frames (labeler.messages).
            max_bytes: of the whole body.

        Raises:
            TooLarge: a header or the body is larger than is taken.
            ProtocolViolation: the bytes are no messages, or end in the middle of one.
            NotEnrolled, Forged: the first header is of a stranger; no body was read.
            Unavailable: too much is under way, or it comes too slowly; send it again later.
        """
        refuse_length(request, max_bytes=max_bytes)
        body = _Body(chunks(request, max_bytes=max_bytes))
        sender, held = "", 0
        parts: list[bytes] = []
        try:
            while head := await body.upto(FRAME_HEAD_BYTES, HEADER_S):
                header_bytes, body_bytes = frame_sizes(head)
                signed = await body.upto(header_bytes + SIGNATURE_BYTES, HEADER_S)
                if len(signed) < header_bytes + SIGNATURE_BYTES:
                    raise ProtocolViolation("a message is cut off in its header")
                if not sender:
                    # What follows in the same request is read when it is handled, and counts as this sender's.
                    header = Header.parse(signed[:header_bytes])
                    # On the event loop: it takes a tenth of a millisecond, less than to hand it to a thread.
                    self._check_sender(header, signed[header_bytes:])
                    sender = header.sender
                self._hold(sender, body_bytes)
                held += body_bytes
                content = await body.upto(body_bytes, HEADER_S + body_bytes / LEAST_BYTES_PER_S)
                if len(content) < body_bytes:
                    raise ProtocolViolation("a message is cut off in its body")
                parts += [head, signed, content]
            data = b"".join(parts)
            parts.clear()
            yield data
        finally:
            self._in_flight[sender] -= held
            if not self._in_flight[sender]:
                del self._in_flight[sender]

    def _hold(self, sender: str, size: int) -> None:
        is_greedy = self._in_flight[sender] + size > MAX_MESSAGE_BYTES
        if is_greedy or self._in_flight.total() + size > self._most:
            whose = f"of {sender!r}" if is_greedy else "of all parties"
            raise Crowded(
                f"as many bytes of messages {whose} are under way as are taken at once; send again in {RETRY_AFTER_S} s"
            )
        self._in_flight[sender] += size


class _Body:
    """The body of a request, as many bytes at a time as are asked for."""

    def __init__(self, source: AsyncIterator[bytes]) -> None:
        self._source = source
        self._kept = b""
        self._start = 0

    async def upto(self, count: int, seconds: float) -> bytes:
        """So many bytes; fewer only where the body ends.

        Raises:
            Unavailable: they have not come within so many seconds.
        """
        end = self._start + count
        if end > len(self._kept):
            self._kept = await _in_time(self._read(count), seconds)
            self._start, end = 0, min(count, len(self._kept))
        data = self._kept[self._start : end]
        self._start = end
        return data

    async def _read(self, count: int) -> bytes:
        parts, size = [self._kept[self._start :]], len(self._kept) - self._start
        while size < count:
            chunk = await anext(self._source, b"")
            if not chunk:
                break
            parts.append(chunk)
            size += len(chunk)
        return b"".join(parts)


async def _in_time(reading: Coroutine[Any, Any, bytes], seconds: float) -> bytes:
    try:
        # Not `wait_for`, which makes a task of what mostly need not wait: the body is there.
        async with asyncio.timeout(seconds):
            return await reading
    except TimeoutError:
        raise Unavailable(f"a message was not whole after {seconds:.0f} s; send it again") from None
