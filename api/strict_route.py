"""The way of a request into every route: access first, then the body, and only JSON that means one thing.

FastAPI reads a body before it looks at dependencies, so access is checked one step earlier, here: a stranger's 64 MiB
are never read. JSON is taken as RFC 8259 has it: no NaN, no Infinity, no number that overflows to one, no nesting deep
enough to exhaust the parser, no NUL character (PostgreSQL cannot store it), and no name twice in an object, of which
one would be passed over.

Below /v1 a parameter that the route does not know, or one that is given twice and means one thing, is refused: it would
be left out of account, and whoever mistyped `limit` would take a page for everything. What stands outside /v1 is asked
by browsers, proxies and probes, which add parameters of their own, and answers as if they were not there.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Mapping
from functools import cached_property
from typing import Any, TypeVar, get_args, get_origin

from fastapi import Request, Response
from fastapi.dependencies.models import Dependant
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.types import Message, Scope

from api.access import ACCESS, NO_TOKEN, Gate
from api.form_parts import chunks, refuse_length
from labeler.errors import LabelerError, TooLarge

MAX_JSON_BYTES = 1024 * 1024
"""Of ordinary requests."""
MAX_STRANGERS_BYTES = 16 * 1024
"""Of requests that anybody may send, of which an enrolment is the longest, with some 600: parsed JSON takes a hundred
times its text in memory."""
MAX_FEATURES_JSON_BYTES = 16 * 1024 * 1024
"""Of jobs that carry feature vectors as JSON; more of them come in Parquet, which takes a fraction of the memory."""
MAX_JSON_VALUES = 2_000_000
"""Each number of a parsed document takes up to 100 bytes, however short it was written."""

VERSIONED = "/v1/"
"""What the paths begin with that programs call."""

_ALL_DIGITS_ALIKE = bytes.maketrans(b"123456789E", b"000000000e")
_OVERFLOWING = (b"e000", b"0" * 100)
"""What a number beyond 1.8e308 has: three digits in its exponent, or more than two hundred before it."""

_JSON = "application/json"
SMALL_BYTES = 64 * 1024
"""Parsed at once; what is larger would hold up every other request."""


def parse_json(data: bytes) -> Any:
    """Read one JSON document strictly.

    Raises:
        json.JSONDecodeError: it is not JSON, holds a number that is not finite, a NUL or a name twice, or is nested too
            deeply.
        TooLarge: it holds more values than are taken.
    """
    values = data.count(b",") + data.count(b"[")
    if values > MAX_JSON_VALUES:
        raise TooLarge(
            f"the document holds about {values} values; at most {MAX_JSON_VALUES} are taken as JSON. "
            "Send more feature vectors as Parquet in a form (columns name and feature)"
        )
    try:
        text = data.decode("utf-8")
        if "\\u0000" in text:
            raise json.JSONDecodeError("the NUL character is not taken", "", text.index("\\u0000"))
        # A call for each number takes several times as long as the parser; it is needed where one may overflow.
        parse_float = _finite if _may_overflow(data) else None
        return json.loads(
            text, parse_constant=_refuse_constant, parse_float=parse_float, object_pairs_hook=_refuse_repeats
        )
    except json.JSONDecodeError as error:
        # A fresh error without the document: the original carries the whole body.
        raise json.JSONDecodeError(error.msg, "", error.pos) from None
    except UnicodeDecodeError as error:
        raise json.JSONDecodeError("the body is not UTF-8", "", error.start) from None
    except RecursionError:
        raise json.JSONDecodeError("the document is nested too deeply", "", 0) from None
    except ValueError:
        raise json.JSONDecodeError("a number has too many digits", "", 0) from None


def _may_overflow(data: bytes) -> bool:
    """Whether a number in a document may be too large for a float; True also for some where none is.

    A pattern is matched at every place of it and takes longer than the parser, holding up every other thread.
    """
    alike = data.translate(_ALL_DIGITS_ALIKE, b"+")
    return any(one in alike for one in _OVERFLOWING)


def _refuse_constant(name: str) -> float:
    raise json.JSONDecodeError(f"{name} is no JSON number", "", 0)


def _refuse_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) != len(pairs):
        raise json.JSONDecodeError("a name stands twice in an object", "", 0)
    return content


def _finite(digits: str) -> float:
    number = float(digits)
    if not math.isfinite(number):
        raise json.JSONDecodeError("a number is too large", "", 0)
    return number


class StrictRequest(Request):
    """A request whose body has a bound, and whose `json()` refuses what RFC 8259 does not know."""

    def __init__(self, request: Request, *, max_body_bytes: int) -> None:
        super().__init__(request.scope, request.receive)
        self._max_body_bytes = max_body_bytes
        self._read: bytes | None = None
        self._is_told = False

    async def body(self) -> bytes:
        if self._read is None:
            refuse_length(self, max_bytes=self._max_body_bytes)
            self._read = b"".join([chunk async for chunk in chunks(self, max_bytes=self._max_body_bytes)])
        return self._read

    async def receive_again(self) -> Message:
        """What comes, for whoever reads this request anew: a body that was read comes once more."""
        if self._read is None or self._is_told:
            return await self._receive()
        self._is_told = True
        return {"type": "http.request", "body": self._read, "more_body": False}

    async def json(self) -> Any:
        body = await self.body()
        if len(body) <= SMALL_BYTES:
            return parse_json(body)
        return await run_in_threadpool(parse_json, body)


AtOnce = Callable[[Request], Coroutine[Any, Any, Response | None]]
ENTERED = "labeler.entered"
"""Key of a request's scope: it was let in before the router was asked."""

Endpoint = TypeVar("Endpoint", bound=Callable[..., Any])


def at_once(answer: AtOnce) -> Callable[[Endpoint], Endpoint]:
    """Give an endpoint a short way, which is taken before the router is asked (api.front).

    It answers, or returns None: then the endpoint answers as if there were no short way, so that everything unusual has
    one place. What the short way raises is refused as it would be there.
    """

    def mark(endpoint: Endpoint) -> Endpoint:
        endpoint.at_once = answer  # type: ignore[attr-defined]  # read by StrictRoute
        return endpoint

    return mark


class StrictRoute(APIRoute):
    """A route that asks the gate first, then looks at the kind and size of the body, then reads it."""

    max_body_bytes = MAX_JSON_BYTES

    @cached_property
    def most_bytes(self) -> int:
        """Of a body; little where whoever sends it shows no token."""
        needs = {ACCESS.get((method, self.path)) for method in self.methods or ()}
        return MAX_STRANGERS_BYTES if needs & NO_TOKEN else self.max_body_bytes

    @property
    def short(self) -> AtOnce | None:
        """The short way of its endpoint, where it has one."""
        return getattr(self.endpoint, "at_once", None)

    @cached_property
    def query_names(self) -> Mapping[str, bool]:
        """The parameters that it knows in a query, and whether each may be repeated."""
        return dict(_queries(self.dependant))

    async def enter(self, request: Request, gate: Gate) -> Request:
        """Let a request in, or raise why not; the request as it is to be read.

        Raises:
            LabelerError, HTTPException: it is refused.
        """
        await gate.admit(request, self.path)
        _refuse_nul(request.scope)
        if request.scope["query_string"] and self.path.startswith(VERSIONED):
            _refuse_unknown(request, self.query_names)
        if self.body_field is None:
            return request
        media_type(request, _JSON)
        return StrictRequest(request, max_body_bytes=self.most_bytes)

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def guarded(request: Request) -> Response:
            if ENTERED not in request.scope:
                request = await self.enter(request, request.app.state.gate)
            elif self.body_field is not None:
                request = StrictRequest(request, max_body_bytes=self.most_bytes)
            try:
                return await handle(request)
            except HTTPException as error:
                # FastAPI turns whatever happens while a body is read into "400"; ours says what it was.
                if isinstance(error.__cause__, LabelerError):
                    raise error.__cause__ from None
                raise

        return guarded


def media_type(request: Request, *taken: str) -> str:
    """The media type of a request's body, without parameters.

    Raises:
        HTTPException: 415, it is none of `taken`.
    """
    found = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if found not in taken:
        raise HTTPException(415, f"send the body as {' or '.join(taken)}; found {found[:100] or 'no Content-Type'}")
    return found


def _refuse_nul(scope: Scope) -> None:
    if "\0" in scope["path"] or b"%00" in scope["query_string"]:
        raise HTTPException(422, "the NUL character is not taken in a path or query")


def _queries(dependant: Dependant) -> Iterator[tuple[str, bool]]:
    for one in dependant.query_params:
        yield one.alias, _is_list(one.field_info.annotation)
    for other in dependant.dependencies:
        yield from _queries(other)


def _is_list(annotation: Any) -> bool:
    return get_origin(annotation) is list or any(_is_list(one) for one in get_args(annotation))


def _refuse_unknown(request: Request, known: Mapping[str, bool]) -> None:
    counts = Counter(name for name, _ in request.query_params.multi_items())
    wrong: list[tuple[str, str]] = []
    for name, count in counts.items():
        if name not in known:
            wrong.append((name, f"this route knows {', '.join(known) or 'no parameter'}"))
        elif count > 1 and not known[name]:
            wrong.append((name, f"it was given {count} times, and means one thing"))
    if wrong:
        raise RequestValidationError([{"loc": ("query", name), "msg": message} for name, message in wrong])
