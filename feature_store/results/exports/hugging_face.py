"""A data set folder as the Hugging Face hub and `datasets` have it: Parquet with pictures, and a README card.

`datasets.load_dataset(folder)` gives images, class names and confidences without any further word.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq

from feature_store.results.exports.pictures import check_new, pictures
from feature_store.results.image_labels import ImageStamp, stamp_of
from labeler.system.files import replace_file, replacing, sync_folder

if TYPE_CHECKING:
    from feature_store.results.exports import Wanted

ROWS_PER_FILE = 10_000
ROWS_PER_GROUP = 100
"""Pictures are read a group at a time, so that memory does not grow with the data set."""

_PICTURE = pa.struct([("bytes", pa.binary()), ("path", pa.string())])


def write_data_set(wanted: Wanted) -> Path:
    """Write the folder; the card last, so that a folder with a card is whole."""
    stamp = stamp_of(wanted.table)
    check_new(wanted.out)
    names = wanted.table["source"].to_pylist()
    found = pictures(wanted.images, names) if wanted.images is not None else None
    data = wanted.out / "data"
    data.mkdir(parents=True, exist_ok=True)
    count = len(names)
    files = max(1, -(-count // ROWS_PER_FILE))
    schema = _schema(stamp, with_pictures=found is not None)
    for number in range(files):
        start, stop = number * count // files, (number + 1) * count // files
        path = data / f"train-{number:05d}-of-{files:05d}.parquet"
        with (
            replacing(path) as temporary,
            temporary.open("wb") as file,
            pq.ParquetWriter(file, schema, compression="zstd") as writer,
        ):
            for rows in _groups(wanted.table, found, start, stop, schema):
                writer.write_table(rows)
    sync_folder(data)
    replace_file(wanted.out / "README.md", card(stamp, count, with_pictures=found is not None).encode())
    return wanted.out


def card(stamp: ImageStamp, count: int, *, with_pictures: bool) -> str:
    """The README card: YAML that the hub reads (JSON strings are YAML too), then words for people."""
    classes = "\n".join(f"          '{number}': {_quoted(name)}" for number, name in enumerate(stamp.classes))
    picture = "image" if with_pictures else "file_name"
    kind = "image" if with_pictures else "string"
    guarantee = stamp.privacy
    instance: Any = guarantee.get("instance", {})
    epsilon = instance.get("epsilon") if isinstance(instance, dict) else None
    said = "no bound" if epsilon is None else f"epsilon {epsilon:.4g}"
    seeded = (
        "\n**This is a simulation: its noise came from a known seed and protects nobody.**\n" if stamp.is_seeded else ""
    )
    return f"""---
pretty_name: {_quoted(f"Labels of job {stamp.job_id}")}
task_categories:
- image-classification
tags:
- differential-privacy
- pseudo-labels
dataset_info:
  features:
  - name: {picture}
    dtype: {kind}
  - name: label
    dtype:
      class_label:
        names:
{classes}
  - name: confidence
    dtype: float32
  - name: origin
    dtype: string
  splits:
  - name: train
    num_examples: {count}
configs:
- config_name: default
  data_files:
  - split: train
    path: data/train-*
---

# Privately labelled images
{seeded}
{count} public images, labelled with the private images of several owners, none of which is in here. `confidence` is
the calibrated probability that `label` is right; `origin` says whether an image was asked about itself or its label
follows from other answers.

**What the labels reveal at most**: {said} per private image at delta {guarantee.get("delta")}, for the integer noise
that ran (differential privacy). {guarantee.get("holds_against", "")}

| | |
|---|---|
| task | `{stamp.task_digest}` |
| job | `{stamp.job_id}` |
| made | {stamp.created_at} |

The licence of the images is that of their source.
"""


def _schema(stamp: ImageStamp, *, with_pictures: bool) -> pa.Schema:
    picture: dict[str, Any] = {"image": {"_type": "Image"}} if with_pictures else {"file_name": _value("string")}
    features = picture | {
        "label": {"names": list(stamp.classes), "_type": "ClassLabel"},
        "confidence": _value("float32"),
        "origin": _value("string"),
    }
    metadata = stamp.metadata() | {"huggingface": json.dumps({"info": {"features": features}}, ensure_ascii=False)}
    first = pa.field("image", _PICTURE) if with_pictures else pa.field("file_name", pa.string())
    fields = [first, ("label", pa.int64()), ("confidence", pa.float32()), ("origin", pa.string())]
    return pa.schema(fields, metadata=metadata)


def _groups(table: pa.Table, found: list[Path] | None, start: int, stop: int, schema: pa.Schema) -> Iterator[pa.Table]:
    for begin in range(start, stop, ROWS_PER_GROUP):
        rows = table.slice(begin, min(ROWS_PER_GROUP, stop - begin))
        names = rows["source"].to_pylist()
        first = pa.array(names, pa.string())
        if found is not None:
            values = [
                {"bytes": path.read_bytes(), "path": name}
                for path, name in zip(found[begin : begin + len(names)], names, strict=True)
            ]
            first = pa.array(values, _PICTURE)
        columns = [first, rows["label"].cast(pa.int64()), rows["confidence"], rows["origin"]]
        yield pa.Table.from_arrays(columns, schema=schema)


def _value(dtype: str) -> dict[str, str]:
    return {"dtype": dtype, "_type": "Value"}


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
