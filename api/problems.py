"""Refusals as problem documents (RFC 9457): a stable type, a title and a status for every error of the tree.

`type` is "urn:labeler:problem:" and the error's `problem_type`. Clients decide by it; `detail` is for people. A refusal
for budget has further members: account, level, amount asked, amount left, and last spenders.

This module also renders every refusal as a response: our own, validation's, the router's, and unexpected errors.
"""

from __future__ import annotations

import json
import logging
import secrets
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from api.access import ACCESS
from api.schema import Problem
from labeler import errors
from labeler.budget import epsilon_left, epsilon_spent
from labeler.errors import BudgetExceeded, LabelerError, NotAuthenticated, StorageFull, TryAgain
from labeler.settings import plain_problems
from labeler.system.files import is_full, storage_full

TYPE_PREFIX = "urn:labeler:problem:"

PROBLEMS: dict[type[LabelerError], tuple[int, str]] = {
    errors.LabelerError: (500, "The service could not do this"),
    errors.InvalidSetting: (422, "A setting is outside its bounds"),
    errors.InvalidTask: (422, "The task cannot be made"),
    errors.UnsafeGrid: (422, "The noise grid is too coarse to prove anything"),
    errors.TooLarge: (413, "This is larger than the limit"),
    errors.IdempotencyMismatch: (422, "The idempotency key belongs to another request"),
    errors.BadData: (422, "The data is not what it should be"),
    errors.NotThere: (422, "A file or folder that was named is not there"),
    errors.DamagedShard: (500, "A shard is damaged"),
    errors.MixedShards: (409, "Agents do not agree on classes or backbone"),
    errors.UnreadableImage: (422, "An image cannot be read"),
    errors.UnreadableFile: (422, "A file cannot be read now"),
    errors.IdenticalImages: (422, "Private images are there more than once"),
    errors.NoUsableImage: (422, "No image of a source can be used"),
    errors.JournalBroken: (503, "The journal fails verification"),
    errors.JournalBehind: (503, "The journal is older than an earlier copy of it"),
    errors.UnsafeStorage: (503, "The storage could lose a charge"),
    errors.PrivacyRefusal: (403, "This would void the privacy guarantee"),
    errors.BudgetExceeded: (409, "The privacy budget does not cover this"),
    errors.PolicyRefusal: (403, "The policy of a site does not allow this"),
    errors.RefusedByPerson: (403, "A person at a site has refused this"),
    errors.UnsafeIndex: (403, "The index depends on private data"),
    errors.ProtocolViolation: (409, "A message breaks the rules of the round"),
    errors.WrongDigest: (409, "A message belongs to another task or round"),
    errors.WrongVersion: (409, "A message is written in another version of the wire format"),
    errors.DuplicateAgent: (409, "An agent sent two different contributions"),
    errors.LateShare: (409, "A share came after the sum of its round was made"),
    errors.Forged: (403, "The signature or seal is not valid"),
    errors.Replayed: (409, "The message was taken before"),
    errors.NotEnrolled: (403, "The sender is not enrolled"),
    errors.AccessRefused: (403, "Access refused"),
    errors.NotAuthenticated: (401, "A known token is needed"),
    errors.NotAllowed: (403, "The token's role is not sufficient"),
    errors.NotFound: (404, "No object has that name"),
    errors.Gone: (410, "It was deleted for good"),
    errors.NotReady: (409, "It is not in the state for this"),
    errors.JobNotCompleted: (409, "The job ended without labels"),
    errors.TryAgain: (503, "This may succeed later"),
    errors.Interrupted: (503, "The work was stopped; it continues"),
    errors.QuorumNotReached: (503, "Too few agents answered"),
    errors.OutputInUse: (503, "Another process is at work here"),
    errors.JournalInUse: (503, "Another process holds the journal"),
    errors.AwaitingApproval: (503, "A person at a site has to approve first"),
    errors.SiteStopped: (503, "A site has stopped answering for now"),
    errors.RateLimited: (429, "Too many requests"),
    errors.QuotaUsedUp: (429, "The uploads of this token take too much room"),
    errors.Unavailable: (503, "A part of the service cannot be reached now"),
    errors.StorageFull: (507, "There is no room left to keep it"),
}
"""Status and title by class; an unlisted class has those of its parent."""


BY_STATUS: dict[int, tuple[str, str, str]] = {
    400: ("malformed-body", "The body is not a JSON document", "body.1: JSON decode error: Expecting property name"),
    401: ("not-authenticated", "No token, or an unknown one", "this needs a bearer token"),
    403: ("not-allowed", "The token's role is not sufficient", "this needs a token of role admin or higher"),
    404: ("not-found", "No object has that name", "there is no job of that id"),
    405: ("method-not-allowed", "The route does not allow this method", "this route takes GET, HEAD, POST; found PUT"),
    409: ("not-ready", "It is not in the state for this", "the job is collecting; labels follow once completed"),
    410: (
        "gone",
        "It was deleted for good",
        "the job's questions and results were deleted; its charge stays in the ledger",
    ),
    413: ("too-large", "The body is larger than the limit", "the body has 70000000 bytes; at most 67108864 are taken"),
    415: ("unsupported-media-type", "The body has an unsupported type", "send the body as application/json"),
    422: ("invalid-request", "The request does not fit the schema", "body.k: must be at least 1"),
    429: ("rate-limited", "Too many requests", "one token may send 600 requests a minute; send the next in 3 s"),
    503: ("unavailable", "A part of the service cannot be reached now", "the mailbox does not answer; try again"),
    507: ("storage-full", "There is no room left to keep it", "the upload cannot be kept: the disk is full"),
}
"""Type, title and example sentence by status: for the router's refusals, and for every documented one."""


class KeptRefusal(BudgetExceeded):
    """A repeated refusal for budget: the problem document that was stored with the refused job."""

    def __init__(self, problem: Mapping[str, Any]) -> None:
        super().__init__(str(problem["detail"]))
        self.problem = dict(problem)


def status_of(error: LabelerError) -> int:
    """Return the HTTP status of an error."""
    return _row(error)[0]


def problem_of(error: LabelerError, *, delta: float | None = None, job_id: str = "") -> dict[str, Any]:
    """Return the problem document of an error, as JSON types.

    Args:
        delta: of the epsilons in a refusal for budget; None leaves them out.
        job_id: the refused job, if there is one.
    """
    if isinstance(error, KeptRefusal):
        return error.problem
    status, title = _row(error)
    problem: dict[str, Any] = {
        "type": TYPE_PREFIX + error.problem_type,
        "title": title,
        "status": status,
        "detail": str(error),
    }
    if job_id:
        problem["job_id"] = job_id
    if isinstance(error, BudgetExceeded) and error.account:
        problem |= _budget_members(error, delta)
    return problem


def _row(error: LabelerError) -> tuple[int, str]:
    return next(PROBLEMS[kind] for kind in type(error).__mro__ if kind in PROBLEMS)


def _budget_members(error: BudgetExceeded, delta: float | None) -> dict[str, Any]:
    # A charge is at least one nano-unit, so 0 asked means that no finite charge exists.
    members: dict[str, Any] = {
        "account": error.account,
        "level": error.level,
        "asked_nano": error.asked or None,
        "left_nano": error.left,
        "cap_nano": error.cap,
        "last_spenders": [{"reservation_id": name, "amount_nano": amount} for name, amount in error.last_spenders],
    }
    if delta is not None:
        members |= {
            "delta": delta,
            "asked_epsilon": epsilon_spent(error.asked, delta) if error.asked else None,
            "left_epsilon": epsilon_left(error.left, delta),
            "cap_epsilon": epsilon_spent(error.cap, delta),
        }
    return members


log = logging.getLogger("labeler.api")

MEDIA_TYPE = "application/problem+json"
INVALID_REQUEST = TYPE_PREFIX + "invalid-request"
INTERNAL = TYPE_PREFIX + "internal"
MAX_FIELDS = 20
TO_A_STRANGER = "the service cannot answer this now; its operator finds the reason in its log"
"""Replaces the reason of a failure for callers with neither a token nor a party's signature."""
FULL_RETRY_AFTER_S = 60
"""A person has to make room on a full disk, so retrying every second would only keep it busy."""


def install(app: FastAPI) -> None:
    """Render every refusal of an app as a problem document; any other exception is a defect of ours."""
    for kind in (LabelerError, RequestValidationError, HTTPException):
        app.add_exception_handler(kind, answer)


async def answer(request: Request, error: Exception) -> Response:
    """Answer a refusal with its problem document."""
    if isinstance(error, LabelerError):
        made = refusal(error, instance=request.url.path, delta=request.app.state.delta)
        need = ACCESS.get((request.method, getattr(request.scope.get("route"), "path", "")))
        if made.status_code < 500 or need in (None, "signed") or getattr(request.state, "token", None) is not None:
            return made
        # The sentence may name the journal's database and its host.
        log.warning("refused to a stranger", extra={"problem": error.problem_type, "detail": str(error)})
        told = json.loads(bytes(made.body)) | {"detail": TO_A_STRANGER}
        kept = {name: value for name, value in made.headers.items() if name == "retry-after"}
        return render(told, headers=kept)
    return await (_invalid if isinstance(error, RequestValidationError) else _of_the_router)(request, error)


def render(problem: Mapping[str, Any], *, headers: Mapping[str, str] | None = None) -> Response:
    """Render a problem document as a response."""
    content = Problem.model_validate(problem).model_dump_json()
    return Response(content, status_code=problem["status"], media_type=MEDIA_TYPE, headers=headers)


def refusal(error: LabelerError, *, instance: str, delta: float | None = None) -> Response:
    """Render one of our own errors as a response, with the headers that its status requires.

    Args:
        delta: of the epsilons in a refusal for budget.
    """
    problem = problem_of(error, delta=delta, job_id=getattr(error, "job_id", "")) | {"instance": instance}
    headers: dict[str, str] = {}
    if isinstance(error, NotAuthenticated):
        headers["WWW-Authenticate"] = 'Bearer realm="labeler"'
    if isinstance(error, TryAgain) or problem["status"] in (429, 503):
        usual_s = FULL_RETRY_AFTER_S if problem["status"] == 507 else 1
        headers["Retry-After"] = str(getattr(error, "retry_after_s", usual_s))
    return render(problem, headers=headers)


def unexpected(error: Exception, *, instance: str) -> Response:
    """Answer an unexpected error: its place goes to the log, an incident id to the caller.

    A full disk is recognized here, because any write may meet it.
    """
    if isinstance(error, OSError) and is_full(error):
        log.warning("no room left", extra={"problem": StorageFull.problem_type})
        return refusal(storage_full("what was sent"), instance=instance)
    incident = secrets.token_hex(8)
    log.error("unexpected error", extra={"incident": incident}, exc_info=error)
    problem = {
        "type": INTERNAL,
        "title": "The service failed unexpectedly",
        "status": 500,
        "detail": f"the request may be fine; tell the operator the incident id {incident}",
        "instance": instance,
        "incident": incident,
    }
    return render(problem)


async def _invalid(request: Request, error: Exception) -> Response:
    """Refuse a request that does not fit its schema: name the fields and reasons, never their values.

    The status is 400 if its body is not JSON at all.
    """
    assert isinstance(error, RequestValidationError)  # noqa: S101 - installed for this type only
    status, found = 422, []
    for field in error.errors():
        if field.get("type") == "json_invalid":
            status = 400
            why = field.get("ctx", {}).get("error")
            field = {**field, "msg": f"{field['msg']}: {why}"} if why else field
        found.append(field)
    body = getattr(request.scope.get("route"), "body_field", None)
    model = None if body is None else body.field_info.annotation
    listed = [
        {"field": ".".join(str(part)[:100] for part in loc), "message": said[:300]}
        for loc, said in plain_problems(found, model=model, within=1)
    ]
    first = f"{listed[0]['field']}: {listed[0]['message']}" if listed else "the request does not fit the schema"
    more = f" (and {len(listed) - 1} more)" if len(listed) > 1 else ""
    slug, title, _ = BY_STATUS[status]
    problem = {
        "type": TYPE_PREFIX + slug,
        "title": title,
        "status": status,
        "detail": first + more,
        "instance": request.url.path,
        "fields": listed[:MAX_FIELDS],
    }
    return render(problem)


async def _of_the_router(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)  # noqa: S101 - installed for this type only
    slug, title, _ = BY_STATUS.get(error.status_code, ("refused", HTTPStatus(error.status_code).phrase, ""))
    detail, headers = str(error.detail), dict(error.headers or {})
    if error.status_code == 405:
        # The router reports only the first of several routes on one path.
        path = getattr(request.scope.get("route"), "path", "")
        known = {method for method, where in ACCESS if where == path}
        headers["Allow"] = ", ".join(sorted(known | ({"HEAD"} if "GET" in known else set())))
        detail = f"this route takes {headers['Allow']}; found {request.method[:20]}"
    elif detail == HTTPStatus.NOT_FOUND.phrase:
        detail = "no route has this path; /openapi.json lists them all"
    problem = {
        "type": TYPE_PREFIX + slug,
        "title": title,
        "status": error.status_code,
        "detail": detail,
        "instance": request.url.path,
    }
    return render(problem, headers=headers)
