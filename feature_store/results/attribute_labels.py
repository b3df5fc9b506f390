"""The attributes of every public image: the schema in which a job about attributes gives them back.

As `feature_store.results.image_labels`, whose labels are one class each; here a column per attribute says whether an
image has it, and another how sure that is.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Final

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from feature_store.results.image_labels import ImageStamp, Origin
from labeler.errors import BadData

ON: Final = 0.5
"""An attribute of at least this probability holds."""

FILE_HEADINGS: Final = ("file", "image_id")
"""What may stand over the names of images in a table of attributes (feature_store.sources)."""

LABEL: Final = "label."
SEVERAL: Final = "labels"
CONFIDENCE: Final = "confidence."


def attribute_label_table(
    stamp: ImageStamp, *, sources: Sequence[str], probabilities: NDArray[np.floating], asked: NDArray[np.bool_]
) -> pa.Table:
    """A row per public image: `source`; `labels`, the names of the attributes that it has; for each attribute NAME
    `label.NAME`, true or false, and `confidence.NAME`, the probability that this is right; where it comes from.

    Args:
        stamp: of the job; its classes are the attributes.
        sources: names of the images.
        probabilities: shape (num_images, num_attributes), each from 0 to 1.
        asked: shape (num_images,), which images were questions.

    Raises:
        BadData: lengths differ.
    """
    count = len(sources)
    if probabilities.shape != (count, len(stamp.classes)) or asked.shape != (count,):
        raise BadData(f"there are {count} images, and probabilities of shape {probabilities.shape}")
    has = probabilities >= ON
    names = [[stamp.classes[place] for place in np.flatnonzero(row)] for row in has]
    columns = {"source": pa.array(sources, pa.string()), SEVERAL: pa.array(names, pa.list_(pa.string()))}
    for place, name in enumerate(stamp.classes):
        sure = np.where(has[:, place], probabilities[:, place], 1 - probabilities[:, place])
        columns[LABEL + name] = pa.array(has[:, place], pa.bool_())
        columns[CONFIDENCE + name] = pa.array(sure, pa.float32())
    columns["origin"] = pa.array(np.where(asked, str(Origin.ASKED), str(Origin.INFERRED)), pa.string())
    for column, value in (("task_digest", stamp.task_digest), ("job_id", stamp.job_id)):
        columns[column] = pa.repeat(pa.scalar(value, pa.string()), count)
    return pa.table(columns).replace_schema_metadata(stamp.metadata() | {"attributes": json.dumps(True)})


def are_attributes(table: pa.Table) -> bool:
    """Whether a table of image labels is of attributes."""
    return b"attributes" in (table.schema.metadata or {})
