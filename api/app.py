"""The coordinator as an HTTP application: routes, refusals, metrics and the document that describes them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI

from api import problems
from api.access import PARSED_AT_ONCE, Gate
from api.documentation import document
from api.limits import LISTS_AT_ONCE, LISTS_EACH, Limits, RateLimits, Turns
from api.metrics import Metrics
from api.request_context import RequestContext, Shutdown
from api.routes.administration import invitation_routes, party_routes, token_routes
from api.routes.budget import budget_routes, evidence_routes
from api.routes.jobs import job_routes, label_routes, task_routes
from api.routes.messages import message_routes
from api.routes.operations import operation_routes

if TYPE_CHECKING:
    from api.coordinator.service import Coordinator

_DESCRIPTION = """
Label public images with the private images of several organizations. What leaves them carries a proven
differential-privacy bound, and every query is paid for from a budget.

Send a token as `Authorization: Bearer lab_...`. Refusals are problem documents (RFC 9457) with a stable `type`.
"""


def create_app(coordinator: Coordinator) -> FastAPI:
    """Build the application.

    Args:
        coordinator: an opened coordinator; the caller starts and stops it.
    """
    metrics = Metrics(coordinator)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        app.state.shutdown = Shutdown()
        yield
        app.state.shutdown.begin()
        await coordinator.aclose()

    app = FastAPI(
        title="private-labeler",
        version=version("private-labeler"),
        summary="A private labeling service",
        description=_DESCRIPTION.strip(),
        openapi_url=None,
        docs_url=None,
        redoc_url=None,
        lifespan=lifespan,
        redirect_slashes=False,
        # Generated clients name their calls by it (`submit_job`), so a route's function keeps its name.
        generate_unique_id_function=lambda route: route.name,
    )
    limits = RateLimits(requests_per_minute=coordinator.config.limits.max_requests_per_minute)
    app.state.limits = limits
    app.state.lists = Turns("lists", each=LISTS_EACH, at_once=LISTS_AT_ONCE)
    app.state.parsing = asyncio.Semaphore(PARSED_AT_ONCE)
    app.state.gate = Gate(coordinator.tokens, limits, is_metrics_open=coordinator.config.metrics == "open")
    app.state.delta = coordinator.config.delta
    routers = (
        task_routes(coordinator),
        job_routes(coordinator),
        label_routes(coordinator),
        budget_routes(coordinator),
        evidence_routes(coordinator),
        party_routes(coordinator),
        invitation_routes(coordinator),
        token_routes(coordinator),
        message_routes(coordinator),
        operation_routes(coordinator, metrics),
    )
    for router in routers:
        app.include_router(router)
    problems.install(app)
    app.add_middleware(
        Limits,
        limits=coordinator.config.limits,
        uploads=coordinator.uploads,
        refuse=lambda error, path: problems.refusal(error, instance=path),
    )
    app.add_middleware(RequestContext, metrics=metrics)

    def openapi() -> dict[str, Any]:
        return document(app)

    app.openapi = openapi  # type: ignore[method-assign]  # the way FastAPI documents
    return app
