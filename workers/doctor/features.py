"""Whether the network that embeds gives the same features alone and among others, and in half precision.

A record is found by its feature, so two machines, or two batches, must not make two of one image. The network is the
one that comes with this package; the images are made here.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from feature_store.backbones import load_backbone
from feature_store.quantize import quantize
from labeler.errors import LabelerError
from workers.doctor.finding import Finding, look, well, wrong

BACKBONE: Final = "efficientnet-lite0"
_IMAGES: Final = 6
_SAME: Final = 0.9999
"""Cosine between two features of one image; of two images of one class it is below 0.99."""
_USABLE: Final = 0.999


def pictures(count: int, pixels: int) -> list[Image.Image]:
    """Images with structure at every size, as photographs have; the same at every run."""
    rng = np.random.default_rng(pixels)
    made = []
    for _ in range(count):
        sum_ = np.zeros((pixels, pixels, 3))
        for size in (3, 8, 20, 60):
            noise = Image.fromarray(rng.integers(0, 256, (size, size, 3), dtype=np.uint8))
            sum_ += np.asarray(noise.resize((pixels, pixels), Image.Resampling.BICUBIC), dtype=np.float64) / 4
        made.append(Image.fromarray(sum_.astype(np.uint8)))
    return made


def features(gpu: bool) -> Iterator[Finding]:
    """Batches of 1 against large ones; float16 against float32 on a device."""
    asked = pictures(_IMAGES, 256)
    try:
        yield _judged("features alone and in a batch", *_features(asked, "cpu", (1, 32)))
        if gpu:
            yield _judged("features, batch 1 and 256 on a device", *_features(asked, "cuda", (1, 256)))
            half, single = (
                _embedded(asked, device="cuda", half=True, batch_size=256),
                _embedded(asked, device="cpu", half=False, batch_size=32),
            )
            yield _judged("features, float16 on a device and float32", half, single)
    except LabelerError as error:
        yield wrong("features", str(error), "see that torch sees the device, or embed with --device cpu")


def _features(
    asked: list[Image.Image], device: str, batches: tuple[int, int]
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    first, second = (_embedded(asked, device=device, half=False, batch_size=size) for size in batches)
    return first, second


def _embedded(asked: list[Image.Image], *, device: str, half: bool, batch_size: int) -> NDArray[np.float32]:
    return load_backbone(BACKBONE, device=device, half=half, batch_size=batch_size).embed(asked)


def _judged(what: str, first: NDArray[np.float32], second: NDArray[np.float32]) -> Finding:
    one, other = quantize(first).astype(np.float64), quantize(second).astype(np.float64)
    cosines = np.vecdot(one, other) / (np.linalg.norm(one, axis=1) * np.linalg.norm(other, axis=1))
    least, differ = float(cosines.min()), float((one != other).mean())
    most = np.abs(one - other).max()
    found = f"cosine at least {least:.6f}; {differ:.2%} of the stored numbers differ, by at most {most:.0f}"
    numbers = {"cosine": least, "differ": differ}
    if not least >= _USABLE:
        help_ = "do not embed with this setting: shards made with it would not match others; use --device cpu"
        return wrong(what, found, help_, **numbers)
    if least < _SAME:
        return look(what, found, "embed all shards of a federation with one setting", **numbers)
    return well(what, found, **numbers)
