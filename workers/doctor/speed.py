"""How fast this machine does what the service spends its time on, as a share of what it could, and what holds it back.

Every share is a ratio of two times of one run. The limit of a processor is what the fastest library of those installed
reaches for a product of float32; a search can be above it, because int16 takes half the time (index.engine_int16). The
limit of a device is what its clock and its units allow, where they are known, else the same.

Before that, the network that embeds is checked: the same features alone and among others, and in half precision. A
record is found by its feature, so two machines, or two batches, must not make two of one image. The network is the one
that comes with this package; the images are made here.
"""

from __future__ import annotations

import io
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Final

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from feature_store.backbones import load_backbone
from feature_store.backbones.backbone import decode_for, prepare_image
from feature_store.index import ENGINES, build_index
from feature_store.rows import quantize
from labeler.errors import InvalidSetting, LabelerError, UnsafeIndex
from workers.doctor.checkup import Finding, look, well, wrong
from workers.doctor.engines import full_norm

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


_RECORDS, _QUERIES, _DIMENSION, _K = 8000, 512, 768, 50
_DEVICE_RECORDS, _DEVICE_QUERIES = 200_000, 4096
_COPIED_BYTES: Final = 256 << 20
_SIDE: Final = 1024
_DEVICE_SIDE: Final = 8192
_PHOTO_PIXELS: Final = 500
_BATCH: Final = 32
_DEVICE_BATCH: Final = 256
_IMAGE_MULTIPLICATIONS: Final = 0.39e9
"""Of one image through BACKBONE at 224 pixels."""

_SLOW_SEARCH: Final = 0.4
_LONG_S: Final = 0.5
_BUSY: Final = 0.3
"""Others' share of the processors from which on they are told."""

_HALF_PER_CLOCK: Final = {
    70: 512,
    75: 512,
    80: 1024,
    86: 256,
    89: 256,
    90: 2048,
    100: 4096,
    103: 4096,
    120: 256,
}
"""Multiplications of float16 with float32 sums that one multiprocessor of a compute capability does per clock (NVIDIA's
architecture whitepapers; 86, 89 and 120 are those of consumer cards)."""


def speed(gpu: bool) -> Iterator[Finding]:
    """The processor, and the device where it was asked for."""
    yield from _others()
    yield from _copy()
    limit, library = _product_limit()
    yield well(
        "product", f"{limit / 1e9:.0f} G multiplications of float32 a second ({library})", multiplications_per_s=limit
    )
    yield from _searches(limit)
    yield from _images("cpu", _BATCH, limit)
    if gpu:
        yield from _device()


def _others() -> Iterator[Finding]:
    if not hasattr(os, "getloadavg"):
        return
    load, cores = os.getloadavg()[0], os.cpu_count() or 1
    # Steps before this one took a processor themselves.
    others = max(0.0, load - 1) / cores
    if others > _BUSY:
        yield look(
            "other programs", f"keep {load:.1f} processors busy, of {cores}: speeds below are lower than they could be",
            "run this again when they are done", load=load, cores=cores,
        )  # fmt: skip


def _copy() -> Iterator[Finding]:
    source = np.ones(_COPIED_BYTES, dtype=np.uint8)
    into = np.empty_like(source)
    rate = _COPIED_BYTES / _seconds(lambda: np.copyto(into, source))
    yield well("memory copy", f"{rate / 1e9:.1f} GB a second", bytes_per_s=rate)


def _product_limit() -> tuple[float, str]:
    import torch

    left = np.random.default_rng(0).standard_normal((_SIDE, _SIDE)).astype(np.float32)
    tensor = torch.from_numpy(left)
    taken = {
        f"numpy {np.__version__}": _seconds(lambda: left @ left),
        f"torch {torch.__version__}": _seconds(lambda: tensor @ tensor),
    }
    library = min(taken, key=lambda name: taken[name])
    return _SIDE**3 / taken[library], library


def _searches(limit: float) -> Iterator[Finding]:
    rng = np.random.default_rng(1)
    features, queries = full_norm(rng, _RECORDS, _DIMENSION), full_norm(rng, _QUERIES, _DIMENSION)
    for engine in ENGINES:
        if engine != "auto" and not engine.endswith("-gpu"):
            yield from _search(engine, features, queries, limit)


def _search(engine: str, features: NDArray[np.int16], queries: NDArray[np.int16], limit: float) -> Iterator[Finding]:
    try:
        index = build_index(features, np.arange(len(features), dtype=np.int64), engine=engine)
        rate = features.size * len(queries) / _seconds(lambda: index.search(queries, _K))
    except (InvalidSetting, UnsafeIndex):
        return  # said by its own step
    share = rate / limit
    held = "the product" if share > _SLOW_SEARCH else "choosing the nearest, or slow kernels,"
    found = f"{share:.0%} of the product's speed; {held} holds it back"
    yield well(f"search by {engine}", found, share=share, multiplications_per_s=rate)


def _images(device: str, batch: int, limit: float) -> Iterator[Finding]:
    photos = [_jpeg(picture) for picture in pictures(8, _PHOTO_PIXELS)]
    backbone = load_backbone(BACKBONE, device=device, half=device != "cpu", batch_size=batch)

    transform = backbone.transform

    def prepared(photo: bytes) -> NDArray[np.uint8]:
        return prepare_image(decode_for(photo, transform), transform)

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with ThreadPoolExecutor(cores) as pool:
        decoding = 4 * len(photos) / _seconds(lambda: list(pool.map(prepared, photos * 4)))
    stack = np.stack([prepared(photo) for photo in photos] * (batch // len(photos)))
    network = batch / _seconds(lambda: backbone.embed_prepared(stack))
    share = network * _IMAGE_MULTIPLICATIONS / limit
    slower = "decoding" if decoding < network else "the network"
    where = "" if device == "cpu" else " on a device"
    found = (
        f"{network:.0f} a second through {BACKBONE} ({share:.0%} of the product's speed), {decoding:.0f} decoded by "
        f"{cores} cores; {slower} holds embedding back"
    )
    yield well(f"images{where}", found, network_per_s=network, decoded_per_s=decoding, share=share)


def _device() -> Iterator[Finding]:
    import torch

    if not torch.cuda.is_available():
        return  # said by the step `devices`
    card = torch.cuda.get_device_properties(0)
    host = torch.ones(_COPIED_BYTES, dtype=torch.uint8, pin_memory=True)
    there = torch.empty(_COPIED_BYTES, dtype=torch.uint8, device="cuda")
    other = torch.empty_like(there)
    up = _COPIED_BYTES / _seconds(lambda: there.copy_(host), torch.cuda.synchronize)
    inside = 2 * _COPIED_BYTES / _seconds(lambda: other.copy_(there), torch.cuda.synchronize)
    # DDR: two transfers a clock; the clock is in kHz, the bus in bits.
    peak = 2e3 * getattr(card, "memory_clock_rate", 0) * getattr(card, "memory_bus_width", 0) / 8
    share = f" ({inside / peak:.0%} of its memory's speed)" if peak else ""
    yield well(
        "device copy", f"{up / 1e9:.1f} GB a second from pinned memory, {inside / 1e9:.0f} within{share}",
        to_device_bytes_per_s=up, within_bytes_per_s=inside,
    )  # fmt: skip
    square = torch.ones((_DEVICE_SIDE, _DEVICE_SIDE), dtype=torch.float16, device="cuda")
    taken = _seconds(lambda: torch.mm(square, square, out_dtype=torch.float32), torch.cuda.synchronize)
    limit = _DEVICE_SIDE**3 / taken
    per_clock = _HALF_PER_CLOCK.get(10 * card.major + card.minor, 0)
    could = 1e3 * getattr(card, "clock_rate", 0) * per_clock * card.multi_processor_count
    share = f" ({limit / could:.0%} of what its clock allows)" if could else ""
    yield well(
        "device product",
        f"{limit / 1e12:.1f} T multiplications of float16 a second{share}",
        multiplications_per_s=limit,
    )
    rng = np.random.default_rng(1)
    features, queries = full_norm(rng, _DEVICE_RECORDS, 256), full_norm(rng, _DEVICE_QUERIES, 256)
    for engine in (name for name in ENGINES if name.endswith("-gpu")):
        yield from _search(engine, features, queries, limit)
    yield from _images("cuda", _DEVICE_BATCH, limit)


def _jpeg(picture: Image.Image) -> bytes:
    written = io.BytesIO()
    picture.save(written, "JPEG", quality=90)
    return written.getvalue()


def _seconds(work: Callable[[], object], wait: Callable[[], object] = lambda: None) -> float:
    """The least of three times after one that warms up; of fewer, where they take long."""
    work()
    wait()
    taken: list[float] = []
    while len(taken) < 3 and sum(taken) < _LONG_S:
        started = time.perf_counter()
        work()
        wait()
        taken.append(time.perf_counter() - started)
    return min(taken)
