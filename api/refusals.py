"""Every refusal as application/problem+json (RFC 9457): our own, of validation, of the router, and the unexpected."""

from __future__ import annotations

import json
import logging
import secrets
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from api.access import ACCESS
from api.problems import TYPE_PREFIX, problem_of
from api.schema import Problem
from labeler.errors import LabelerError, NotAuthenticated, StorageFull, TryAgain
from labeler.system.files import is_full, storage_full

_log = logging.getLogger("labeler.api")

MEDIA_TYPE = "application/problem+json"
INVALID_REQUEST = TYPE_PREFIX + "invalid-request"
INTERNAL = TYPE_PREFIX + "internal"
_BY_STATUS = {
    404: ("not-found", "There is nothing of that name"),
    405: ("method-not-allowed", "The route does not know this method"),
    413: ("too-large", "The body is larger than is taken"),
    415: ("unsupported-media-type", "The body has a type that is not taken"),
    422: ("invalid-request", "The request does not fit the schema"),
}
MAX_FIELDS = 20
TO_A_STRANGER = "the service cannot answer this now; its operator finds the reason in its log"
"""Instead of what is out of order, for whoever shows neither a token nor the signature of a party."""
FULL_RETRY_AFTER_S = 60
"""Somebody has to make room on a disk that is full: whoever asks every second only keeps it busy."""


REFUSED = (LabelerError, RequestValidationError, HTTPException)
"""What says why a request is refused; anything else is a mistake of ours."""


def install(app: FastAPI) -> None:
    """Render every refusal of an app as a problem document."""
    for kind in REFUSED:
        app.add_exception_handler(kind, answer)


async def answer(request: Request, error: Exception) -> Response:
    """The problem document of a refusal."""
    if isinstance(error, LabelerError):
        made = refusal(error, instance=request.url.path, delta=request.app.state.delta)
        need = ACCESS.get((request.method, getattr(request.scope.get("route"), "path", "")))
        if made.status_code < 500 or need in (None, "signed") or getattr(request.state, "token", None) is not None:
            return made
        # A sentence about what is out of order may name the journal's database and its host.
        _log.warning("refused to a stranger", extra={"problem": error.problem_type, "detail": str(error)})
        told = json.loads(bytes(made.body)) | {"detail": TO_A_STRANGER}
        kept = {name: value for name, value in made.headers.items() if name == "retry-after"}
        return render(told, headers=kept)
    return await (_invalid if isinstance(error, RequestValidationError) else _of_the_router)(request, error)


def render(problem: Mapping[str, Any], *, headers: Mapping[str, str] | None = None) -> Response:
    """A problem document as a response."""
    content = Problem.model_validate(problem).model_dump_json()
    return Response(content, status_code=problem["status"], media_type=MEDIA_TYPE, headers=headers)


def refusal(error: LabelerError, *, instance: str, delta: float | None = None) -> Response:
    """One of our own errors as a response, with the headers its status asks for.

    Args:
        delta: at which a refusal for budget states its epsilons.
    """
    problem = problem_of(error, delta=delta, job_id=getattr(error, "job_id", "")) | {"instance": instance}
    headers: dict[str, str] = {}
    if isinstance(error, NotAuthenticated):
        headers["WWW-Authenticate"] = 'Bearer realm="labeler"'
    if isinstance(error, TryAgain) or problem["status"] in (429, 503):
        usual_s = FULL_RETRY_AFTER_S if problem["status"] == 507 else 1
        headers["Retry-After"] = str(getattr(error, "retry_after_s", usual_s))
    return render(problem, headers=headers)


def invalid(fields: Sequence[Mapping[str, Any]], *, instance: str) -> Response:
    """A request that does not fit its schema: which fields, and why; never what stood in them."""
    listed = [
        {"field": ".".join(str(part)[:100] for part in field["loc"]), "message": str(field["msg"])[:300]}
        for field in fields[:MAX_FIELDS]
    ]
    first = f"{listed[0]['field']}: {listed[0]['message']}" if listed else "the request does not fit the schema"
    more = f" (and {len(fields) - 1} more)" if len(fields) > 1 else ""
    problem = {
        "type": INVALID_REQUEST,
        "title": _BY_STATUS[422][1],
        "status": 422,
        "detail": first + more,
        "instance": instance,
        "fields": listed,
    }
    return render(problem)


def unexpected(error: Exception, *, instance: str) -> Response:
    """An error nobody foresaw: its place goes to the log, an incident id to whoever asked.

    A full disk may show itself wherever something is written, so it is known here, whoever met it.
    """
    if isinstance(error, OSError) and is_full(error):
        _log.warning("no room left", extra={"problem": StorageFull.problem_type})
        return refusal(storage_full("what was sent"), instance=instance)
    incident = secrets.token_hex(8)
    _log.error("unexpected error", extra={"incident": incident}, exc_info=error)
    problem = {
        "type": INTERNAL,
        "title": "The service made a mistake",
        "status": 500,
        "detail": f"nothing is known to be wrong with the request; tell the operator the incident id {incident}",
        "instance": instance,
        "incident": incident,
    }
    return render(problem)


async def _invalid(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)  # noqa: S101 - installed for this type only
    fields = []
    for field in error.errors():
        reason = field.get("ctx", {}).get("error") if field.get("type") == "json_invalid" else None
        fields.append({"loc": field["loc"], "msg": f"{field['msg']}: {reason}" if reason else field["msg"]})
    return invalid(fields, instance=request.url.path)


async def _of_the_router(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)  # noqa: S101 - installed for this type only
    slug, title = _BY_STATUS.get(error.status_code, ("refused", HTTPStatus(error.status_code).phrase))
    problem = {
        "type": TYPE_PREFIX + slug,
        "title": title,
        "status": error.status_code,
        "detail": str(error.detail),
        "instance": request.url.path,
    }
    headers = dict(error.headers or {})
    if error.status_code == 405:
        # The router knows only the first of several routes on one path.
        path = getattr(request.scope.get("route"), "path", "")
        known = {method for method, where in ACCESS if where == path}
        headers["Allow"] = ", ".join(sorted(known | ({"HEAD"} if "GET" in known else set())))
    return render(problem, headers=headers)
