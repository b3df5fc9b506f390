"""The labels of every public image: the schema of what most users came for, as a local job and a service write it.

A row for each public image, whether it was asked about or not. Everything in it follows from public images and released
answers, at no price. A job about attributes has a column per attribute that says whether an image has it, and another
for how sure that is; else an image has one class.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from labeler.errors import BadData, InvalidSetting
from labeler.query_budgets import COLUMNS


class Origin(StrEnum):
    """The source of an image's label."""

    ASKED = "asked"
    """It was a question itself, and its answer was released; the other answers may outweigh a noisy one of its own."""
    INFERRED = "inferred"
    """It follows from the answers to other questions."""


BUDGET_FIELDS: Final = (
    pa.field("account", pa.string()),
    pa.field("level", pa.string()),
    pa.field("share_kind", pa.string()),
    pa.field("share_nano", pa.int64()),
    pa.field("total_nano", pa.int64()),
    pa.field("total_epsilon", pa.float64()),
    pa.field("charge_nano", pa.int64()),
    pa.field("agent_share_nano", pa.int64()),
    pa.field("agent_total_nano", pa.int64()),
    pa.field("agent_total_epsilon", pa.float64()),
)
"""The budget of a row's question (`labeler.query_budgets.COLUMNS`), the last columns of both label files."""

IMAGE_SCHEMA = pa.schema(
    [
        ("source", pa.string()),
        ("label", pa.int16()),
        ("label_name", pa.string()),
        ("confidence", pa.float32()),
        ("origin", pa.string()),
        ("task_digest", pa.string()),
        ("job_id", pa.string()),
        *BUDGET_FIELDS,
    ]
)
"""`source` is the image's name as it was sent. `confidence` is the probability that `label` is right as the
student states it, together with the released answer about the image itself where it was asked
(feature_store.students.labeling says what it rests on). Tables of earlier versions have no budgets
(`with_image_budgets`)."""


@dataclass(frozen=True)
class ImageStamp:
    """The facts that all labels of one job share, written into the schema's metadata.

    Attributes:
        classes: names in label order.
        privacy: the job's data-independent guarantee, as in the privacy card.
        is_seeded: True for a simulation, whose noise protects nobody.
        created_at: ISO 8601, UTC.
        task_name: for people; empty where it is not known.
    """

    task_digest: str
    job_id: str
    classes: tuple[str, ...]
    privacy: Mapping[str, object]
    is_seeded: bool
    created_at: str
    task_name: str = ""

    def metadata(self) -> dict[str, str]:
        """As Parquet keeps it."""
        return {
            "task_digest": self.task_digest,
            "task_name": self.task_name,
            "job_id": self.job_id,
            "classes": json.dumps(list(self.classes), ensure_ascii=False),
            "privacy": json.dumps(dict(self.privacy), sort_keys=True),
            "seeded": json.dumps(self.is_seeded),
            "created_at": self.created_at,
        }


def image_label_table(
    stamp: ImageStamp,
    *,
    sources: Sequence[str],
    probabilities: NDArray[np.floating],
    asked: NDArray[np.bool_],
    labels: NDArray[np.integer] | None = None,
    several: bool = False,
) -> pa.Table:
    """Put what a student says of every public image into a table, without budgets (`with_image_budgets`).

    Where an image has one class, the table has IMAGE_SCHEMA. Of attributes it has `source`; `labels`, the names of the
    attributes that the image has; for each attribute NAME `label.NAME`, true or false, and `confidence.NAME`, the
    probability that this is right; `origin`, `task_digest` and `job_id`.

    Args:
        stamp: of the job.
        sources: names of the images.
        probabilities: shape (num_images, num_classes); rows sum to one, but of attributes.
        asked: shape (num_images,), which images were questions with an answer.
        labels: shape (num_images,), where they are not the most probable (feature_store.results.scores).
        several: whether the classes are attributes, any number per image.

    Raises:
        BadData: lengths differ.
    """
    count = len(sources)
    if probabilities.shape != (count, len(stamp.classes)) or asked.shape != (count,):
        raise BadData(f"there are {count} images, and probabilities of shape {probabilities.shape}")
    columns = {"source": pa.array(sources, pa.string())}
    if several:
        has = probabilities >= ON
        names = [[stamp.classes[place] for place in np.flatnonzero(row)] for row in has]
        columns[SEVERAL] = pa.array(names, pa.list_(pa.string()))
        for place, name in enumerate(stamp.classes):
            sure = np.where(has[:, place], probabilities[:, place], 1 - probabilities[:, place])
            columns[LABEL + name] = pa.array(has[:, place], pa.bool_())
            columns[CONFIDENCE + name] = pa.array(sure, pa.float32())
    else:
        labels = probabilities.argmax(axis=1) if labels is None else labels
        columns["label"] = pa.array(labels, pa.int16())
        columns["label_name"] = pa.array(stamp.classes, pa.string()).take(pa.array(labels))
        columns["confidence"] = pa.array(probabilities[np.arange(count), labels], pa.float32())
    columns["origin"] = pa.array(np.where(asked, str(Origin.ASKED), str(Origin.INFERRED)), pa.string())
    for column, value in (("task_digest", stamp.task_digest), ("job_id", stamp.job_id)):
        columns[column] = pa.repeat(pa.scalar(value, pa.string()), count)
    kind = {"attributes": json.dumps(True)} if several else {}
    return pa.table(columns).replace_schema_metadata(stamp.metadata() | kind)


def with_image_budgets(images: pa.Table, questions: pa.Table) -> pa.Table:
    """Return a table of images with budgets: of an image that questions are named after, what they took together.

    An image without a question took nothing: its label follows from other answers. So the shares of images add up to
    those of the questions. Its total is that after the job's last question.

    Args:
        questions: the job's, with `labeler.query_budgets.COLUMNS`.
    """
    budgets = questions.select(list(COLUMNS)).to_pylist()
    if not budgets:
        raise BadData("a job without questions has no budget to state")
    last = budgets[-1]
    nothing = {name: 0 if name.endswith("share_nano") and last[name] is not None else last[name] for name in COLUMNS}
    nothing["charge_nano"] = 0
    sources = images["source"].to_pylist()
    place = {source: row for row, source in reversed(list(enumerate(sources)))}
    rows = [nothing] * len(sources)
    for source, budget in zip(questions["source"].to_pylist(), budgets, strict=True):
        row = place.get(source)
        if row is None:
            continue
        added = {
            name: rows[row][name] + budget[name]
            for name in ("share_nano", "agent_share_nano")
            if rows[row][name] is not None and budget[name] is not None
        }
        rows[row] = budget | added
    return with_budgets(images, {name: [row[name] for row in rows] for name in COLUMNS})


def has_budgets(table: pa.Table) -> bool:
    """Return whether rows of a table state budgets; those of earlier versions do not."""
    return set(COLUMNS) <= set(table.schema.names)


def with_budgets(table: pa.Table, budgets: Mapping[str, Sequence[Any]]) -> pa.Table:
    """Return a table with the budget of each row behind its other columns."""
    for field in BUDGET_FIELDS:
        table = table.append_column(field, pa.array(budgets[field.name], field.type))
    return table


def stamp_of(table: pa.Table) -> ImageStamp:
    """Return the facts of its job that a table of image labels holds.

    Raises:
        BadData: it is no such table, or one of an earlier version.
        InvalidSetting: it is of attributes (feature_store.results.image_labels).
    """
    if are_attributes(table):
        raise InvalidSetting(
            "these images have attributes, any number each, and this format holds one class per image; read "
            "student_labels.parquet itself, which has a column for each attribute"
        )
    try:
        about = {key.decode(): value.decode() for key, value in (table.schema.metadata or {}).items()}
        if [name for name in table.schema.names if name not in COLUMNS] != IMAGE_SCHEMA.names[: -len(BUDGET_FIELDS)]:
            raise ValueError
        classes = tuple(json.loads(about["classes"]))
        "".join(classes).encode()  # JSON can spell half of a surrogate pair, which is no text
        return ImageStamp(
            task_digest=about["task_digest"],
            job_id=about["job_id"],
            classes=classes,
            privacy=json.loads(about["privacy"]),
            is_seeded=bool(json.loads(about["seeded"])),
            created_at=about["created_at"],
            task_name=about.get("task_name", ""),
        )
    except (KeyError, TypeError, ValueError):
        raise BadData(
            "these are no labels of images as this version writes them; run `labeler run` again in the job's folder: "
            "nothing is asked or charged twice"
        ) from None


ON: Final = 0.5
"""An attribute of at least this probability holds."""

FILE_HEADINGS: Final = ("file", "image_id")
"""What may stand over the names of images in a table of attributes (feature_store.sources)."""

LABEL: Final = "label."
SEVERAL: Final = "labels"
CONFIDENCE: Final = "confidence."


def are_attributes(table: pa.Table) -> bool:
    """Tell whether a table of image labels is of attributes."""
    return b"attributes" in (table.schema.metadata or {})
