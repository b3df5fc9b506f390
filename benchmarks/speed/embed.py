"""Embedding photographs on a processor: `labeler embed`, torch in the place of ONNX Runtime, and a plain loop.

Every way runs alone in a fresh interpreter, and its start counts. CPU seconds are those of the
process and of all its children, user and system: other work on the machine hardly moves them. The plain loop is what
one writes without this project: timm, torchvision's transforms and folder, a DataLoader with two workers.

    python -m benchmarks.speed.embed torch|plain|load PHOTOS OUT        one way, for this bench
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from benchmarks import BenchRow, in_turn, rows_of
from benchmarks.accuracy.office_caltech import data_folder
from feature_store.backbones.spec import DEFAULT_BACKBONE, PACKAGED, Transform
from feature_store.shard import Shard
from labeler.errors import LabelerError
from workers.progress import ProgressCallback, silent

ARCHITECTURES: Final = (
    "tf_efficientnet_lite0",
    "tf_efficientnetv2_b0",
    "mobilenetv3_large_100",
    "resnet50",
    "vit_small_patch16_224",
    "convnext_tiny",
)
WORKERS: Final = 2
BATCH: Final = 32
OURS, TORCH, PLAIN = "labeler embed", "torch in its place", "timm and DataLoader"


@dataclass(frozen=True)
class Spent:
    """The time of one process, from its start to its end.

    Attributes:
        seconds: by the clock on the wall.
        cpu_seconds: of it and its children.
    """

    seconds: float
    cpu_seconds: float


def bench_embed(*, data: Path | None = None, full: bool = False, progress: ProgressCallback = silent) -> list[BenchRow]:
    """Measure embedding on a processor; see the module."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        images = _copy_photos(data_folder(data) / "office-caltech10", folder / "photos", most=None if full else 64)
        cache = {"XDG_CACHE_HOME": str(folder / "cache")}
        load = [sys.executable, "-m", "benchmarks.speed.embed", "load", "-", "-"]
        loads = [_spent(load, cache) for _ in range(2)]
        spent = {
            way: _spent(_command(way, folder / "photos", folder / way), cache)
            for way in in_turn(progress, "Embedding", (OURS, TORCH, PLAIN))
        }
        differ, largest = _differences(folder / OURS, folder / TORCH)
    settings = {"backbone": DEFAULT_BACKBONE, "images": images, "cores": os.cpu_count()}
    case = f"{images:,} photographs"
    rows = [BenchRow(case, way, "CPU seconds", one.cpu_seconds, settings=settings) for way, one in spent.items()]
    rows += [
        BenchRow(case, way, "images per second", images / one.seconds, settings=settings) for way, one in spent.items()
    ]
    cheaper = spent[OURS].cpu_seconds / spent[TORCH].cpu_seconds
    faster = spent[PLAIN].seconds / spent[OURS].seconds
    found = [
        (f"{OURS} / {TORCH}", "CPU time ratio", cheaper, "at most 0.45"),
        (f"{OURS} / {PLAIN}", "images per second ratio", faster, "at least 2.5"),
        (f"{OURS}, {TORCH}", "share of int16 coordinates that differ", differ, None),
        (f"{OURS}, {TORCH}", "largest difference in int16 steps", largest, None),
    ]
    rows += rows_of(case, found, settings=settings)
    start = [
        (f"converted {'again' if place == 0 else 'before'}", "CPU seconds", one.cpu_seconds, None)
        for place, one in enumerate(loads)
    ]
    return rows + rows_of("loading the default backbone", start) + _forward_rows(progress)


def _copy_photos(root: Path, folder: Path, *, most: int | None) -> int:
    """Copy photographs of all domains into one folder of classes; return how many."""
    files = sorted(root.glob("*/*/*.jpg"))
    chosen = files if most is None else files[:: max(1, len(files) // most)][:most]
    for file in chosen:
        target = folder / file.parent.name / f"{file.parents[1].name}-{file.name}"
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(file, target)
    return len(chosen)


def _command(way: str, photos: Path, out: Path) -> list[str]:
    if way == OURS:
        options = ["--public", "--device", "cpu", "--json", "--out", str(out)]
        return [sys.executable, "-m", "workers.cli", "embed", str(photos), *options]
    return [sys.executable, "-m", "benchmarks.speed.embed", "torch" if way == TORCH else "plain", str(photos), str(out)]


def _spent(command: list[str], environment: dict[str, str]) -> Spent:
    """Run a command to its end."""
    about = os.environ | environment | {"PYTHONPATH": str(Path(__file__).parents[2])}
    started = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, env=about)
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise LabelerError(f"a measuring process failed: {' '.join(command[1:5])}")
    return Spent(time.perf_counter() - started, used.ru_utime + used.ru_stime)


def _differences(one: Path, other: Path) -> tuple[float, float]:
    """Return the share of coordinates that differ, and the largest difference, of two shards of the same images."""
    first, second = (_rows_by_name(Shard.open(path)) for path in (one, other))
    apart = np.abs(first - second)
    return float((apart > 0).mean()), float(apart.max())


def _rows_by_name(shard: Shard) -> NDArray[np.int32]:
    order = np.argsort(np.array(shard.sources))
    found: NDArray[np.int32] = np.asarray(shard.features)[order].astype(np.int32)
    return found


def _forward_rows(progress: ProgressCallback) -> list[BenchRow]:
    """Measure a forward pass of one image on one core; weights are random, which costs the same."""
    return [row for architecture in in_turn(progress, "Networks", ARCHITECTURES) for row in _forward(architecture)]


def _forward(architecture: str) -> list[BenchRow]:
    import torch

    from feature_store.backbones.network import CPU_BATCH, NetworkBackbone, create_timm
    from feature_store.backbones.onnx_network import OnnxBackbone, convert

    torch.set_num_threads(1)
    torch.manual_seed(0)
    half = (0.5,) * 3
    module = create_timm(architecture, {}, pretrained=False)
    transform = Transform(resize=224, crop=224, mean=half, std=half)
    spec: dict[str, Any] = {"architecture": architecture, "transform": transform.model_dump(mode="json")}
    with torch.inference_mode():
        dimension = module.eval()(torch.zeros(1, 3, 224, 224)).shape[1]
    network = NetworkBackbone(module, dimension=dimension, transform=transform, spec=spec, device="cpu")
    converted = convert(network, None)
    if not isinstance(converted, OnnxBackbone):
        raise LabelerError(f"{architecture} could not be converted")
    images = np.random.default_rng(1).integers(0, 256, (CPU_BATCH, 224, 224, 3), dtype=np.uint8)
    found = []
    for method, backbone in (("torch", network), ("ONNX Runtime", converted)):
        taken = []
        for _ in range(3):
            started = time.process_time()
            backbone.embed_prepared(images)
            taken.append(1e3 * (time.process_time() - started) / len(images))
        found.append((method, "milliseconds of one core per image", min(taken), None))
    return rows_of(f"forward pass, {architecture}", found)


# One way each, in a separate process.


def _embed_by_torch(photos: Path, out: Path) -> None:
    from feature_store.backbones import load_network
    from feature_store.embedding import embed_source

    embed_source(photos, lambda: load_network(DEFAULT_BACKBONE, device="cpu"), out, public=True)


def _embed_plainly(photos: Path) -> None:
    import timm
    import torch
    from torch.utils.data import DataLoader
    from torchvision.datasets import ImageFolder

    from feature_store.backbones.network import load_packaged

    package = PACKAGED[DEFAULT_BACKBONE]
    model = timm.create_model(package.architecture, pretrained=False, num_classes=0).eval()
    load_packaged(model, package)  # with random weights numbers become so small that a pass takes three times as long
    config = timm.data.resolve_model_data_config(model)  # type: ignore[attr-defined, no-untyped-call]  # timm is half typed
    transform = timm.data.create_transform(**config)  # type: ignore[attr-defined]  # as above
    loader = DataLoader(ImageFolder(photos, transform), batch_size=BATCH, num_workers=WORKERS)
    with torch.inference_mode():
        torch.cat([model(images) for images, _ in loader])


def _load() -> None:
    from feature_store.backbones import load_backbone

    load_backbone(DEFAULT_BACKBONE, device="cpu")


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["torch", photos, out]:
            _embed_by_torch(Path(photos), Path(out))
        case ["plain", photos, _]:
            _embed_plainly(Path(photos))
        case ["load", *_]:
            _load()
