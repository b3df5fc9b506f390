"""Labels as CSV, as Label Studio tasks, and as a tree of folders by class."""

from __future__ import annotations

import csv
import io
import json
import os
import shutil
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from feature_store.results.attribute_labels import FILE_HEADINGS, LABEL, are_attributes
from feature_store.results.exports.pictures import check_new, pictures
from feature_store.results.image_labels import stamp_of
from labeler.system.files import replace_file, sync_folder

if TYPE_CHECKING:
    from feature_store.results.exports import Wanted

LABEL_STUDIO_CHOICES = "label"
LABEL_STUDIO_IMAGE = "image"
"""Tags of the Label Studio project: <Image name="image" value="$image"/> and <Choices name="label" toName="image">."""


def write_csv(wanted: Wanted) -> Path:
    """`file_name,label,confidence,origin`: beside the images as metadata.csv, `datasets` and AutoML tools read it.

    Of attributes `file` and a column of 1 and 0 for each, as `labeler embed --attributes` reads them.
    """
    check_new(wanted.out)
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    if are_attributes(wanted.table):
        columns = [name for name in wanted.table.schema.names if name.startswith(LABEL)]
        writer.writerow([FILE_HEADINGS[0], *(name.removeprefix(LABEL) for name in columns)])
        has = [wanted.table[name].to_pylist() for name in columns]
        for source, *row in zip(wanted.table["source"].to_pylist(), *has, strict=True):
            writer.writerow([source, *(int(one) for one in row)])
        replace_file(wanted.out, text.getvalue().encode())
        return wanted.out
    stamp_of(wanted.table)
    writer.writerow(["file_name", "label", "confidence", "origin"])
    for row in wanted.table.to_pylist():
        writer.writerow([row["source"], row["label_name"], f"{row['confidence']:.4f}", row["origin"]])
    replace_file(wanted.out, text.getvalue().encode())
    return wanted.out


def write_label_studio(wanted: Wanted) -> Path:
    """A JSON array of tasks; each label is a prediction with its score, so that a person can accept or correct it.

    Tasks come least certain first: Label Studio shows them in this order.
    """
    stamp = stamp_of(wanted.table)
    check_new(wanted.out)
    rows = sorted(wanted.table.to_pylist(), key=lambda row: row["confidence"])
    tasks = [_task(row, wanted.image_root, stamp.job_id) for row in rows]
    replace_file(wanted.out, json.dumps(tasks, ensure_ascii=False, indent=1).encode())
    return wanted.out


def write_image_folder(wanted: Wanted) -> Path:
    """One folder for each class with a link (or a copy) of each of its images, as torchvision's ImageFolder reads it.

    Names keep the folders they were in, with "-" for "/"; where two meet, the later gets a number.
    """
    stamp = stamp_of(wanted.table)
    check_new(wanted.out)
    found = pictures(wanted.images, wanted.table["source"].to_pylist())
    for name in stamp.classes:
        (wanted.out / folder_name(name)).mkdir(parents=True, exist_ok=True)
    for path, name, label in zip(
        found, wanted.table["source"].to_pylist(), wanted.table["label_name"].to_pylist(), strict=True
    ):
        target = _free(wanted.out / folder_name(label) / "-".join(PurePosixPath(name).parts))
        if wanted.copy:
            shutil.copyfile(path, target)
        else:
            target.symlink_to(os.path.relpath(path.resolve(), target.parent.resolve()))
    sync_folder(wanted.out)
    return wanted.out


def folder_name(name: str) -> str:
    """A class name as the name of a folder: no separators, never the folder above."""
    plain = name.replace("/", "_").replace("\\", "_").replace("\0", "_")
    return plain if plain.strip(". ") else f"class {plain!r}"


def _free(path: Path) -> Path:
    number, wanted = 1, path
    while path.is_symlink() or path.exists():
        number += 1
        path = wanted.with_name(f"{wanted.stem}-{number}{wanted.suffix}")
    return path


def _task(row: dict[str, Any], image_root: str, job_id: str) -> dict[str, Any]:
    choice = {
        "from_name": LABEL_STUDIO_CHOICES,
        "to_name": LABEL_STUDIO_IMAGE,
        "type": "choices",
        "value": {"choices": [row["label_name"]]},
        "score": round(row["confidence"], 4),
    }
    prediction = {
        "model_version": f"private-labeler {job_id}",
        "score": round(row["confidence"], 4),
        "result": [choice],
    }
    root = image_root if not image_root or image_root.endswith(("/", "=")) else image_root + "/"
    data = {"image": root + row["source"], "origin": row["origin"], "task_digest": row["task_digest"]}
    return {"data": data, "predictions": [prediction]}
