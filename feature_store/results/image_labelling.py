"""Labels of every image of a service's jobs, and their students: from files of a job to files of a job.

    jobs/JOB/labels.parquet          questions and released answers  \\        image-labels.parquet
    jobs/JOB/questions.safetensors   what was asked                   }-->    student.safetensors
    jobs/JOB/upload.parquet, shard   names and features of images    /        or image-labels.json: why there are none

Run as a program it reads orders from its input, a line of JSON each, and answers each with an exit code on a line. It
is a process of its own, bounded in memory and time by the system, so that neither of a coordinator follows the size of
its jobs; it stays for further jobs, because loading its libraries takes longer than a small one. All it reads is public
or released: what it makes is post-processing, and costs no privacy. The same files give the same labels.
"""

from __future__ import annotations

import json
import select
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field

from feature_store.results.choosing import DISK_IS_FULL, given_features
from feature_store.results.image_labels import ImageStamp, image_label_table
from feature_store.results.models import ATTRIBUTES, model_file
from feature_store.results.questions import (
    IMAGE_FAILURE,
    IMAGE_LABELS,
    LABELS,
    QUESTIONS,
    SHARD,
    STUDENT,
    UPLOAD,
    read_stored_questions,
    write_failure,
)
from feature_store.shard import Shard
from labeler.errors import BadData, LabelerError
from labeler.system.files import is_full, replace_file, replacing
from labeler.system.process_pool import bound_process

CPU_S: Final = 1800
ROOM_BYTES: Final = 2**30
IDLE_S: Final = 60.0
"""How long it waits for another order; then it ends, which gives its memory back."""

COPIES: Final = 24
"""Copies of the features, as they were sent, that learning may hold at once: as float64, projected, and per student."""

BYTES_PER_IMAGE: Final = 32 * 2**10
"""Beside them: a block of similarities to every image, its order, and labels."""


class LabellingOrder(BaseModel):
    """A job to label, with what the journal knows of it.

    Attributes:
        contributors: how many agents' noise is in the answers, at most.
        card: see `labeler.privacy_card.privacy_card`.
        privacy: see `labeler.privacy_card.guarantee`.
        is_seeded: whether any noise came from a known seed.
        created_at: ISO 8601, UTC.
        rounds: of a task about attributes, whose counts are read as shares: how many questions each round asked, and of
            how many agents a sum was opened (0: of none).
        source: whether the embedder made the features, or the requester sent them.
        backbone: the name that loads the backbone, where one does.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    folder: str
    job_id: str
    task_digest: str
    classes: tuple[str, ...]
    contributors: Annotated[int, Field(ge=1)]
    card: dict[str, Any]
    privacy: dict[str, Any]
    is_seeded: bool
    created_at: str
    source: Literal["images", "features"]
    backbone: str = ""
    rounds: tuple[tuple[int, int], ...] = ()


def label_job(order: LabellingOrder) -> None:
    """Write the labels of every image of a job, and its student; the labels last.

    Raises:
        BadData: nothing was answered, or a file cannot be read.
    """
    # Here: whoever only makes orders loads no learning library.
    from feature_store.results.answered import answers_of, task_of
    from feature_store.results.attribute_labels import attribute_label_table
    from feature_store.students.attributes import attributes_of
    from feature_store.students.labelling import label_images

    folder = Path(order.folder)
    questions = read_stored_questions(folder / QUESTIONS)
    features = questions.images if questions.images is not None else _features(folder, order.source)
    try:
        table = pq.read_table(folder / LABELS)
        sources = pq.read_table(folder / UPLOAD, columns=["name"])["name"].to_pylist()
    except (OSError, pa.ArrowException, KeyError):
        raise BadData("what the job asked and got cannot be read; restore its folder from a backup") from None
    stamp = ImageStamp(
        task_digest=order.task_digest,
        job_id=order.job_id,
        classes=order.classes,
        privacy=order.privacy,
        is_seeded=order.is_seeded,
        created_at=order.created_at,
    )
    task = task_of(table)[0]
    if task.attributes_per_record is not None:
        contributors = np.repeat([own for _, own in order.rounds], [asked for asked, _ in order.rounds])
        read = attributes_of(
            task,
            [row or [0.0] * task.num_classes for row in table["noisy_votes"].to_pylist()],
            contributors,
            questions.features,
            features,
            rows=questions.rows,
        )
        has = attribute_label_table(stamp, sources=sources, probabilities=read.probabilities, asked=read.asked)
        _write(folder, order, read.student.arrays, ATTRIBUTES, has)
        return
    asks_for_a_model = task.traits.asks_for_a_model
    answers = answers_of(
        table,
        features=features if asks_for_a_model else questions.features,
        assignment=questions.assignment,
        contributors=order.contributors,
    )
    labelled = label_images(answers, features, rows=None if asks_for_a_model else questions.rows)
    rows = image_label_table(stamp, sources=sources, probabilities=labelled.probabilities, asked=labelled.asked)
    _write(folder, order, labelled.student.arrays, labelled.student.kind, rows)


def _write(
    folder: Path, order: LabellingOrder, arrays: Mapping[str, NDArray[np.generic]], kind: str, rows: pa.Table
) -> None:
    student = model_file(
        arrays,
        kind=kind,
        classes=order.classes,
        card=order.card,
        backbone=order.backbone,
        job_id=order.job_id,
    )
    replace_file(folder / STUDENT, student, mode=0o600)
    with replacing(folder / IMAGE_LABELS, mode=0o600) as temporary, temporary.open("wb") as file:
        pq.write_table(rows, file)


def _features(folder: Path, source: str) -> NDArray[np.int16]:
    if source == "features":
        return given_features(folder / UPLOAD)
    return np.asarray(Shard.open(folder / SHARD, verify=False).features)


# The program.


def main() -> int:
    """Label every job that is ordered, until nobody has ordered one for a while."""
    while select.select([sys.stdin], [], [], IDLE_S)[0] and (line := sys.stdin.readline()):
        wanted = json.loads(line)
        bound_process(ROOM_BYTES + COPIES * wanted["feature_bytes"] + BYTES_PER_IMAGE * wanted["images"], CPU_S)
        sys.stdout.write(f"{_labelled(LabellingOrder.model_validate(wanted['order']))}\n")
        sys.stdout.flush()
    return 0


def _labelled(order: LabellingOrder) -> int:
    """Label a job; the exit code says whether there was room on the disk."""
    try:
        label_job(order)
    except LabelerError as error:
        write_failure(Path(order.folder), error, name=IMAGE_FAILURE)
    except FileNotFoundError:
        pass  # forgotten meanwhile
    except OSError as error:
        if not is_full(error):
            raise
        return DISK_IS_FULL
    return 0


if __name__ == "__main__":
    sys.exit(main())
