"""A job whose mistake stands in a task file or a manifest is refused before any large file is read.

A question about a cluster is named after the same image by `labeler run` and by the service.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from feature_store.index import build
from feature_store.results.job_process import QuestionRequest, read_names, write_questions
from feature_store.results.questions import QUESTIONS, UPLOAD, read_stored_questions
from feature_store.shard import Shard
from labeler.errors import BadData, BudgetExceeded, DamagedShard, InvalidSetting, InvalidTask, LabelerError, MixedShards
from labeler.ledger.jobs import JobRecord
from labeler.randomness import seeded_source
from labeler.rounds.effects import AskedStrategy
from tests.workers.builders import shard_of_rows
from workers.run.folder import open_job_folder
from workers.run.labeling import run_job
from workers.run.preparation import LabelingJob, prepare
from workers.run.task_file import JobBudgetTable, QueriesTable, TaskFile, TaskTable

FILE = TaskFile(task=TaskTable(name="t", epsilon=0.5, delta=1e-5), queries=QueriesTable(strategy="random", count=8))


@pytest.fixture
def job(tmp_path: Path, make_shard: Any) -> LabelingJob:
    """Two agents and public images, of which each has a damaged byte: whoever reads a shard whole finds it."""
    shards = [make_shard(name, seed=seed) for seed, name in enumerate(("a", "b"))]
    public = make_shard("public", seed=9, public=True)
    for shard in (*shards, public):
        path = shard.path / "features.npy"
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
    return LabelingJob(FILE, tuple(shard.path for shard in shards), public.path, tmp_path / "job")


def test_what_is_damaged_is_found_when_everything_is_read(job: LabelingJob) -> None:
    with pytest.raises(DamagedShard):
        run_job(job)


def replace_queries(queries: QueriesTable) -> TaskFile:
    return FILE.model_copy(update={"queries": queries})


def mistakes(job: LabelingJob, make: Any) -> dict[str, tuple[dict[str, Any], type[LabelerError], str]]:
    """What is changed about a job, and how it is refused."""
    other, strange = make("other", public=True, classes=("x", "y")).path, make("strange", fingerprint="f").path
    return {
        "an engine that is none": ({"engine": "fais"}, InvalidSetting, "fais"),
        "no shard": ({"shards": ()}, InvalidSetting, "at least one private shard"),
        "public as private": ({"shards": (*job.shards, job.queries)}, InvalidSetting, "is a public shard"),
        "private as public": ({"queries": job.shards[0]}, InvalidSetting, "is a private shard"),
        "other classes": ({"test": other}, MixedShards, "class lists"),
        "another backbone": ({"shards": (*job.shards, strange)}, MixedShards, "backbones"),
        "no images": ({"queries": job.out / "none"}, InvalidSetting, "no shard, folder or file"),
        "images by another backbone": ({"queries": job.out, "backbone": "pixels:8"}, MixedShards, "--backbone has"),
        "no such backbone": ({"queries": job.out, "backbone": "b.toml"}, InvalidSetting, "no backbone file"),
        "a task of other classes": ({"file": _file(classes=("a", "b"))}, InvalidTask, "lists other classes"),
        "too many colluding": ({"file": _file(colluding_agents=2)}, InvalidTask, "too few agents"),
        "more questions than images": ({"file": _file(count=61)}, InvalidSetting, "61 of 60 public images"),
        "a count that all passes over": (
            {"file": replace_queries(QueriesTable(count=20))},
            InvalidSetting,
            "queries.count is 20, and strategy 'all'",
        ),
        "too small a budget": (
            {"file": _file(cap=0.4)},
            BudgetExceeded,
            "In the task file, ask for epsilon 0.4 or less",
        ),
    }


def test_a_mistake_that_a_manifest_shows_is_told_before_shards_are_read(job: LabelingJob, make_shard: Any) -> None:
    for name, (change, error, said) in mistakes(job, make_shard).items():
        with pytest.raises(error) as refused:
            run_job(replace(job, **change))
        assert said in str(refused.value), name


def test_a_folder_of_another_job_is_refused_before_shards_are_read(job: LabelingJob) -> None:
    with open_job_folder(job.out) as folder:
        folder.begin({"shards": ["others"], "seed": None})
    with pytest.raises(BadData, match=r"holds another job \(differs in: shards\)"):
        run_job(job)


def test_names_that_cannot_be_written_down_are_refused_before_anybody_is_asked(tmp_path: Path, make_shard: Any) -> None:
    """Such a job was answered and paid for, and no label of it could ever be published."""
    shards = [make_shard(name, seed=seed).path for seed, name in enumerate(("a", "b"))]
    public = make_shard("odd\udcff", seed=9, public=True)
    with pytest.raises(InvalidSetting, match=r"names of 60 public images are no text .* odd\\udcff/\d+.png"):
        run_job(LabelingJob(FILE, tuple(shards), public.path, tmp_path / "job"))
    assert not list((tmp_path / "job").rglob("journal.db"))


def images_seen_several_times(folder: Path) -> Shard:
    """Public images of three directions, each image three times: whichever copy lies nearest is a tie."""
    once = np.random.default_rng(3).normal(size=(12, 16)) + 6 * np.repeat(np.eye(16)[:3], 4, axis=0)
    return shard_of_rows(
        folder, np.tile(once, (3, 1)), np.full(36, -1), classes=("cat", "dog", "eel"), fingerprint="backbone",
        public=True, backbone={"kind": "pixels"}, random_bytes=seeded_source(b"public").bytes,
    )  # fmt: skip


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


def _file(*, count: int = 8, cap: float | None = None, **changes: Any) -> TaskFile:
    task = TaskTable.model_validate({"name": "t", "epsilon": 0.5, "delta": 1e-5} | changes)
    return TaskFile(
        task=task, queries=QueriesTable(strategy="random", count=count), budget=JobBudgetTable(instance_epsilon=cap)
    )


def test_a_run_meets_a_device_only_where_its_public_size_is_worth_it(
    tmp_path: Path, make_shard: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the bounds that shards declare, whatever they hold. A method without neighbors meets none."""
    sizes = {"one": 10_000, "other": 90_000}
    shards = tuple(
        make_shard(name, seed=seed, max_records=most).path for seed, (name, most) in enumerate(sizes.items())
    )
    public = make_shard("public", seed=9, public=True)
    table = TaskTable(name="t", method="knn", k=3, epsilon=0.5, delta=1e-5)
    job = LabelingJob(FILE.model_copy(update={"task": table}), shards, public.path, tmp_path / "job")
    with open_job_folder(job.out) as folder:
        prepared = prepare(job, folder)
    products = sum(sizes.values()) * 8 * public.dimension
    for worth, engine in ((products, "auto"), (products + 1, "faiss")):
        monkeypatch.setattr(build, "WORTH_A_DEVICE", worth)
        assert prepared.engine == engine
        assert replace(prepared, job=replace(job, engine="int16")).engine == ("faiss" if engine == "faiss" else "int16")
        assert replace(prepared, job=replace(job, engine="numpy")).engine == "numpy"
    ensemble = prepared.task.model_copy(update={"method": "ensemble", "k": 1})
    assert replace(prepared, task=ensemble).engine == "auto"
