"""Labels as files: JSON lines, Parquet, Label Studio tasks and setup, and the metadata.csv of an image folder.

A table covers every image (feature_store.results.image_labels) or only the asked questions (pseudo_labels); its columns
say which. Every format is a generator of bytes, so that a large job is sent while it is written. Rows keep the job's
order. An unanswered query keeps its row (label -1, no name) in JSON lines and Parquet. It has no prediction in Label
Studio, and an empty label in the CSV, so that no image vanishes from a data set unnoticed.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime

import pyarrow as pa
import pyarrow.parquet as pq

from api.schema import LabelFormat, LabelsOf
from feature_store.results.exports import (
    ROWS_PER_CHUNK,
    chunks,
    image_folder_csv,
    label_studio_config,
    label_studio_task,
)
from feature_store.results.pseudo_labels import question_share

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
    for rows in chunks(table):
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
    for rows in chunks(table):
        parts = []
        for row in rows:
            parts.append(separator + _JSON(label_studio_task(row, name)))
            separator = ",\n"
        yield "".join(parts).encode()
    yield b"\n]\n"


def labeling_setup(table: pa.Table) -> Iterator[bytes]:
    """Yield the labeling configuration that a Label Studio project needs for the tasks."""
    yield label_studio_config(table)


EXPORTS: dict[LabelFormat, Export] = {
    "jsonl": Export("application/jsonl", "jsonl", json_lines),
    "parquet": Export("application/vnd.apache.parquet", "parquet", parquet),
    "label-studio": Export("application/json", "label-studio.json", label_studio),
    "label-studio-config": Export("application/xml", "label-studio.config.xml", labeling_setup),
    "image-folder-csv": Export("text/csv", "csv", image_folder_csv),
}
