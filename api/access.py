"""Access control of every route: a table of roles, the gate that applies it, and strict reading of the body.

A token is looked up by its SHA-256 (in labeler.ledger), never compared here, never logged. Routes for agents and
talliers carry no token: every message is signed by its sender, and the coordinator checks that.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final, Literal, TypeVar, cast, get_args, get_origin

from fastapi import Request, Response
from fastapi.dependencies.models import Dependant
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException

from api.coordinator.ownership import Reader
from api.limits import BODY_KEY, SMALL_BYTES, RateLimits, RequestBody, address_group
from api.schema import Role
from labeler.errors import LabelerError, NotAllowed, NotAuthenticated, TooLarge
from labeler.settings import nearest

if TYPE_CHECKING:
    from labeler.ledger.tokens import TokenRecord, TokenStore

Need = Literal["open", "optional", "scraper", "signed", "invited", "viewer", "auditor", "requester", "admin"]
"""`open`: anybody. `optional`: anybody; a token gets a fuller answer. `scraper`: an auditor, or anybody if the settings
open /metrics. `signed`: a party, by its signature. `invited`: the holder of an invitation's one-use token, which the
signed body carries. `auditor`: a viewer or an administrator, but no requester, because the answer names the jobs of all
requesters."""

ACCESS: dict[tuple[str, str], Need] = {
    ("GET", "/healthz"): "open",
    ("GET", "/readyz"): "optional",
    ("GET", "/openapi.json"): "open",
    ("GET", "/api"): "open",
    ("GET", "/docs"): "open",
    ("GET", "/redoc"): "open",
    ("GET", "/"): "open",
    ("GET", "/dashboard"): "open",
    ("GET", "/dashboard/{asset:path}"): "open",
    ("GET", "/metrics"): "scraper",
    ("POST", "/v1/messages"): "signed",
    ("POST", "/v1/messages:poll"): "signed",
    ("GET", "/v1/whoami"): "viewer",
    ("GET", "/v1/tasks"): "viewer",
    ("GET", "/v1/tasks/{task_id}"): "viewer",
    ("POST", "/v1/tasks"): "requester",
    ("POST", "/v1/tasks/{task_id}/shares"): "requester",
    ("DELETE", "/v1/tasks/{task_id}/shares/{token_id}"): "requester",
    ("POST", "/v1/jobs:estimate"): "viewer",
    ("POST", "/v1/jobs"): "requester",
    ("GET", "/v1/jobs"): "viewer",
    ("GET", "/v1/jobs/{job_id}"): "viewer",
    ("DELETE", "/v1/jobs/{job_id}"): "requester",
    ("DELETE", "/v1/jobs/{job_id}/data"): "requester",
    ("GET", "/v1/jobs/{job_id}/labels"): "requester",
    ("GET", "/v1/jobs/{job_id}/model"): "requester",
    ("GET", "/v1/jobs/{job_id}/student"): "requester",
    ("GET", "/v1/jobs/{job_id}/evaluation"): "requester",
    ("POST", "/v1/jobs/{job_id}:thumbnails"): "requester",
    ("GET", "/v1/jobs/{job_id}/events"): "viewer",
    ("POST", "/v1/labels"): "requester",
    ("GET", "/v1/budget"): "viewer",
    ("GET", "/v1/budget/agents/{agent_id}"): "viewer",
    ("GET", "/v1/budget/queries"): "viewer",
    ("GET", "/v1/ledger"): "viewer",
    ("GET", "/v1/evidence"): "auditor",
    ("GET", "/v1/parties"): "viewer",
    ("POST", "/v1/parties"): "admin",
    ("POST", "/v1/parties/{party_id}:rotate"): "admin",
    ("DELETE", "/v1/parties/{party_id}"): "admin",
    ("POST", "/v1/invitations"): "admin",
    ("DELETE", "/v1/invitations/{party_id}"): "admin",
    ("POST", "/v1/enrolments"): "invited",
    ("GET", "/v1/tokens"): "admin",
    ("POST", "/v1/tokens"): "admin",
    ("DELETE", "/v1/tokens/{token_id}"): "admin",
}
"""The dashboard's files hold no data: the page asks its reader for a token and calls /v1 with it. Ownership of tasks
and jobs, and what a viewer sees of them, is decided behind the gate (api.coordinator.ownership). A price is free, so a
viewer may ask for it."""

LISTS: Final = frozenset(
    {
        ("GET", "/metrics"),
        ("GET", "/v1/budget"),
        ("GET", "/v1/budget/agents/{agent_id}"),
        ("GET", "/v1/budget/queries"),
        ("GET", "/v1/ledger"),
        ("GET", "/v1/jobs"),
        ("GET", "/v1/tasks"),
        ("GET", "/v1/parties"),
        ("GET", "/v1/tokens"),
    }
)
"""Lists and sums, which anybody may read again and again: they take turns (api.limits.Turns), and nobody else waits."""

VERSIONED: Final = "/v1/"
"""Prefix of the paths that programs call."""
JSON: Final = "application/json"
MAX_JSON_VALUES: Final = 2_000_000
"""A parsed number takes up to 100 bytes, however short its text."""
PARSED_AT_ONCE: Final = 2
"""Large documents parsed at once: parsing briefly takes many times their size in memory."""

Parsed = TypeVar("Parsed")

_RANK: dict[Role, int] = {"viewer": 0, "requester": 1, "admin": 2}
MAX_TOKEN_CHARS = 200


def reaches(role: Role, need: Role) -> bool:
    """Return whether a token of `role` may do what needs `need`."""
    return _RANK[role] >= _RANK[need]


class Gate:
    """Admits a request or refuses it with a reason.

    Args:
        limits: how often one token may call, and how often one address may fail to show a good one.
        is_metrics_open: whether /metrics takes no token. The source address proves nothing: behind a proxy on this
            machine, every stranger comes from this machine.
    """

    def __init__(self, tokens: TokenStore, limits: RateLimits, *, is_metrics_open: bool = False) -> None:
        self._tokens = tokens
        self._limits = limits
        self._is_metrics_open = is_metrics_open

    async def admit(self, request: Request, path: str) -> None:
        """Check a request against the table and count it; store its token's record in `request.state.token`.

        Raises:
            NotAuthenticated: no token, or one that is unknown or revoked.
            NotAllowed: the token's role does not reach this route, or the table has no row for the route.
            RateLimited: too many requests from this token, or too many failures or enrolments from this address.
            Crowded: too many bodies are being received already.
        """
        request.state.token = None
        need = ACCESS.get((request.method, path))
        if need is None:
            raise NotAllowed(f"{request.method} {path} has no row in the table of roles, so nobody may call it")
        body: RequestBody = request.scope[BODY_KEY]
        if need == "invited":
            # Before the body is read: a client without a token is charged for the attempt, not for its content.
            self._limits.enrolments.hit(client_address(request))
            body.admit("stranger", client_address(request))
        if need == "signed":
            body.admit("party", client_address(request))
        if need in ("open", "signed", "invited") or (need == "scraper" and self._is_metrics_open):
            return
        if need == "optional" and "authorization" not in request.headers:
            return
        secret = _bearer(request)
        record: TokenRecord | None = None
        if secret is not None:
            record = self._tokens.known(secret) or await run_in_threadpool(self._tokens.find, secret)
        if record is None or record.revoked_at is not None:
            self._limits.failures.hit(client_address(request))
            raise NotAuthenticated(
                "this needs a bearer token: send the header 'Authorization: Bearer lab_...'. "
                + ("None was sent." if secret is None else "The one that was sent is unknown or was revoked.")
            )
        request.state.token = record
        self._limits.requests.hit(record.token_id)
        least: Role = "viewer" if need in ("optional", "scraper", "auditor") else cast(Role, need)
        role = record.role
        if need in ("auditor", "scraper") and role == "requester":
            raise NotAllowed(
                f"{request.method} {path} shows every requester's jobs, so it needs an auditor's token (role "
                "viewer) or an administrator's; this token is a requester's"
            )
        if not reaches(role, least):
            raise NotAllowed(
                f"{request.method} {path} needs a token of role {least} or higher; this token is a {role}. "
                "Ask an administrator for another token."
            )
        body.admit("token", record.token_id)


async def reader(request: Request) -> Reader:
    """Return the reader: id and role of the request's token. Runs on the event loop, because nothing is looked up."""
    record: TokenRecord = request.state.token
    return Reader(record.token_id, record.role)


def _bearer(request: Request) -> str | None:
    scheme, _, secret = request.headers.get("authorization", "").partition(" ")
    secret = secret.strip()
    if scheme.lower() != "bearer" or not secret or len(secret) > MAX_TOKEN_CHARS or not secret.isascii():
        return None
    return secret


def client_address(request: Request) -> str:
    """Return the address a request is counted under: the peer's, or the one a trusted proxy reports."""
    return "" if request.client is None else address_group(request.client.host)


class Route(APIRoute):
    """A route that passes the gate before its body is read, and takes only unambiguous JSON.

    FastAPI reads a body before it resolves dependencies, so access is checked one step earlier: a stranger's bytes are
    never read. Below /v1, an unknown query parameter or a repeated single-valued one is refused. Otherwise a client
    that mistyped `limit` would take one page for everything. Routes outside /v1 serve browsers, proxies and probes,
    which add query parameters.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Return the handler that answers a request."""
        handle = super().get_route_handler()
        known = dict(_queries(self.dependant))

        async def guarded(request: Request) -> Response:
            await request.app.state.gate.admit(request, self.path)
            if "\0" in request.scope["path"] or b"%00" in request.scope["query_string"]:
                raise HTTPException(422, "a path or query must not hold a NUL character")
            if self.path.startswith(VERSIONED):
                _refuse_unknown(request, known)
            if self.body_field is not None:
                media_type(request, JSON)
                request = _StrictRequest(request.scope, request.receive)
            try:
                if (request.method, self.path) not in LISTS:
                    return await handle(request)
                token: TokenRecord | None = request.state.token
                async with request.app.state.lists.hold(client_address(request) if token is None else token.token_id):
                    return await handle(request)
            except HTTPException as error:
                # FastAPI turns any error during the reading of a body into "400"; restore the real one.
                if isinstance(error.__cause__, LabelerError):
                    raise error.__cause__ from None
                raise

        return guarded


def media_type(request: Request, *taken: str) -> str:
    """Return the media type of a request's body, without parameters.

    Raises:
        HTTPException: 415, the type is none of `taken`.
    """
    found = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if found not in taken:
        raise HTTPException(415, f"send the body as {' or '.join(taken)}; found {found[:100] or 'no Content-Type'}")
    return found


def _queries(dependant: Dependant) -> Iterator[tuple[str, bool]]:
    """Yield the query parameters that a route knows, and whether each may be repeated."""
    for one in dependant.query_params:
        yield one.alias, _is_list(one.field_info.annotation)
    for other in dependant.dependencies:
        yield from _queries(other)


def _is_list(annotation: Any) -> bool:
    return get_origin(annotation) is list or any(_is_list(one) for one in get_args(annotation))


def _refuse_unknown(request: Request, known: Mapping[str, bool]) -> None:
    wrong: list[tuple[str, str]] = []
    for name, count in Counter(name for name, _ in request.query_params.multi_items()).items():
        if name not in known:
            near = nearest(name[:100], known)
            hint = "" if near is None else f"; did you mean {near}?"
            wrong.append((name, f"this route knows {', '.join(known) or 'no parameter'}{hint}"))
        elif count > 1 and not known[name]:
            wrong.append((name, f"it was given {count} times; give it once"))
    if wrong:
        raise RequestValidationError([{"loc": ("query", name), "msg": message} for name, message in wrong])


class _StrictRequest(Request):
    async def json(self) -> Any:
        return await read_json(self, parse_json)


async def read_json(request: Request, parse: Callable[[bytes], Parsed], *, writes: bool = False) -> Parsed:
    """Parse a request's body; a large one in a thread, few at once, so that it delays no other request.

    Args:
        parse: a function like `parse_json`.
        writes: whether it may wait for the disk, so that no other request may wait for it.
    """
    # Not `request.body()`, which would keep the bytes for as long as the request lasts.
    data = b"".join([part async for part in request.stream()])
    if len(data) <= SMALL_BYTES:
        return await run_in_threadpool(parse, data) if writes else parse(data)
    async with request.app.state.parsing:
        return await run_in_threadpool(parse, data)


def parse_json(data: bytes) -> Any:
    """Read one JSON document as RFC 8259 has it.

    NaN, Infinity and numbers that overflow to it are refused. So is nesting deep enough to exhaust the parser. NUL
    characters are refused because PostgreSQL cannot store them, and a repeated name because one of the two would be
    ignored.

    Raises:
        json.JSONDecodeError: not such a document. The error does not carry the body.
        TooLarge: more values than the limit.
    """
    values = data.count(b",") + data.count(b"[")
    if values > MAX_JSON_VALUES:
        raise TooLarge(
            f"the document holds about {values} values; at most {MAX_JSON_VALUES} are taken as JSON. "
            "Send more feature vectors as Parquet in a form (columns name and feature)"
        )
    try:
        if b"\\u0000" in data:
            raise ValueError("a document must not hold a NUL character")
        return json.loads(
            data.decode("utf-8"),
            parse_constant=_refuse_constant,
            parse_float=_finite,
            object_pairs_hook=_refuse_repeats,
        )
    except RecursionError:
        why, place = "the document is nested too deeply", 0
    except ValueError as error:  # also raised by text that is not UTF-8, and by an integer with too many digits
        why, place = getattr(error, "msg", str(error)), getattr(error, "pos", 0)
    raise json.JSONDecodeError(why, "", place)


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not a JSON number")


def _refuse_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) != len(pairs):
        raise ValueError("an object has the same name twice")
    return content


def _finite(digits: str) -> float:
    number = float(digits)
    if not math.isfinite(number):
        raise ValueError("a number is too large")
    return number
