"""New images labeled with a job's student: from a notebook as docs/labels.md writes it, and in a shell."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

import labeler
from feature_store.results.image_labels import IMAGE_SCHEMA, stamp_of
from labeler.errors import MixedShards
from tests.workers.notebook.test_notebook import folders, job  # noqa: F401
from workers.commands.catalog import app

DOCUMENT = (Path(__file__).parents[3] / "docs" / "labels.md").read_text()


def test_the_three_lines_of_the_document_label_new_images(
    job: labeler.LabeledJob,  # noqa: F811
    folders: Path,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (block,) = re.findall(r"^```python\n(.*?)^```", DOCUMENT, flags=re.M | re.S)
    assert len(block.split("\n\n", 1)[1].splitlines()) + 1 == 3
    (tmp_path / "job").symlink_to(job.path)
    (tmp_path / "new-scans").symlink_to(folders / "other")
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    exec(block, names)  # as it stands in the document
    labels = names["labels"]
    assert list(labels.columns) == IMAGE_SCHEMA.names  # type: ignore[attr-defined]
    right = [
        Path(source).parent.name == name for source, name in zip(labels["source"], labels["label_name"], strict=True)
    ]  # type: ignore[index]
    assert len(right) == 100
    assert np.mean(right) > 0.7


def test_predict_writes_the_schema_of_image_labels_and_counts(
    job: labeler.LabeledJob,  # noqa: F811
    folders: Path,  # noqa: F811
    tmp_path: Path,
) -> None:
    student = str(job.path / "student.safetensors")
    done = CliRunner().invoke(app, ["predict", student, str(folders / "other"), "--out", str(tmp_path / "new.parquet")])
    assert done.exit_code == 0, done.output
    assert "100 images labeled" in done.stdout
    table = pq.read_table(tmp_path / "new.parquet")
    assert table.schema.equals(IMAGE_SCHEMA)
    assert set(table["origin"].to_pylist()) == {"inferred"}
    assert stamp_of(table).privacy["instance"]["epsilon"] == job.report["privacy"]["instance"]["epsilon"]
    assert stamp_of(table).is_seeded, "the job's noise came from a seed, and so it is told"
    done = CliRunner().invoke(
        app, ["predict", student, str(folders / "other"), "--out", str(tmp_path / "new.csv"), "--json"]
    )
    assert json.loads(done.stdout)["images"] == 100
    with (tmp_path / "new.csv").open() as file:
        assert [row["label"] for row in csv.DictReader(file)] == table["label_name"].to_pylist()


def test_another_backbone_is_refused_before_an_image_is_read(
    job: labeler.LabeledJob,  # noqa: F811
    folders: Path,  # noqa: F811
    tmp_path: Path,
) -> None:
    student = str(job.path / "student.safetensors")
    done = CliRunner().invoke(app, ["predict", student, str(tmp_path), "--backbone", "pixels:7"])
    assert isinstance(done.exception, MixedShards)
    assert "and backbone 'pixels:7' has" in str(done.exception)
    other = labeler.embed(folders / "other", tmp_path / "other.shard", backbone="pixels:7", public=True, quiet=True)
    done = CliRunner().invoke(app, ["predict", student, str(other.path)])
    assert isinstance(done.exception, MixedShards)
    assert "its labels would mean nothing" in str(done.exception)


def test_a_price_at_which_noise_drowns_the_votes_is_told_in_plan_and_run(
    folders: Path,  # noqa: F811
    tmp_path: Path,
) -> None:
    plan = labeler.plan(epsilon=0.001, delta=1e-4, queries=16, agents=2, classes=4)
    assert "WARNING: the noise drowns the votes" in str(plan)
    assert plan.expected_accuracy is not None
    assert plan.expected_accuracy[1] < 0.6
    assert labeler.plan(epsilon=8.0, delta=1e-4, queries=16, agents=2, classes=4).warning == ""
    document = json.loads(
        CliRunner().invoke(app, ["plan", "--sigma", "4000", "--method", "reverse-knn", "--json"]).stdout
    )
    assert document["warning"]
    assert document["expected_accuracy"]["high"] < 0.5
    sites = [folders / "site-a.shard", folders / "site-b.shard"]
    with pytest.warns(UserWarning, match="the noise drowns the votes"):
        labeler.run(sites, folders / "scans.shard", tmp_path / "job", epsilon=0.001, delta=1e-4, seed=3, quiet=True)
