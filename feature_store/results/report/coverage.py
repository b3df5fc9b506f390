"""A map of the public set: two principal directions of its features, and what the answered queries cover.

The map is made from public features and the positions of the queries alone, so it costs no privacy.
This module also chooses the questions that a report shows with small pictures.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError

from feature_store.results.report.model import AnsweredQuery, Coverage, evenly
from feature_store.students.answers import unit_rows
from labeler.errors import UnreadableImage
from labeler.rounds.effects import AnswerStatus

MAX_DRAWN = 3000
"""Most dots on a map. More dots would tell no more, and make the page heavy."""

_NEAR_RANK = 10
_PROBES = 500
_BLOCK_ROWS = 8192


def map_public_set(
    public_features: NDArray[np.generic],
    query_features: NDArray[np.generic],
    answered: NDArray[np.bool_],
    *,
    cells: NDArray[np.integer] | None = None,
) -> Coverage:
    """Lay the public set out in two dimensions and find which images the answers cover.

    Args:
        public_features: shape (num_images, dimension), of any real dtype.
        query_features: shape (num_queries, dimension).
        answered: shape (num_queries,), True where a query has a label.
        cells: shape (num_images,), number of the query that stands for each image; -1 for none. Without it, the nearest
            answered query covers an image that is similar enough to it (by cosine). A typical public image and its
            tenth nearest neighbor are just similar enough.
    """
    queries = unit_rows(query_features)
    if cells is None:
        covering = _nearest_answered(public_features, queries, answered)
        meaning = f"as similar to an answered question as a typical image is to its {_NEAR_RANK}th nearest neighbor"
    else:
        named = cells.astype(np.int64)
        covering = np.where((named >= 0) & answered[named], named, -1)
        meaning = "in a group of similar images about which a question was answered"
    drawn = evenly(len(public_features), MAX_DRAWN)
    images = unit_rows(public_features[drawn])
    center, directions = _principal_directions(images)
    return Coverage(
        points=(images - center) @ directions,
        point_query=covering[drawn],
        query_points=(queries - center) @ directions,
        fraction=float((covering >= 0).mean()),
        public_images=len(public_features),
        meaning=meaning,
    )


def _principal_directions(rows: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the mean and the two directions of largest variance, as columns.

    Signs are fixed, so that a rerun gives the same map.
    """
    center = rows.mean(axis=0)
    centered = rows - center
    if rows.shape[1] == 1:
        return center, np.array([[1.0, 0.0]])
    directions = np.linalg.eigh(centered.T @ centered)[1][:, :-3:-1]
    strongest = directions[np.abs(directions).argmax(axis=0), np.arange(2)]
    return center, directions * np.where(strongest < 0, -1.0, 1.0)


def _nearest_answered(
    features: NDArray[np.generic], queries: NDArray[np.float64], answered: NDArray[np.bool_]
) -> NDArray[np.int64]:
    """Return the nearest answered query of each image, -1 if none is near.

    It reads the features in blocks, so a set may be larger than memory.
    """
    count, numbers = len(features), np.flatnonzero(answered)
    covering = np.full(count, -1, dtype=np.int64)
    if not len(numbers):
        return covering
    probes = unit_rows(features[evenly(count, _PROBES)])
    rank = min(_NEAR_RANK, count - 1) + 1  # An image is its own nearest, so its tenth neighbor has rank eleven.
    nearest = np.full((len(probes), 0), -np.inf)
    for start in range(0, count, _BLOCK_ROWS):
        block = unit_rows(features[start : start + _BLOCK_ROWS])
        merged = np.hstack([nearest, probes @ block.T])
        keep = min(rank, merged.shape[1])
        nearest = np.partition(merged, -keep, axis=1)[:, -keep:]
    near = float(np.median(nearest.min(axis=1)))
    for start in range(0, count, _BLOCK_ROWS):
        similarity = unit_rows(features[start : start + _BLOCK_ROWS]) @ queries[numbers].T
        best = similarity.argmax(axis=1)
        is_near = similarity[np.arange(len(best)), best] >= near
        covering[start : start + _BLOCK_ROWS] = np.where(is_near, numbers[best], -1)
    return covering


MAX_SHOWN = 60
"""Most questions shown with pictures: first those that went wrong, then an even choice of the others."""

MAX_WRONG = 24
"""Most questions shown because they went wrong."""

MAX_PER_QUERY = 3
"""Most pictures shown of the group behind one question."""

SIDE = 112
"""Longest side of a picture on the page, in pixels."""

_SMOOTH_FROM = 40


def places_to_show(queries: Sequence[AnsweredQuery]) -> list[int]:
    """Return the queries that a page has room for, in the order to show them. So a caller reads only their pictures.

    Wrong answers come first, then questions without an answer, then the others. If votes were released, the least
    clear of the others come first.
    """
    order = sorted(range(len(queries)), key=lambda place: _urgency(queries[place]))
    gone_wrong = [place for place in order if _urgency(queries[place])[0] < _FINE][:MAX_WRONG]
    rest = [place for place in order if _urgency(queries[place])[0] == _FINE]
    room = max(0, MAX_SHOWN - len(gone_wrong))
    return gone_wrong + [rest[number] for number in evenly(len(rest), room).tolist()]


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
        UnreadableImage: the bytes are not a PNG image, or one with more than 4096 pixels on a side.
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
    """Tell whether a picture has so few pixels that smoothing would only blur it."""
    return max(picture.size) < _SMOOTH_FROM


def data_uri(picture: Image.Image) -> str:
    """Return a picture as a data URI: PNG if it is tiny or transparent, else JPEG, which is a fifth as long."""
    buffer = io.BytesIO()
    opaque = picture.mode != "RGBA" or picture.getchannel("A").getextrema() == (255, 255)
    if opaque and not is_tiny(picture):
        picture.convert("L" if picture.mode == "L" else "RGB").save(buffer, "JPEG", quality=85)
        return "data:image/jpeg;base64," + base64.b64encode(buffer.getvalue()).decode()
    picture.save(buffer, "PNG", optimize=True)
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()
