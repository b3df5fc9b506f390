"""The console of a site: a browser page on the machine its agent runs on, its checks, and its own server.

It shows the public part of what was asked, and the site's own accounting. Decisions go through the same functions as in
the shell, by `SiteActions`. Its look and colors are the dashboard's.

It takes only requests from this machine, under a name of this machine, with the token, from its own page:

connection   from a loopback address; the server listens on one loopback address only.
Host         a loopback address or localhost. A stranger's page whose name was pointed at 127.0.0.1 (DNS rebinding)
             sends its own name and is refused before anything else is read.
Origin       for a change: none (not a browser), or this exact address.
token        256 bits, made at each start, passed in the URL's fragment, which no browser sends to any server;
             compared in constant time.
"""

from __future__ import annotations

import hmac
import json
import mimetypes
import secrets
import threading
from collections.abc import Callable, Iterable
from importlib.resources import files
from importlib.resources.abc import Traversable
from typing import Any, Final, Protocol
from urllib.parse import urlsplit

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel, ConfigDict, Field
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from api import console as dashboard
from api.problems import status_of
from api.server import GRACE_S, Server, listen, url_of
from labeler.errors import InvalidSetting, LabelerError
from labeler.system.http_client import is_loopback

STATIC: Final[Traversable] = files(__name__) / "static"
"""The folder of the page's own files."""

SHARED: Final = ("dashboard.css", "theme.js", "dom.js", "icon.svg")
"""Dashboard files that the page uses unchanged."""

HEADERS: Final[dict[str, str]] = dashboard.HEADERS | {
    "Cache-Control": "no-store",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "X-Frame-Options": "DENY",
}
"""Headers of every answer: only our own scripts and styles, no other host, no frame, no caching."""


MAX_BODY_BYTES = 16 * 1024


class Guard:
    """Checks every request before the application sees it, and adds the headers to every answer.

    Args:
        token: the secret that a request under /v1 must carry.
    """

    def __init__(self, app: ASGIApp, *, token: str) -> None:
        self._app = app
        self._expected = f"Bearer {token}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                known = [pair for pair in message.get("headers", ()) if pair[0].lower() not in _OURS]
                message = {**message, "headers": [*known, *_HEADERS]}
            await send(message)

        status, sentence = self._objection(scope)
        if status:
            await _refuse(status, sentence, with_headers)
            return
        await self._app(scope, receive, with_headers)

    def _objection(self, scope: Scope) -> tuple[int, str]:
        """Return status and sentence of a refusal; (0, "") for a request that passes."""
        client = scope.get("client")
        if client is None or not is_loopback(client[0]):
            return 403, "the desk answers only this machine"
        host = _one(scope, b"host")
        if host is None or not is_loopback(_hostname(host)):
            return 421, "the desk is reached as 127.0.0.1 or localhost and by no other name"
        if not scope["path"].startswith("/v1/"):
            return 0, ""
        shown = _one(scope, b"authorization")
        if shown is None or not hmac.compare_digest(shown.encode("latin-1"), self._expected):
            return 401, "open the desk by the whole address that `labeler agent desk` printed, with what follows the #"
        if scope["method"] != "GET":
            origin = _one(scope, b"origin")
            if (b"origin" in dict(scope["headers"])) and (origin is None or urlsplit(origin).netloc != host):
                return 403, "the desk takes decisions only from its own page"
            length = _one(scope, b"content-length") or ""
            if not length.isdecimal() or int(length) > MAX_BODY_BYTES:
                return 413, f"a decision has at most {MAX_BODY_BYTES} bytes, and states how many"
        return 0, ""


def _hostname(host: str) -> str:
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""


def _one(scope: Scope, name: bytes) -> str | None:
    """Return the value of a header that came exactly once; else None."""
    found = [value for key, value in scope["headers"] if key == name]
    return found[0].decode("latin-1") if len(found) == 1 else None


async def _refuse(status: int, sentence: str, send: Send) -> None:
    body = json.dumps({"detail": sentence}).encode()
    headers: Iterable[tuple[bytes, bytes]] = (
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
    )
    await send({"type": "http.response.start", "status": status, "headers": list(headers)})
    await send({"type": "http.response.body", "body": body})


_HEADERS = [(name.lower().encode(), value.encode()) for name, value in HEADERS.items()]
_OURS = frozenset(name for name, _ in _HEADERS)


PAGE = "index.html"


class SiteActions(Protocol):
    """Actions open to the people of a site; each raises `LabelerError` with a sentence for them."""

    def overview(self) -> dict[str, Any]:
        """Return the site's identity, whether it answers, waiting and past decisions, budget left, answers, images."""

    def rounds(self) -> list[dict[str, Any]]:
        """Return every round that was ever answered."""

    def rounds_csv(self) -> str:
        """Return `rounds` as CSV."""

    def approve(self, digest: str) -> None:
        """Let the agent answer a task."""

    def refuse(self, digest: str, reason: str) -> None:
        """Refuse a task."""

    def stop(self, reason: str) -> None:
        """Answer nothing new."""

    def resume(self) -> None:
        """Answer again."""

    def embed(self) -> None:
        """Begin to embed what has changed in the folder of images."""


class Why(BaseModel):
    """The reason for a decision."""

    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)

    reason: str = Field(default="", max_length=1000)


def create_desk(site: SiteActions, *, token: str) -> FastAPI:
    """Build the application.

    Args:
        token: the secret that a request under /v1 must carry.
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

    @app.post("/v1/images/embed")
    def embed(_: Why) -> dict[str, Any]:
        site.embed()
        return site.overview()

    @app.exception_handler(LabelerError)
    async def refused(_: Request, error: Exception) -> Response:
        status = status_of(error) if isinstance(error, LabelerError) else 500
        return JSONResponse({"detail": str(error)}, status_code=status)

    @app.exception_handler(RequestValidationError)
    async def malformed(_: Request, error: Exception) -> Response:
        kinds = [one["type"] for one in error.errors()] if isinstance(error, RequestValidationError) else []
        status = 400 if "json_invalid" in kinds else 422
        told = "a decision is JSON with at most a reason of 1000 characters"
        return JSONResponse({"detail": told}, status_code=status)

    app.add_middleware(Guard, token=token)
    return app


MOST_IDLE = 64
"""Most connections without a request under way; beyond it the longest idle ones are closed."""
_WATCH_S = 0.2


def serve_desk(
    site: SiteActions, *, host: str, port: int, stop: threading.Event, on_ready: Callable[[str], None] = lambda _: None
) -> None:
    """Serve a site's console to this machine.

    Args:
        host: a loopback address.
        port: 0 takes a free one.
        on_ready: called with the full URL, token included, once it listens.

    Raises:
        InvalidSetting: other machines can reach the address.
        Unavailable: the address is taken.
    """
    if not is_loopback(host):
        raise InvalidSetting(
            f"the desk is only for the machine that its agent runs on, and other machines reach {host!r}: leave out "
            "--host, and forward the port from elsewhere (ssh -L 8600:127.0.0.1:8600 HOST)"
        )
    token = secrets.token_urlsafe(32)
    with listen(host, port) as listening:
        server = Server(create_desk(site, token=token), most_idle=MOST_IDLE, proxy_headers=False)
        running = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, name="desk", daemon=True)
        running.start()
        on_ready(f"{url_of(listening)}/#token={token}")
        while not stop.wait(_WATCH_S) and running.is_alive():
            pass
        server.should_exit = True
        running.join(GRACE_S + 5)
