"""Results of completed jobs: answers, the label of every image, the student, the evaluation, the model, and pictures.

    answers                       the questions with what was released for each, and the budget of each: a function of
                                  stored data, put into one file by the first who needs it
    labels of images, student,    made once, on request before jobs that no request waits for, or just before their
    or evaluation                 sources are deleted (api.coordinator.retention)
    model                         what a blind-average or federated job released; two downloads give the same file
    pictures                      small JPEGs, as long as the upload is there; none is stored

Labels of images come from a separate process that learns from released answers and public features
(feature_store.results.job_process). The system bounds its memory and time, and it writes files into the job's folder;
this process holds none of that data. Small jobs share one process, one after the other, and do not wait for large ones.
Requesters take turns (api.fair_pool). If a process ends during a job, the job is tried once more in a new one; if that
ends too, a failure is written.

Pictures are for the requester who sent the images. An upload is a stranger's bytes, so no byte of it is passed on. A
separate process decodes it (feature_store.decode_process) and returns squares of a fixed size, which become JPEGs here.
"""

from __future__ import annotations

import base64
import io
import json
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray
from PIL import Image

from api.coordinator.config import CoordinatorConfig
from api.coordinator.coordinator_thread import feature_bytes
from api.coordinator.ownership import Owners, Reader
from api.coordinator.pricing import certified_price
from api.coordinator.query_budgets import JobBudgets
from api.coordinator.stores import Stores
from api.fair_pool import FairPool
from api.schema import LabelRow, Thumbnail, ThumbnailsView
from feature_store.backbones.spec import Transform
from feature_store.decode_process import PixelLimits, UnusableImage, decoded_images
from feature_store.results.evaluations import EVALUATION
from feature_store.results.image_labels import has_budgets, with_budgets, with_image_budgets
from feature_store.results.job_process import DISK_IS_FULL, JobProcess, LabelingOrder, read_names
from feature_store.results.models import LINEAR, RELEASED, ReleasedModels, model_file
from feature_store.results.pseudo_labels import (
    AnsweredRound,
    JobStamp,
    label_table,
    question_share,
)
from feature_store.results.questions import (
    IMAGE_FAILURE,
    IMAGE_LABELS,
    LABELS,
    QUESTIONS,
    STUDENT,
    UPLOAD,
    forget_progress,
    read_failure,
    read_parquet,
    read_progress,
    read_stored_questions,
    write_failure,
)
from labeler.batching import mu_squared_of
from labeler.errors import BadData, Gone, LabelerError, NotFound, NotReady, TooLarge, TryAgain, Unavailable
from labeler.ledger.jobs import JobRecord, RoundRecord
from labeler.linear_model import released_model
from labeler.planning import Price
from labeler.privacy_card import guarantee, privacy_card
from labeler.query_budgets import COLUMNS
from labeler.release import Release, release_from_bytes
from labeler.system.files import making_room, replacing
from labeler.task import Task

log = logging.getLogger("labeler.coordinator")

SMALL_BYTES: Final = 8 * 2**20
"""A job is small if its features have at most this many bytes."""

WAIT_S = 10.0
"""How long a request waits until it is told to retry."""

SIDE: Final = 128
"""Side of a picture in pixels: the center square of the image, as the network sees it."""

TAKES_S: Final = 20.0
"""Most seconds for which one request may decode. Pictures not ready by then are not shown."""

_SQUARE = Transform(resize=SIDE, crop=SIDE, mean=(0.0, 0.0, 0.0), std=(1.0, 1.0, 1.0), interpolation="bicubic")
_QUALITY = 82
_TOO_MUCH = (
    "labeling every image takes more memory or time than one job is given; download the questions (of=questions), and "
    "train a student on them with `labeler student`"
)
_Made = TypeVar("_Made")


class Results:
    """Makes and reads the results of jobs; see the module. One per service.

    A call with a reader raises NotFound if there is no such job or it is another requester's, NotReady if it is not
    completed, and Gone if it was forgotten.
    """

    def __init__(self, config: CoordinatorConfig, stores: Stores, owners: Owners, budgets: JobBudgets) -> None:
        self._config, self._stores, self._owners, self._budgets = config, stores, owners, budgets
        self.pen = threading.Lock()
        """Held by writers and removers: a label file must not appear in a folder that is being removed."""
        self._stopping = threading.Event()
        self._workers = {is_small: (FairPool("labeling", threads=1), JobProcess()) for is_small in (True, False)}

    # Reading.

    def labels(self, job_id: str, *, reader: Reader) -> pa.Table:
        """Return questions and answers of a job.

        Raises:
            BadData: its stored files cannot be read.
            Unavailable: the budget of its questions takes longer to compute than a request waits.
        """
        self._job(job_id, reader)
        return self._labels(job_id)

    def image_labels(self, job_id: str, *, reader: Reader) -> pa.Table:
        """Return the label of every image of a job; make them now if missing.

        Raises:
            NotFound: the job evaluates a model.
            Gone: its features were removed before its images were labeled.
            Unavailable: it takes longer than a request waits.
            LabelerError: there are no labels, for example because nothing was answered.
        """
        table = self._read_made(job_id, IMAGE_LABELS, pq.read_table, reader)
        return table if has_budgets(table) else with_image_budgets(table, self._labels(job_id))

    def student(self, job_id: str, *, reader: Reader) -> bytes:
        """Return the student that labeled the images of a job; raises as `image_labels`."""
        return self._read_made(job_id, STUDENT, Path.read_bytes, reader)

    def evaluation(self, job_id: str, *, reader: Reader) -> bytes:
        """Return the evaluation from a job, as JSON; raises as `image_labels`, NotFound if it labels images."""
        return self._read_made(job_id, EVALUATION, Path.read_bytes, reader)

    def model(self, job_id: str, *, reader: Reader) -> bytes:
        """Return the model that a job released, as a safetensors file with its privacy card.

        Raises:
            NotFound: its task asks for labels, not for a model.
            BadData: its stored files cannot be read.
        """
        self._job(job_id, reader)
        found = _Opened.of(job_id, self._stores)
        if found.job.state != "completed" or not found.opened:
            raise NotReady(f"job {job_id} is {found.job.state}, so there is no model to fetch")
        task = found.task
        asked = None
        if task.training is not None and task.training.axes is not None:
            # A model without axes is complete in the journal; only one with axes needs the questions.
            asked = read_stored_questions(self.folder(job_id) / QUESTIONS).features
        model = released_model(task, found.opened, asked)
        if model is None:
            raise NotFound(
                f"job {job_id} asked for labels (method {task.method}), so there is no model of the agents; train a "
                "student on its labels"
            )
        made = model_file(model.arrays, kind=LINEAR, classes=task.classes, card=found.card, job_id=job_id)
        ReleasedModels(self._config.home / RELEASED).add(made)
        return made

    def rows(self, job_id: str, *, reader: Reader) -> tuple[LabelRow, ...]:
        """Return the answers of a job, one by one, with the labels of its images; for small jobs.

        Raises:
            TryAgain: its images are being labeled.
        """
        images = None
        if self._owners.job(reader, job_id).source == "images":
            try:
                images = self.image_labels(job_id, reader=reader)
            except TryAgain:
                raise
            except LabelerError:
                pass  # nothing was answered, for example: the questions say so
        return label_rows(self.labels(job_id, reader=reader), images)

    def thumbnails(self, job_id: str, sources: Sequence[str], *, reader: Reader) -> ThumbnailsView:
        """Return small pictures of a job's images.

        Args:
            sources: names of images, as the job's labels give them.

        Raises:
            NotFound: the job was sent as vectors.
            Gone: its images were deleted.
        """
        if self._job(job_id, reader).source != "images":
            raise NotFound(f"job {job_id} was sent as feature vectors, so there are no pictures of it")
        upload = self.folder(job_id) / UPLOAD
        try:
            names = read_parquet(upload, columns=["name"])["name"].to_pylist()
        except (OSError, pa.ArrowException):
            raise Gone(
                f"the images of job {job_id} were deleted, as they are soon after a job has ended; "
                "its labels stay, with the names of the images"
            ) from None
        place = {name: row for row, name in enumerate(names)}
        asked = [place[source] for source in dict.fromkeys(sources) if source in place]
        limits = PixelLimits(self._config.limits.max_pixels, self._config.limits.max_job_pixels)
        made = {names[row]: _jpeg(pixels) for row, pixels in _pictures(upload, asked, limits)}
        return ThumbnailsView(items=tuple(Thumbnail(source=one, jpeg=made.get(one)) for one in sources))

    # Making.

    def folder(self, job_id: str) -> Path:
        """Return the folder of a job's files."""
        return self._config.home / "jobs" / job_id

    def begin(self, job_id: str, *, reader: Reader) -> Future[None] | None:
        """Begin to label the images of a job; None where it was sent as vectors, or nothing is left to do."""
        if self._owners.job(reader, job_id).source != "images":
            return None
        try:
            self._job(job_id, reader)
            return self._begin(job_id)
        except TryAgain:
            raise
        except LabelerError:
            return None  # `rows` says what there is

    def table(self, job_id: str) -> pa.Table:
        """Make the table of a completed job's questions and answers (feature_store.results.pseudo_labels).

        Raises:
            NotReady: it is not completed.
            BadData: its stored files cannot be read.
            Unavailable: the budget of its questions takes longer to compute than a request waits.
        """
        found = _Opened.of(job_id, self._stores)
        job, task = found.job, found.task
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
            for one, release in zip(found.rounds, found.releases, strict=True)
        ]
        questions, names = read_names(self.folder(job_id), job)
        stamp = JobStamp(
            job_id=job_id,
            backbone=questions.backbone,
            created_at=job.updated_at,
            privacy=guarantee(found.price) | {"mu_squared": mu_squared_of(task, job.num_queries)},
            is_seeded=found.is_seeded,
        )
        return label_table(
            task,
            stamp,
            names,
            rounds,
            budgets=self._budgets.columns(job, task, found.rounds),
            questions=questions.features,
            images=questions.images,
        )

    def order(self, job: JobRecord) -> LabelingOrder:
        """Return the instructions for labeling all images of a completed job.

        Raises:
            LabelerError: its stored files cannot be read.
        """
        found = _Opened.of(job.job_id, self._stores)
        task = found.task
        loads = self._config.backbones.get(task.backbone_fingerprint, "")
        return LabelingOrder(
            folder=str(self.folder(job.job_id)),
            job_id=job.job_id,
            task_digest=task.digest,
            classes=task.classes,
            contributors=max((len(one.contributors) for one in found.opened), default=task.agents),
            card=found.card,
            privacy=guarantee(found.price),
            is_seeded=found.is_seeded,
            created_at=job.updated_at.isoformat(),
            source=job.source,
            rounds=()
            if task.attributes_per_record is None
            else tuple(
                (one.num_queries, 0 if release is None else len(release.contributors))
                for one, release in zip(found.rounds, found.releases, strict=True)
            ),
            # A path on the operator's machine would not help the person who downloads the student.
            backbone="" if (self._config.home / loads).exists() or "/" in loads else loads,
        )

    def write_labels(self, job: JobRecord) -> bool:
        """Write questions and answers to their file unless it exists; False if the job was forgotten meanwhile, or if
        something that they need is still being made.

        Raises:
            LabelerError: as `table`; StorageFull.
        """
        path = self.folder(job.job_id) / LABELS
        if path.exists():
            return True
        if not self._budgets.is_ready(job):
            return False
        table = self.table(job.job_id)
        with self.pen:
            if self._stores.forgotten.at([job.job_id]):
                return False
            with making_room("the labels of a job"), replacing(path, mode=0o600) as temporary:
                pq.write_table(table, temporary)
        return True

    def label(self, job: JobRecord, *, first: bool = False) -> Future[None] | None:
        """Start labeling the images of a completed job unless it is done; its answers are in their file.

        Args:
            first: put it before jobs that no request waits for.

        Returns:
            The running labeling; None if there is nothing to do.

        Raises:
            BadData: its upload cannot be read.
        """
        folder = self.folder(job.job_id)
        if is_labelled(folder):
            return None
        size = feature_bytes(folder, job)
        pool, process = self._workers[size <= SMALL_BYTES]
        return pool.submit(job.created_by, partial(self._label, job, size, process), key=job.job_id, first=first)

    def stop(self) -> None:
        """End every labeling process; missing results are made at the next request."""
        self._stopping.set()
        for pool, process in self._workers.values():
            pool.stop()
            process.end()

    def _job(self, job_id: str, reader: Reader) -> JobRecord:
        """Return a job that the reader may see and that was not forgotten."""
        job = self._owners.job(reader, job_id)
        at = self._stores.forgotten.at([job_id]).get(job_id)
        if at is not None:
            raise Gone(
                f"the questions and results of job {job_id} were deleted on {at:%Y-%m-%d %H:%M} UTC, on request or "
                "after the retention time; its charge and the digests of its batches stay in the ledger. Ask again in "
                "a new job"
            )
        return job

    def _labels(self, job_id: str) -> pa.Table:
        """Return questions and answers of a completed job, from their file if there is one; raises as `labels`."""
        with suppress(FileNotFoundError):
            return self._read_labels(job_id)
        try:
            return self.table(job_id)
        except LabelerError:
            # Meanwhile the file may have appeared and the questions may have been removed.
            with suppress(FileNotFoundError):
                return self._read_labels(job_id)
            raise

    def _read_labels(self, job_id: str) -> pa.Table:
        table = read_parquet(self.folder(job_id) / LABELS)
        return table if has_budgets(table) else with_budgets(table, self._budgets.of_job(self._stores.jobs.get(job_id)))

    def _begin(self, job_id: str) -> Future[None] | None:
        """Begin to label every image of a completed job, before jobs that no request waits for.

        Returns:
            The running labeling; None if it is over, whether it succeeded or not.
        """
        folder = self.folder(job_id)
        self._labels(job_id)  # raises unless the job is completed and readable
        job = self._stores.jobs.get(job_id)
        if not is_labelled(folder):
            if not (folder / QUESTIONS).exists():
                raise Gone(
                    f"the features of job {job_id} were deleted before its images were labeled; its questions and "
                    "answers are there (of=questions)"
                )
            if not self.write_labels(job):
                raise being_labeled(folder)
        return self.label(job, first=True)

    def _read_made(self, job_id: str, name: str, read: Callable[[Path], _Made], reader: Reader) -> _Made:
        """Read a result that the labeling makes; make it now if missing."""
        self._job(job_id, reader)
        folder = self.folder(job_id)
        with suppress(FileNotFoundError):
            if is_made(folder):
                return _read_of(folder, name, read)
        labeling = self._begin(job_id)
        if labeling is not None:
            with suppress(TimeoutError, CancelledError):
                labeling.result(WAIT_S)
        with suppress(FileNotFoundError):
            if (folder / IMAGE_FAILURE).stat().st_size:
                raise read_failure(folder / IMAGE_FAILURE)
        if not is_made(folder):
            raise being_labeled(folder)
        return _read_of(folder, name, read)

    def _label(self, job: JobRecord, size: int, process: JobProcess) -> None:
        try:
            self._have_labeled(job, size, process)
        except Exception:
            # A defect in one job must not stop the others.
            log.exception("the images of a job could not be labeled", extra={"job_id": job.job_id})

    def _have_labeled(self, job: JobRecord, size: int, process: JobProcess) -> None:
        folder = self.folder(job.job_id)
        if is_labelled(folder):
            return
        try:
            order = self.order(job).model_dump(mode="json")
        except LabelerError as error:
            write_failure(folder, error, name=IMAGE_FAILURE)
            return
        line = json.dumps({"order": order, "feature_bytes": size, "images": job.images}).encode()
        for _ in range(2):
            # The process may have ended by design, after long idling or at its time limit; so try once more.
            code = process.carry_out(line, is_over=self._stopping.is_set)
            forget_progress(folder)
            if self._stopping.is_set() or is_labelled(folder) or not folder.exists():
                return
            if code == DISK_IS_FULL:
                log.warning("labels of images wait for room on the disk", extra={"job_id": job.job_id})
                return
        log.warning("the images of a job cannot be labeled", extra={"job_id": job.job_id})
        with suppress(OSError):
            write_failure(folder, BadData(_TOO_MUCH), name=IMAGE_FAILURE)


@dataclass(frozen=True)
class _Opened:
    """A job with its task, its rounds, and what each of them released."""

    job: JobRecord
    task: Task
    rounds: list[RoundRecord]
    releases: list[Release | None]

    @classmethod
    def of(cls, job_id: str, stores: Stores) -> _Opened:
        """Read it from one state of the journal."""
        with stores.database.read() as connection:
            job = stores.jobs.get(job_id, connection=connection)
            task = stores.tasks.get(job.task_digest, connection=connection).task
            rounds = stores.jobs.rounds(job_id, connection=connection)
            data = [stores.jobs.release(job_id, one.number, connection=connection) for one in rounds]
        return cls(job, task, rounds, [None if one is None else release_from_bytes(one) for one in data])

    @property
    def opened(self) -> list[Release]:
        """Return what was released."""
        return [one for one in self.releases if one is not None]

    @property
    def is_seeded(self) -> bool:
        """Return whether any noise came from a known seed."""
        return any(one.is_seeded for one in self.opened)

    @property
    def price(self) -> Price:
        """Return the price of the job."""
        return certified_price(self.task, self.job.num_queries)

    @property
    def card(self) -> dict[str, Any]:
        """Return the privacy card."""
        return privacy_card(self.task, self.price, is_seeded=self.is_seeded)


def is_made(folder: Path) -> bool:
    """Return whether all results of a job were made: the file written last exists."""
    return (folder / IMAGE_LABELS).exists() or (folder / EVALUATION).exists()


def is_labelled(folder: Path) -> bool:
    """Return whether a job's image labels or evaluation exist, or have failed for good."""
    return is_made(folder) or (folder / IMAGE_FAILURE).exists()


def _read_of(folder: Path, name: str, read: Callable[[Path], _Made]) -> _Made:
    """Read a result file of a job.

    Raises:
        NotFound: the job is of the other kind: it evaluates a model, or it labels images.
    """
    evaluates = (folder / EVALUATION).exists()
    if name == (IMAGE_LABELS if evaluates else EVALUATION):
        raise NotFound(
            f"job {folder.name} evaluates a model and labels no image; read its evaluation"
            if evaluates
            else f"job {folder.name} labels images and evaluates no model; ask for an evaluation of its student"
        )
    return read(folder / name)


def being_labeled(folder: Path) -> Unavailable:
    """Return the error for results of a job that are being made, with how much is done."""
    percent = read_progress(folder)
    done = "" if percent is None else f": {percent} % done"
    return Unavailable(f"the images of job {folder.name} are being labeled{done}; ask again in a moment")


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


def _jpeg(pixels: NDArray[np.uint8]) -> str:
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, format="JPEG", quality=_QUALITY)
    return base64.b64encode(buffer.getvalue()).decode()
