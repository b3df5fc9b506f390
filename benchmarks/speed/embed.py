"""The cost of embedding an image, step by step: both decoders against each other, and the whole against its parts.

Decoding and preparing are measured in processor time of one thread, which other work on the machine hardly moves; the
decoders take turns. The whole (`labeler embed` without its command) takes turns with the forward pass alone and the
input alone, so that a change of the machine's speed hits all three. It is measured in processor time where the
processor computes, for there nothing can overlap and every core is busy. Where a GPU computes, it is measured by the
clock.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import get_args

import numpy as np
import torch

from benchmarks import BenchRow, seconds_of
from benchmarks.accuracy.office_caltech import data_folder
from feature_store.backbones import Decoder, load_backbone, read_spec
from feature_store.backbones.backbone import Backbone, decode_for, prepare_image
from feature_store.backbones.spec import DEFAULT_BACKBONE, Transform
from feature_store.embedding import all_cores, embed_source, load_image, loaded_batches
from feature_store.sources import open_source
from workers.progress import ProgressCallback, silent

DOMAINS = {
    "amazon": "300 x 300",
    "caltech10": "about 300 x 250",
    "webcam": "about 500 x 500",
    "dslr": "1000 x 1000",
}
CLASSES = ("one", "two")


def bench_embed(*, data: Path | None = None, full: bool = False, progress: ProgressCallback = silent) -> list[BenchRow]:
    """Measure the steps of embedding; see the module."""
    root = data_folder(data) / "office-caltech10"
    backbone = load_backbone(DEFAULT_BACKBONE)
    rows: list[BenchRow] = []
    for number, (domain, size) in enumerate(DOMAINS.items()):
        progress("Embedding", number, len(DOMAINS) + 1)
        files = _some(root / domain, 40 if full else 16)
        case = f"{domain}, JPEG {size}"
        rows += _steps(case, [file.read_bytes() for file in files], backbone.transform, turns=7 if full else 3)
    progress("Embedding", len(DOMAINS), len(DOMAINS) + 1)
    rows += _whole(_some(root / "webcam", 192 if full else 96), backbone, turns=5 if full else 3)
    progress("Embedding", len(DOMAINS) + 1, len(DOMAINS) + 1)
    return rows


def _some(folder: Path, count: int) -> list[Path]:
    """Return photographs of all classes of a domain."""
    files = sorted(folder.rglob("*.jpg"))
    return files[:: max(1, len(files) // count)][:count]


def _steps(case: str, files: list[bytes], transform: Transform, *, turns: int) -> list[BenchRow]:
    """Measure decoding and preparing by each decoder, in milliseconds of one core, and the ratio of the new one to the
    old.
    """
    transforms = [transform.model_copy(update={"decoder": decoder}) for decoder in get_args(Decoder)]
    spent = {one.decoder: np.zeros((turns, 2)) for one in transforms}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    for turn in range(-1, turns):
        for one in transforms:
            for file in files:
                started = time.thread_time()
                image = decode_for(file, one)
                decoded = time.thread_time()
                prepare_image(image, one)
                if turn >= 0:
                    spent[one.decoder][turn] += (decoded - started, time.thread_time() - decoded)
    torch.set_num_threads(threads)
    settings = {"photographs": len(files), "turns": turns, "bytes": sum(map(len, files)) // len(files)}
    rows = []
    for decoder, each in spent.items():
        decode, prepare = 1e3 * np.median(each, axis=0) / len(files)
        rows += [
            BenchRow(case, f"decode, {decoder}", "milliseconds of one core", float(decode), settings=settings),
            BenchRow(case, f"prepare, {decoder}", "milliseconds of one core", float(prepare), settings=settings),
        ]
    ratio = float(np.median(spent["pillow"].sum(axis=1) / spent["turbo"].sum(axis=1)))
    return [
        *rows,
        BenchRow(
            case, "decode and prepare, pillow / turbo", "time ratio", ratio, reference="at least 3", settings=settings
        ),
    ]


def _whole(files: list[Path], backbone: Backbone, *, turns: int) -> list[BenchRow]:
    """Measure a shard of photographs of about 500 x 500, the forward pass alone, and the input alone."""
    slow = load_backbone(read_spec(DEFAULT_BACKBONE).model_copy(update={"decoder": "pillow"}))
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        images = len(files)
        _copy(files, folder / "photos")
        source = open_source(folder / "photos")
        threads = all_cores()
        pixels = np.stack([_prepared(load_image(source, index, backbone.transform).pixels) for index in range(images)])

        def forward() -> None:
            backbone.embed_prepared(pixels)

        def read() -> None:
            def one(index: int) -> object:
                return load_image(source, index, backbone.transform)

            for _ in loaded_batches(one, range(images), batch_size=backbone.batch_size, threads=threads):  # type: ignore[arg-type]
                pass

        def embed(by: Backbone) -> Callable[[], None]:
            def run() -> None:
                with tempfile.TemporaryDirectory(dir=folder) as out:
                    embed_source(source, by, Path(out) / "shard", classes=CLASSES, duplicates="keep-all")

            return run

        clock = time.process_time if not torch.cuda.is_available() else time.perf_counter
        measured = [
            [seconds_of(work, clock) for work in (forward, read, embed(backbone), embed(slow))] for _ in range(turns)
        ]
    forwards, reads, wholes, befores = ([turn[place] for turn in measured] for place in range(4))
    share = statistics.median(
        max(one, other) / whole for one, other, whole in zip(forwards, reads, wholes, strict=True)
    )
    ratio = statistics.median(before / whole for before, whole in zip(befores, wholes, strict=True))
    settings = {
        "images": images, "turns": turns, "batch_size": backbone.batch_size, "threads": threads,
        "precision": backbone.spec["precision"],
    }  # fmt: skip
    case = f"webcam, {DEFAULT_BACKBONE}"

    def row(method: str, seconds: Sequence[float]) -> BenchRow:
        each = 1e3 * statistics.median(seconds) / images
        return BenchRow(case, method, "milliseconds per image", each, settings=settings)

    return [
        row("forward pass alone", forwards),
        row("reading, decoding, preparing alone", reads),
        row("a whole shard", wholes),
        row("a whole shard, decoder pillow", befores),
        BenchRow(
            case, "slower of forward pass and input / whole shard", "time ratio", share, reference="at least 0.9",
            settings=settings,
        ),
        BenchRow(case, "whole shard, pillow / turbo", "time ratio", ratio, settings=settings),
    ]  # fmt: skip


def _copy(files: list[Path], folder: Path) -> None:
    for number, file in enumerate(files):
        copied = folder / CLASSES[number % len(CLASSES)] / f"{number:04}.jpg"
        copied.parent.mkdir(parents=True, exist_ok=True)
        copied.write_bytes(file.read_bytes())


def _prepared(
    pixels: np.ndarray[tuple[int, ...], np.dtype[np.uint8]] | None,
) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    assert pixels is not None  # noqa: S101  # we made them
    return pixels
