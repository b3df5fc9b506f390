"""A backbone without a network: the pixels themselves, the baseline every learned feature must beat."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from feature_store.backbones.backbone import ImageLike, fingerprint_of, stack_prepared
from feature_store.backbones.spec import BackboneSpec, Transform
from labeler.errors import InvalidSetting

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
