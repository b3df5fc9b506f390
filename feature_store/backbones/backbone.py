"""The one interface of every backbone, its preprocessing and its fingerprint; needs no deep-learning library.

The one backbone without a network is here: the pixels themselves, the baseline every learned feature must beat.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from feature_store.backbones.spec import BackboneSpec, Transform
from feature_store.decode import MAX_PIXELS, decode_image
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

    A feature is computed from its own image alone: networks run in inference mode, with no statistics over the
    batch, and in batches of one fixed shape, the last one padded. Neighbouring data sets are sets of *stored*
    features: a record that is added or removed adds or removes its stored row and moves no other, because what is
    stored is never computed again. So even a last-bit difference between two runs of a network costs no privacy.
    """

    @property
    def fingerprint(self) -> str:
        """SHA-256 in hexadecimal; equal exactly when weights, options, preprocessing and major versions are."""

    @property
    def dimension(self) -> int:
        """Numbers in a feature."""

    @property
    def spec(self) -> dict[str, Any]:
        """What the fingerprint was made of, as JSON values, for manifests; names files, never folders."""

    @property
    def transform(self) -> Transform:
        """How files become what `embed_prepared` takes: `decode_for` and `prepare_image`, in any thread or process."""

    @property
    def batch_size(self) -> int:
        """Images in a forward pass. Fewer cost as much as so many, so batches should be multiples of it."""

    @property
    def passes_ahead(self) -> int:
        """How many passes to begin before waiting for the first: 1 where a device computes while we prepare, else 0."""

    def embed_prepared(self, prepared: NDArray[np.uint8]) -> NDArray[np.float32]:
        """Features, shape (n, dimension), of prepared images of shape (n, height, width, channels)."""

    def begin(self, prepared: NDArray[np.uint8]) -> Callable[[], NDArray[np.float32]]:
        """Begin what `embed_prepared` does; the function that comes back waits for the features."""

    def embed(self, images: Sequence[ImageLike]) -> NDArray[np.float32]:
        """Features, shape (n, dimension), of images of any size; not normalised."""


def decode_for(data: bytes | Path, transform: Transform, *, max_pixels: int = MAX_PIXELS) -> ImageLike:
    """Decode one image as far as a network needs it; `prepare_image` takes it from here.

    Args:
        data: the bytes of a file, or its path.
        transform: its decoder decides.
        max_pixels: most width times height.

    Raises:
        UnreadableImage: see `decode_image`; the same images for every decoder.
    """
    if transform.decoder == "turbo":
        # Here and not above: most commands decode nothing.
        from feature_store.backbones.turbo import decode_reduced

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
        from feature_store.backbones.turbo import region, resize_region

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
    # Cropping inside the resize skips the pixels that would be thrown away, which a panorama has a lot of.
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
    """SHA-256 over the canonical JSON of a manifest's backbone description.

    The weights' file name and the precision are left out: the same weights under another name are the same backbone.
    """
    named = {key: value for key, value in spec.items() if key not in ("weights", "precision")}
    canonical = json.dumps(named, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(b"labeler-backbone/1\n" + canonical.encode()).hexdigest()


_CENTRE = 0.5


class PixelBackbone:
    """Resized pixels in [0, 1] less the public constant 0.5, flattened.

    The centre is a constant, not a mean of the data: subtracting a mean of private images would move every
    feature when one record leaves, and void the guarantee. No image has a zero feature (127.5 is no pixel value).

    Args:
        size: side of the square every image is resized to.
        channels: 1 (grey) or 3 (colour).
    """

    def __init__(self, *, size: int = 16, channels: int = 1) -> None:
        if type(size) is not int or not 1 <= size <= 256 or channels not in (1, 3):
            raise InvalidSetting(
                f"pixels needs a size from 1 to 256 and 1 or 3 channels, found size {size} and channels {channels}"
            )
        centre = (_CENTRE,) * channels
        self.transform = Transform(resize=size, crop=size, mean=centre, std=(1.0,) * channels)
        self.batch_size, self.passes_ahead = 1, 0
        self.dimension = size * size * channels
        self.spec: dict[str, Any] = {"kind": "pixels", "transform": self.transform.model_dump(mode="json")}
        self.fingerprint = fingerprint_of(self.spec)

    def embed_prepared(self, prepared: NDArray[np.uint8]) -> NDArray[np.float32]:
        flat = prepared.reshape(len(prepared), self.dimension)
        return flat.astype(np.float32) / np.float32(255) - np.float32(_CENTRE)

    def begin(self, prepared: NDArray[np.uint8]) -> Callable[[], NDArray[np.float32]]:
        features = self.embed_prepared(prepared)
        return lambda: features

    def embed(self, images: Sequence[ImageLike]) -> NDArray[np.float32]:
        return self.embed_prepared(stack_prepared(images, self.transform))


def load_pixels(spec: BackboneSpec) -> PixelBackbone:
    """The pixel backbone of a spec of kind pixels."""
    size, channels = spec.options.get("size", 16), spec.options.get("channels", 1)
    if not isinstance(size, int) or not isinstance(channels, int):
        raise InvalidSetting(f"pixels needs whole numbers for size and channels, found {size!r} and {channels!r}")
    return PixelBackbone(size=size, channels=channels)
