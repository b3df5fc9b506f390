"""A multipart/form-data body, part by part while it arrives: never all its images in memory, nor on disk twice."""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator
from dataclasses import dataclass

from fastapi import Request
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.exceptions import HTTPException

from labeler.errors import TooLarge

MAX_PARTS = 200_000

OUR_BOUNDARY = b"labeler-"
"""Begins the boundary of forms that our own clients write (api.form_body, the dashboard): they quote a name as HTTP
does. Browsers and most libraries write a quote in a name as %22 instead, and nothing else so."""

_AS_BROWSERS_WRITE = ((b"%22", b'"'), (b"%0D", b"\r"), (b"%0A", b"\n"))


@dataclass(frozen=True)
class PartStart:
    """The head of a part: its field, and the file's name ("" for a plain field)."""

    field: str
    file_name: str


@dataclass(frozen=True, repr=False)
class PartData:
    """Some bytes of the part that started last."""

    data: bytes


@dataclass(frozen=True)
class PartEnd:
    """The part that started last is complete."""


Event = PartStart | PartData | PartEnd


async def form_events(request: Request, *, max_bytes: int) -> AsyncIterator[Event]:
    """Read a form as a stream of events.

    Args:
        request: its content type must be multipart/form-data.
        max_bytes: of the whole body; checked against Content-Length before reading and against what arrives.

    Raises:
        TooLarge: the body is larger.
        HTTPException: 422, it is not a well-formed form.
    """
    refuse_length(request, max_bytes=max_bytes)
    _, options = parse_options_header(request.headers.get("content-type", ""))
    boundary = options.get(b"boundary")
    if not boundary:
        raise HTTPException(422, "the Content-Type of a form needs a boundary")
    parts = _Parts(is_ours=boundary.startswith(OUR_BOUNDARY))
    try:
        parser = MultipartParser(boundary, parts.callbacks())  # type: ignore[arg-type]
        async for chunk in chunks(request, max_bytes=max_bytes):
            parser.write(chunk)
            while parts.events:
                yield parts.events.popleft()
        parser.finalize()
    except FormParserError:
        raise HTTPException(422, "the body is no well-formed multipart/form-data") from None
    while parts.events:
        yield parts.events.popleft()
    if not parts.is_complete:
        raise HTTPException(422, "the form ends before its closing boundary; the upload was cut off")


def refuse_length(request: Request, *, max_bytes: int) -> None:
    """Refuse a body by its Content-Length, before a byte of it is read.

    Raises:
        TooLarge: it is larger than `max_bytes`.
    """
    length = request.headers.get("content-length", "")
    if length.isdigit() and int(length) > max_bytes:
        raise TooLarge(f"the body has {int(length)} bytes; at most {max_bytes} are taken. Split it into several jobs.")


async def chunks(request: Request, *, max_bytes: int) -> AsyncIterator[bytes]:
    """The body as it arrives, never more than `max_bytes` of it.

    Raises:
        TooLarge: more bytes came.
    """
    size = 0
    async for chunk in request.stream():
        size += len(chunk)
        if size > max_bytes:
            raise TooLarge(f"the body is larger than the {max_bytes} bytes that are taken. Split it into several jobs.")
        if chunk:
            yield chunk


class _Parts:
    """Turns the parser's callbacks into events; bounds what a part's head may hold."""

    def __init__(self, *, is_ours: bool) -> None:
        self._is_ours = is_ours
        self.events: deque[Event] = deque()
        self.is_complete = False
        self._count = 0
        self._name = b""
        self._value = b""
        self._disposition = b""

    def callbacks(self) -> dict[str, object]:
        return {
            "on_part_begin": self._begin,
            "on_header_field": self._header_field,
            "on_header_value": self._header_value,
            "on_header_end": self._header_end,
            "on_headers_finished": self._head_is_complete,
            "on_part_data": self._data,
            "on_part_end": self._end,
            "on_end": self._all,
        }

    def _begin(self) -> None:
        self._count += 1
        if self._count > MAX_PARTS:
            raise TooLarge(f"a form may have at most {MAX_PARTS} parts; send a zip or Parquet instead")
        self._disposition = b""

    def _header_field(self, data: bytes, start: int, end: int) -> None:
        self._name += data[start:end]

    def _header_value(self, data: bytes, start: int, end: int) -> None:
        self._value += data[start:end]

    def _header_end(self) -> None:
        if self._name.lower() == b"content-disposition":
            self._disposition = self._value
        self._name = self._value = b""

    def _head_is_complete(self) -> None:
        _, options = parse_options_header(self._disposition)
        if b"name" not in options:
            raise FormParserError("a part has no name")
        field, name = options[b"name"].decode("utf-8", "replace"), options.get(b"filename", b"")
        for written, meant in () if self._is_ours else _AS_BROWSERS_WRITE:
            name = name.replace(written, meant)
        self.events.append(PartStart(field, name.decode("utf-8", "replace")))

    def _data(self, data: bytes, start: int, end: int) -> None:
        self.events.append(PartData(data[start:end]))

    def _end(self) -> None:
        self.events.append(PartEnd())

    def _all(self) -> None:
        self.is_complete = True
