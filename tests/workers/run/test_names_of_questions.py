"""A question about a cluster is named after the same image by `labeler run` and by the service."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from api.coordinator.labels import read_names
from feature_store.results.job_process import QuestionRequest, write_questions
from feature_store.results.questions import QUESTIONS, UPLOAD, read_stored_questions
from feature_store.shard import Shard
from feature_store.shard_writer import ShardWriter
from labeler.ledger.jobs import JobRecord
from labeler.randomness import seeded_source
from labeler.rounds.effects import AskedStrategy
from workers.run.folder import open_job_folder
from workers.run.preparation import LabelingJob, prepare
from workers.run.task_file import QueriesTable, TaskFile, TaskTable


def images_seen_several_times(folder: Path) -> Shard:
    """Public images of three directions, each image three times: whichever copy lies nearest is a tie."""
    once = np.random.default_rng(3).normal(size=(12, 16)) + 6 * np.repeat(np.eye(16)[:3], 4, axis=0)
    with ShardWriter(
        folder, classes=("cat", "dog", "eel"), fingerprint="backbone", dimension=16, public=True,
        backbone={"kind": "pixels"}, random_bytes=seeded_source(b"public").bytes,
    ) as writer:  # fmt: skip
        writer.append(np.tile(once, (3, 1)), np.full(36, -1), [f"{number}.png" for number in range(36)])
        writer.finish()
    return Shard.open(folder)


@pytest.mark.parametrize("strategy", ["clustered", "spectral"])
def test_the_service_and_run_ask_the_same_and_name_a_cluster_after_the_same_image(
    make_shard: Any, tmp_path: Path, strategy: AskedStrategy
) -> None:
    public = images_seen_several_times(tmp_path / "public")
    file = TaskFile(
        task=TaskTable(name="t", method="knn", k=3, sigma_votes=20.0, delta=1e-5),
        queries=QueriesTable(strategy=strategy, count=3),
    )
    agents = tuple(make_shard(f"a{number}", seed=number).path for number in range(2))
    with open_job_folder(tmp_path / "out") as folder:
        prepared = prepare(LabelingJob(file, agents, public.path, tmp_path / "out"), folder)
    found = prepared.query_names
    # Copies are equally similar: the first of each three names the cluster.
    assert all(int(source.removesuffix(".png")) < 12 for source in found.sources)

    job_folder = tmp_path / "job"
    job_folder.mkdir()
    features = np.ascontiguousarray(public.features)
    column = pa.FixedSizeListArray.from_arrays(pa.array(features.ravel()), 16)
    pq.write_table(pa.table({"name": list(public.sources), "feature": column}), job_folder / UPLOAD)
    request = QuestionRequest(
        strategy=strategy, count=3, seed=file.queries.seed, fingerprint="backbone", source="features"
    )
    write_questions(job_folder, request)
    stored = read_stored_questions(job_folder / QUESTIONS)
    assert stored.features.tobytes() == prepared.queries.features.tobytes()
    assert stored.assignment.tobytes() == prepared.queries.assignment.tobytes()
    now = datetime(2026, 1, 1, tzinfo=UTC)
    job = JobRecord("job", "0" * 64, "t", "completed", 36, 3, 0, strategy, 3, 0, "features", now, now, now, "token")
    _, names = read_names(job_folder, job)
    assert names == found
