"""Small pictures of a job's own images, for the requester who sent them: to look at labels beside what they label.

An upload is a stranger's bytes, so no byte of it is passed on: a process of its own decodes
(feature_store.decode_process), what comes back are squares of a fixed size, and the JPEG that a browser gets is made
here from those. Nothing is kept: pictures can be had for as long as the upload lies in the job's folder, and no longer
(see the table in docs/coordinator.md).
"""

from __future__ import annotations

import base64
import io
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import Final

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from PIL import Image

from api.schema import Thumbnail, ThumbnailsView
from feature_store.backbones.spec import Transform
from feature_store.decode_process import PixelLimits, UnusableImage, decoded_images
from feature_store.results.questions import UPLOAD, read_parquet
from labeler.errors import BadData, Gone, NotFound, TooLarge
from labeler.ledger.jobs import JobRecord

SIDE: Final = 128
"""Pixels of a picture, each way: the middle square of the image, as the network sees it."""

TAKES_S: Final = 20.0
"""How long one request may decode; what is not done by then is not shown."""

_SQUARE = Transform(resize=SIDE, crop=SIDE, mean=(0.0, 0.0, 0.0), std=(1.0, 1.0, 1.0), interpolation="bicubic")
_QUALITY = 82


def thumbnails(folder: Path, job: JobRecord, sources: Sequence[str], limits: PixelLimits) -> ThumbnailsView:
    """Pictures of some images of a job.

    Args:
        job: whose images; the caller has checked that it is the reader's.
        sources: names of images, as the job's labels give them.
        limits: of pixels, as the upload was taken under.

    Raises:
        NotFound: the job was sent as feature vectors.
        Gone: its upload was deleted.
    """
    if job.source != "images":
        raise NotFound(f"job {job.job_id} was sent as feature vectors, so there are no pictures of it")
    try:
        names = read_parquet(folder / UPLOAD, columns=["name"])["name"].to_pylist()
    except (OSError, pa.ArrowException):
        raise Gone(
            f"the images of job {job.job_id} are not kept any more: they are deleted soon after a job has ended; "
            "its labels stay, with the names of the images"
        ) from None
    place = {name: row for row, name in enumerate(names)}
    rows = [place[source] for source in dict.fromkeys(sources) if source in place]
    made = {names[row]: _jpeg(pixels) for row, pixels in _pictures(folder / UPLOAD, rows, limits)}
    found = ((source, made.get(source)) for source in sources)
    return ThumbnailsView(
        items=tuple(
            Thumbnail(source=source, jpeg=None if data is None else base64.b64encode(data).decode())
            for source, data in found
        )
    )


class _TookTooLong(Exception):
    pass


def _pictures(upload: Path, rows: Sequence[int], limits: PixelLimits) -> Iterator[tuple[int, NDArray[np.uint8]]]:
    """Those of the rows that can be decoded in time; one that cannot does not keep the others."""
    until = time.monotonic() + TAKES_S

    def look() -> None:
        if time.monotonic() > until:
            raise _TookTooLong

    left = list(rows)
    # A file that is damaged as a whole, or was deleted meanwhile, has no pictures.
    with suppress(_TookTooLong, BadData, TooLarge):
        while left:
            with closing(decoded_images(upload, _SQUARE, limits, rows=list(left), look=look)) as images:
                for pixels in images:
                    row = left.pop(0)
                    if not isinstance(pixels, UnusableImage):
                        yield row, pixels


def _jpeg(pixels: NDArray[np.uint8]) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, format="JPEG", quality=_QUALITY)
    return buffer.getvalue()
