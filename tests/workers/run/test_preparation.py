"""A job whose mistake stands in a task file or a manifest is refused before any large file is read."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from labeler.errors import BadData, BudgetExceeded, DamagedShard, InvalidSetting, InvalidTask, LabelerError, MixedShards
from workers.run.folder import open_job_folder
from workers.run.labeling import run_job
from workers.run.preparation import LabelingJob
from workers.run.task_file import BudgetTable, QueriesTable, TaskFile, TaskTable

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
        "too small a budget": ({"file": _file(cap=0.4)}, BudgetExceeded, "its budget allows 0.4"),
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


def _file(*, count: int = 8, cap: float | None = None, **changes: Any) -> TaskFile:
    task = TaskTable.model_validate({"name": "t", "epsilon": 0.5, "delta": 1e-5} | changes)
    return TaskFile(
        task=task, queries=QueriesTable(strategy="random", count=count), budget=BudgetTable(instance_epsilon=cap)
    )
