"""Mail of agents and talliers: signed messages in, waiting messages out.

These routes take no token: a message is signed by its sender and, if it is for another party, sealed to it. A signature
covers the header, and the header binds the body by its digest, so a stranger is refused after a few hundred bytes. The
bytes in progress have two bounds: one for all parties together, and one for each party, the size of the largest
message. So a party that sends slowly or often cannot shut out the others.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import TYPE_CHECKING

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from api.access import Route, client_address, media_type
from api.documentation import Answers, problem
from api.limits import Crowded
from api.request_context import unless_stopping
from labeler.errors import Forged, NotEnrolled, ProtocolViolation, Unavailable
from labeler.messages import FRAME_HEAD_BYTES, MAX_MESSAGE_BYTES, SIGNATURE_BYTES, Header, frame_sizes

if TYPE_CHECKING:
    from api.coordinator.service import Coordinator

OCTETS = "application/octet-stream"
MAX_BYTES_IN_FLIGHT = 256 * 1024 * 1024
"""The most body bytes, of all parties together, that are received or handled at once."""
_FRAMES = {OCTETS: {"schema": {"type": "string", "format": "binary"}, "example": "(frames of signed messages)"}}
_BODY = {"requestBody": {"required": True, "content": _FRAMES}}


class MessageIntake:
    """Receives the frames of parties; used on one event loop.

    Args:
        check_sender: verifies the signer of a header; raises Forged or NotEnrolled.
    """

    def __init__(
        self, check_sender: Callable[[Header, bytes], None], *, max_bytes_in_flight: int = MAX_BYTES_IN_FLIGHT
    ) -> None:
        self._check_sender = check_sender
        self._most = max_bytes_in_flight
        self._in_flight: Counter[str] = Counter()

    @property
    def bytes_in_flight(self) -> int:
        """Return the bytes being received or handled now."""
        return self._in_flight.total()

    @asynccontextmanager
    async def receive(self, request: Request) -> AsyncIterator[bytes]:
        """Receive all frames of one request. They count as in flight until the block ends.

        Args:
            request: a request whose body is frames (labeler.messages).

        Raises:
            TooLarge: a header or the body is above its limit.
            ProtocolViolation: the bytes are not messages, or end in the middle of one.
            NotEnrolled, Forged: a stranger sent the first header; no body was read.
            Unavailable: too much is in flight, or the bytes come too slowly; send again later.
        """
        source = request.stream()
        data = bytearray()

        async def upto(end: int, part: str) -> None:
            while len(data) < end:
                chunk = await anext(source, None)
                if chunk is None:
                    raise ProtocolViolation(f"a message is cut off in its {part}")
                data.extend(chunk)

        sender, held, start = "", 0, 0
        try:
            while await _has_more(source, data, start):
                await upto(start + FRAME_HEAD_BYTES, "lengths")
                header_bytes, body_bytes = frame_sizes(bytes(data[start : start + FRAME_HEAD_BYTES]))
                start += FRAME_HEAD_BYTES
                await upto(start + header_bytes + SIGNATURE_BYTES, "header")
                signed = bytes(data[start : start + header_bytes + SIGNATURE_BYTES])
                start += len(signed)
                if not sender:
                    # Later frames count as this sender's. They are checked when the request is handled.
                    header = Header.parse(signed[:header_bytes])
                    # Checked on the event loop: it takes a tenth of a millisecond, less than a hop to a thread.
                    self._check_sender(header, signed[header_bytes:])
                    sender = header.sender
                self._hold(sender, body_bytes)
                held += body_bytes
                start += body_bytes
                await upto(start, "body")
            yield bytes(data)
        finally:
            self._in_flight[sender] -= held
            if not self._in_flight[sender]:
                del self._in_flight[sender]

    def _hold(self, sender: str, size: int) -> None:
        is_greedy = self._in_flight[sender] + size > MAX_MESSAGE_BYTES
        if is_greedy or self._in_flight.total() + size > self._most:
            whose = f"of {sender!r}" if is_greedy else "of all parties"
            raise Crowded(f"as many bytes of messages {whose} are in progress as are accepted at once; send again soon")
        self._in_flight[sender] += size


async def _has_more(source: AsyncIterator[bytes], data: bytearray, start: int) -> bool:
    while len(data) <= start:
        chunk = await anext(source, None)
        if chunk is None:
            return False
        data.extend(chunk)
    return True


def message_routes(coordinator: Coordinator) -> APIRouter:
    """Return the routes /v1/messages and /v1/messages:poll."""
    router = APIRouter(tags=["messages"], route_class=Route)
    intake = MessageIntake(coordinator.mailroom.check_sender)

    @router.post(
        "/v1/messages",
        status_code=202,
        summary="Hand in messages",
        description=(
            "Signed messages of one party, framed one after another (labeler.messages). The party may append its next "
            "`poll`, in the form that `/v1/messages:poll` takes. Then the answer is 200, after the messages are taken."
        ),
        responses=_answers(
            202, {"description": "How many were taken", "content": {"application/json": {"example": {"taken": 1}}}}
        )
        | {200: {"description": "All were taken; frames for this party, or nothing in time", "content": _FRAMES}},
        openapi_extra=_BODY,
    )
    async def send_messages(request: Request) -> Response:
        media_type(request, OCTETS)
        with _counting_failures(request):
            async with intake.receive(request) as data:
                taken = await coordinator.mailroom.take(data)
            del data  # no longer counted, so free it
        if taken.asking is None:
            return JSONResponse({"taken": taken.count}, 202)
        # The messages are taken in any case. A party that gets no mail here polls for it, and learns the reason there.
        frames = await unless_stopping(request, coordinator.mailroom.mail_after(taken.asking))
        return Response(frames or b"", media_type=OCTETS)

    @router.post(
        "/v1/messages:poll",
        summary="Ask for messages",
        description="One signed `poll` message. If no mail waits, the answer waits up to the time that the poll names.",
        responses=_answers(200, {"description": "Frames for this party", "content": _FRAMES}),
        response_class=Response,
        openapi_extra=_BODY,
    )
    async def poll_messages(request: Request) -> Response:
        media_type(request, OCTETS)
        with _counting_failures(request):
            async with intake.receive(request) as received:
                data = received
            # A poll is small and may wait long, so it is no longer counted.
            frames = await unless_stopping(request, coordinator.mailroom.poll(data))
        if frames is None:
            raise Unavailable("the coordinator is stopping; ask again in a moment")
        return Response(frames, media_type=OCTETS)

    return router


@contextmanager
def _counting_failures(request: Request) -> Iterator[None]:
    try:
        yield
    except (Forged, NotEnrolled):
        request.app.state.limits.failures.hit(client_address(request))
        raise


def _answers(status: int, answer: dict[str, object]) -> Answers:
    replayed = problem(409, slug="replayed", title="The message was taken before", detail="sequence 7 was seen before")
    forged = problem(
        403, slug="forged", title="The signature or seal is not valid", detail="the signature does not hold"
    )
    return {
        status: answer,
        403: forged,
        409: replayed,
        **{code: problem(code) for code in (413, 415, 422, 429, 503)},
    }
