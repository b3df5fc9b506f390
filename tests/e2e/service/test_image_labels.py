"""One job of a real federation, from photos to labels of every image: the service gives what the same release gives
here."""

from __future__ import annotations

import csv
import json
from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
from sklearn.datasets import load_digits
from typer.testing import CliRunner

from api.schema import Selection, TaskRequest
from feature_store.query_selection import select_queries
from feature_store.results.exports import folder_name
from feature_store.results.image_labels import IMAGE_SCHEMA
from feature_store.results.pseudo_labels import answers_of
from feature_store.students.labeling import label_images
from tests.e2e.service.conftest import Service
from tests.e2e.service.harm import digits_as_files
from workers.commands.catalog import app

IMAGES, CLUSTERS = 120, 24


def labeler(*arguments: object, service: Service | None = None) -> str:
    at = {} if service is None else {"LABELER_URL": service.url, "LABELER_TOKEN": service.token}
    done = CliRunner().invoke(app, [str(one) for one in arguments], env=at)
    assert done.exit_code == 0, done.output
    return done.stdout


def test_photos_become_labels_of_every_image_a_student_and_labels_of_new_photos(
    service: Service, digit_features: np.ndarray, tmp_path: Path
) -> None:
    photos, new = digits_as_files(tmp_path / "photos", 0, IMAGES), digits_as_files(tmp_path / "new", 1400, 50)
    wanted = {"name": "digits", "method": "reverse-knn", "sigma_votes": 2.0, "delta": 1e-5, "max_queries": CLUSTERS}
    with service.client() as client:
        task = client.create_task(TaskRequest.model_validate(wanted))
        selection = Selection(strategy="clustered", count=CLUSTERS)
        job = client.wait(client.submit(task.task_id, images=photos, selection=selection).job_id)
        assert job.state == "completed", job
        table = pq.read_table(client.labels(job.job_id, tmp_path / "labels.parquet"))
        asked = pq.read_table(client.labels(job.job_id, tmp_path / "questions.parquet", of="questions"))

    # Every image, with what the same release and the same public images give here.
    assert table.schema.equals(IMAGE_SCHEMA)
    assert table["source"].to_pylist() == [f"{number:04d}.png" for number in range(IMAGES)]
    assert asked.num_rows == CLUSTERS
    questions = select_queries(digit_features[:IMAGES], strategy="clustered", count=CLUSTERS, seed=0)
    answers = answers_of(asked, features=questions.features, assignment=questions.assignment)
    here = label_images(answers, digit_features[:IMAGES], rows=questions.rows, kind="planned")
    assert table["label"].to_pylist() == here.probabilities.argmax(axis=1).tolist()
    assert np.allclose(table["confidence"].to_numpy(), here.probabilities.max(axis=1), atol=1e-6)
    assert (table["label"].to_numpy() == load_digits().target[:IMAGES]).mean() > 0.6

    # The student, and new photos.
    student = tmp_path / "student.safetensors"
    told = json.loads(labeler("student", job.job_id, "--out", student, "--json", service=service))
    assert told == {"kind": here.student.kind, "path": str(student)}
    out = ("--out", tmp_path / "new.csv", "--backbone", "pixels:8", "--json")
    counted = json.loads(labeler("predict", student, new, *out))
    assert counted["images"] == 50
    with (tmp_path / "new.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["file_name"] for row in rows] == [f"{number:04d}.png" for number in range(1400, 1450)]
    assert Counter(row["label"] for row in rows) == {name: n for name, n in counted["counts"].items() if n}
    expected = here.student.predict(digit_features[1400:1450])
    assert [int(row["label"]) for row in rows] == expected.tolist()

    # Other formats, made here from the same table.
    export = ("export", job.job_id, "--out")
    labeler(*export, tmp_path / "sorted", "--format", "image-folder", "--images", photos, service=service)
    for name, label in zip(table["source"].to_pylist(), table["label_name"].to_pylist(), strict=True):
        assert (tmp_path / "sorted" / folder_name(label) / name).exists()
    labeler(*export, tmp_path / "asked.jsonl", "--of", "questions", "--format", "jsonl", service=service)
    assert len((tmp_path / "asked.jsonl").read_text().splitlines()) == CLUSTERS
