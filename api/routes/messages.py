"""The post of agents and talliers: signed messages in, waiting messages out.

No token stands on these routes: a message is signed by its sender and, where it is for another party, sealed to it. The
coordinator checks the signature of a header before it reads the body that the header binds.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from api.access import client_address
from api.documentation import Answers, problem
from api.message_intake import MessageIntake
from api.patience import unless_stopping
from api.strict_route import StrictRoute, at_once, media_type
from labeler.errors import Forged, NotEnrolled, Unavailable
from labeler.messages import MAX_MESSAGE_BYTES

if TYPE_CHECKING:
    from api.coordinator.service import Coordinator

OCTETS = "application/octet-stream"
MAX_POLL_BYTES = 1024 * 1024
_FRAMES = {OCTETS: {"schema": {"type": "string", "format": "binary"}, "example": "(frames of signed messages)"}}
_BODY = {"requestBody": {"required": True, "content": _FRAMES}}


def message_routes(coordinator: Coordinator) -> APIRouter:
    """Routes /v1/messages and /v1/messages:poll."""
    router = APIRouter(tags=["messages"], route_class=StrictRoute)
    intake = MessageIntake(coordinator.mailroom.check_sender)

    async def take_now(request: Request) -> Response:
        media_type(request, OCTETS)
        with _counting_failures(request):
            async with intake.receive(request, max_bytes=MAX_MESSAGE_BYTES) as data:
                taken = await coordinator.mailroom.take(data)
            del data  # is no longer counted
        if taken.asking is None:
            return JSONResponse({"taken": taken.count}, 202)
        # What was taken stays taken: whoever does not get its mail here asks for it, and is told why there.
        frames = await unless_stopping(request, coordinator.mailroom.mail_after(taken.asking))
        return Response(frames or b"", media_type=OCTETS)

    async def poll_now(request: Request) -> Response:
        media_type(request, OCTETS)
        with _counting_failures(request):
            async with intake.receive(request, max_bytes=MAX_POLL_BYTES) as received:
                data = received
            # A poll is small and may wait long: it is no longer counted.
            frames = await unless_stopping(request, coordinator.mailroom.poll(data))
        if frames is None:
            raise Unavailable("the coordinator is stopping; ask again in a moment")
        return Response(frames, media_type=OCTETS)

    @router.post(
        "/v1/messages",
        status_code=202,
        summary="Hand in messages",
        description=(
            "Signed messages of one party, framed one after another (labeler.messages). Behind them its next `poll` "
            "may stand, as `/v1/messages:poll` takes it; then the answer is 200, once the messages are taken."
        ),
        responses=_answers(
            202, {"description": "How many were taken", "content": {"application/json": {"example": {"taken": 1}}}}
        )
        | {200: {"description": "All were taken; frames for this party, or nothing in time", "content": _FRAMES}},
        openapi_extra=_BODY,
    )
    @at_once(take_now)
    async def take(request: Request) -> Response:
        return await take_now(request)

    @router.post(
        "/v1/messages:poll",
        summary="Ask for messages",
        description="One signed `poll` message; the answer waits up to the time it names while there is nothing.",
        responses=_answers(200, {"description": "Frames for this party", "content": _FRAMES}),
        response_class=Response,
        openapi_extra=_BODY,
    )
    @at_once(poll_now)
    async def poll(request: Request) -> Response:
        return await poll_now(request)

    return router


@contextmanager
def _counting_failures(request: Request) -> Iterator[None]:
    try:
        yield
    except (Forged, NotEnrolled):
        request.app.state.limits.failed(client_address(request))
        raise


def _answers(status: int, answer: dict[str, object]) -> Answers:
    replayed = problem(409, slug="replayed", title="The message was taken before", detail="sequence 7 was seen before")
    forged = problem(403, slug="forged", title="Signature or seal does not hold", detail="the signature does not hold")
    return {
        status: answer,
        403: forged,
        409: replayed,
        **{code: problem(code) for code in (413, 415, 422, 429, 503)},
    }
