"""`labeler demo`: the whole pipeline on real handwritten digits, without any download.

The digits are the 1,797 scanned ones that come with scikit-learn (UCI Optical Recognition of Handwritten
Digits, 8x8 pixels). Two fifths of them are dealt to five agents with their labels, two fifths are public without
labels, one fifth is kept to score the student. The backbone sees the public part only.
"""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray
from PIL import Image
from sklearn.datasets import load_digits

from feature_store.backbones import Backbone
from feature_store.durable import replacing
from feature_store.embedding import embed_source
from labeler.randomness import seeded_source
from workers.job_folder import open_job_folder
from workers.labelling import run_in_folder
from workers.preparation import LabellingJob
from workers.progress import ProgressCallback, StageClock, silent
from workers.task_file import QueriesTable, StudentTable, TaskFile, TaskTable

AGENTS = 5
PRIVATE_SHARE = 0.4
PUBLIC_SHARE = 0.4
CLASSES = tuple(str(digit) for digit in range(10))

TASK = TaskFile(
    task=TaskTable(name="Handwritten digits", method="reverse-knn", k=1, epsilon=0.5, delta=1e-4, colluding_agents=1),
    queries=QueriesTable(strategy="clustered", count=20),
    student=StudentTable(),
)
"""What the demo asks: one question per cluster of public digits, one vote per private digit, epsilon 0.5."""


def run_demo(
    out: Path, *, seed: int | None = None, task: TaskFile = TASK, progress: ProgressCallback = silent
) -> dict[str, Any]:
    """Run the demo into a folder.

    Args:
        out: the folder; a demo interrupted there continues.
        seed: decides who holds which digit, the backbone's training and the noise. Without it the split is that
            of seed 0 and the noise is the operating system's.
        task: what to ask.

    Returns:
        The content of report.json.
    """
    clock = StageClock()
    with open_job_folder(out) as folder:
        inputs = out / ".job" / "inputs"
        inputs.mkdir(exist_ok=True)
        with clock.stage("pretrain backbone"):
            parts = write_digits(inputs, seed=seed or 0)
            backbone = pretrain_on(parts["public"], inputs / "backbone.safetensors", seed=seed or 0, progress=progress)
        with clock.stage("embed"):
            for number, (name, path) in enumerate(parts.items()):
                progress("Embedding", number, len(parts))
                _embed(name, path, backbone, inputs / f"{name}.shard", seed=seed)
            progress("Embedding", len(parts), len(parts))
        job = LabellingJob(
            file=task,
            shards=tuple(inputs / f"agent-{number}.shard" for number in range(1, AGENTS + 1)),
            queries=inputs / "public.shard",
            out=out,
            test=inputs / "test.shard",
            seed=seed,
        )
        return run_in_folder(job, folder, clock=clock, progress=progress)


def write_digits(folder: Path, *, seed: int) -> dict[str, Path]:
    """Deal the digits: one Parquet file of images per agent, one public, one to test on.

    Public and test files carry their labels as well, which only scoring reads.
    """
    digits = load_digits()
    order = np.random.default_rng(seed).permutation(len(digits.target))
    private, public = (int(share * len(order)) for share in (PRIVATE_SHARE, PUBLIC_SHARE))
    parts = {f"agent-{number + 1}": order[number:private:AGENTS] for number in range(AGENTS)}
    parts |= {"public": order[private : private + public], "test": order[private + public :]}
    paths = {name: folder / f"{name}.parquet" for name in parts}
    for name, rows in parts.items():
        if not paths[name].exists():
            _write_images(paths[name], digits.images[rows], digits.target[rows], rows)
    return paths


def pretrain_on(path: Path, checkpoint: Path, *, seed: int, progress: ProgressCallback = silent) -> Backbone:
    """Pretrain SimCLR on the images of a Parquet file."""
    from feature_store.backbones.simclr import DIGITS_CONFIG, pretrain
    from feature_store.images import open_source

    images = open_source(path)
    return pretrain(
        [images.read(number) for number in range(len(images.names))],
        config=DIGITS_CONFIG,
        seed=seed,
        checkpoint=checkpoint,
        progress=lambda done, total, _: progress("Pretraining SimCLR", done, total),
        threads=1,
    )


def _write_images(path: Path, images: NDArray[np.float64], labels: NDArray[np.int64], rows: NDArray[np.int64]) -> None:
    table = pa.table(
        {
            "id": [f"digit-{row:04d}" for row in rows.tolist()],
            "image": pa.array([_png(image) for image in images], pa.binary()),
            "label": [CLASSES[label] for label in labels.tolist()],
        }
    )
    with replacing(path) as temporary:
        pq.write_table(table, temporary)


def _png(image: NDArray[np.float64]) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray((image * (255 / 16)).round().astype(np.uint8)).save(buffer, format="PNG")
    return buffer.getvalue()


def _embed(name: str, path: Path, backbone: Backbone, out: Path, *, seed: int | None) -> None:
    private = name.startswith("agent")
    random_bytes = os.urandom if seed is None else seeded_source(f"record ids {seed} {name}".encode()).bytes
    embed_source(path, backbone, out, classes=CLASSES, public=not private, random_bytes=random_bytes)
