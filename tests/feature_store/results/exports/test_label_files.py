"""Every format holds every row, and is made in pieces."""

from __future__ import annotations

import csv
import io
import json
from datetime import UTC, datetime
from xml.etree import ElementTree

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from feature_store.results.label_files import (
    FILE_WRITERS,
    ROWS_PER_CHUNK,
    image_folder_csv,
    json_lines,
    label_studio,
    labeling_setup,
    parquet,
)
from feature_store.results.pseudo_labels import SCHEMA
from tests.labeler.tasks import budgets_of, make_task

COUNT = 3 * ROWS_PER_CHUNK + 7


def make_table(count: int, *, names: list[str] | None = None) -> pa.Table:
    numbers = np.arange(count)
    answered = numbers % 5 != 0
    labels = np.where(answered, numbers % 3, -1)
    rows = {
        "query_id": [f"query-{n}" for n in numbers],
        "source": names or [f"folder/photo {n}.jpg" for n in numbers],
        "label": labels,
        "label_name": [f'class "{label}", ü' if label >= 0 else None for label in labels],
        "status": ["answered" if one else "abstained" for one in answered],
        "task_digest": ["a" * 64] * count,
        "job_id": ["job-1"] * count,
        "release": ["histogram"] * count,
        "sigma": [25.0] * count,
        "k": [1] * count,
        "backbone": ["pixels"] * count,
        "backbone_fingerprint": ["sha256:1"] * count,
        "ledger_seq": [9] * count,
        "created_at": [datetime(2027, 3, 1, tzinfo=UTC)] * count,
        "noisy_votes": [[1.5, -2.0, 3.25]] * count,
        "mu_squared_share": [None] * count,
        **budgets_of(make_task(), count),
    }
    return pa.table(rows, schema=SCHEMA.with_metadata({"classes": '["x"]', "privacy": "{}"}))


def test_json_lines_hold_every_row_and_column() -> None:
    rows = [json.loads(line) for line in b"".join(json_lines(make_table(COUNT))).splitlines()]
    assert len(rows) == COUNT
    assert list(rows[0]) == SCHEMA.names
    assert rows[0]["label"] == -1
    assert rows[0]["label_name"] is None
    assert rows[1]["noisy_votes"] == [1.5, -2.0, 3.25]
    assert rows[1]["created_at"] == "2027-03-01T00:00:00+00:00"


def test_parquet_is_the_table_with_its_metadata() -> None:
    table = make_table(COUNT)
    read = pq.read_table(io.BytesIO(b"".join(parquet(table))))
    assert read.equals(table)
    assert read.schema.metadata[b"classes"] == b'["x"]'


def test_label_studio_gets_a_prediction_only_where_there_is_an_answer() -> None:
    tasks = json.loads(b"".join(label_studio(make_table(COUNT))))
    assert len(tasks) == COUNT
    assert tasks[0]["predictions"] == []
    assert tasks[1]["data"]["image"] == "folder/photo%201.jpg"
    assert tasks[1]["data"]["source"] == "folder/photo 1.jpg"
    assert tasks[1]["predictions"][0]["result"][0] == {
        "from_name": "label",
        "to_name": "image",
        "type": "choices",
        "value": {"choices": ['class "1", ü']},
    }


def test_the_csv_keeps_names_byte_for_byte_and_leaves_unanswered_labels_empty() -> None:
    names = ["=1+1.jpg", 'a "b", c.jpg', "new\nline.jpg", "ü.jpg"]
    text = b"".join(image_folder_csv(make_table(4, names=names))).decode()
    rows = list(csv.DictReader(io.StringIO(text)))
    assert [row["file_name"] for row in rows] == names
    assert [bool(row["label"]) for row in rows] == [False, True, True, True]


def test_the_labeling_setup_of_label_studio_has_every_class_and_never_needs_the_rows() -> None:
    view = ElementTree.fromstring(b"".join(labeling_setup(make_table(0))))
    assert [choice.get("value") for choice in view.iter("Choice")] == ["x"]


@pytest.mark.parametrize("name", [name for name in FILE_WRITERS if name != "label-studio-config"])
def test_an_empty_job_gives_a_valid_file(name: str) -> None:
    data = b"".join(FILE_WRITERS[name](make_table(0)))
    expected = {"jsonl": b"", "label-studio": b"[\n]\n", "csv": b"file_name,label\n"}
    if name == "parquet":
        assert pq.read_table(io.BytesIO(data)).num_rows == 0
    else:
        assert data == expected[name]


@pytest.mark.parametrize("name", [name for name in FILE_WRITERS if name != "label-studio-config"])
def test_a_large_job_comes_in_pieces(name: str) -> None:
    table = make_table(70_000 if name == "parquet" else COUNT)  # a piece of Parquet is a group of 65,536 rows
    assert sum(1 for piece in FILE_WRITERS[name](table) if piece) > 1
