"""Messages as they arrive: a stranger's body is never read, and what is under way at once is bounded."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from fastapi import Request

from api.routes.messages import MessageIntake
from labeler.errors import NotEnrolled, ProtocolViolation, TooLarge, Unavailable
from labeler.messages import MAX_MESSAGE_BYTES, Header, frame
from labeler.system.keys import PartyKeys

KEYS = PartyKeys.generate()


def framed(sender: str, *, size: int, sequence: int = 1) -> bytes:
    message = KEYS.message("answered", sender=sender, recipient="coordinator", sequence=sequence, body=bytes(size))
    return frame([message])


def request_of(data: bytes, *, chunk: int = 100) -> tuple[Request, list[int]]:
    """A request whose body comes in pieces, and how many bytes of it were taken."""
    taken: list[int] = []

    async def pieces() -> AsyncIterator[dict[str, object]]:
        for start in range(0, len(data), chunk):
            piece = data[start : start + chunk]
            taken.append(len(piece))
            yield {"type": "http.request", "body": piece, "more_body": True}
        yield {"type": "http.request", "body": b"", "more_body": False}

    source = pieces()
    scope = {"type": "http", "method": "POST", "path": "/", "headers": [], "query_string": b""}

    async def receive() -> dict[str, object]:
        return await anext(source)

    return Request(scope, receive), taken


def known(header: Header, signature: bytes) -> None:
    if header.sender == "stranger":
        raise NotEnrolled("no such party")


async def take(intake: MessageIntake, data: bytes) -> bytes:
    request, _ = request_of(data)
    async with intake.receive(request) as received:
        return received


@pytest.mark.parametrize("chunk", [1, 7, 1000])
def test_frames_arrive_as_they_were_sent_however_they_are_cut(chunk: int) -> None:
    data = framed("east", size=500) + framed("east", size=0, sequence=2) + framed("east", size=33, sequence=3)

    async def run() -> bytes:
        request, _ = request_of(data, chunk=chunk)
        async with MessageIntake(known).receive(request) as received:
            return received

    assert asyncio.run(run()) == data


@pytest.mark.parametrize("data", [b"\0" * 5, b"\0" * 76, framed("east", size=50)[:40], framed("east", size=50)[:-1]])
def test_what_is_no_message_or_half_of_one_is_refused_and_holds_nothing(data: bytes) -> None:
    intake = MessageIntake(known)
    with pytest.raises(ProtocolViolation):
        asyncio.run(take(intake, data))
    assert intake.bytes_in_flight == 0


def test_a_length_beyond_what_is_taken_is_refused_by_its_first_bytes() -> None:
    with pytest.raises(TooLarge):
        asyncio.run(take(MessageIntake(known), b"\0\0\1\0" + b"\xff" * 8 + bytes(100)))


def test_bytes_under_way_are_bounded_for_all_parties_together_and_for_each() -> None:
    async def run() -> None:
        intake = MessageIntake(known, max_bytes_in_flight=1000)
        first, _ = request_of(framed("east", size=600))
        async with intake.receive(first):
            assert intake.bytes_in_flight == 600
            with pytest.raises(Unavailable, match="of all parties") as caught:
                await take(intake, framed("west", size=600))
            assert caught.value.retry_after_s >= 1  # type: ignore[attr-defined]  # what Retry-After says
            await take(intake, framed("west", size=300))
        assert intake.bytes_in_flight == 0
        await take(intake, framed("west", size=600))

        wide = MessageIntake(known)
        large = framed("east", size=MAX_MESSAGE_BYTES - 1000)
        request, _ = request_of(large, chunk=2**20)
        async with wide.receive(request):
            with pytest.raises(Unavailable, match="of 'east'"):
                await take(wide, framed("east", size=2000, sequence=2))
            await take(wide, framed("west", size=2000))

    asyncio.run(run())
