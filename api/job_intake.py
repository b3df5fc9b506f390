"""What comes with a job: feature vectors in JSON, or images in a form, written to disk while they arrive."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException

from api.coordinator.home import INCOMING
from api.coordinator.uploads import UploadWriter
from api.form_parts import PartData, PartEnd, PartStart, chunks, form_events, refuse_length
from api.schema import JobRequest
from api.strict_route import MAX_FEATURES_JSON_BYTES, MAX_JSON_BYTES, SMALL_BYTES, media_type, parse_json
from labeler.errors import InvalidSetting, LabelerError, TooLarge

if TYPE_CHECKING:
    from api.coordinator.config import LimitsTable
    from api.coordinator.uploads import Upload

JSON = "application/json"
FORM = "multipart/form-data"
PARSED_AT_ONCE = 2
"""Large documents: parsing takes many times their size in memory, for a moment."""
FORM_OVERHEAD_BYTES = 64 * 1024 * 1024
"""What part heads and the request itself may add to the images of a form."""


@dataclass(frozen=True)
class Received:
    """A job request with what came beside it."""

    request: JobRequest
    upload: Upload | None


class JobIntake:
    """Receives job requests.

    Args:
        home: of the coordinator; an upload lies in `home/incoming` until its job has taken it over.
    """

    def __init__(self, home: Path, limits: LimitsTable) -> None:
        self._incoming = home / INCOMING
        self._limits = limits
        self._parsing = asyncio.Semaphore(PARSED_AT_ONCE)

    @asynccontextmanager
    async def receive(self, request: Request) -> AsyncIterator[Received]:
        """Read a job request; its upload is removed at exit unless a job has moved it away.

        Raises:
            HTTPException: 415, neither JSON nor a form; 422, a form without a request, or malformed.
            RequestValidationError: the request does not fit its schema.
            TooLarge, UnreadableImage, InvalidSetting: what came beside it cannot be taken.
        """
        if media_type(request, JSON, FORM) == JSON:
            yield Received(await self._from_json(request), None)
            return
        folder = await run_in_threadpool(self._folder)
        try:
            yield await self._from_form(request, folder)
        finally:
            await run_in_threadpool(shutil.rmtree, folder, ignore_errors=True)

    def _folder(self) -> Path:
        self._incoming.mkdir(mode=0o700, parents=True, exist_ok=True)
        return Path(tempfile.mkdtemp(dir=self._incoming))

    def is_small(self, request: Request) -> bool:
        """Whether a request says that it is JSON which is parsed at once, without a thread."""
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        length = request.headers.get("content-length", "")
        return (
            kind == JSON and length.isascii() and length.isdigit() and len(length) < 10 and int(length) <= SMALL_BYTES
        )

    async def _from_json(self, request: Request) -> JobRequest:
        try:
            refuse_length(request, max_bytes=MAX_FEATURES_JSON_BYTES)
            data = b"".join([chunk async for chunk in chunks(request, max_bytes=MAX_FEATURES_JSON_BYTES)])
        except TooLarge:
            raise TooLarge(
                f"a job as JSON has at most {MAX_FEATURES_JSON_BYTES} bytes; send more feature vectors as Parquet in a "
                "form (columns name and feature)"
            ) from None
        if len(data) <= SMALL_BYTES:
            return _job_request(data)
        async with self._parsing:
            return await run_in_threadpool(_job_request, data)

    async def _from_form(self, request: Request, folder: Path) -> Received:
        most = self._limits.max_upload_bytes + FORM_OVERHEAD_BYTES
        with UploadWriter(folder, self._limits) as writer:
            form = _Form(folder, writer, max_image_bytes=self._limits.max_image_bytes)
            try:
                async for event in form_events(request, max_bytes=most):
                    if isinstance(event, PartData):
                        form.data(event.data)
                    elif isinstance(event, PartStart):
                        form.start(event)
                    elif isinstance(event, PartEnd):
                        await run_in_threadpool(form.end)
                return await run_in_threadpool(form.received)
            finally:
                form.close()


class _Form:
    """Puts the parts of one form where they belong. One part is in hand at a time; an image is held in memory, a zip or
    Parquet file goes to disk."""

    def __init__(self, folder: Path, writer: UploadWriter, *, max_image_bytes: int) -> None:
        self._folder = folder
        self._writer = writer
        self._max_image_bytes = max_image_bytes
        self._request: JobRequest | None = None
        self._kind = ""
        self._part = PartStart("", "")
        self._held = bytearray()
        self._file: BinaryIO | None = None

    def start(self, part: PartStart) -> None:
        if part.field not in ("request", "images", "archive", "parquet"):
            raise InvalidSetting(
                f"the form has a part {part.field[:100]!r}; known are request, images, archive, parquet"
            )
        if part.field == "request" and self._request is not None:
            raise InvalidSetting("the form has two parts named request")
        if part.field != "request":
            if self._kind not in ("", part.field) or (self._kind and part.field != "images"):
                raise InvalidSetting("send either images (any number), or one archive, or one parquet")
            self._kind = part.field
        if part.field == "images" and not part.file_name:
            raise InvalidSetting("every part named images needs a file name; it becomes the source of its label")
        self._part = part
        if part.field in ("archive", "parquet"):
            self._file = (self._folder / part.field).open("w+b")

    def data(self, data: bytes) -> None:
        if self._file is not None:
            self._file.write(data)
            return
        self._held += data
        most = self._max_image_bytes if self._part.field == "images" else MAX_JSON_BYTES
        if len(self._held) > most:
            what = f"image {self._part.file_name[:100]!r}" if self._part.field == "images" else "the request"
            raise TooLarge(f"{what} is larger than the {most} bytes that are taken")

    def end(self) -> None:
        held, self._held = bytes(self._held), bytearray()
        if self._part.field == "request":
            self._request = _job_request(held)
        elif self._part.field == "images":
            self._writer.add_image(self._part.file_name, [held])
        elif self._file is not None:
            self._file.seek(0)
            add = self._writer.add_zip if self._part.field == "archive" else self._writer.add_parquet
            add(self._file)
            self.close()

    def received(self) -> Received:
        if self._request is None:
            raise HTTPException(422, "the form needs a part named request with the JSON of the job")
        if not self._kind:
            raise HTTPException(
                422, "the form has no images, archive or parquet; send feature vectors as application/json"
            )
        return Received(self._request, self._writer.finish())

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def _job_request(data: bytes) -> JobRequest:
    try:
        return JobRequest.model_validate(parse_json(data))
    except ValidationError as error:
        fields = error.errors(include_input=False, include_url=False, include_context=False)
        raise RequestValidationError([{**field, "loc": ("body", *field["loc"])} for field in fields]) from None
    except LabelerError:
        raise
    except ValueError as error:
        raise RequestValidationError([{"loc": ("body",), "msg": str(error), "type": "json_invalid"}]) from None
