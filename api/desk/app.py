"""The desk as an application: the page's files, what it shows, and what it decides. Decisions are made by `Site`."""

from __future__ import annotations

import mimetypes
from typing import Any, Protocol

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel, ConfigDict, Field

from api import dashboard
from api.desk import SHARED, STATIC
from api.desk.guard import Guard
from api.problems import status_of
from labeler.errors import LabelerError

PAGE = "index.html"


class Site(Protocol):
    """What the people of a site may see and decide; each raises `LabelerError` in sentences for them."""

    def overview(self) -> dict[str, Any]:
        """Who we are, whether we answer, what waits, what was decided, what is left, what was answered."""

    def rounds(self) -> list[dict[str, Any]]:
        """Every round that was ever answered."""

    def rounds_csv(self) -> str:
        """The same as CSV."""

    def approve(self, digest: str) -> None:
        """Let the agent answer a task."""

    def refuse(self, digest: str, reason: str) -> None:
        """Refuse a task."""

    def stop(self, reason: str) -> None:
        """Answer nothing new."""

    def resume(self) -> None:
        """Answer again."""


class Why(BaseModel):
    """The reason of a decision."""

    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)

    reason: str = Field(default="", max_length=1000)


def create_desk(site: Site, *, token: str) -> FastAPI:
    """Build the application.

    Args:
        token: what a request under /v1 has to show.
    """
    app = FastAPI(title="desk", openapi_url=None, docs_url=None, redoc_url=None, redirect_slashes=False)
    files = {path.name: path.read_bytes() for path in STATIC.iterdir() if path.is_file()}
    files |= {name: (dashboard.STATIC / name).read_bytes() for name in SHARED}

    @app.get("/")
    async def page() -> Response:
        return Response(files[PAGE], media_type="text/html")

    @app.get("/files/{name}")
    async def file(name: str) -> Response:
        if name not in files or name == PAGE:
            return JSONResponse({"detail": "the desk has no such file"}, status_code=404)
        return Response(files[name], media_type=mimetypes.guess_type(name)[0] or "application/octet-stream")

    @app.get("/v1/site")
    def overview() -> dict[str, Any]:
        return site.overview()

    @app.get("/v1/rounds.json")
    def rounds() -> list[dict[str, Any]]:
        return site.rounds()

    @app.get("/v1/rounds.csv")
    def rounds_csv() -> Response:
        return Response(site.rounds_csv(), media_type="text/csv; charset=utf-8")

    @app.post("/v1/tasks/{digest}/approve")
    def approve(digest: str, _: Why) -> dict[str, Any]:
        site.approve(digest)
        return site.overview()

    @app.post("/v1/tasks/{digest}/refuse")
    def refuse(digest: str, why: Why) -> dict[str, Any]:
        site.refuse(digest, why.reason)
        return site.overview()

    @app.post("/v1/stop")
    def stop(why: Why) -> dict[str, Any]:
        site.stop(why.reason)
        return site.overview()

    @app.post("/v1/resume")
    def resume(_: Why) -> dict[str, Any]:
        site.resume()
        return site.overview()

    @app.exception_handler(LabelerError)
    async def refused(_: Request, error: Exception) -> Response:
        status = status_of(error) if isinstance(error, LabelerError) else 500
        return JSONResponse({"detail": str(error)}, status_code=status)

    @app.exception_handler(RequestValidationError)
    async def malformed(_: Request, __: Exception) -> Response:
        return JSONResponse({"detail": "a decision is JSON with at most a reason of 1000 characters"}, status_code=422)

    app.add_middleware(Guard, token=token)
    return app
