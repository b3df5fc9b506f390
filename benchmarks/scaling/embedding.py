"""Images embedded by one process and by several, each with images of its own and one core."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Final

import numpy as np
from PIL import Image

from benchmarks.scaling.searching import ONE_CORE
from labeler.errors import LabelerError

BACKBONE: Final = "efficientnet-lite0"
"""Comes as a package: nothing is downloaded."""

WIDTH, HEIGHT = 500, 375


def write_images(folder: Path, *, count: int) -> None:
    """JPEG files of the size of the photographs of Office-Caltech10, of smooth colours with some grain."""
    folder.mkdir()
    rng = np.random.default_rng(0)
    for number in range(count):
        small = Image.fromarray(rng.integers(0, 256, (12, 16, 3), dtype=np.uint8))
        smooth = np.asarray(small.resize((WIDTH, HEIGHT), Image.Resampling.BICUBIC), dtype=np.int16)
        grain = rng.integers(-12, 13, smooth.shape, dtype=np.int16)
        Image.fromarray(np.clip(smooth + grain, 0, 255).astype(np.uint8)).save(folder / f"{number:05d}.jpg", quality=90)


def embed_together(images: Path, *, count: int, processes: int) -> list[dict[str, float]]:
    """Seconds and CPU seconds of each process, which all embed `count` images at the same time.

    Raises:
        LabelerError: a process failed; its last line is in the message.
    """
    order = json.dumps({"images": str(images), "count": count})
    running = [
        subprocess.Popen(
            [sys.executable, "-m", "benchmarks.scaling.embedding", order],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | ONE_CORE | {"PYTHONPATH": str(Path(__file__).parents[2])},
        )
        for _ in range(processes)
    ]
    said = [process.communicate() for process in running]
    for process, (_, errors) in zip(running, said, strict=True):
        if process.returncode:
            raise LabelerError(f"an embedding process failed: {errors.strip().splitlines()[-1:]}")
    return [json.loads(out.splitlines()[-1]) for out, _ in said]


def _embed(images: str, count: int) -> dict[str, float]:
    """Runs in the fresh interpreter."""
    import torch

    from feature_store.backbones import load_backbone
    from feature_store.embedding import embed_source

    torch.set_num_threads(1)
    backbone = load_backbone(BACKBONE)
    with tempfile.TemporaryDirectory() as name:
        few, own = Path(name) / "few", Path(name) / "own"
        for folder, most in ((few, 4), (own, count)):
            folder.mkdir()
            for path in sorted(Path(images).iterdir())[:most]:
                (folder / path.name).symlink_to(path)
        # The network and its kernels are there before the clock runs.
        embed_source(few, backbone, Path(name) / "few.shard", public=True, threads=1)
        began, cpu = time.perf_counter(), time.process_time()
        embed_source(own, backbone, Path(name) / "own.shard", public=True, threads=1)
        return {"seconds": time.perf_counter() - began, "cpu_s": time.process_time() - cpu}


if __name__ == "__main__":
    sys.stdout.write(json.dumps(_embed(**json.loads(sys.argv[1]))) + "\n")
