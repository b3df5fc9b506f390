"""A service's job about attributes: files of a job to labels, and labels to what downloads are."""

from __future__ import annotations

import csv
import io
import json
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from feature_store.results.job_process import LabelingOrder, QuestionRequest, label_job, write_questions
from feature_store.results.label_files import FILE_WRITERS
from feature_store.results.models import read_model
from feature_store.results.pseudo_labels import AnsweredRound, JobStamp, QuestionNames, label_table
from feature_store.rows import quantize
from labeler.errors import BadData
from labeler.planning import price
from labeler.privacy_card import guarantee, privacy_card
from labeler.release import Release
from labeler.task import Task, parse_task
from tests.labeler.tasks import budgets_of

NAMES = ("bald", "smiling, young", "red")
IMAGES, K = 120, 10


def _task() -> Task:
    return parse_task(
        {
            "name": "faces", "method": "knn", "classes": NAMES, "k": K, "sigma_votes": 1.0, "delta": 1e-5,
            "max_queries": IMAGES,
            "agents": 5, "max_dropouts": 2, "attributes_per_record": 3, "backbone_fingerprint": "f",
        }
    )  # fmt: skip


def _job(folder: Path, contributors: tuple[int, int]) -> tuple[LabelingOrder, np.ndarray]:
    """Two rounds of a job, opened of so many agents each, whose neighbors all say the truth."""
    rng = np.random.default_rng(3)
    points = rng.normal(size=(IMAGES, 8))
    truth, features = (points[:, :3] > 0).astype(np.int64), quantize(points)
    column = pa.FixedSizeListArray.from_arrays(pa.array(features.ravel()), features.shape[1])
    names = [f"{number}.png" for number in range(IMAGES)]
    pq.write_table(pa.table({"name": names, "feature": column}), folder / "upload.parquet")
    wanted = {"strategy": "all", "count": None, "seed": 0, "fingerprint": "f", "source": "features"}
    write_questions(folder, QuestionRequest.model_validate(wanted))
    task, half, rounds = _task(), IMAGES // 2, []
    for number, present in enumerate(contributors):
        part = slice(number * half, (number + 1) * half)
        votes = K * present * truth[part] + rng.normal(0, 1.0, (half, 3))
        opened = frozenset(f"agent-{one}" for one in range(present))
        release = Release("histogram", votes.argmax(axis=1).astype(np.int16), votes, opened, is_seeded=False)
        rounds.append(AnsweredRound(part.start, half, number + 1 if present else 0, release if present else None))
    stamp = JobStamp("job-1", "pixels", datetime(2030, 1, 1, tzinfo=UTC), guarantee(price(task)), is_seeded=False)
    table = label_table(
        task, stamp, QuestionNames.of(np.arange(IMAGES), names, kind="query"), rounds, budgets=budgets_of(task, IMAGES)
    )
    pq.write_table(table, folder / "labels.parquet")
    return LabelingOrder(
        folder=str(folder),
        job_id="job-1",
        task_digest=task.digest,
        classes=NAMES,
        contributors=max(1, *contributors),
        card=privacy_card(task, price(task), is_seeded=False),
        privacy=guarantee(price(task)),
        is_seeded=False,
        created_at="2030-01-01T00:00:00+00:00",
        source="features",
        rounds=tuple((half, present) for present in contributors),
    ), truth


def _labels(folder: Path, contributors: tuple[int, int]) -> tuple[pa.Table, np.ndarray, np.ndarray]:
    order, truth = _job(folder, contributors)
    label_job(order)
    table = pq.read_table(folder / "image-labels.parquet")
    said = np.column_stack([table[f"label.{name}"].to_numpy(zero_copy_only=False) for name in NAMES])
    return table, said, truth


def test_rounds_of_fewer_agents_are_read_as_shares_of_those_who_answered(tmp_path: Path) -> None:
    table, said, truth = _labels(tmp_path, (5, 3))
    assert (said == truth).mean() > 0.99
    # Of three agents of five a majority of the five could never hold by much: read as shares, both rounds are as sure.
    sure = np.column_stack([table[f"confidence.{name}"].to_numpy() for name in NAMES])
    assert sure[IMAGES // 2 :].mean() > sure[: IMAGES // 2].mean() - 0.05
    assert read_model(tmp_path / "student.safetensors").kind == "attributes"


def test_a_round_that_was_not_opened_leaves_its_images_to_the_others(tmp_path: Path) -> None:
    table, said, truth = _labels(tmp_path, (5, 0))
    assert table["origin"].to_pylist() == ["asked"] * 60 + ["inferred"] * 60
    assert (said[60:] == truth[60:]).mean() > 0.75
    questions = pq.read_table(tmp_path / "labels.parquet")
    assert questions["status"].to_pylist() == ["answered"] * 60 + ["failed_quorum"] * 60
    assert questions["noisy_votes"].null_count == 60


def test_a_job_without_an_answer_has_no_labels(tmp_path: Path) -> None:
    order, _ = _job(tmp_path, (0, 0))
    with pytest.raises(BadData, match="no question was answered"):
        label_job(order)


def test_every_download_has_all_attributes_of_an_image(tmp_path: Path) -> None:
    table, said, _ = _labels(tmp_path, (5, 5))
    names = [[NAMES[place] for place in np.flatnonzero(row)] for row in said]

    def sent(name: str) -> str:
        return b"".join(FILE_WRITERS[name](table)).decode()

    lines = [json.loads(line) for line in sent("jsonl").splitlines()]
    assert [line["labels"] for line in lines] == names
    assert [[line[f"label.{name}"] for name in NAMES] for line in lines] == said.tolist()
    heading, *rows = csv.reader(io.StringIO(sent("csv")))
    assert heading == ["file", *NAMES]
    assert [[int(value) for value in row[1:]] for row in rows] == said.astype(int).tolist()
    studio = json.loads(sent("label-studio"))
    assert [one["predictions"][0]["result"][0]["value"]["choices"] for one in studio] == names
