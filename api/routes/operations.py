"""Routes for operators: liveness, readiness, metrics, API reference, and the dashboard's files."""

from __future__ import annotations

import mimetypes
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from anyio import CapacityLimiter, to_thread
from fastapi import APIRouter, Request, Response
from fastapi import Path as PathParameter
from fastapi.responses import FileResponse, HTMLResponse, JSONResponse, PlainTextResponse

from api import console as dashboard
from api import examples
from api.access import Route
from api.coordinator.roster import for_strangers
from api.documentation import SWAGGER, SWAGGER_FILES, answers, document, problem, reference_page
from api.metrics import Metrics
from api.schema import ReadinessView
from labeler.errors import NotFound

if TYPE_CHECKING:
    from api.coordinator.service import Coordinator

STATIC = Path(str(dashboard.STATIC))
_PAGE = "index.html"
_BEGIN = "The dashboard is at /dashboard\n"
_REFERENCE = "The documentation is at /api\n"


def operation_routes(coordinator: Coordinator, metrics: Metrics) -> APIRouter:
    """Build the routes outside /v1. Dashboard files that are added later are not served."""
    router = APIRouter(tags=["operations"], route_class=Route)
    probes = CapacityLimiter(1)  # a thread of their own, so that a probe waits for no other request
    made: dict[str, bytes] = {}  # cached, because strangers may request the document any number of times
    making = threading.Lock()  # one makes it, and the others of the same moment wait
    assets = {path.relative_to(STATIC).as_posix(): path for path in STATIC.rglob("*") if path.is_file()}
    assets |= {name: Path(str(SWAGGER / name)) for name in SWAGGER_FILES}
    reference: list[Response] = []  # cached alike

    @router.get(
        "/healthz",
        summary="Is the process alive?",
        description="Answers as long as the process takes requests; says nothing about its parts.",
        responses=answers("It is", {"status": "alive"}, is_open=True),
    )
    async def check_health() -> dict[str, str]:
        return {"status": "alive"}

    @router.get(
        "/readyz",
        summary="Can jobs be taken?",
        description="503 while the journal fails its check, the mailbox is away or the quorum is gone. Only an "
        "administrator's token sees the reason; everybody else reads a fixed sentence.",
        responses=answers(
            "They can",
            examples.READY,
            is_open=True,
            status_401=problem(401),
            status_429=problem(429),
            status_503={
                "description": "They cannot; to an administrator the checks say why",
                "model": ReadinessView,
                "content": {"application/json": {"example": examples.NOT_READY}},
            },
        ),
    )
    async def check_readiness(request: Request, response: Response) -> ReadinessView:
        view = await to_thread.run_sync(coordinator.health.readiness, limiter=probes)
        token = request.state.token
        response.status_code = 200 if view.ready else 503
        return view if token is not None and token.role == "admin" else for_strangers(view)

    @router.get(
        "/metrics",
        summary="Metrics for Prometheus",
        description="For an administrator's or a viewer's token; for anybody if the settings open it (metrics).",
        response_class=Response,
        responses={
            200: {
                "description": "Prometheus text format",
                "content": {"text/plain": {"schema": {"type": "string"}, "example": "labeler_ledger_seq 17.0\n"}},
            },
            401: problem(401),
            403: problem(403),
            429: problem(429),
        },
    )
    def read_metrics() -> Response:
        return Response(metrics.render(), media_type=metrics.media_type)

    @router.get(
        "/openapi.json",
        summary="This document",
        description="Every route with its schema, its problems and examples.",
        responses=answers(
            "OpenAPI 3.1", {"openapi": "3.1.0", "info": {"title": "private-labeler"}}, is_open=True, problems=(429,)
        ),
        response_class=Response,
    )
    def read_openapi(request: Request) -> Response:
        with making:
            if "openapi" not in made:
                made["openapi"] = bytes(JSONResponse(document(request.app)).body)
        return Response(made["openapi"], media_type="application/json")

    @router.get(
        "/api",
        summary="This document, for people",
        description="Every route with examples, as a page of Swagger UI that needs nothing from elsewhere.",
        response_class=Response,
        responses=_page("text/html", "<!doctype html>..."),
    )
    def read_reference(request: Request) -> Response:
        with making:
            if not reference:
                page, script = reference_page("REST interface of private-labeler", document(request.app))
                policy = dashboard.HEADERS["Content-Security-Policy"]
                policy = policy.replace("script-src 'self'", f"script-src 'self' {script}")
                # Its script is not ours. A sandbox makes the page another origin, without the dashboard's token.
                headers = dashboard.HEADERS | {"Content-Security-Policy": f"sandbox allow-scripts; {policy}"}
                reference.append(HTMLResponse(page, headers=headers))
        return reference[0]

    for place in ("/docs", "/redoc"):
        router.get(
            place,
            name=f"read_{place[1:]}",
            summary="Where people look for the documentation",
            description="Leads to /api, the page of every route.",
            status_code=307,
            response_class=Response,
            responses=_leads_to("/api", _REFERENCE),
        )(_to_reference)

    @router.get(
        "/",
        summary="Where people begin",
        description="Leads to the dashboard.",
        status_code=307,
        response_class=Response,
        responses=_leads_to("/dashboard", _BEGIN),
    )
    async def read_root() -> Response:
        return PlainTextResponse(_BEGIN, 307, {"Location": "/dashboard"})

    @router.get(
        "/dashboard",
        summary="The dashboard",
        description="A page for people. It holds no data; it asks for a token and then calls /v1 with it.",
        response_class=Response,
        responses=_page("text/html", "<!doctype html>..."),
    )
    async def read_dashboard() -> Response:
        return _file(assets, _PAGE)

    @router.get(
        "/dashboard/{asset:path}",
        summary="A file of the dashboard",
        description="Scripts, styles and pictures; all of them come from this service.",
        response_class=Response,
        responses=_page("text/javascript", "export ...") | {404: problem(404), 422: problem(422)},
    )
    async def read_dashboard_file(
        asset: Annotated[str, PathParameter(max_length=200, examples=["app.js"], description="path of the file")],
    ) -> Response:
        return _file(assets, asset)

    return router


async def _to_reference() -> Response:
    return PlainTextResponse(_REFERENCE, 307, {"Location": "/api"})


def _leads_to(place: str, said: str) -> dict[int | str, dict[str, Any]]:
    """Return the documented answers of a route that redirects."""
    led = {
        "description": f"Leads to {place}",
        "headers": {"Location": {"description": place, "schema": {"type": "string"}}},
        "content": {"text/plain": {"schema": {"type": "string"}, "example": said}},
    }
    return {307: led, 429: problem(429)}


def _file(assets: dict[str, Path], name: str) -> Response:
    path = assets.get(name)
    if path is None:
        raise NotFound("the dashboard has no such file")
    kind = mimetypes.guess_type(path.name)[0] or "application/octet-stream"
    return FileResponse(path, media_type=kind, headers=dashboard.HEADERS)


def _page(media_type: str, example: str) -> dict[int | str, dict[str, object]]:
    content = {media_type: {"schema": {"type": "string"}, "example": example}}
    return {200: {"description": "The file", "content": content}, 429: problem(429)}
