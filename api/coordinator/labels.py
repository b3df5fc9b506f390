"""The labels of a finished job, the model it released, and small pictures of what it labeled.

The table and the model are functions of stored data, so two downloads give the same file.

Pictures are for the requester who sent the images. An upload is a stranger's bytes, so no byte of it is passed on. A
separate process decodes it (feature_store.decode_process) and returns squares of a fixed size. This module makes JPEGs
for the browser from these squares. It stores none: there are pictures as long as the upload is in the job's folder
(see the table in docs/coordinator.md).
"""

from __future__ import annotations

import base64
import io
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from PIL import Image

from api.coordinator.config import CoordinatorConfig
from api.coordinator.pricing import certified_price
from api.coordinator.query_budgets import JobBudgets
from api.coordinator.stores import Stores
from api.schema import LabelRow, Thumbnail, ThumbnailsView
from feature_store.backbones.spec import Transform
from feature_store.decode_process import PixelLimits, UnusableImage, decoded_images
from feature_store.results.job_process import LabelingOrder
from feature_store.results.models import LINEAR, RELEASED, ReleasedModels, model_file
from feature_store.results.pseudo_labels import (
    AnsweredRound,
    JobStamp,
    QuestionNames,
    label_table,
    query_rows,
    question_share,
)
from feature_store.results.questions import (
    QUESTIONS,
    SHARD,
    UPLOAD,
    StoredQuestions,
    read_parquet,
    read_stored_questions,
)
from feature_store.shard import Shard
from labeler.batching import mu_squared_of
from labeler.errors import BadData, Gone, NotFound, NotReady, TooLarge
from labeler.ledger.jobs import JobRecord, RoundRecord
from labeler.linear_model import released_model
from labeler.privacy_card import guarantee, privacy_card
from labeler.query_budgets import COLUMNS
from labeler.release import Release, release_from_bytes
from labeler.task import Task


def job_label_table(job_id: str, *, stores: Stores, config: CoordinatorConfig, budgets: JobBudgets) -> pa.Table:
    """Return the pseudo-label set of a completed job, with the schema of feature_store.results.pseudo_labels.

    Raises:
        NotFound: there is no such job.
        NotReady: it is not completed.
        BadData: its stored files cannot be read.
        Unavailable: the budget of its questions takes longer to compute than a request waits.
    """
    job, task, kept, releases = _read(job_id, stores)
    if job.state != "completed":
        advice = "it ended without all its labels" if job.is_finished else "wait until it is completed"
        raise NotReady(f"job {job_id} is {job.state}, so there are no labels to fetch: {advice}")
    rounds = [
        AnsweredRound(
            start=one.first_query - job.first_query,
            num_queries=one.num_queries,
            ledger_seq=one.ledger_seq or 0,
            release=release,
        )
        for one, release in zip(kept, releases, strict=True)
    ]
    folder = config.home / "jobs" / job_id
    questions, names = read_names(folder, job)
    stamp = JobStamp(
        job_id=job.job_id,
        backbone=questions.backbone,
        created_at=job.updated_at,
        privacy=guarantee(certified_price(task, job.num_queries))
        | {"mu_squared": mu_squared_of(task, job.num_queries)},
        is_seeded=any(one.is_seeded for one in releases if one is not None),
    )
    return label_table(
        task,
        stamp,
        names,
        rounds,
        budgets=budgets.columns(job, task, kept),
        questions=questions.features,
        images=questions.images,
    )


def _read(job_id: str, stores: Stores) -> tuple[JobRecord, Task, list[RoundRecord], list[Release | None]]:
    """Return a job with its task, its rounds, and what each of them released."""
    with stores.database.read() as connection:
        job = stores.jobs.get(job_id, connection=connection)
        task = stores.tasks.get(job.task_digest, connection=connection).task
        rounds = stores.jobs.rounds(job_id, connection=connection)
        data = [stores.jobs.release(job_id, one.number, connection=connection) for one in rounds]
    return job, task, rounds, [None if one is None else release_from_bytes(one) for one in data]


def labeling_order(job: JobRecord, *, stores: Stores, config: CoordinatorConfig) -> LabelingOrder:
    """Return the instructions for labeling all images of a completed job.

    Raises:
        LabelerError: its stored files cannot be read.
    """
    _, task, kept, releases = _read(job.job_id, stores)
    opened = [one for one in releases if one is not None]
    price, is_seeded = certified_price(task, job.num_queries), any(one.is_seeded for one in opened)
    loads = config.backbones.get(task.backbone_fingerprint, "")
    return LabelingOrder(
        folder=str(config.home / "jobs" / job.job_id),
        job_id=job.job_id,
        task_digest=task.digest,
        classes=task.classes,
        contributors=max((len(one.contributors) for one in opened), default=task.agents),
        card=privacy_card(task, price, is_seeded=is_seeded),
        privacy=guarantee(price),
        is_seeded=is_seeded,
        created_at=job.updated_at.isoformat(),
        source=job.source,
        rounds=()
        if task.attributes_per_record is None
        else tuple(
            (one.num_queries, 0 if release is None else len(release.contributors))
            for one, release in zip(kept, releases, strict=True)
        ),
        # A path on the operator's machine would not help the person who downloads the student.
        backbone="" if (config.home / loads).exists() or "/" in loads else loads,
    )


def job_model(job_id: str, *, stores: Stores, config: CoordinatorConfig) -> bytes:
    """Return the model that a completed job released, as a safetensors file with its privacy card.

    Raises:
        NotFound: there is no such job, or it asked for labels.
        NotReady: it is not completed.
        BadData: its stored files cannot be read.
    """
    job, task, _, releases = _read(job_id, stores)
    opened = [one for one in releases if one is not None]
    if job.state != "completed" or not opened:
        raise NotReady(f"job {job_id} is {job.state}, so there is no model to fetch")
    if task.traits.labels != "images":
        raise NotFound(
            f"job {job.job_id} asked for labels (method {task.method}), so there is no model of the agents; train a "
            "student on its labels"
        )
    price, is_seeded = certified_price(task, job.num_queries), any(one.is_seeded for one in opened)
    card = privacy_card(task, price, is_seeded=is_seeded)
    asked = None
    if task.training is not None and task.training.axes is not None:
        # A model without axes is complete in the journal; only one with axes needs the questions.
        asked = read_stored_questions(config.home / "jobs" / job_id / QUESTIONS).features
    model = released_model(task, opened, asked)
    made = model_file(model.arrays, kind=LINEAR, classes=task.classes, card=card, job_id=job_id)
    ReleasedModels(config.home / RELEASED).add(made)
    return made


def label_rows(table: pa.Table, images: pa.Table | None = None) -> tuple[LabelRow, ...]:
    """Convert the rows of a small table of questions to their JSON form.

    Args:
        images: the labels of the images that were asked about, which each row then states.
    """
    columns = ["query_id", "source", "label", "label_name", "status", "noisy_votes", *COLUMNS]
    share = question_share(table)
    said: dict[str, dict[str, Any]] = {}
    if images is not None and "confidence" in images.column_names:  # of attributes there is one for each
        of_images = ["source", "label", "label_name", "confidence"]
        said = {row["source"]: row for row in images.select(of_images).to_pylist()}
    rows = table.select(columns).to_pylist()
    return tuple(LabelRow.model_validate(row | share | said.get(row["source"], {})) for row in rows)


def read_names(folder: Path, job: JobRecord) -> tuple[StoredQuestions, QuestionNames]:
    """Read a job's questions and their names, from its upload and its stored choice of questions.

    Raises:
        BadData: a file is missing or damaged.
    """
    try:
        questions = read_stored_questions(folder / QUESTIONS)
        sources = read_parquet(folder / UPLOAD, columns=["name"])["name"].to_pylist()
        rows = query_rows(
            questions.rows,
            questions.assignment,
            centres=questions.features,
            images=_image_features(folder, job) if questions.asks_clusters else None,
        )
        kind = "cluster" if questions.asks_clusters else None if job.source == "features" else "query"
        names = QuestionNames.of(rows, sources, kind=kind)
    except (OSError, BadData, pa.ArrowException, KeyError, IndexError) as error:
        raise BadData(
            f"what job {job.job_id} asked cannot be read ({type(error).__name__}); restore its folder "
            "in jobs/ from a backup"
        ) from None
    answers = job.images if job.strategy == "weights" else job.num_queries
    if len(names.sources) != answers:
        raise BadData(f"job {job.job_id} has {answers} answers, but its folder names {len(names.sources)}")
    return questions, names


def _image_features(folder: Path, job: JobRecord) -> NDArray[np.int16] | None:
    """Return the features of all images, as sent or as the embedder stored them; None if they are gone."""
    if job.source == "features":
        column = read_parquet(folder / UPLOAD, columns=["feature"])["feature"].combine_chunks()
        entries: NDArray[np.int16] = column.flatten().to_numpy(zero_copy_only=False)
        return entries.reshape(len(column), -1)
    shard = folder / SHARD
    return np.asarray(Shard.open(shard, verify=False).features) if shard.exists() else None


SIDE: Final = 128
"""Side of a picture in pixels: the center square of the image, as the network sees it."""

TAKES_S: Final = 20.0
"""Most seconds for which one request may decode. Pictures not ready by then are not shown."""

_SQUARE = Transform(resize=SIDE, crop=SIDE, mean=(0.0, 0.0, 0.0), std=(1.0, 1.0, 1.0), interpolation="bicubic")
_QUALITY = 82


def thumbnails(folder: Path, job: JobRecord, sources: Sequence[str], limits: PixelLimits) -> ThumbnailsView:
    """Return pictures of some images of a job.

    Args:
        job: a job of the reader's; the caller has checked that.
        sources: names of images, as the job's labels give them.
        limits: pixel limits under which the upload was accepted.

    Raises:
        NotFound: the job was sent as feature vectors.
        Gone: its upload was deleted.
    """
    if job.source != "images":
        raise NotFound(f"job {job.job_id} was sent as feature vectors, so there are no pictures of it")
    try:
        names = read_parquet(folder / UPLOAD, columns=["name"])["name"].to_pylist()
    except (OSError, pa.ArrowException):
        raise Gone(
            f"the images of job {job.job_id} were deleted, as they are soon after a job has ended; "
            "its labels stay, with the names of the images"
        ) from None
    place = {name: row for row, name in enumerate(names)}
    rows = [place[source] for source in dict.fromkeys(sources) if source in place]
    made = {names[row]: _jpeg(pixels) for row, pixels in _pictures(folder / UPLOAD, rows, limits)}
    found = ((source, made.get(source)) for source in sources)
    return ThumbnailsView(
        items=tuple(
            Thumbnail(source=source, jpeg=None if data is None else base64.b64encode(data).decode())
            for source, data in found
        )
    )


class _TookTooLong(Exception):
    pass


def _pictures(upload: Path, rows: Sequence[int], limits: PixelLimits) -> Iterator[tuple[int, NDArray[np.uint8]]]:
    """Yield the pixels of rows that can be decoded in time. A row that cannot be decoded does not delay the others."""
    until = time.monotonic() + TAKES_S

    def look() -> None:
        if time.monotonic() > until:
            raise _TookTooLong

    left = list(rows)
    # A damaged file, or one deleted meanwhile, has no pictures.
    with suppress(_TookTooLong, BadData, TooLarge):
        while left:
            with closing(decoded_images(upload, _SQUARE, limits, rows=list(left), look=look)) as images:
                for pixels in images:
                    row = left.pop(0)
                    if not isinstance(pixels, UnusableImage):
                        yield row, pixels


def _jpeg(pixels: NDArray[np.uint8]) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, format="JPEG", quality=_QUALITY)
    return buffer.getvalue()
