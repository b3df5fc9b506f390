"""`labeler demo`: the whole pipeline on real handwritten digits, without any download.

Two fifths of the digits are dealt to five agents with their labels, two fifths are public without labels, one
fifth is kept to score the student (workers.digits). The backbone sees the public part only.

The same questions are asked twice: by the default method, and by the paper's (knn), whose job lies in `knn/`. Features
are shared. Every other file is of the default, and its report shows both.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from feature_store.backbones import Backbone
from feature_store.embedding import embed_source
from feature_store.sources import open_source
from labeler.randomness import seeded_source
from labeler.system.site_key import KEY_BYTES, SiteKey
from workers.digits import AGENTS, CLASSES, write_digits
from workers.progress import ProgressCallback, StageClock, silent
from workers.run.folder import open_job_folder
from workers.run.labeling import run_in_folder
from workers.run.preparation import LabelingJob
from workers.run.task_file import QueriesTable, TaskFile, TaskTable

TASK = TaskFile(
    task=TaskTable(name="Handwritten digits", epsilon=0.5, delta=1e-4),
    queries=QueriesTable(strategy="clustered", count=20),
)
"""The demo's task: one question per cluster of public digits, one vote per private digit, epsilon 0.5."""

COMPARED = TASK.model_copy(update={"task": TaskTable(name="Handwritten digits", method="knn", epsilon=3.0, delta=1e-4)})
"""The same questions by kNN-DPFL, at a price at which its labels are as good: each digit may vote at every one."""


def run_demo(
    out: Path,
    *,
    seed: int | None = None,
    clock: StageClock | None = None,
    progress: ProgressCallback = silent,
) -> dict[str, Any]:
    """Run the demo into a folder.

    Args:
        out: the folder; a demo interrupted there continues.
        seed: decides who holds which digit, the backbone's training and the noise. Without it the split is that of seed
            0 and the noise is the operating system's.
        clock: takes how long each stage took; nothing that is written says so.

    Returns:
        The content of report.json.
    """
    from feature_store.backbones.simclr import DIGITS_CONFIG, pretrain

    clock = clock or StageClock()
    with open_job_folder(out) as folder:
        inputs = out / ".job" / "inputs"
        inputs.mkdir(exist_ok=True)
        with clock.stage("pretrain backbone"):
            parts = write_digits(inputs, seed=seed or 0)
            images = open_source(parts["public"])
            backbone = pretrain(
                [images.read(number) for number in range(len(images.names))],
                config=DIGITS_CONFIG,
                seed=seed or 0,
                checkpoint=inputs / "backbone.safetensors",
                progress=lambda done, total, _: progress("Pretraining SimCLR", done, total),
                threads=1,
            )
        with clock.stage("embed"):
            for number, (name, path) in enumerate(parts.items()):
                progress("Embedding", number, len(parts))
                _embed(name, path, backbone, inputs / f"{name}.shard", seed=seed)
            progress("Embedding", len(parts), len(parts))
        job = LabelingJob(
            file=TASK,
            shards=tuple(inputs / f"agent-{number}.shard" for number in range(1, AGENTS + 1)),
            queries=inputs / "public.shard",
            out=out,
            test=inputs / "test.shard",
            seed=seed,
        )
        with clock.stage("the same by knn"):
            paper = replace(job, file=COMPARED, out=out / COMPARED.task.method)
            with open_job_folder(paper.out) as beside:
                other = run_in_folder(paper, beside, clock=StageClock(), has_curve=False)
        return run_in_folder(job, folder, compared=(other,), clock=clock, progress=progress)


def _embed(name: str, path: Path, backbone: Backbone, out: Path, *, seed: int | None) -> None:
    private = name.startswith("agent")
    random_bytes = os.urandom if seed is None else seeded_source(f"record ids {seed} {name}".encode()).bytes
    # A shard's version, and so its noise, depends on digests: with a key from the seed, a demo repeats itself.
    key = None if seed is None else SiteKey(seeded_source(f"site key {seed} {name}".encode()).bytes(KEY_BYTES))
    embed_source(path, backbone, out, classes=CLASSES, public=not private, key=key, random_bytes=random_bytes)
