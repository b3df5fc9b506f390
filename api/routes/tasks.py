"""Tasks: what all parties agree on. Immutable, named by their digest."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Annotated

from fastapi import APIRouter, Body, Response

from api import examples
from api.access import Route
from api.coordinator.long_prices import takes_long
from api.documentation import After, Caller, Limit, TaskId, TokenId, Who, answers
from api.in_turn import Pricing
from api.schema import ShareRequest, TaskPage, TaskRequest, TaskView

if TYPE_CHECKING:
    from api.coordinator.service import Coordinator


def task_routes(coordinator: Coordinator, pricing: Pricing) -> APIRouter:
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
        request: Annotated[TaskRequest, Body(examples=[examples.TASK_REQUEST])], response: Response, by: Caller
    ) -> TaskView:
        is_long = takes_long(request.method, request.release)
        view = await pricing.run(by, partial(coordinator.create_task, request, by=by), is_long=is_long)
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
