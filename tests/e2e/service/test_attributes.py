"""Votes on attributes among real processes: a job from pictures to the attributes of each, and what agents decline."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from api.client import Client
from api.schema import TaskRequest
from feature_store.backbones import load_backbone
from feature_store.embedding import embed_source
from feature_store.results.models import read_model
from feature_store.shard import Shard
from feature_store.sources import celeba_source, read_attributes
from tests.e2e.service.conftest import running
from tests.workers.run.test_attribute_run import NAMES, draw

PUBLIC = 60


def _task(client: Client, **changes: Any) -> str:
    fields = {"name": "shapes", "method": "knn", "k": 5, "sigma_votes": 1.0, "max_queries": 2 * PUBLIC} | changes
    return client.create_task(TaskRequest.model_validate(fields)).task_id


@pytest.mark.long
def test_a_service_labels_every_attribute_and_its_agents_decline_what_they_do_not_hold(tmp_path: Path) -> None:
    backbone, shards = load_backbone("pixels:8"), []
    for number, name in enumerate("abc"):
        shards.append(tmp_path / f"{name}.shard")
        embed_source(
            celeba_source(draw(tmp_path / name, images=120, seed=number)),
            backbone,
            shards[-1],
            duplicates="keep-all",
            max_records=1000,
        )
    asked = draw(tmp_path / "asked", images=PUBLIC, seed=9)
    images = asked / "img_align_celeba"
    arguments = [part for shard in shards for part in ("--shard", shard)]
    with (
        running(tmp_path / "federation", *arguments, "--instance-epsilon", "unlimited") as service,
        service.client() as client,
    ):
        task = _task(client, attributes_per_record=3)
        job = client.wait(client.submit(task, images=images).job_id)
        assert job.state == "completed", job
        table = pq.read_table(client.labels(job.job_id, tmp_path / "labels.parquet"))
        lines = client.labels(job.job_id, tmp_path / "labels.jsonl", format="jsonl").read_text().splitlines()
        csv = client.labels(job.job_id, tmp_path / "metadata.csv", format="csv")
        studio = json.loads(client.labels(job.job_id, tmp_path / "ls.json", format="label-studio").read_text())
        questions = pq.read_table(client.labels(job.job_id, tmp_path / "questions.parquet", of="questions"))
        model = read_model(client.student(job.job_id, tmp_path / "student.safetensors"))
        before = client.budget()
        one_class = client.wait(client.submit(_task(client), images=images).job_id)
        assert one_class.state == "refused", one_class
        assert one_class.problem is not None
        assert [one.posted_nano for one in client.budget().accounts] == [one.posted_nano for one in before.accounts]

    wanted = read_attributes(asked / "list_attr_celeba.txt", frozenset(table["source"].to_pylist())).rows
    truth = np.array([wanted[name] for name in table["source"].to_pylist()])
    said = np.column_stack([table[f"label.{name}"].to_numpy(zero_copy_only=False) for name in NAMES])
    assert (said == truth).mean() > 0.85
    names = [[NAMES[place] for place in np.flatnonzero(row)] for row in said]
    assert table["labels"].to_pylist() == [json.loads(line)["labels"] for line in lines] == names
    assert [one["predictions"][0]["result"][0]["value"]["choices"] for one in studio] == names
    again = read_attributes(csv, frozenset(wanted))
    assert again.names == NAMES
    assert np.array_equal([again.rows[name] for name in table["source"].to_pylist()], said)
    assert set(questions["label"].to_pylist()) == {-1}
    assert len(questions["noisy_votes"][0].as_py()) == len(NAMES)
    assert model.classes == NAMES
    shard = Shard.open(shards[0])
    heads = model.predict_proba(np.asarray(shard.features)) >= 0.5
    assert (heads == shard.labels).mean() > 0.85
