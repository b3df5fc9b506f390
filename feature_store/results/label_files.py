"""Labels as one file: JSON lines, Parquet, Label Studio tasks and setup, and the metadata.csv of an image folder.

A table covers every image (feature_store.results.image_labels) or only the asked questions (pseudo_labels); its columns
say which. Every format is a generator of bytes, so that a large job is sent while it is written. Rows keep the job's
order. An unanswered query keeps its row (label -1, no name) in JSON lines and Parquet. It has no prediction in Label
Studio, and an empty label in the CSV, so that no image vanishes from a data set unnoticed.
"""

from __future__ import annotations

import csv
import json
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import datetime
from types import SimpleNamespace
from typing import Any, Final
from urllib.parse import quote, urlsplit
from xml.etree import ElementTree

import pyarrow as pa
import pyarrow.parquet as pq

from feature_store.results.image_labels import FILE_HEADINGS, LABEL, SEVERAL, are_attributes
from labeler.errors import InvalidSetting

_PIECE_BYTES = 2**16
_JSON = json.JSONEncoder(ensure_ascii=False, default=datetime.isoformat).encode
ROWS_PER_CHUNK: Final = 1024


def json_lines(table: pa.Table) -> Iterator[bytes]:
    """Yield one JSON object per row: the columns of the table, and each question's share of mu squared."""
    # Imported on use: it loads scipy, and naming `labeler.run` loads this module.
    from feature_store.results.pseudo_labels import question_share

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


LABEL_STUDIO_CHOICES = "label"
LABEL_STUDIO_IMAGE = "image"
"""Names of the tags in `label_studio_config`, to which each prediction refers."""


_NO_XML: Final = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def label_studio_config(table: pa.Table) -> bytes:
    """The labeling configuration of a Label Studio project that takes the tasks of a table of labels, as XML.

    To be pasted into the project's settings (Labeling Interface, Code) before its tasks are imported: a prediction of a
    choice that the project does not have is refused.

    Raises:
        InvalidSetting: a class has a name that XML cannot hold.
    """
    several = "multiple" if are_attributes(table) else "single"
    view = ElementTree.Element("View")
    ElementTree.SubElement(view, "Image", name=LABEL_STUDIO_IMAGE, value=f"${LABEL_STUDIO_IMAGE}")
    choices = ElementTree.SubElement(
        view, "Choices", name=LABEL_STUDIO_CHOICES, toName=LABEL_STUDIO_IMAGE, choice=several
    )
    for name in json.loads(table.schema.metadata[b"classes"]):
        if _NO_XML.search(name):
            raise InvalidSetting(
                f"the class {name!r} has a character that Label Studio's configuration, which is XML, cannot hold; "
                "choose another format"
            )
        ElementTree.SubElement(choices, "Choice", value=name)
    ElementTree.indent(view)
    return ElementTree.tostring(view, encoding="unicode").encode() + b"\n"


_STORES: Final = ("s3", "gs", "azure-blob")
"""Schemes of stores whose keys Label Studio takes letter for letter."""


def image_address(source: str, *, image_root: str) -> str:
    """Return the address at which Label Studio finds an image.

    Label Studio fetches it as a URL, and the server that serves local files (`?d=`) decodes a query, in which "+" is a
    space. So every letter of a name that means something in a URL is percent-encoded. Keys of object stores are no
    part of a URL and stay as they are.
    """
    root = image_root if not image_root or image_root.endswith(("/", "=")) else image_root + "/"
    return root + (source if urlsplit(root).scheme in _STORES else quote(source))


def label_studio_task(row: Mapping[str, Any], task_name: str, *, image_root: str = "") -> dict[str, Any]:
    """Return a row of labels as a task of Label Studio: its names are a prediction; an unanswered query has none.

    `data.image` is an address, and `data.source` the name of the image as it was given.
    """
    score = {"score": round(row["confidence"], 4)} if "confidence" in row else {}
    names = row[SEVERAL] if SEVERAL in row else [row["label_name"]] if row["label_name"] is not None else None
    predictions = []
    if names is not None:
        choice = {
            "from_name": LABEL_STUDIO_CHOICES,
            "to_name": LABEL_STUDIO_IMAGE,
            "type": "choices",
            "value": {"choices": names},
        }
        named = {"model_version": f"private-labeler {row['job_id']}", "result": [choice | score]}
        predictions.append(named | score)
    source = row["source"] or row["query_id"]
    data = {"image": image_address(source, image_root=image_root), "source": source}
    data |= {field: row[field] for field in ("query_id", "status", "origin") if field in row}
    return {"data": data | {"task": task_name, "task_digest": row["task_digest"]}, "predictions": predictions}


def image_folder_csv(table: pa.Table) -> Iterator[bytes]:
    """Yield the labels as CSV: `file_name,label`, and for images `confidence,origin` too.

    Save it as metadata.csv next to the images, where the imagefolder builder of `datasets` and AutoML tools read it.
    Attributes give `file` and a column of 1 and 0 for each, as `labeler embed --attributes` reads them.

    Cells are not escaped. A spreadsheet may read a cell that starts with "=" as a formula. But file names must match
    the requester's files byte for byte, and a prefix would break the loaders that read this file.
    """
    columns = [name for name in table.column_names if name.startswith(LABEL)] if SEVERAL in table.column_names else []
    heading = ["file_name", "label", *(name for name in ("confidence", "origin") if name in table.column_names)]
    if columns:
        heading = [FILE_HEADINGS[0], *(name.removeprefix(LABEL) for name in columns)]
    yield csv_lines([heading])
    for rows in chunks(table):
        yield csv_lines(
            [row["source"], *(int(row[name]) for name in columns)] if columns else _labelled(row) for row in rows
        )


def _labelled(row: Mapping[str, Any]) -> list[Any]:
    beside = [f"{row['confidence']:.4f}", row["origin"]] if "confidence" in row else []
    return [row["source"] or row["query_id"], row["label_name"] or "", *beside]


def csv_lines(rows: Iterable[Iterable[Any]]) -> bytes:
    """Return rows as CSV."""
    lines: list[str] = []
    # With this end of a line: Python before 3.13 quotes a carriage return, which ends a row for readers, only then.
    csv.writer(SimpleNamespace(write=lines.append), lineterminator="\r\n").writerows(rows)
    return "".join(line.removesuffix("\r\n") + "\n" for line in lines).encode()


def chunks(table: pa.Table) -> Iterator[list[dict[str, Any]]]:
    """Yield the rows of a table, `ROWS_PER_CHUNK` at a time."""
    for batch in table.to_batches(max_chunksize=ROWS_PER_CHUNK):
        yield batch.to_pylist()


FILE_WRITERS: Final[dict[str, Callable[[pa.Table], Iterator[bytes]]]] = {
    "jsonl": json_lines,
    "parquet": parquet,
    "label-studio": label_studio,
    "label-studio-config": labeling_setup,
    "csv": image_folder_csv,
}
