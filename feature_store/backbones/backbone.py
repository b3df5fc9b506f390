"""The interface of every backbone, with its preprocessing and fingerprint. It needs no deep-learning library.

The only backbone without a network is here too: the pixels themselves, a baseline that learned features must beat.

**The decoder "turbo"** makes a network's input in three steps that are fast because each throws pixels away.

1. A JPEG is decoded at 1/2, 1/4 or 1/8 of its size if its shorter side stays at least `least_side`. libjpeg-turbo
   (through simplejpeg) leaves out the high frequencies of every block, which costs less than computing them.
2. If this result, or an image in another format, is still at least twice too large, Pillow halves it by averaging. Then
   the square that the network sees is cut out, at whole pixels.
3. That square is resized with antialiasing, in integers. torch does this, and gives the same on every processor.

The pixels differ a little from those of the decoder "pillow" (decode everything, resize, cut). So the two have
different fingerprints, and `Transform.decoder` names the one in use. For both, `feature_store.decode` decides what
counts as an image, and how orientation, transparency, palettes, 16 bits and animations are treated. This module decodes
only plain JPEGs. If it refuses one, Pillow decides.

The first two steps need neither torch nor much memory, and their result is at most `2 * least_side + 1` pixels wide
and high. The process that decodes strangers' images runs only these two (feature_store.decode_process).
"""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from feature_store.backbones.spec import BackboneSpec, Transform
from feature_store.decode import MAX_PIXELS, decode_image, to_rgb
from labeler.errors import BadData, InvalidSetting

ImageLike = Image.Image | NDArray[np.uint8]

_FILTERS = {
    "nearest": Image.Resampling.NEAREST,
    "bilinear": Image.Resampling.BILINEAR,
    "bicubic": Image.Resampling.BICUBIC,
    "lanczos": Image.Resampling.LANCZOS,
}


class Backbone(Protocol):
    """A frozen function from an image to a feature.

    A feature is computed from its own image alone. Networks run in inference mode, with no statistics over the
    batch. All batches have one fixed shape, and the last one is padded. Neighboring data sets are sets of *stored*
    features. Adding or removing a record adds or removes its stored row. It changes no other row, because a stored row
    is never computed again. So even a last-bit difference between two runs of a network costs no privacy.
    """

    @property
    def fingerprint(self) -> str:
        """A SHA-256 in hexadecimal. Two are equal exactly if weights, options, preprocessing and major versions are."""

    @property
    def dimension(self) -> int:
        """The number of entries in a feature."""

    @property
    def spec(self) -> dict[str, Any]:
        """The description behind the fingerprint, as JSON values for manifests. It names files, never folders."""

    @property
    def transform(self) -> Transform:
        """The settings with which `decode_for` and `prepare_image`, in any thread, make input for `embed_prepared`."""

    @property
    def batch_size(self) -> int:
        """The number of images in a forward pass. A smaller batch costs as much, so pass multiples of this number."""

    def embed_prepared(self, prepared: NDArray[np.uint8]) -> NDArray[np.float32]:
        """Return features, shape (n, dimension), of prepared images, shape (n, height, width, channels)."""

    def embed(self, images: Sequence[ImageLike]) -> NDArray[np.float32]:
        """Return features, shape (n, dimension), of images of any size; not normalized."""


def decode_for(data: bytes | Path, transform: Transform, *, max_pixels: int = MAX_PIXELS) -> ImageLike:
    """Decode one image as far as a network needs it; `prepare_image` takes it from here.

    Raises:
        UnreadableImage: see `decode_image`; every decoder refuses the same images.
    """
    if transform.decoder == "turbo":
        return decode_reduced(data, transform, max_pixels=max_pixels)
    return decode_image(data, max_pixels=max_pixels)


def prepare_image(image: ImageLike, transform: Transform) -> NDArray[np.uint8]:
    """Resize the shorter side, cut the middle square, give it the channels the network takes.

    Args:
        image: Pillow image, or uint8 array of shape (height, width) or (height, width, 3).
        transform: sizes, filter and number of channels.

    Returns:
        uint8, shape (crop, crop, channels).

    Raises:
        BadData: an array of another type or shape, or an image without pixels.
    """
    _check_image(image)
    if transform.decoder == "turbo":
        return resize_region(region(image, transform), transform)
    if not isinstance(image, Image.Image):
        image = Image.fromarray(image[..., 0] if image.shape[2:] == (1,) else image)
    width, height = image.size
    image = image.convert("L" if transform.channels == 1 else "RGB")
    shorter = min(width, height)
    size = (
        max(transform.crop, round(width * transform.resize / shorter)),
        max(transform.crop, round(height * transform.resize / shorter)),
    )
    # Cropping inside the resize skips the pixels that would be thrown away; a panorama has many of them.
    left, top = (size[0] - transform.crop) // 2, (size[1] - transform.crop) // 2
    box = (
        left * width / size[0],
        top * height / size[1],
        (left + transform.crop) * width / size[0],
        (top + transform.crop) * height / size[1],
    )
    resized = image.resize((transform.crop, transform.crop), _FILTERS[transform.interpolation], box=box)
    pixels = np.asarray(resized, dtype=np.uint8)
    return pixels.reshape(transform.crop, transform.crop, transform.channels)


def _check_image(image: ImageLike) -> None:
    if isinstance(image, Image.Image):
        width, height = image.size
    else:
        array = np.asarray(image)
        if array.dtype != np.uint8 or array.ndim not in (2, 3) or (array.ndim == 3 and array.shape[2] not in (1, 3)):
            raise BadData(
                "an image array must be uint8 of shape (height, width), or (height, width, 3); "
                f"found {array.dtype} of shape {array.shape}"
            )
        height, width = array.shape[:2]
    if not width or not height:
        raise BadData(f"an image needs at least one pixel, found {width} x {height}")


def stack_prepared(images: Iterable[ImageLike], transform: Transform) -> NDArray[np.uint8]:
    """Prepare several images, one after the other, into one array of shape (n, crop, crop, channels)."""
    empty = np.empty((0, transform.crop, transform.crop, transform.channels), dtype=np.uint8)
    prepared = [prepare_image(image, transform) for image in images]
    return np.stack(prepared) if prepared else empty


def fingerprint_of(spec: dict[str, Any]) -> str:
    """Return the SHA-256 of the canonical JSON of a manifest's backbone description.

    The weights' file name, the precision and the runtime are left out: the same weights are the same backbone
    under another name and on another machine.
    A probe is left out too. It is compared separately, because its features differ by rounding.
    """
    named = {key: value for key, value in spec.items() if key not in ("weights", "precision", "runtime", "probe")}
    canonical = json.dumps(named, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(b"labeler-backbone/1\n" + canonical.encode()).hexdigest()


_CENTRE = 0.5


class PixelBackbone:
    """Resized pixels in [0, 1] minus the public constant 0.5, flattened.

    The center is a constant, not a mean of the data: subtracting a mean of private images would move every
    feature when one record leaves, and void the guarantee. No image has a zero feature (127.5 is no pixel value).

    Args:
        size: side of the square every image is resized to.
        channels: 1 (gray) or 3 (color).
    """

    def __init__(self, *, size: int = 16, channels: int = 1) -> None:
        if type(size) is not int or not 1 <= size <= 256 or channels not in (1, 3):
            raise InvalidSetting(
                f"pixels needs a size from 1 to 256 and 1 or 3 channels, found size {size} and channels {channels}"
            )
        centre = (_CENTRE,) * channels
        self.transform = Transform(resize=size, crop=size, mean=centre, std=(1.0,) * channels)
        self.batch_size = 1
        self.dimension = size * size * channels
        self.spec: dict[str, Any] = {"kind": "pixels", "transform": self.transform.model_dump(mode="json")}
        self.fingerprint = fingerprint_of(self.spec)

    def embed_prepared(self, prepared: NDArray[np.uint8]) -> NDArray[np.float32]:
        flat = prepared.reshape(len(prepared), self.dimension)
        return flat.astype(np.float32) / np.float32(255) - np.float32(_CENTRE)

    def embed(self, images: Sequence[ImageLike]) -> NDArray[np.float32]:
        return self.embed_prepared(stack_prepared(images, self.transform))


def load_pixels(spec: BackboneSpec) -> PixelBackbone:
    """Return the pixel backbone of a spec of kind pixels."""
    size, channels = spec.options.get("size", 16), spec.options.get("channels", 1)
    if not isinstance(size, int) or not isinstance(channels, int):
        raise InvalidSetting(f"pixels needs whole numbers for size and channels, found {size!r} and {channels!r}")
    return PixelBackbone(size=size, channels=channels)


_LEAST_SIDE = 64
"""No image is reduced below this before it is resized, so that small networks and thumbnails keep some detail."""

_ORIENTATION = 0x0112
_JPEG = b"\xff\xd8\xff"

_BY_PILLOW = ("nearest", "lanczos")
"""Interpolations for which torch has no integer kernel, so Pillow does them."""


def least_side(transform: Transform) -> int:
    """Return the least shorter side of a reduced image, in pixels."""
    return max(transform.crop, _LEAST_SIDE)


def decode_reduced(data: bytes | Path, transform: Transform, *, max_pixels: int) -> NDArray[np.uint8]:
    """Decode one image; decode a plain JPEG at a fraction of its size.

    Raises:
        UnreadableImage: as `decode_image`.
    """
    if isinstance(data, bytes) and data.startswith(_JPEG):
        # If this fails for any reason, Pillow decides below whether it is an image.
        with suppress(Exception):
            return _plain_jpeg(data, transform, max_pixels)
    return _as_array(decode_image(data, max_pixels=max_pixels), transform)


def region(image: Image.Image | NDArray[np.uint8], transform: Transform) -> NDArray[np.uint8]:
    """Return the square that the network will see, halved until it is less than twice too large.

    Args:
        image: RGB or gray, from `decode_reduced` or from elsewhere.

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
    """Resize what `region` left to the size that the network takes.

    Returns:
        uint8, shape (crop, crop, channels).
    """
    size = (transform.crop, transform.crop)
    if transform.interpolation in _BY_PILLOW:
        picture = Image.fromarray(square[..., 0] if transform.channels == 1 else square)
        return _as_array(picture.resize(size, _FILTERS[transform.interpolation]), transform)
    # Imported here: a process that only decodes starts seconds earlier without torch.
    import torch
    from torch.nn.functional import interpolate

    height, width, channels = square.shape
    # In this memory layout torch moves nothing around on the way, which would take longer than resizing.
    pixels = torch.empty((1, channels, height, width), dtype=torch.uint8, memory_format=torch.channels_last)
    pixels[0].permute(1, 2, 0).numpy()[:] = square
    resized = interpolate(pixels, size=size, mode=transform.interpolation, antialias=True)
    return np.ascontiguousarray(resized[0].permute(1, 2, 0).numpy())


def _plain_jpeg(data: bytes, transform: Transform, max_pixels: int) -> NDArray[np.uint8]:
    """Decode a gray or YCbCr JPEG within the limit at a fraction of its size, and turn it the right way up."""
    import simplejpeg

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
    """Undo the rotation and mirroring that the EXIF orientation states; any value but 2 to 8 means none."""
    if orientation not in range(2, 9):
        return array
    turned = array.transpose(1, 0, 2) if orientation in (5, 6, 7, 8) else array
    return turned[:: -1 if orientation in (3, 4, 7, 8) else 1, :: -1 if orientation in (2, 3, 6, 7) else 1]


def _as_array(image: Image.Image | NDArray[np.uint8], transform: Transform) -> NDArray[np.uint8]:
    if not isinstance(image, Image.Image):
        if image.ndim == 3 and image.shape[2] == transform.channels:
            return image
        image = Image.fromarray(image[..., 0] if image.shape[2:] == (1,) else image)
    converted = image.convert("L") if transform.channels == 1 else to_rgb(image)
    array = np.asarray(converted, dtype=np.uint8)
    return array.reshape(*array.shape[:2], transform.channels)


def _middle(length: int, shorter: int, transform: Transform) -> tuple[int, int]:
    """Return the start and end of the square along a side, in whole pixels, at least one pixel apart.

    The square covers the middle `crop` pixels of the side, once the image is resized so that `shorter` is `resize`.
    """
    resized = max(transform.crop, round(length * transform.resize / shorter))
    before = (resized - transform.crop) // 2
    first = min(round(before * length / resized), length - 1)
    return first, max(first + 1, round((before + transform.crop) * length / resized))
