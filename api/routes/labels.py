"""A few labels at once: submit, wait, answer; or say where the answer will be."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Annotated

from fastapi import APIRouter, Body, Request, Response
from starlette.concurrency import run_in_threadpool

from api import examples, refusals
from api.access import Route
from api.coordinator.ownership import Reader
from api.documentation import BUDGET_REFUSAL, answers, problem
from api.limits import Slots, TooManyRequests
from api.request_context import unless_stopping
from api.routes.parameters import IdempotencyKey, Who
from api.schema import FINISHED, JobRequest, JobView, LabelRow, LabelsRequest, LabelsView

if TYPE_CHECKING:
    from api.coordinator.service import Coordinator


MAX_WAITING = 200
"""Requests that wait for their labels at once."""


def label_routes(coordinator: Coordinator) -> APIRouter:
    """Route /v1/labels."""
    router = APIRouter(tags=["labels"], route_class=Route)
    waits = Slots("waiting requests", each=MAX_WAITING, total=MAX_WAITING)

    @router.post(
        "/v1/labels",
        response_model=LabelsView,
        summary="Ask for a few labels and wait",
        description="Up to 64 feature vectors. 200 with the labels, or 202 with the place of the job when it takes "
        "longer than wait_s. It is a job like any other: priced, reserved, in the ledger.",
        responses=answers(
            "The labels",
            examples.LABELS,
            problems=(404, 413, 415, 422),
            status_202={
                "description": "It takes longer; read the job",
                "model": LabelsView,
                "content": {"application/json": {"example": examples.LABELS_LATER}},
            },
            status_409=problem(409, **BUDGET_REFUSAL),
        ),
    )
    async def ask(
        request: Annotated[LabelsRequest, Body(examples=[examples.LABELS_REQUEST])],
        http: Request,
        response: Response,
        who: Who,
        idempotency_key: IdempotencyKey = None,
    ) -> LabelsView | Response:
        job = JobRequest.model_validate(request.model_dump(exclude={"wait_s"}))
        view: JobView = await run_in_threadpool(
            coordinator.submit, job, None, reader=who, idempotency_key=idempotency_key
        )
        # Where too many wait already, the answer is the place of the job.
        with contextlib.suppress(TooManyRequests), waits.hold(who.token_id):
            view = await _finished(coordinator, http, view, request.wait_s, who)
        if view.state not in FINISHED:
            response.status_code = 202
            response.headers["Location"] = f"/v1/jobs/{view.job_id}"
            response.headers["Retry-After"] = "1"
            return LabelsView(job_id=view.job_id, state=view.state, price=view.price)
        if view.problem is not None:
            return refusals.render(view.problem.model_dump() | {"job_id": view.job_id, "instance": http.url.path})
        rows: tuple[LabelRow, ...] = ()
        if view.state == "completed":
            # The token may have been revoked while its holder waited.
            await run_in_threadpool(coordinator.check_token, who)
            rows = await run_in_threadpool(coordinator.label_rows, view.job_id, reader=who)
        return LabelsView(job_id=view.job_id, state=view.state, price=view.price, labels=tuple(rows))

    return router


async def _finished(coordinator: Coordinator, request: Request, view: JobView, wait_s: float, who: Reader) -> JobView:
    """The job once it is finished, or as it stands when the time is up or the server stops."""
    latest = view

    async def watch() -> None:
        nonlocal latest
        async for _, seen in coordinator.events(view.job_id, "", reader=who):
            latest = seen

    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(unless_stopping(request, watch()), wait_s)
    return latest
