"""The decoder "turbo": an image becomes a network's input in three steps that are fast because each throws pixels away.

1. A JPEG is decoded at 1/2, 1/4 or 1/8 of its size where its shorter side stays at least `least_side`: libjpeg-turbo
   leaves the high frequencies of every block out, which costs less than computing them (simplejpeg).
2. What is still twice too large, and every other format, is halved by averages (Pillow), and the square that the
   network sees is cut out, at whole pixels.
3. That square is resized with antialiasing, in integers (torch, whose kernels give the same on every processor).

The pixels differ a little from those of the decoder "pillow" (decode everything, resize, cut), so the two have other
fingerprints; which is meant stands in `Transform.decoder`. What counts as an image, and what becomes of orientation,
transparency, palettes, 16 bits and animations, is `feature_store.decode` for both: only plain JPEGs are decoded here,
and one that this decoder refuses is Pillow's to judge.

The first two steps need neither torch nor much memory, and what they leave is at most `2 * least_side + 1` pixels wide
and high: they are what a process that meets strangers' images does (feature_store.decode_process).
"""

from __future__ import annotations

import io
from contextlib import suppress
from pathlib import Path

import numpy as np
import simplejpeg
from numpy.typing import NDArray
from PIL import Image

from feature_store.backbones.spec import Transform
from feature_store.decode import decode_image, to_rgb

_LEAST_SIDE = 64
"""No image is made smaller than this before it is resized, so that small networks and thumbnails keep something."""

_ORIENTATION = 0x0112
_JPEG = b"\xff\xd8\xff"

_FILTERS = {"nearest": Image.Resampling.NEAREST, "lanczos": Image.Resampling.LANCZOS}
"""What torch has no integer kernel for is resized by Pillow."""


def least_side(transform: Transform) -> int:
    """How short the shorter side of a reduced image may become, in pixels."""
    return max(transform.crop, _LEAST_SIDE)


def decode_reduced(data: bytes | Path, transform: Transform, *, max_pixels: int) -> NDArray[np.uint8]:
    """Decode one image, a plain JPEG at a fraction of its size.

    Args:
        data: the bytes of a file, or its path.
        transform: what it is decoded for.
        max_pixels: most width times height, as the file says it.

    Returns:
        uint8, shape (height, width, channels).

    Raises:
        UnreadableImage: as `decode_image`.
    """
    if isinstance(data, bytes) and data.startswith(_JPEG):
        # Whatever goes wrong here, Pillow says whether it is an image.
        with suppress(Exception):
            return _plain_jpeg(data, transform, max_pixels)
    return _as_array(decode_image(data, max_pixels=max_pixels), transform)


def region(image: Image.Image | NDArray[np.uint8], transform: Transform) -> NDArray[np.uint8]:
    """The square that the network will see, halved until it is less than twice too large.

    Args:
        image: RGB or grey; what `decode_reduced` gives, or any other.

    Returns:
        uint8, shape (height, width, channels), both sides from 1 to `2 * least_side + 1`.
    """
    array = _as_array(image, transform)
    shorter, factor = min(array.shape[:2]), 1
    while -(-shorter // (2 * factor)) >= least_side(transform):
        factor *= 2
    if factor > 1:
        picture = Image.fromarray(array[..., 0] if transform.channels == 1 else array)
        array = _as_array(picture.reduce(factor), transform)
    height, width = array.shape[:2]
    left, right = _middle(width, min(width, height), transform)
    top, bottom = _middle(height, min(width, height), transform)
    return array[top:bottom, left:right]


def resize_region(square: NDArray[np.uint8], transform: Transform) -> NDArray[np.uint8]:
    """What `region` left, at the size that the network takes.

    Returns:
        uint8, shape (crop, crop, channels).
    """
    size = (transform.crop, transform.crop)
    if transform.interpolation in _FILTERS:
        picture = Image.fromarray(square[..., 0] if transform.channels == 1 else square)
        return _as_array(picture.resize(size, _FILTERS[transform.interpolation]), transform)
    # Here and not above: a process that only decodes starts seconds earlier without.
    import torch
    from torch.nn.functional import interpolate

    height, width, channels = square.shape
    # In this order of memory nothing is turned around on the way, which would take longer than resizing.
    pixels = torch.empty((1, channels, height, width), dtype=torch.uint8, memory_format=torch.channels_last)
    pixels[0].permute(1, 2, 0).numpy()[:] = square
    resized = interpolate(pixels, size=size, mode=transform.interpolation, antialias=True)
    return np.ascontiguousarray(resized[0].permute(1, 2, 0).numpy())


def _plain_jpeg(data: bytes, transform: Transform, max_pixels: int) -> NDArray[np.uint8]:
    """A grey or YCbCr JPEG within the limit, decoded at a fraction of its size, the right way up."""
    with Image.open(io.BytesIO(data)) as header:
        width, height = header.size
        if header.format not in ("JPEG", "MPO") or header.mode not in ("RGB", "L") or width * height > max_pixels:
            raise ValueError
        orientation = header.getexif().get(_ORIENTATION, 1)
    factor = 1
    while factor < 8 and -(-min(width, height) // (2 * factor)) >= least_side(transform):
        factor *= 2
    size = (-(-height // factor), -(-width // factor))
    colours = "GRAY" if transform.channels == 1 else "RGB"
    array = simplejpeg.decode_jpeg(data, colours, min_height=size[0], min_width=size[1], min_factor=float(factor))
    if array.shape != (*size, transform.channels):
        raise ValueError
    return _upright(array, orientation)


def _upright(array: NDArray[np.uint8], orientation: object) -> NDArray[np.uint8]:
    """Undo the rotation and mirroring that EXIF speaks of; anything else than 2 to 8 means none."""
    match orientation:
        case 2:
            return array[:, ::-1]
        case 3:
            return array[::-1, ::-1]
        case 4:
            return array[::-1]
        case 5:
            return array.transpose(1, 0, 2)
        case 6:
            return array.transpose(1, 0, 2)[:, ::-1]
        case 7:
            return array.transpose(1, 0, 2)[::-1, ::-1]
        case 8:
            return array.transpose(1, 0, 2)[::-1]
        case _:
            return array


def _as_array(image: Image.Image | NDArray[np.uint8], transform: Transform) -> NDArray[np.uint8]:
    if not isinstance(image, Image.Image):
        if image.ndim == 3 and image.shape[2] == transform.channels:
            return image
        image = Image.fromarray(image[..., 0] if image.shape[2:] == (1,) else image)
    converted = image.convert("L") if transform.channels == 1 else to_rgb(image)
    array = np.asarray(converted, dtype=np.uint8)
    return array.reshape(*array.shape[:2], transform.channels)


def _middle(length: int, shorter: int, transform: Transform) -> tuple[int, int]:
    """Where the square begins and ends along a side, in whole pixels, at least one.

    It is the middle `crop` of the side after `shorter` would have become `resize`.
    """
    resized = max(transform.crop, round(length * transform.resize / shorter))
    before = (resized - transform.crop) // 2
    first = min(round(before * length / resized), length - 1)
    return first, max(first + 1, round((before + transform.crop) * length / resized))
