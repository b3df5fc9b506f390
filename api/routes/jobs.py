"""Tasks, which are immutable; jobs: price, submit, watch, cancel, download; and a few labels at once."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from functools import cache, partial
from typing import TYPE_CHECKING, Annotated, Any

from anyio import CapacityLimiter, to_thread
from fastapi import APIRouter, Body, Depends, Header, Query, Request, Response
from fastapi.responses import StreamingResponse
from fastapi.sse import EventSourceResponse, ServerSentEvent
from starlette.concurrency import run_in_threadpool

from api import examples, problems
from api.access import JSON, Route
from api.coordinator.estimates import takes_long
from api.coordinator.ownership import Reader
from api.coordinator.results import SIDE
from api.documentation import (
    BUDGET_REFUSAL,
    JSON_PART,
    After,
    IdempotencyKey,
    JobId,
    Limit,
    TaskId,
    TokenId,
    Who,
    answers,
    body,
    problem,
    typed_part,
)
from api.job_intake import Intake, Received
from api.limits import BODY_KEY, Slots, TooManyRequests
from api.request_context import unless_stopping, until_stopping
from api.schema import (
    FINISHED,
    MAX_SYNCHRONOUS_QUERIES,
    MAX_THUMBNAILS,
    EstimateRequest,
    EstimateView,
    JobPage,
    JobRequest,
    JobState,
    JobView,
    LabelFormat,
    LabelRow,
    LabelsOf,
    LabelsRequest,
    LabelsView,
    ShareRequest,
    TaskPage,
    TaskRequest,
    TaskView,
    ThumbnailsRequest,
    ThumbnailsView,
)
from feature_store.results import FILE_KINDS
from feature_store.results.label_files import FILE_WRITERS, ROWS_PER_CHUNK
from labeler.errors import TryAgain

if TYPE_CHECKING:
    from api.coordinator.service import Coordinator

RETRY_AFTER_S = "1"
MODEL_MEDIA_TYPE = "application/octet-stream"
MAX_STREAMS_OF_A_TOKEN = 20
WRITERS = 16
"""Submissions that wait for the disk at once. They have separate threads, so that reads wait for none of them."""
MAX_STREAMS = 200
"""Most open event streams: each reads the journal every two seconds."""
MAX_LABELING_OF_A_TOKEN = 4
MAX_LABELING = 16
"""Most requests that may wait until a job's images are labeled: each holds a thread for some seconds."""
MAX_PICTURES = 2
"""Most requests for pictures at once: each starts a decoding process."""
_FORM: dict[str, Any] = {
    "schema": {
        "type": "object",
        "required": ["request"],
        "properties": {
            "request": typed_part(JobRequest, "send it before the files"),
            "images": {"type": "array", "items": {"type": "string", "format": "binary"}},
            "archive": {"type": "string", "format": "binary", "description": "a zip of images"},
            "parquet": {
                "type": "string",
                "format": "binary",
                "description": "columns name and image (bytes), or name and feature (a list of numbers)",
            },
        },
    },
    "encoding": JSON_PART,
    "example": {"request": {"task_id": examples.TASK_ID}, "images": ["(bytes of photo-1.jpg)"]},
}
_FEW_IMAGES: dict[str, Any] = {
    "schema": {
        "type": "object",
        "required": ["request", "images"],
        "properties": {
            "request": typed_part(LabelsRequest, "without images and features"),
            "images": {
                "type": "array",
                "items": {"type": "string", "format": "binary"},
                "maxItems": MAX_SYNCHRONOUS_QUERIES,
            },
        },
    },
    "encoding": JSON_PART,
    "example": {"request": {"task_id": examples.TASK_ID}, "images": ["(bytes of photo-1.jpg)"]},
}
_LINKS = {
    "Location": {"description": "where the job can be read", "schema": {"type": "string"}},
    "Retry-After": {"description": "seconds", "schema": {"type": "integer"}},
}


def job_routes(coordinator: Coordinator) -> APIRouter:
    """Routes under /v1/jobs."""
    router = APIRouter(tags=["jobs"], route_class=Route)
    intake = Intake(coordinator.config.home, coordinator.config.limits, JobRequest)
    pictures = Slots("requests for pictures", each=1, total=MAX_PICTURES)
    labeling = Slots("requests for labels of images", each=MAX_LABELING_OF_A_TOKEN, total=MAX_LABELING)
    streams = Slots("event streams", each=MAX_STREAMS_OF_A_TOKEN, total=MAX_STREAMS)

    # Made at the first request, because they belong to the serving event loop.
    @cache
    def writers() -> CapacityLimiter:
        return CapacityLimiter(WRITERS)

    async def take(received: Received[JobRequest], who: Reader, key: str | None) -> JobView:
        step = partial(coordinator.submit, received.request, received.upload, reader=who, idempotency_key=key)
        return await to_thread.run_sync(step, limiter=writers())

    @router.post(
        "/v1/jobs:estimate",
        summary="What would a job cost?",
        description="The price at both levels and whether the budgets cover it now. Charges nothing, asks nobody.",
        responses=answers("The price", examples.ESTIMATE, problems=(404, 409, 413, 415, 422, 429, 503)),
    )
    async def estimate_job(
        request: Annotated[EstimateRequest, Body(examples=[examples.ESTIMATE_REQUEST])], who: Who
    ) -> EstimateView:
        return await coordinator.estimates.price(request, reader=who)

    accepted = answers(
        "The job is queued",
        examples.JOB,
        status=202,
        problems=(404, 413, 415, 422),
        status_409=problem(409, **BUDGET_REFUSAL),
    )
    accepted[202]["headers"] = _LINKS

    @router.post(
        "/v1/jobs",
        status_code=202,
        response_model=JobView,
        summary="Submit a job",
        description="Feature vectors as JSON; images as files, zip or Parquet in a form. The worst-case price is "
        "reserved before anybody is asked.",
        responses=accepted,
        openapi_extra={
            "requestBody": {
                "required": True,
                "content": {
                    "application/json": body(JobRequest, examples.JOB_REQUEST),
                    "multipart/form-data": _FORM,
                },
            }
        },
    )
    async def submit_job(
        request: Request, response: Response, who: Who, idempotency_key: IdempotencyKey = None
    ) -> JobView:
        async with intake.receive(request) as received:
            view = await take(received, who, idempotency_key)
        response.headers["Location"] = f"/v1/jobs/{view.job_id}"
        response.headers["Retry-After"] = RETRY_AFTER_S
        return view

    @router.get(
        "/v1/jobs",
        summary="List jobs",
        description="Newest first, optionally only those in some states. A requester reads the jobs of its token, a "
        "viewer everybody's without names and details of problems.",
        responses=answers("One page of jobs", examples.JOB_PAGE, problems=(422,)),
    )
    def list_jobs(
        who: Who,
        after: After = None,
        limit: Limit = 50,
        state: Annotated[
            list[JobState] | None, Query(max_length=8, examples=[["completed"]], description="may be repeated")
        ] = None,
    ) -> JobPage:
        return coordinator.jobs(after, limit, frozenset(state) if state else None, reader=who)

    # Before the routes of one job, whose id pattern matches the action too: a 405 lists the first match's methods.
    @router.post(
        "/v1/jobs/{job_id}:thumbnails",
        summary="Look at a job's images",
        description=f"Pictures of {SIDE} pixels of up to {MAX_THUMBNAILS} of the images that the job was sent, made by "
        "this service. 404 where it was sent as vectors, 410 once its images were deleted: soon after it has ended.",
        responses=answers("The pictures", examples.THUMBNAILS, problems=(404, 410, 413, 415, 422)),
    )
    def job_thumbnails(
        job_id: JobId, request: Annotated[ThumbnailsRequest, Body(examples=[examples.THUMBNAILS_REQUEST])], who: Who
    ) -> ThumbnailsView:
        with pictures.hold(who.token_id):
            return coordinator.results.thumbnails(job_id, request.sources, reader=who)

    @router.get(
        "/v1/jobs/{job_id}",
        summary="Read a job",
        description="State, progress by round, price, and the reason where it was refused.",
        responses=answers("The job", examples.JOB, problems=(404, 422)),
    )
    def read_job(job_id: JobId, who: Who) -> JobView:
        return coordinator.job(job_id, reader=who)

    @router.delete(
        "/v1/jobs/{job_id}",
        summary="Cancel a job",
        description="Only with the token that submitted it, or an administrator's. Rounds nobody was asked about are "
        "refunded, and their queries can be asked again; the others stay charged. Again: no change.",
        responses=answers("The job", examples.JOB_CANCELLED, problems=(404, 409, 422)),
    )
    def cancel_job(job_id: JobId, who: Who) -> JobView:
        return coordinator.cancel(job_id, reader=who)

    @router.delete(
        "/v1/jobs/{job_id}/data",
        summary="Delete what a job sent and got",
        description="For a job that has ended, with the token that submitted it, or an administrator's. Images, "
        "vectors, questions and labels are deleted for good, and cannot be downloaded any more; charges, digests and "
        "releases stay in the journal, so that the accounts stay provable. Again: no change.",
        responses=answers("The job", examples.JOB_FORGOTTEN, problems=(404, 409, 422)),
    )
    def delete_job_data(job_id: JobId, who: Who) -> JobView:
        return coordinator.forget(job_id, reader=who)

    @router.get(
        "/v1/jobs/{job_id}/labels",
        summary="Download the labels",
        description="The label of every image with a confidence, asked about or inferred (of=images, "
        "docs/labels.md); or the questions with what was released for each (of=questions). Streamed as JSON lines, "
        "Parquet, Label Studio tasks with predictions (and label-studio-config, the labeling setup they need), or csv, "
        "the metadata.csv of an image folder. `labeler export` makes the formats that are folders. "
        "409 until the job is completed, 503 while its images are being labeled, 410 once its labels were deleted.",
        response_class=Response,
        responses=_label_answers(),
    )
    def job_labels(
        job_id: JobId,
        who: Who,
        labels_format: Annotated[
            LabelFormat, Query(alias="format", examples=["jsonl"], description="of the file")
        ] = "jsonl",
        of: Annotated[LabelsOf, Query(examples=["images"], description="every image, or what was asked")] = "images",
    ) -> Response:
        kind, write = FILE_KINDS[labels_format], FILE_WRITERS[labels_format]
        headers = {"Content-Disposition": f'attachment; filename="{kind.file_name(job_id, of)}"'}
        if of == "images":
            with labeling.hold(who.token_id):
                table = coordinator.results.image_labels(job_id, reader=who)
        else:
            table = coordinator.results.labels(job_id, reader=who)
        if table.num_rows <= ROWS_PER_CHUNK:
            # Sent whole: each piece of a stream would hop between event loop and thread.
            return Response(b"".join(write(table)), media_type=kind.media_type, headers=headers)
        return StreamingResponse(write(table), media_type=kind.media_type, headers=headers)

    @router.get(
        "/v1/jobs/{job_id}/model",
        summary="Download the model",
        description="What a blind-average or federated job "
        "released, as a safetensors file whose metadata holds the privacy card. "
        "404 where the job asked for labels, 409 until it is completed, 410 once it was deleted.",
        response_class=Response,
        responses=_model_answers("The model"),
    )
    def job_model(job_id: JobId, who: Who) -> Response:
        return _safetensors(coordinator.results.model(job_id, reader=who), f"{job_id}-model")

    @router.get(
        "/v1/jobs/{job_id}/student",
        summary="Download the student",
        description="The model that labeled the job's images, to label others: a safetensors file whose metadata "
        "holds the privacy card (docs/labels.md). 409 until the job is completed, 503 while it is being trained, 410 "
        "once it was deleted.",
        response_class=Response,
        responses=_model_answers("The student"),
    )
    def job_student(job_id: JobId, who: Who) -> Response:
        with labeling.hold(who.token_id):
            return _safetensors(coordinator.results.student(job_id, reader=who), f"{job_id}-student")

    @router.get(
        "/v1/jobs/{job_id}/evaluation",
        summary="Read an evaluation",
        description="Of a job of a task of method evaluate, whose question was a released model: how good it is on the "
        "agents' records. Accuracy, recall by class, balanced accuracy and AUROC as far as the layout tells, and the "
        "share that is right in each band of stated confidence, each with a 95 % interval for noise and one for noise "
        "and sampling. GET .../student gives the model, stating these shares. 404 where the job labels images, 409 "
        "until it is completed, 503 while it is being made, 410 once it was deleted.",
        response_class=Response,
        responses=_download("The evaluation", {JSON: {"schema": {"type": "object"}, "example": examples.EVALUATION}}),
    )
    def job_evaluation(job_id: JobId, who: Who) -> Response:
        with labeling.hold(who.token_id):
            data = coordinator.results.evaluation(job_id, reader=who)
        return Response(data, media_type=JSON)

    async def watched(job_id: JobId, who: Who) -> AsyncIterator[None]:
        # Before the stream begins, so that an unknown job is a 404 and not an empty stream.
        with streams.hold(who.token_id):
            await run_in_threadpool(coordinator.job, job_id, reader=who)
            yield

    @router.get(
        "/v1/jobs/{job_id}/events",
        summary="Watch a job",
        description="Server-sent events: `job` with the JobView at once and at every change; ends with the job, or "
        "when the token is revoked. After a broken connection send Last-Event-ID and only what is new comes. A token "
        f"may keep {MAX_STREAMS_OF_A_TOKEN} streams open.",
        response_class=EventSourceResponse,
        dependencies=[Depends(watched)],
        responses={
            200: {
                "description": "A stream of events",
                "content": {"text/event-stream": {"example": 'event: job\nid: 4\ndata: {"job_id": "..."}\n\n'}},
            },
            **{code: problem(code) for code in (401, 403, 404, 422, 429, 503)},
        },
    )
    async def job_events(
        request: Request,
        job_id: JobId,
        who: Who,
        last_event_id: Annotated[
            str, Header(alias="Last-Event-ID", max_length=200, examples=["4"], description="id of the last event seen")
        ] = "",
    ) -> AsyncIterator[ServerSentEvent]:
        async for identity, view in until_stopping(request, coordinator.events(job_id, last_event_id, reader=who)):
            yield ServerSentEvent(raw_data=view.model_dump_json(), event="job", id=str(identity), retry=1000)
            await asyncio.sleep(0)

    return router


def _safetensors(data: bytes, name: str) -> Response:
    disposition = f'attachment; filename="{name}.safetensors"'
    return Response(data, media_type=MODEL_MEDIA_TYPE, headers={"Content-Disposition": disposition})


def _download(what: str, content: dict[str, Any]) -> dict[int | str, dict[str, Any]]:
    """Return the documented answers of a route that gives a file."""
    documented: dict[int | str, dict[str, Any]] = {200: {"description": what, "content": content}}
    documented.update({code: problem(code) for code in (401, 403, 404, 409, 410, 422, 429, 503)})
    return documented


def _model_answers(what: str) -> dict[int | str, dict[str, Any]]:
    example = {"schema": {"type": "string", "format": "binary"}, "example": "(bytes)"}
    return _download(what, {MODEL_MEDIA_TYPE: example})


def _label_answers() -> dict[int | str, dict[str, Any]]:
    text = {"type": "string"}
    content = {
        "application/jsonl": {"schema": text, "example": examples.IMAGE_LABEL_LINE},
        "application/vnd.apache.parquet": {"schema": {"type": "string", "format": "binary"}, "example": "(bytes)"},
        "application/json": {
            "schema": {"type": "array", "items": {"type": "object"}},
            "example": [{"data": {"image": "photo-1.jpg"}, "predictions": []}],
        },
        "application/xml": {"schema": text, "example": "<View><Choices>...</Choices></View>"},
        "text/csv": {"schema": text, "example": "file_name,label,confidence,origin\nphoto-1.jpg,mug,0.9712,inferred\n"},
    }
    return _download("The labels", content)


MAX_WAITING_OF_A_TOKEN = 50
MAX_WAITING = 200
"""Most requests that wait for their labels at once; the next one is told the place of its job."""


def label_routes(coordinator: Coordinator) -> APIRouter:
    """Route /v1/labels."""
    router = APIRouter(tags=["labels"], route_class=Route)
    waits = Slots("waiting requests", each=MAX_WAITING_OF_A_TOKEN, total=MAX_WAITING)
    intake = Intake(coordinator.config.home, coordinator.config.limits, LabelsRequest)

    async def submit(http: Request, who: Reader, key: str | None) -> tuple[JobView, float]:
        """Return the job of a request and the seconds to wait; what was sent is not in memory during the wait."""
        async with intake.receive(http) as received:
            asked = received.request
            job = JobRequest.model_validate(asked.model_dump(exclude={"wait_s", "images"}))
            view = await run_in_threadpool(coordinator.submit, job, received.upload, reader=who, idempotency_key=key)
            return view, asked.wait_s

    @router.post(
        "/v1/labels",
        response_model=LabelsView,
        summary="Ask for a few labels and wait",
        description=f"Up to {MAX_SYNCHRONOUS_QUERIES} images, as files of a form or as base64 in JSON, or feature "
        "vectors. Images are embedded with the task's backbone, and each row has the label and its confidence. 200 "
        "with the labels, or 202 with the place of the job when it takes longer than wait_s. It is a job like any "
        "other: priced, reserved, in the ledger. An image that cannot be read is a 422 that names it, and nothing is "
        "charged. More images are a 413: send them to `/v1/jobs`.",
        responses=answers(
            "The labels",
            examples.LABELS,
            problems=(404, 410, 413, 415, 422),
            status_202={
                "description": "It takes longer; read the job",
                "model": LabelsView,
                "content": {"application/json": {"example": examples.LABELS_LATER}},
            },
            status_409=problem(409, **BUDGET_REFUSAL),
        ),
        openapi_extra={
            "requestBody": {
                "required": True,
                "content": {
                    "application/json": body(LabelsRequest, examples.LABELS_REQUEST),
                    "multipart/form-data": _FEW_IMAGES,
                },
            }
        },
    )
    async def label_images(
        http: Request, response: Response, who: Who, idempotency_key: IdempotencyKey = None
    ) -> LabelsView | Response:
        view, wait_s = await submit(http, who, idempotency_key)
        # Its upload counts as the job's from here on, and not a second time while the request waits.
        http.scope[BODY_KEY].close()
        until_s = time.monotonic() + wait_s
        rows: tuple[LabelRow, ...] | None = None
        # If too many wait already, answer with the job's address.
        with contextlib.suppress(TooManyRequests), waits.hold(who.token_id):
            view = await _finished(coordinator, http, view, wait_s, who)
            rows = ()
            if view.state == "completed":
                # The token may have been revoked during the wait.
                await run_in_threadpool(coordinator.check_token, who)
                rows = await _rows(coordinator, http, view.job_id, until_s, who)
        if view.problem is not None:
            return problems.render(view.problem.model_dump() | {"job_id": view.job_id, "instance": http.url.path})
        if view.state not in FINISHED or rows is None:
            response.status_code = 202
            response.headers["Location"] = f"/v1/jobs/{view.job_id}"
            response.headers["Retry-After"] = "1"
            return _labels_view(view, ())
        return _labels_view(view, rows)

    return router


def _labels_view(view: JobView, rows: tuple[LabelRow, ...]) -> LabelsView:
    shared = view.model_dump(include={"job_id", "state", "price", "passed_over", "passed_over_files"})
    return LabelsView.model_validate({**shared, "labels": rows})


async def _rows(
    coordinator: Coordinator, request: Request, job_id: str, until_s: float, who: Reader
) -> tuple[LabelRow, ...] | None:
    """Return the answers of a completed job; None when the time is up before they can be told."""
    with contextlib.suppress(TryAgain):
        labeling = await run_in_threadpool(coordinator.results.begin, job_id, reader=who)
        if labeling is not None:
            left_s = max(0.0, until_s - time.monotonic())
            await unless_stopping(request, asyncio.wait([asyncio.wrap_future(labeling)], timeout=left_s))
        if labeling is None or labeling.done():
            return await run_in_threadpool(coordinator.results.rows, job_id, reader=who)
    return None


async def _finished(coordinator: Coordinator, request: Request, view: JobView, wait_s: float, who: Reader) -> JobView:
    """Return the job once it is finished, or its present view when the time is up or the server stops."""
    async for _, seen in until_stopping(request, coordinator.events(view.job_id, "", reader=who, within_s=wait_s)):
        view = seen
    return view


def task_routes(coordinator: Coordinator) -> APIRouter:
    """Routes under /v1/tasks."""
    router = APIRouter(tags=["tasks"], route_class=Route)

    @router.post(
        "/v1/tasks",
        status_code=201,
        summary="Make a task",
        description="Fix what all parties shall agree on: classes, method, noise, who takes part. Costs nothing. "
        "Every task is new: it has a nonce, so that its noise is its own.",
        responses=answers("The task as it is kept", examples.TASK, status=201, problems=(409, 413, 415, 422, 429, 503)),
    )
    async def create_task(
        request: Annotated[TaskRequest, Body(examples=[examples.TASK_REQUEST, examples.TASK_REQUEST_OF_THE_PAPER])],
        response: Response,
        who: Who,
    ) -> TaskView:
        is_long = takes_long(request)
        make = partial(coordinator.create_task, request, by=who.token_id)
        view = await coordinator.prices.run(who.token_id, make, is_long=is_long)
        response.headers["Location"] = f"/v1/tasks/{view.task_id}"
        return view

    @router.get(
        "/v1/tasks",
        summary="List tasks",
        description="Newest first. A requester reads the tasks that its token made or that are shared with it.",
        responses=answers("One page of tasks", examples.TASK_PAGE, problems=(422,)),
    )
    def list_tasks(who: Who, after: After = None, limit: Limit = 50) -> TaskPage:
        return coordinator.tasks(after, limit, reader=who)

    @router.get(
        "/v1/tasks/{task_id}",
        summary="Read a task",
        description="The task itself, what all its queries cost, and how many are left.",
        responses=answers("The task", examples.TASK, problems=(404, 422)),
    )
    def read_task(task_id: TaskId, who: Who) -> TaskView:
        return coordinator.task(task_id, reader=who)

    @router.post(
        "/v1/tasks/{task_id}/shares",
        status_code=201,
        summary="Share a task",
        description="Let another requester's token submit jobs into it. Only with the token that made the task, or an "
        "administrator's. Each sees its own jobs; the queries are everybody's. Again: no change.",
        responses=answers("The task", examples.TASK_SHARED, status=201, problems=(404, 413, 415, 422)),
    )
    def share_task(
        task_id: TaskId, request: Annotated[ShareRequest, Body(examples=[examples.SHARE_REQUEST])], who: Who
    ) -> TaskView:
        return coordinator.share_task(task_id, request.token_id, reader=who)

    @router.delete(
        "/v1/tasks/{task_id}/shares/{token_id}",
        summary="Stop sharing a task",
        description="The token submits no more into it, and no longer sees it; its jobs stay its own. "
        "Again: no change.",
        responses=answers("The task", examples.TASK, problems=(404, 422)),
    )
    def unshare_task(task_id: TaskId, token_id: TokenId, who: Who) -> TaskView:
        return coordinator.unshare_task(task_id, token_id, reader=who)

    return router
