"""What a job publishes follows from public things and from what was released and paid for, never from private sizes.

The same job runs on shards of very different sizes in which the same records vote, with noise from one seed: then
ballots, noise and releases are equal, and so is every byte that is published.
"""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pytest

import workers.run.publishing
from feature_store.shard import Shard
from labeler.randomness import seeded_source
from tests.workers.builders import shard_of_rows
from workers.progress import StageClock
from workers.run.labeling import run_job
from workers.run.preparation import LabelingJob
from workers.run.task_file import QueriesTable, TaskFile, TaskTable

CLASSES = ("cat", "dog", "eel")
DIMENSION = 16
TASK = TaskFile(
    task=TaskTable(name="animals", method="knn", k=5, sigma_votes=4.0, delta=1e-5),
    queries=QueriesTable(strategy="random", count=12),
)


class _Noon(datetime):
    @classmethod
    def now(cls, tz: object = None) -> datetime:  # type: ignore[override]  # noqa: ARG003  # datetime's signature
        return datetime(2026, 1, 1, 12, tzinfo=UTC)


def _write(path: Path, *, records: int, far: int = 0, seed: int = 0, public: bool = False) -> Path:
    """Records that vote, and `far` more on the other side of the space, which are never among the nearest."""
    rng = np.random.default_rng(seed)
    centres = 5 + np.random.default_rng(7).normal(size=(len(CLASSES), DIMENSION))
    labels = (np.arange(records) % len(CLASSES)).astype(np.int16)
    features = centres[labels] + 0.3 * rng.normal(size=(records, DIMENSION))
    away = -(5 + np.random.default_rng(11).normal(size=(far, DIMENSION)))
    every = np.concatenate([labels, (np.arange(far) % len(CLASSES)).astype(np.int16)])
    return shard_of_rows(
        path, np.concatenate([features, away]), every, classes=CLASSES, fingerprint="backbone", public=public,
        backbone={"kind": "pixels"}, random_bytes=seeded_source(str(path).encode()).bytes,
    ).path  # fmt: skip


def _published(folder: Path, *, far: int, agents: int = 2) -> dict[str, bytes]:
    folder.mkdir()
    shards = [_write(folder / f"agent-{number}", records=60, far=far, seed=number) for number in range(agents)]
    public = (
        _write(folder.parent / "public", records=30, seed=99, public=True) if far == 0 else folder.parent / "public"
    )
    clock = StageClock()
    job = LabelingJob(file=TASK, shards=tuple(shards), queries=public, out=folder / "out", test=public, seed=3)
    summary = run_job(job, clock=clock)
    assert {"read and check", "label", "report"} <= set(clock.seconds)
    assert "seconds" not in str(summary)
    out = folder / "out"
    return {
        str(path.relative_to(out)): path.read_bytes()
        for path in sorted(out.rglob("*"))
        if path.is_file() and ".job" not in path.relative_to(out).parts
    }


def test_jobs_with_the_same_votes_publish_the_same_bytes_however_many_records_there_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Noise is drawn for a version of the records; here only what is published beside it shall differ, if anything.
    monkeypatch.setattr(Shard, "version", property(lambda self: "public" if self.is_public else "private"))
    monkeypatch.setattr(workers.run.publishing, "datetime", _Noon)
    small, large = _published(tmp_path / "small", far=0), _published(tmp_path / "large", far=5_000)
    assert {
        "report.json",
        "report.html",
        "pseudo_labels.parquet",
        "privacy_card.md",
        "student.safetensors",
    } <= small.keys()
    assert small.keys() == large.keys()
    assert [name for name in small if small[name] != large[name]] == []
