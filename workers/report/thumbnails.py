"""Which questions a report shows with their pictures, and pictures small enough for one page."""

from __future__ import annotations

import base64
import io

import numpy as np
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError

from labeler.errors import UnreadableImage
from workers.report.coverage import evenly
from workers.report.model import AnsweredQuery, JobReport

MAX_SHOWN = 120
"""Questions shown with pictures; of more, evenly chosen ones."""

MAX_PER_QUERY = 3
"""Pictures shown of the group behind one question."""

SIDE = 112
"""Longest side of a picture on the page, in pixels."""

_SMOOTH_FROM = 40


def shown_queries(num_queries: int, *, most: int = MAX_SHOWN) -> NDArray[np.int64]:
    """Numbers of the queries that a page has room for, so that a caller reads no picture in vain."""
    return evenly(num_queries, most)


def choose(report: JobReport) -> list[tuple[int, AnsweredQuery]]:
    """The (number, query) pairs to show: those with pictures first, evenly chosen if they are too many."""
    numbered = list(enumerate(report.queries, start=1))
    pictured = [pair for pair in numbered if pair[1].thumbnails] or numbered
    return [pictured[place] for place in shown_queries(len(pictured)).tolist()]


def open_picture(png: bytes, query_id: str) -> Image.Image:
    """Decode a thumbnail and shrink it to SIDE.

    Raises:
        UnreadableImage: the bytes are no image, or one larger than a thumbnail has any reason to be.
    """
    try:
        with Image.open(io.BytesIO(png), formats=["PNG"]) as image:
            if max(image.size) > 4096:
                raise UnreadableImage(
                    f"the thumbnail of query {query_id!r} is {image.width} x {image.height} pixels; "
                    "4096 on a side is the most: shrink it before making the report"
                )
            picture = image.convert("L" if image.mode in ("1", "L") else "RGBA")
    except (UnidentifiedImageError, OSError, SyntaxError, ValueError, Image.DecompressionBombError):
        raise UnreadableImage(f"the thumbnail of query {query_id!r} is not a readable PNG image") from None
    picture.thumbnail((SIDE, SIDE))
    return picture


def is_tiny(picture: Image.Image) -> bool:
    """Whether a picture has so few pixels that smoothing would only blur it."""
    return max(picture.size) < _SMOOTH_FROM


def data_uri(picture: Image.Image) -> str:
    """The picture inside a data URI: PNG for tiny or transparent ones, else JPEG, which is a fifth as long."""
    buffer = io.BytesIO()
    opaque = picture.mode != "RGBA" or picture.getchannel("A").getextrema() == (255, 255)
    if opaque and not is_tiny(picture):
        picture.convert("L" if picture.mode == "L" else "RGB").save(buffer, "JPEG", quality=85)
        return "data:image/jpeg;base64," + base64.b64encode(buffer.getvalue()).decode()
    picture.save(buffer, "PNG", optimize=True)
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()
