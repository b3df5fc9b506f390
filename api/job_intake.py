"""Intake of requests for labels: vectors or a few images in JSON, or images in a form, read part by part as it comes.

`POST /v1/jobs` and `POST /v1/labels` share it, so an image is named, checked and refused by the same rules. A form's
images are never all in memory, nor on disk twice. Of the current part, `SPOOL_BYTES` are in memory; the rest is in the
upload's own folder, so unfinished forms cost disk and not memory.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Final, Generic, TypeVar, cast

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ValidationError
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException

from api.access import JSON, media_type, parse_json, read_json
from api.coordinator.stores import INCOMING
from api.coordinator.uploads import UploadWriter, upload_of_images
from api.limits import BODY_KEY, MAX_JSON_BYTES, SPOOL_BYTES, RequestBody
from api.schema import MAX_SYNCHRONOUS_QUERIES, LabelsRequest
from labeler.errors import InvalidSetting, LabelerError, TooLarge
from labeler.settings import problems_of

if TYPE_CHECKING:
    from api.coordinator.config import LimitsTable
    from api.coordinator.uploads import Upload

FORM: Final = "multipart/form-data"
MAX_PARTS: Final = 200_000
OUR_BOUNDARY: Final = b"labeler-"
"""Prefix of the form boundary of our own clients (api.client_http, the dashboard), which quote a name as HTTP does.
Browsers and most libraries write a quote in a name as %22 instead, and encode nothing else."""

_AS_BROWSERS_WRITE: Final = ((b"%22", b'"'), (b"%0D", b"\r"), (b"%0A", b"\n"))
_FILES: Final = ("images", "archive", "parquet")
_FEW_FILES: Final = ("images",)

Asked = TypeVar("Asked", bound=BaseModel)


@dataclass(frozen=True)
class Received(Generic[Asked]):
    """A request with its upload, if any."""

    request: Asked
    upload: Upload | None


class Intake(Generic[Asked]):
    """Receives requests for labels.

    Args:
        home: of the coordinator; an upload is in `home/incoming` until its job takes it over.
        model: of the request: a job, or a few labels at once.
    """

    def __init__(self, home: Path, limits: LimitsTable, model: type[Asked]) -> None:
        self._incoming = home / INCOMING
        self._limits, self._model = limits, model

    @asynccontextmanager
    async def receive(self, request: Request) -> AsyncIterator[Received[Asked]]:
        """Read a job request; its upload is removed at exit unless a job has moved it.

        Raises:
            HTTPException: 415, neither JSON nor a form; 422, a form without a request, or malformed.
            RequestValidationError: the request does not fit its schema.
            TooLarge, UnreadableImage, InvalidSetting: the upload is refused.
        """
        if media_type(request, JSON, FORM) == JSON:
            # Images are decoded where they are parsed: of large documents only few are in memory at once.
            received = await read_json(request, self._from_json, writes=self._model is LabelsRequest)
            try:
                yield received
            finally:
                if received.upload is not None:
                    received.upload.discard()
            return
        folder = await run_in_threadpool(self._folder)
        try:
            yield await self._from_form(request, folder)
        finally:
            await run_in_threadpool(shutil.rmtree, folder, ignore_errors=True)

    def _folder(self) -> Path:
        self._incoming.mkdir(mode=0o700, parents=True, exist_ok=True)
        return Path(tempfile.mkdtemp(dir=self._incoming))

    def _from_json(self, data: bytes) -> Received[Asked]:
        asked = _parsed(data, self._model)
        if not isinstance(asked, LabelsRequest) or asked.images is None:
            return Received(asked, None)
        if asked.features is not None:
            raise InvalidSetting("the request holds images and feature vectors; send one of the two")
        upload = upload_of_images(
            [(image.name, image.data) for image in asked.images], folder=self._incoming, limits=self._limits
        )
        return Received(asked.model_copy(update={"images": None}), upload)

    async def _from_form(self, request: Request, folder: Path) -> Received[Asked]:
        _, options = parse_options_header(request.headers.get("content-type", ""))
        boundary = options.get(b"boundary")
        if not boundary:
            raise HTTPException(422, "the Content-Type of a form needs a boundary")
        body: RequestBody = request.scope[BODY_KEY]
        with (
            # An archive lies on the disk beside what is unpacked from it.
            UploadWriter(folder, self._limits, on_bytes=lambda size: body.count(size + form.part_bytes)) as writer,
            tempfile.SpooledTemporaryFile(SPOOL_BYTES, dir=str(folder)) as spool,
        ):
            form = _Form(
                cast("BinaryIO", spool),
                writer,
                self._model,
                is_ours=boundary.startswith(OUR_BOUNDARY),
                max_image_bytes=self._limits.max_image_bytes,
            )
            try:
                parser = MultipartParser(boundary, form.callbacks())  # type: ignore[arg-type]
                async for chunk in request.stream():
                    # In a thread, because a part may go to the disk, and its end may unpack a zip.
                    await run_in_threadpool(parser.write, chunk)
                parser.finalize()
            except FormParserError:
                raise HTTPException(422, "the body is not well-formed multipart/form-data") from None
            if not form.is_complete:
                raise HTTPException(422, "the form ends before its closing boundary; the upload was cut off")
            return await run_in_threadpool(form.received)


class _Form(Generic[Asked]):
    """Handles the parts of one form, one at a time, as the parser finds them."""

    def __init__(
        self, spool: BinaryIO, writer: UploadWriter, model: type[Asked], *, is_ours: bool, max_image_bytes: int
    ) -> None:
        self.is_complete = False
        self._spool, self._writer, self._model, self._is_ours = spool, writer, model, is_ours
        self._files = _FEW_FILES if model is LabelsRequest else _FILES
        self._most = {"request": MAX_JSON_BYTES, "images": max_image_bytes}
        self._request: Asked | None = None
        self._kind = ""
        self._field = self._file_name = ""
        self.part_bytes = self._count = self._images = 0
        self._name = self._value = self._disposition = b""

    def callbacks(self) -> dict[str, object]:
        return {
            "on_part_begin": self._begin,
            "on_header_field": self._header_field,
            "on_header_value": self._header_value,
            "on_header_end": self._header_end,
            "on_headers_finished": self._start,
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

    def _start(self) -> None:
        _, options = parse_options_header(self._disposition)
        if b"name" not in options:
            raise FormParserError("a part has no name")
        written = options.get(b"filename", b"")
        for code, meant in () if self._is_ours else _AS_BROWSERS_WRITE:
            written = written.replace(code, meant)
        field, file_name = options[b"name"].decode("utf-8", "replace"), written.decode("utf-8", "replace")
        if field == "request":
            if self._request is not None:
                raise InvalidSetting("the form has two parts named request")
        elif field not in self._files:
            known = f"known are request, {', '.join(self._files)}"
            elsewhere = "; send it to /v1/jobs" if field in _FILES else ""
            raise InvalidSetting(f"the form has a part {field[:100]!r}; {known}{elsewhere}")
        elif self._kind and (self._kind, field) != ("images", "images"):
            raise InvalidSetting("send either images (any number), or one archive, or one parquet")
        else:
            self._kind = field
        if field == "images" and not file_name:
            raise InvalidSetting("every part named images needs a file name; it becomes the source of its label")
        if field == "images" and self._model is LabelsRequest:
            self._images += 1
            _refuse_many("images", self._images)
        self._field, self._file_name, self.part_bytes = field, file_name, 0
        self._spool.seek(0)
        self._spool.truncate()

    def _data(self, data: bytes, start: int, end: int) -> None:
        self.part_bytes += end - start
        most = self._most.get(self._field)
        if most is not None and self.part_bytes > most:
            what = f"image {self._file_name[:100]!r}" if self._field == "images" else "the request"
            raise TooLarge(f"{what} is larger than the {most} bytes that are taken")
        self._spool.write(data[start:end])

    def _end(self) -> None:
        self._spool.seek(0)
        if self._field == "request":
            self._request = _parsed(self._spool.read(), self._model)
        elif self._field == "images":
            self._writer.add_image(self._file_name, self._spool.read())
        elif self._field == "archive":
            self._writer.add_zip(self._spool)
        else:
            self._writer.add_parquet(self._spool)

    def _all(self) -> None:
        self.is_complete = True

    def received(self) -> Received[Asked]:
        if self._request is None:
            raise HTTPException(422, "the form needs a part named request with the JSON of the job")
        if not self._kind:
            raise HTTPException(
                422, f"the form has no {' or '.join(self._files)}; send feature vectors as application/json"
            )
        if isinstance(self._request, LabelsRequest) and self._request.images is not None:
            raise InvalidSetting("the form holds images, and so does its request; send them in one of the two")
        return Received(self._request, self._writer.finish())


def _refuse_many(what: str, count: int) -> None:
    if count > MAX_SYNCHRONOUS_QUERIES:
        raise TooLarge(
            f"one request takes at most {MAX_SYNCHRONOUS_QUERIES} {what}; send more as a job: POST /v1/jobs takes "
            "files, a zip or Parquet, and GET /v1/jobs/{job_id}/labels gives the labels"
        )


def _parsed(data: bytes, model: type[Asked]) -> Asked:
    try:
        document: Any = parse_json(data)
        if model is LabelsRequest and isinstance(document, dict):
            for field, what in (("images", "images"), ("features", "feature vectors")):
                if isinstance(sent := document.get(field), list):
                    _refuse_many(what, len(sent))
        return model.model_validate(document)
    except ValidationError as error:
        raise RequestValidationError(
            [{"loc": ("body", *loc), "msg": said, "type": "refused"} for loc, said in problems_of(error, model=model)]
        ) from None
    except LabelerError:
        raise
    except ValueError as error:
        raise RequestValidationError([{"loc": ("body",), "msg": str(error), "type": "json_invalid"}]) from None
