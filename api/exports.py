"""Labels as files: JSON lines, Parquet, Label Studio tasks and setup, and the metadata.csv of an image folder.

A table covers every image (feature_store.results.image_labels) or only the asked questions (pseudo_labels); its columns
say which. Images have a confidence: the score in Label Studio, a column in the CSV.

Every format is a generator of bytes, so that a large job is sent while it is written. Rows keep the job's order. With
attributes, an image has any number of labels: a list of choices in Label Studio, a column for each in the CSV. An
unanswered query keeps its row (label -1, no name) in JSON lines and Parquet. It has no prediction in Label Studio, and
an empty label in the CSV, so that no image vanishes from a data set unnoticed.

CSV cells are not escaped. A spreadsheet may read a cell that starts with "=" as a formula. But file names must match
the requester's files byte for byte, and a prefix would break the loaders that read this file.
"""

from __future__ import annotations

import csv
import io
import json
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from api.schema import LabelFormat, LabelsOf
from feature_store.results.exports import LABEL_STUDIO_CHOICES, LABEL_STUDIO_IMAGE, label_studio_config
from feature_store.results.image_labels import FILE_HEADINGS, LABEL, SEVERAL
from feature_store.results.pseudo_labels import question_share

ROWS_PER_CHUNK = 1024
_PIECE_BYTES = 2**16
_JSON = json.JSONEncoder(ensure_ascii=False, default=datetime.isoformat).encode


@dataclass(frozen=True)
class Export:
    """One export format."""

    media_type: str
    suffix: str
    write: Callable[[pa.Table], Iterator[bytes]]

    def file_name(self, job_id: str, of: LabelsOf) -> str:
        """Return the name under which a browser saves it."""
        what = "labels" if of == "images" else "questions"
        return f"{job_id}-{what}.{self.suffix}" if self.suffix != "csv" else "metadata.csv"


def json_lines(table: pa.Table) -> Iterator[bytes]:
    """Yield one JSON object per row: the columns of the table, and each question's share of mu squared."""
    share = question_share(table)
    for rows in _chunks(table):
        yield "".join(_JSON(row | share) + "\n" for row in rows).encode()


def parquet(table: pa.Table) -> Iterator[bytes]:
    """Yield the table itself, schema metadata included."""
    with tempfile.SpooledTemporaryFile(_PIECE_BYTES) as file:
        pq.write_table(table, file, compression="zstd", row_group_size=64 * ROWS_PER_CHUNK)
        file.seek(0)
        while piece := file.read(_PIECE_BYTES):
            yield piece


def label_studio(table: pa.Table) -> Iterator[bytes]:
    """Yield a JSON array of tasks; the label is a prediction, which a person can accept or correct."""
    yield b"["
    separator = "\n"
    metadata = table.schema.metadata or {}
    # Tables of images have the task's name alone; tables of questions have the whole task.
    name = metadata.get(b"task_name", b"").decode() or json.loads(metadata.get(b"task", b"{}")).get("name", "")
    for rows in _chunks(table):
        parts = []
        for row in rows:
            parts.append(separator + _JSON(_task(row, name)))
            separator = ",\n"
        yield "".join(parts).encode()
    yield b"\n]\n"


def labeling_setup(table: pa.Table) -> Iterator[bytes]:
    """Yield the labeling configuration that a Label Studio project needs for the tasks."""
    yield label_studio_config(table)


def image_folder_csv(table: pa.Table) -> Iterator[bytes]:
    """Yield `file_name,label` and, for images, `confidence,origin`: saved as metadata.csv next to the images, the
    imagefolder builder of `datasets` reads it. Attributes give `file` and a column of 1 and 0 for each, as `labeler
    embed --attributes` reads them."""
    if SEVERAL in table.column_names:
        columns = [name for name in table.column_names if name.startswith(LABEL)]
        heading = [FILE_HEADINGS[0], *(name.removeprefix(LABEL) for name in columns)]
    else:
        columns = []
        heading = ["file_name", "label", *(name for name in ("confidence", "origin") if name in table.column_names)]
    yield _csv([heading])
    for rows in _chunks(table):
        yield _csv(
            [row["source"], *(int(row[name]) for name in columns)] if columns else _labelled(row) for row in rows
        )


def _labelled(row: dict[str, Any]) -> list[Any]:
    beside = [f"{row['confidence']:.4f}", row["origin"]] if "confidence" in row else []
    return [row["source"] or row["query_id"], row["label_name"] or "", *beside]


def _csv(rows: Iterable[Iterable[Any]]) -> bytes:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue().encode()


EXPORTS: dict[LabelFormat, Export] = {
    "jsonl": Export("application/jsonl", "jsonl", json_lines),
    "parquet": Export("application/vnd.apache.parquet", "parquet", parquet),
    "label-studio": Export("application/json", "label-studio.json", label_studio),
    "label-studio-config": Export("application/xml", "label-studio.config.xml", labeling_setup),
    "image-folder-csv": Export("text/csv", "csv", image_folder_csv),
}


def _chunks(table: pa.Table) -> Iterator[list[dict[str, Any]]]:
    for batch in table.to_batches(max_chunksize=ROWS_PER_CHUNK):
        yield batch.to_pylist()


def _task(row: dict[str, Any], name: str) -> dict[str, Any]:
    predictions = []
    score = {"score": round(row["confidence"], 4)} if "confidence" in row else {}
    names = row[SEVERAL] if SEVERAL in row else [row["label_name"]] if row["label_name"] is not None else None
    if names is not None:
        choice = {
            "from_name": LABEL_STUDIO_CHOICES,
            "to_name": LABEL_STUDIO_IMAGE,
            "type": "choices",
            "value": {"choices": names},
        }
        named = {"model_version": f"private-labeler {row['job_id']}", "result": [choice | score]}
        predictions.append(named | score)
    data = {"image": row["source"] or row["query_id"]}
    data |= {field: row[field] for field in ("query_id", "status", "origin") if field in row}
    return {"data": data | {"task": name, "task_digest": row["task_digest"]}, "predictions": predictions}
