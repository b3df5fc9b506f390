"""Which questions a report shows with their pictures, and pictures small enough for one page."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence

import numpy as np
from PIL import Image, UnidentifiedImageError

from feature_store.results.report.coverage import evenly
from feature_store.results.report.model import AnsweredQuery, JobReport
from labeler.errors import UnreadableImage
from labeler.rounds.effects import AnswerStatus

MAX_SHOWN = 60
"""Questions shown with pictures; of more, those that went wrong first, then evenly chosen ones."""

MAX_WRONG = 24
"""Questions that went wrong and are shown as such, at most."""

MAX_PER_QUERY = 3
"""Pictures shown of the group behind one question."""

SIDE = 112
"""Longest side of a picture on the page, in pixels."""

_SMOOTH_FROM = 40


def places_to_show(queries: Sequence[AnsweredQuery]) -> list[int]:
    """Which queries a page has room for, in the order in which to look at them: a caller reads no picture in vain.

    Wrong answers come first, then questions without one, then the others, the least clear first where votes were
    released.
    """
    order = sorted(range(len(queries)), key=lambda place: _urgency(queries[place]))
    gone_wrong = [place for place in order if _urgency(queries[place])[0] < _FINE][:MAX_WRONG]
    rest = [place for place in order if _urgency(queries[place])[0] == _FINE]
    room = max(0, MAX_SHOWN - len(gone_wrong))
    return gone_wrong + [rest[number] for number in evenly(len(rest), room).tolist()]


def choose(report: JobReport) -> list[tuple[int, AnsweredQuery]]:
    """The (number, query) pairs to show, what went wrong first; numbers begin with 1."""
    return [(place + 1, report.queries[place]) for place in places_to_show(report.queries)]


_FINE = 2


def _urgency(query: AnsweredQuery) -> tuple[int, float]:
    if query.is_right is False:
        return 0, 0.0
    if query.status is not AnswerStatus.ANSWERED:
        return 1, 0.0
    if query.noisy_votes is None:
        return _FINE, 0.0
    first, second = np.sort(query.noisy_votes)[:-3:-1]
    return _FINE, float(first - second)


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
