"""A stranger's images are decoded in a separate process, whose memory the system bounds and which ends with its job.

The embedder starts the decoder on jobs/JOB/upload.parquet and looks every moment whether the job still waits; if it
does not, it kills the decoder. The decoder limits itself, adds up the pixels of all headers, decodes two images at a
time, resizes them, and sends about the network's pixels, in order.

An image unpacks to a thousand times its size and takes seconds; its effect on the library stays in the decoder. The
embedder holds pixels of about the size its network takes and nothing else. So its memory does not grow with what it is
sent, and it stops within a moment, in the middle of an image as well. On systems other than Linux the decoder's memory
is not bounded.
"""

from __future__ import annotations

import json
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from itertools import count
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from feature_store.backbones.backbone import decode_for, least_side, prepare_image, region, resize_region
from feature_store.backbones.spec import Transform
from feature_store.decode import header_pixels
from feature_store.results.questions import job_pixels_refusal
from feature_store.sources import ParquetSource
from labeler.errors import BadData, LabelerError, TooLarge, UnreadableImage
from labeler.system.process_pool import Frames, UnsoundProcess, bound_process, serve_process, start_process, write_frame

ROOM_BYTES = 512 * 2**20
"""What the decoder may use besides the images in its hands: libraries, one row group."""

BYTES_PER_PIXEL = 32
"""Most that decoding and resizing hold of one pixel at once: 16-bit gray takes 21 bytes, transparency 16."""

IMAGE_S = 60.0
"""How long nothing may come: an image that takes longer to decode is refused."""

THREADS = 2
LARGE_PIXELS = 4_000_000
"""Images beyond this are decoded one at a time, so that memory is bounded by one of them."""

_AHEAD = 32
_MOST_LETTERS = 1000
_GONE = "decoding it takes more memory or time than is given to one image, or it is damaged"


@dataclass(frozen=True)
class PixelLimits:
    """Bounds on decoding.

    Attributes:
        max_pixels: of one image, width times height.
        max_job_pixels: of all together.
    """

    max_pixels: int
    max_job_pixels: int


@dataclass(frozen=True)
class UnusableImage:
    """An image of an upload that cannot be used.

    Attributes:
        reason: a short sentence.
        is_last: it has ended the decoder, so that what comes after it was not looked at.
    """

    index: int
    reason: str
    is_last: bool = False


def decoded_images(
    upload: Path,
    transform: Transform,
    limits: PixelLimits,
    *,
    start: int = 0,
    rows: Sequence[int] | None = None,
    look: Callable[[], None],
) -> Generator[NDArray[np.uint8] | UnusableImage]:
    """The images of an upload from one on, in order, each as the network takes it, or why it cannot be used.

    Args:
        upload: Parquet with a column image.
        transform: of the backbone.
        limits: checked from the headers before the first image of an upload is decoded.
        start: index of the first image wanted.
        rows: indices of these images alone, in this order; what all images have together is then not looked at.
        look: called every moment; what it raises ends the decoder at once.

    Yields:
        uint8, shape (crop, crop, channels).

    Raises:
        TooLarge, BadData: the upload as a whole.
    """
    settings = {
        "path": str(upload),
        "transform": transform.model_dump(mode="json"),
        "limits": asdict(limits),
        "start": start,
        "rows": None if rows is None else [int(row) for row in rows],
    }
    process = start_process("feature_store.decode_process", json.dumps(settings), answers=True)
    try:
        frames = Frames(process.stdout, most_head_bytes=8192, silence_s=IMAGE_S, look=look)
        yield from _taken(frames, transform, count(start) if rows is None else rows)
    finally:
        process.kill()
        process.communicate()


def _taken(frames: Frames, transform: Transform, indices: Iterable[int]) -> Iterator[NDArray[np.uint8] | UnusableImage]:
    expected = iter(indices)
    index = next(expected, -1)
    try:
        while True:
            match frames.head():
                case {"kind": "end"}:
                    return
                case {"kind": "pixels", "height": int(height), "width": int(width)}:
                    yield _square(frames, transform, height, width)
                case {"kind": "bad", "sentence": str(sentence)}:
                    yield UnusableImage(index, sentence)
                case {"kind": "refused", "problem": problem, "sentence": str(sentence)}:
                    raise (TooLarge if problem == TooLarge.problem_type else BadData)(sentence)
                case _:
                    raise UnsoundProcess
            index = next(expected, -1)
    except UnsoundProcess:
        yield UnusableImage(index, _GONE, is_last=True)


def _square(frames: Frames, transform: Transform, height: int, width: int) -> NDArray[np.uint8]:
    """An image as the network takes it."""
    is_turbo = transform.decoder == "turbo"
    least, most = (1, 2 * least_side(transform) + 1) if is_turbo else (transform.crop, transform.crop)
    if not (least <= height <= most and least <= width <= most):
        raise UnsoundProcess
    data = frames.exactly(height * width * transform.channels)
    square = np.frombuffer(data, dtype=np.uint8).reshape(height, width, transform.channels)
    return resize_region(square, transform) if is_turbo else square


# The decoder's side.


def serve(arguments: Sequence[str], _: BinaryIO, out: BinaryIO) -> int:
    """Send the pixels of images, as the only argument says in JSON."""
    settings = json.loads(arguments[0])
    limits = PixelLimits(**settings["limits"])
    # Room for one of the largest images, and for a small one at the same time.
    bound_process(ROOM_BYTES + BYTES_PER_PIXEL * (max(limits.max_pixels, LARGE_PIXELS) + LARGE_PIXELS))
    # Pillow's own bound warns at a size that is allowed here; ours is checked before anything is decoded.
    Image.MAX_IMAGE_PIXELS = max(limits.max_pixels, 1)
    try:
        source = ParquetSource(Path(settings["path"]), max_pixels=limits.max_pixels)
        rows = settings["rows"]
        if rows is None and not settings["start"]:
            total = 0
            for index in range(len(source.names)):
                total += header_pixels(source.file(index))
                if total > limits.max_job_pixels:
                    raise TooLarge(job_pixels_refusal(index + 1, total, limits.max_job_pixels))
        transform = Transform.model_validate(settings["transform"])
        for head, data in _decoded(
            source, transform, limits, range(settings["start"], len(source.names)) if rows is None else rows
        ):
            write_frame(out, head, data)
        write_frame(out, {"kind": "end"})
    except LabelerError as error:
        write_frame(out, {"kind": "refused", "problem": error.problem_type, "sentence": str(error)[:_MOST_LETTERS]})
    return 0


def _decoded(
    source: ParquetSource, transform: Transform, limits: PixelLimits, rows: Iterable[int]
) -> Iterator[tuple[dict[str, Any], bytes]]:
    """Decode a few images ahead of the caller, and yield the answer about each."""
    large = threading.Lock()

    def one(index: int) -> tuple[dict[str, Any], bytes]:
        try:
            data = source.file(index)
            with large if header_pixels(data) > LARGE_PIXELS else nullcontext():
                image = decode_for(data, transform, max_pixels=limits.max_pixels)
                # What resizes a turbo image takes seconds to load, which this process would spend on every slice.
                square = region(image, transform) if transform.decoder == "turbo" else prepare_image(image, transform)
                return {"kind": "pixels", "height": square.shape[0], "width": square.shape[1]}, square.tobytes()
        except (UnreadableImage, BadData) as error:
            return {"kind": "bad", "sentence": str(error)[:_MOST_LETTERS]}, b""

    waiting: deque[Future[tuple[dict[str, Any], bytes]]] = deque()
    with ThreadPoolExecutor(THREADS) as pool:
        try:
            for index in rows:
                waiting.append(pool.submit(one, index))
                if len(waiting) >= _AHEAD:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


if __name__ == "__main__":
    serve_process(serve)
