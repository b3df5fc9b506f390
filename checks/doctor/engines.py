"""Steps of a check-up that compute: engines against the definition, devices, features, and speed.

**Engines.** Each must find what the definition finds, in the hardest cases, and give back its memory. The reference is
a product of 64-bit integers and a full sort. The records would show any rounding: similarities up to 2^24, one number
or 1280, all tied. Searches ask for k on both sides of what libraries return at once (2048), under every switch of torch
by which a process may have allowed products of less precision.

**Devices.** For CUDA devices, the step checks which there are, whether the libraries were built for them, and what is
free. Each library is asked by itself, because one can see a device that another was not built for.

**Speed.** Every share is a ratio of two times of one run. The limit of a processor is the speed of the fastest
installed library for a product of float32. The limit of a device follows from its clock and its units where they are
known, else from the same product.

**Features.** The network that embeds is checked: the same features alone and among others, and in half precision. A
record is found by its feature, so two machines, or two batches, must not make two features of one image. The network
comes with this package; the images are made here.
"""

from __future__ import annotations

import gc
import io
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from checks.doctor.checkup import CheckFinding, look, well, wrong
from feature_store.backbones import load_backbone
from feature_store.backbones.backbone import decode_for, prepare_image
from feature_store.cluster.search import build_index_of
from feature_store.index import ENGINES, NeighborIndex, Neighbors, build_index, nearest_by_definition
from feature_store.index.build import is_cluster
from feature_store.rows import quantize
from labeler.errors import InvalidSetting, LabelerError, UnsafeIndex

_DRIVER: Final = Path("/proc/driver/nvidia/version")
_QUERY: Final = "--query-gpu=name,driver_version,memory.total,memory.used"
_LITTLE: Final = 2 << 30


def devices() -> Iterator[CheckFinding]:
    """Check driver, architectures, memory."""
    yield _driver()
    yield from _by_torch()


def built_for(architectures: list[str], capability: tuple[int, int]) -> bool:
    """True if a list such as ["sm_80", "sm_90", "compute_90"] holds code for a device.

    Code of one generation (sm_80) runs on later minor versions of it (8.6). Code that can be compiled at load
    (compute_90) runs on everything later. sm_90a and the like count for that version alone.
    """
    for name in architectures:
        kind, _, number = name.partition("_")
        version = divmod(int(number.rstrip("af") or 0), 10)
        if kind == "sm" and version == capability:
            return True
        if number.endswith(("a", "f")):
            continue
        if kind == "sm" and version[0] == capability[0] and version[1] <= capability[1]:
            return True
        if kind == "compute" and version <= capability:
            return True
    return False


def _driver() -> CheckFinding:
    program = shutil.which("nvidia-smi")
    if program is None:
        said = _DRIVER.read_text().splitlines()[0] if _DRIVER.exists() else ""
        if said:
            return look(
                "driver",
                f"{said}; nvidia-smi is missing",
                "in a container, set NVIDIA_DRIVER_CAPABILITIES=compute,utility",
            )
        return wrong(
            "driver", "there is no NVIDIA driver here",
            "install the driver; in a container, start it with --gpus all (NVIDIA container toolkit)",
        )  # fmt: skip
    asked = subprocess.run([program, _QUERY, "--format=csv,noheader"], capture_output=True, text=True, check=False)
    if asked.returncode:
        return wrong(
            "driver", f"nvidia-smi fails: {asked.stdout.strip() or asked.stderr.strip()}", "install the driver again"
        )
    return well("driver", "; ".join(asked.stdout.strip().splitlines()))


def _by_torch() -> Iterator[CheckFinding]:
    import torch

    if torch.version.cuda is None:
        yield wrong(
            "torch", f"torch {torch.__version__} is built for processors only", "install torch's wheel with CUDA"
        )
        return
    if not torch.cuda.is_available():
        yield wrong(
            "torch", f"torch {torch.__version__} (CUDA {torch.version.cuda}) sees no device",
            "compare the driver's version with the one that this CUDA needs, and look at CUDA_VISIBLE_DEVICES",
        )  # fmt: skip
        return
    architectures = torch.cuda.get_arch_list()
    for number in range(torch.cuda.device_count()):
        name, capability = torch.cuda.get_device_name(number), torch.cuda.get_device_capability(number)
        words = f"{name}, compute capability {capability[0]}.{capability[1]}"
        if not built_for(architectures, capability):
            yield wrong(
                f"cuda:{number}", f"{words}; torch {torch.__version__} is built for {', '.join(architectures)}",
                "install a version of torch that is built for this device",
            )  # fmt: skip
            continue
        free, total = torch.cuda.mem_get_info(number)
        found = f"{words}, {free / 2**30:.1f} of {total / 2**30:.1f} GiB free"
        if free < _LITTLE:
            yield look(
                f"cuda:{number}",
                found,
                "end what else uses it (nvidia-smi lists it)",
                free_bytes=free,
                total_bytes=total,
            )
        else:
            yield well(f"cuda:{number}", found, free_bytes=free, total_bytes=total)


DIMENSIONS: Final = (1, 24, 768, 1280)
COUNTS: Final = (1, 50, 2047, 2048, 2049)
RECORDS: Final = 2100
_ASKED: Final = 6
_INDEXES: Final = 100
_INDEX_SHAPE: Final = (1000, 256)
_GROWTH: Final = 16
"""Indexes' worth of memory that may stay after a hundred: allocators keep some."""

_ELSE: Final = "numpy"


@dataclass(frozen=True, eq=False)
class Case:
    """Records and queries, with the neighbors to find."""

    name: str
    features: NDArray[np.int16]
    record_ids: NDArray[np.int64]
    queries: NDArray[np.int16]
    expected: Neighbors


def cases() -> list[Case]:
    """Return the cases, the same at every run."""
    made = []
    for dimension in DIMENSIONS:
        rng = np.random.default_rng(dimension)
        full = full_norm(rng, RECORDS, dimension)
        full[RECORDS // 2 :: 7] = full[0]  # ties among the nearest, and opposite to the farthest
        tied = np.repeat(full_norm(rng, 1, dimension), RECORDS, axis=0)
        for name, features in (("near 2^24", full), ("all tied", tied)):
            ids = rng.choice(2**62, RECORDS, replace=False).astype(np.int64)
            queries = np.concatenate([features[:1], -features[:1], full_norm(rng, _ASKED - 2, dimension)])
            expected = nearest_by_definition(features, ids, queries, max(COUNTS))
            made.append(Case(f"{name}, {dimension} numbers", features, ids, queries, expected))
    return made


def full_norm(rng: np.random.Generator, count: int, dimension: int) -> NDArray[np.int16]:
    """Return rows as long as rows may be: squared norms just below 2^24."""
    vectors = rng.standard_normal((count, dimension))
    vectors *= 4095 / np.linalg.norm(vectors, axis=1, keepdims=True)
    return np.clip(np.trunc(vectors), -2048, 2048).astype(np.int16)


def exactness(engine: str) -> Iterator[CheckFinding]:
    """Check every case and count, as this process is set up; then under every switch, where the engine uses torch."""
    judged = cases()
    try:
        wrongs, refusals, searches = _tried(engine, judged, COUNTS)
    except InvalidSetting as error:
        yield look(f"engine {engine}", str(error), "nothing, unless it should be there; auto uses another")
        return
    switches = list(_switches()) if "torch" in sys.modules else []
    some = [case for case in judged if not case.name.endswith(" 1 numbers")]
    for name, switch in switches:
        undo = switch()
        try:
            found = _tried(engine, some, (50, 2049))
        finally:
            undo()
        wrongs += [f"{which} with {name}" for which in found[0]]
        refusals += [f"{which} with {name}" for which in found[1]]
        searches += found[2]
    numbers = {"searches": searches, "wrong": len(wrongs), "refused": len(refusals)}
    also = f", {len(switches)} switches of torch" if switches else ""
    if wrongs or (refusals and not switches):
        said = [*wrongs, *refusals]
        yield wrong(
            f"engine {engine}",
            f"not exact in {len(said)} of {searches} searches, the first: {said[0]}",
            f'do not use it: set engine = "{_ELSE}", and report this with --json',
            **numbers,
        )
    elif refusals:
        yield look(
            f"engine {engine}", f"exact as set up; refuses {len(refusals)} searches, the first: {refusals[0]}",
            "nothing, unless a program of yours sets such a switch", **numbers,
        )  # fmt: skip
    else:
        yield well(f"engine {engine}", f"exact: {searches} searches equal int64, k to {max(COUNTS)}{also}", **numbers)


def made_and_freed(engine: str) -> Iterator[CheckFinding]:
    """Build a hundred indexes one after the other, each searched once: memory has to come back."""
    rng = np.random.default_rng(0)
    features, ids = full_norm(rng, *_INDEX_SHAPE), np.arange(_INDEX_SHAPE[0], dtype=np.int64)

    def once() -> None:
        build_index(features, ids, engine=engine).search(features[:8], 50)
        gc.collect(0)

    try:
        for _ in range(5):
            once()
    except (InvalidSetting, UnsafeIndex):
        return  # an engine that is absent or not exact was reported before
    before = _taken()
    for _ in range(_INDEXES):
        once()
    after = _taken()
    size = 4 * features.size
    grown = {where: after[where] - before[where] for where in before}
    numbers = {f"{where}_grown_bytes": value for where, value in grown.items()}
    words = ", ".join(f"{value / 2**20:+.1f} MiB in {where} memory" for where, value in grown.items())
    if any(value > _GROWTH * size for value in grown.values()):
        yield wrong(
            f"memory of {engine}", f"{words} after {_INDEXES} indexes of {size / 2**20:.1f} MiB",
            f"it does not give back what it takes: set engine = \"{_ELSE}\", and report this with --json", **numbers,
        )  # fmt: skip
    else:
        yield well(f"memory of {engine}", f"{words} after {_INDEXES} indexes of {size / 2**20:.1f} MiB", **numbers)


def check(engine: str) -> Iterator[CheckFinding]:
    """Check exactness and memory in one process; of a cluster only exactness: its indexes start slow processes."""
    yield from exactness(engine)
    if not is_cluster(engine):
        yield from made_and_freed(engine)


def _tried(engine: str, judged: list[Case], counts: tuple[int, ...]) -> tuple[list[str], list[str], int]:
    """Return the searches that found something else, those that were refused, and the number of searches."""
    wrongs, refusals, searches = [], [], 0
    for case in judged:
        index: NeighborIndex | None = None
        for k in counts:
            searches += 1
            try:
                index = index or build_index_of(engine, case.features, case.record_ids)
                found = index.search(case.queries, k)
            except UnsafeIndex:
                refusals.append(f"{case.name}, k {k}")
                continue
            fault = getattr(index, "fault", None)
            if fault is not None:
                # The index went on with numpy, whose neighbors are right: this one's were not, or never came.
                wrongs.append(f"{case.name}, k {k}, left for numpy: {fault}")
                index = None
                continue
            same = np.array_equal(found.record_ids, case.expected.record_ids[:, :k])
            if not same or not np.array_equal(found.similarities, case.expected.similarities[:, :k]):
                wrongs.append(f"{case.name}, k {k}")
    return wrongs, refusals, searches


def _switches() -> Iterator[tuple[str, Callable[[], Callable[[], None]]]]:
    """Yield the name of each switch of torch with a function that sets it and returns its undo."""
    import torch

    cuda: Any = torch.backends.cuda.matmul
    backends: Any = torch.backends
    processor = backends.mkldnn.matmul

    def setting(owner: Any, name: str, value: object) -> Callable[[], Callable[[], None]]:
        def switch() -> Callable[[], None]:
            before = getattr(owner, name)
            setattr(owner, name, value)
            return lambda: setattr(owner, name, before)

        return switch

    yield "TF32 on a device", setting(cuda, "fp32_precision", "tf32")
    yield "TF32 on the processor", setting(processor, "fp32_precision", "tf32")
    yield "bfloat16 on the processor", setting(processor, "fp32_precision", "bf16")
    for name in (
        "allow_fp16_reduced_precision_reduction",
        "allow_bf16_reduced_precision_reduction",
        "allow_fp16_accumulation",
    ):
        if hasattr(cuda, name):
            yield name, setting(cuda, name, True)


def _taken() -> dict[str, int]:
    """Return the bytes in use by this process, and on the device where torch sees one."""
    gc.collect()
    taken = {}
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        torch.cuda.empty_cache()
        # the first call initializes the device, which takes 100 MiB of main memory
        free, total = torch.cuda.mem_get_info()
        taken["device"] = total - free
    pages = Path("/proc/self/statm")
    if pages.exists():
        taken["main"] = int(pages.read_text().split()[1]) * os.sysconf("SC_PAGESIZE")
    return taken


BACKBONE: Final = "efficientnet-lite0"
_IMAGES: Final = 6
_SAME: Final = 0.9999
"""Cosine between two features of one image; of two images of one class it is below 0.99."""
_USABLE: Final = 0.999


def pictures(count: int, pixels: int) -> list[Image.Image]:
    """Return images with structure at every size, as photographs have; the same at every run."""
    rng = np.random.default_rng(pixels)
    made = []
    for _ in range(count):
        sum_ = np.zeros((pixels, pixels, 3))
        for size in (3, 8, 20, 60):
            noise = Image.fromarray(rng.integers(0, 256, (size, size, 3), dtype=np.uint8))
            sum_ += np.asarray(noise.resize((pixels, pixels), Image.Resampling.BICUBIC), dtype=np.float64) / 4
        made.append(Image.fromarray(sum_.astype(np.uint8)))
    return made


def features(gpu: bool) -> Iterator[CheckFinding]:
    """Check batches of 1 against large ones, and float16 against float32 on a device."""
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


def _judged(what: str, first: NDArray[np.float32], second: NDArray[np.float32]) -> CheckFinding:
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
"""Multiplications of one image through BACKBONE at 224 pixels."""

_SLOW_SEARCH: Final = 0.4
_LONG_S: Final = 0.5
_BUSY: Final = 0.3
"""The share of the processors that others may use before the report mentions them."""

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


def speed(gpu: bool) -> Iterator[CheckFinding]:
    """Measure the processor, and the device where it was asked for."""
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


def _others() -> Iterator[CheckFinding]:
    if not hasattr(os, "getloadavg"):
        return
    load, cores = os.getloadavg()[0], os.cpu_count() or 1
    # Earlier steps used a processor themselves.
    others = max(0.0, load - 1) / cores
    if others > _BUSY:
        yield look(
            "other programs", f"keep {load:.1f} processors busy, of {cores}: speeds below are lower than they could be",
            "run this again when they are done", load=load, cores=cores,
        )  # fmt: skip


def _copy() -> Iterator[CheckFinding]:
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


def _searches(limit: float) -> Iterator[CheckFinding]:
    rng = np.random.default_rng(1)
    features, queries = full_norm(rng, _RECORDS, _DIMENSION), full_norm(rng, _QUERIES, _DIMENSION)
    for engine in ENGINES:
        if engine != "auto" and not engine.endswith("-gpu"):
            yield from _search(engine, features, queries, limit)


def _search(
    engine: str, features: NDArray[np.int16], queries: NDArray[np.int16], limit: float
) -> Iterator[CheckFinding]:
    try:
        index = build_index(features, np.arange(len(features), dtype=np.int64), engine=engine)
        rate = features.size * len(queries) / _seconds(lambda: index.search(queries, _K))
    except (InvalidSetting, UnsafeIndex):
        return  # the engine's own step reports it
    share = rate / limit
    held = "the product" if share > _SLOW_SEARCH else "choosing the nearest, or slow kernels,"
    found = f"{share:.0%} of the product's speed; {held} holds it back"
    yield well(f"search by {engine}", found, share=share, multiplications_per_s=rate)


def _images(device: str, batch: int, limit: float) -> Iterator[CheckFinding]:
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


def _device() -> Iterator[CheckFinding]:
    import torch

    if not torch.cuda.is_available():
        return  # the step `devices` reports it
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
    """Return the least of three times after a warm-up; of fewer where they take long."""
    work()
    wait()
    taken: list[float] = []
    while len(taken) < 3 and sum(taken) < _LONG_S:
        started = time.perf_counter()
        work()
        wait()
        taken.append(time.perf_counter() - started)
    return min(taken)
