"""Retention of an ended job's data, and the labels made from it; see the table in docs/coordinator.md.

    ended without labels        its folder is removed at once, and work for it stops
    completed                   its answers are put into one file and the labels of all its images are made; upload,
                                features and questions are removed after `questions_s`
    older than `labels_s`,      the folder is removed, with journal rows of its rounds that are no longer needed
    or forgotten on request     (labeler.ledger.jobs); charges, digests and releases stay permanently

Each sweep starts from the present files, not from events, so a crash between two steps costs nothing. A folder without
a job, left by a crash during submission, is removed after an hour.

Labels of every image are made on request, with priority, or just before the features are removed. A separate process
learns from released answers and public features (feature_store.results.job_process). The system bounds its memory and
time, and it writes files into the job's folder; this process holds none of that data. Small jobs share one process, one
after the other, and do not wait for large ones. If a process ends during a job, the job is tried once more in a new
one; if that ends too, a failure is written.
"""

from __future__ import annotations

import json
import logging
import os
import select
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import pyarrow as pa
import pyarrow.parquet as pq

from api.coordinator.conductor import feature_bytes
from api.coordinator.config import RetentionTable
from api.fair_pool import FairPool
from feature_store.results.evaluations import EVALUATION
from feature_store.results.image_labels import has_budgets, with_budgets, with_image_budgets
from feature_store.results.job_process import DISK_IS_FULL, LabelingOrder
from feature_store.results.questions import (
    IMAGE_FAILURE,
    IMAGE_LABELS,
    LABELS,
    QUESTIONS,
    STUDENT,
    UPLOAD,
    EmbedBoard,
    forget_progress,
    read_failure,
    read_parquet,
    read_progress,
    write_failure,
)
from labeler.errors import BadData, Gone, LabelerError, NotFound, StorageFull, Unavailable
from labeler.ledger.jobs import FINISHED, ForgottenJobs, JobRecord, JobStore
from labeler.system.clock import Clock
from labeler.system.files import making_room, replacing
from labeler.system.process_pool import start_process

log = logging.getLogger("labeler.coordinator")

SWEEP_S = 5.0
ORPHAN_S = 3600.0
"""Least age of a removed folder without a job: an upload is moved into its folder before its job is written."""

KEPT = frozenset({LABELS, IMAGE_LABELS, IMAGE_FAILURE, STUDENT, EVALUATION})
"""Files that stay when a completed job's upload, features and questions are removed."""

_AT_ONCE = 200
_Made = TypeVar("_Made")


class Keeper:
    """See the module. One per service; `run` is its thread.

    Args:
        table_of: makes the table of questions and answers of a completed job, from its questions and releases.
        is_ready: returns whether `table_of` need not wait for anything; a sweep leaves other jobs for the next one.
        budgets_of: returns the columns of budgets that files of earlier versions lack; None: they are not added.
        on_ended: called with the id of each job whose folder is found ended or was removed; may be called again.
    """

    def __init__(
        self,
        home: Path,
        jobs: JobStore,
        forgotten: ForgottenJobs,
        retention: RetentionTable,
        *,
        table_of: Callable[[str], pa.Table],
        labeller: ImageLabeler,
        clock: Clock,
        is_ready: Callable[[JobRecord], bool] = lambda _: True,
        budgets_of: Callable[[JobRecord], Mapping[str, Sequence[Any]]] | None = None,
        on_ended: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._folder = home / "jobs"
        self._on_ended = on_ended
        self._board = EmbedBoard(home)
        self._jobs = jobs
        self._forgotten = forgotten
        self._retention = retention
        self._table_of = table_of
        self._is_ready = is_ready
        self._budgets_of = budgets_of
        self._labeller = labeller
        self._clock = clock
        self._bell = threading.Event()
        # Held by writers and removers: a label file must not appear in a folder that is being removed.
        self._pen = threading.Lock()
        self._settled: set[str] = set()
        """Jobs of which only results are left, so that a sweep skips them."""

    def run(self, stop: threading.Event) -> None:
        """Sweep every few seconds, and when woken, until `stop` is set."""
        while not stop.is_set():
            try:
                self.sweep()
            except LabelerError as error:
                log.warning("what ended jobs left is kept for now", extra={"problem": error.problem_type})
            except Exception:
                log.exception("what ended jobs left could not be swept")
            self._bell.wait(SWEEP_S)
            self._bell.clear()

    def wake(self) -> None:
        """Sweep soon."""
        self._bell.set()

    def uploads(self) -> Iterator[tuple[str, str, int]]:
        """Yield the id, the token and the bytes of the upload of every job that has not ended."""
        for names in _chunks([path.parent.name for path in self._folder.glob(f"*/{UPLOAD}")]):
            for name, job in self._jobs.many(names).items():
                if job.state not in FINISHED:
                    yield name, job.created_by, (self._folder / name / UPLOAD).stat().st_size

    def forget(self, job_id: str) -> None:
        """Forget an ended job now; a repeated call changes nothing.

        Raises:
            NotFound: there is no such job.
            NotReady: it has not ended.
        """
        self._forgotten.forget(job_id, "asked")
        with self._pen:
            self._remove(job_id)

    def check(self, job_id: str) -> None:
        """Refuse a job that was forgotten.

        Raises:
            Gone: the job was forgotten.
        """
        at = self._forgotten.at([job_id]).get(job_id)
        if at is not None:
            raise Gone(
                f"the questions and results of job {job_id} were deleted on {at:%Y-%m-%d %H:%M} UTC, on request or "
                "after the retention time; its charge and the digests of its batches stay in the ledger. Ask again in "
                "a new job"
            )

    def labels(self, job_id: str) -> pa.Table:
        """Return questions and answers of a completed job, from their file if there is one.

        Raises:
            Gone: the job was forgotten.
            LabelerError: as `table_of`.
        """
        self.check(job_id)
        with suppress(FileNotFoundError):
            return self._read_labels(job_id)
        try:
            return self._table_of(job_id)
        except LabelerError:
            # Meanwhile the file may have appeared and the questions may have been removed.
            with suppress(FileNotFoundError):
                return self._read_labels(job_id)
            raise

    def _read_labels(self, job_id: str) -> pa.Table:
        table = read_parquet(self._folder / job_id / LABELS)
        if self._budgets_of is None or has_budgets(table):
            return table
        return with_budgets(table, self._budgets_of(self._jobs.get(job_id)))

    def image_labels(self, job_id: str) -> pa.Table:
        """Return the label of every image of a completed job; make them now if missing.

        Raises:
            Gone: the job was forgotten, or its features were removed before its images were labeled.
            NotReady: it is not completed.
            Unavailable: it takes longer than a request waits.
            LabelerError: there are no labels, for example because nothing was answered.
        """
        table = self._read_made(job_id, IMAGE_LABELS, pq.read_table)
        if self._budgets_of is None or has_budgets(table):
            return table
        return with_image_budgets(table, self.labels(job_id))

    def student(self, job_id: str) -> bytes:
        """Return the student that labeled the images of a completed job; raises as `image_labels`."""
        return self._read_made(job_id, STUDENT, Path.read_bytes)

    def evaluation(self, job_id: str) -> bytes:
        """Return the evaluation from a completed job, as JSON; raises as `image_labels`."""
        return self._read_made(job_id, EVALUATION, Path.read_bytes)

    def want_image_labels(self, job_id: str) -> Future[None] | None:
        """Begin to label every image of a completed job, before jobs that no request waits for.

        Returns:
            The running labeling; None if it is over, whether it succeeded or not.

        Raises:
            LabelerError: as `image_labels`.
        """
        self.check(job_id)
        folder = self._folder / job_id
        self.labels(job_id)  # raises unless the job is completed and readable
        job = self._jobs.get(job_id)
        if not is_labelled(folder):
            if not (folder / QUESTIONS).exists():
                raise Gone(
                    f"the features of job {job_id} were deleted before its images were labeled; its questions and "
                    "answers are there (of=questions)"
                )
            if not self._write_labels(job):
                raise being_labeled(folder)
        return self._labeller.want(job, first=True)

    def _read_made(self, job_id: str, name: str, read: Callable[[Path], _Made]) -> _Made:
        self.check(job_id)
        folder = self._folder / job_id
        with suppress(FileNotFoundError):
            if is_made(folder):
                return _read_of(folder, name, read)
        self.want_image_labels(job_id)
        self._labeller.wait(self._jobs.get(job_id))
        return _read_of(folder, name, read)

    def sweep(self) -> None:
        """Check every stored job once."""
        for names in _chunks(self._board.all_jobs()):
            records = self._jobs.many(names)
            for name in names:
                if name not in records or records[name].state != "queued":
                    self._board.withdraw(name)
        names_there = [path.name for path in self._folder.iterdir()] if self._folder.exists() else []
        for names in _chunks([name for name in names_there if name not in self._settled]):
            records = self._jobs.many(names)
            gone = self._forgotten.at(names)
            for name in names:
                self._keep(name, records.get(name), is_forgotten=name in gone)
        before = self._clock() - timedelta(seconds=self._retention.labels_s)
        for job_id in self._forgotten.due(before, limit=_AT_ONCE):
            self._forgotten.forget(job_id, "age")
            with self._pen:
                self._remove(job_id)

    def _keep(self, name: str, job: JobRecord | None, *, is_forgotten: bool) -> None:
        if job is None:
            with suppress(FileNotFoundError):
                if self._clock().timestamp() - (self._folder / name).stat().st_mtime < ORPHAN_S:
                    return
                log.warning("a folder without a job is removed", extra={"folder": name[:100]})
                with self._pen:
                    self._remove(name)
            return
        if job.state not in FINISHED:
            return
        if is_forgotten or job.state != "completed":
            with self._pen:
                self._remove(name)
            return
        self._compact(job)
        self._on_ended(name)

    def _compact(self, job: JobRecord) -> None:
        """Put the labels of a completed job into one file, and later remove their sources."""
        folder = self._folder / job.job_id
        try:
            if not self._write_labels(job):
                return
        except StorageFull:
            raise
        except LabelerError as error:
            # One unreadable job must not hold up the others; its folder stays for inspection.
            log.warning("labels cannot be kept", extra={"job_id": job.job_id, "problem": error.problem_type})
            return
        if self._clock() < job.updated_at + timedelta(seconds=self._retention.questions_s):
            return
        if (folder / QUESTIONS).exists() and not is_labelled(folder):
            with suppress(BadData):
                self._labeller.want(job)
                return
        with self._pen:
            for entry in list(os.scandir(folder)) if folder.exists() else []:
                if entry.name not in KEPT:
                    _delete(Path(entry.path))
        self._settled.add(job.job_id)

    def _write_labels(self, job: JobRecord) -> bool:
        """Write questions and answers to their file unless it exists; False if the job was forgotten meanwhile, or if
        something that they need is still being made.

        Raises:
            LabelerError: as `table_of`; StorageFull.
        """
        path = self._folder / job.job_id / LABELS
        if path.exists():
            return True
        if not self._is_ready(job):
            return False
        table = self._table_of(job.job_id)
        with self._pen:
            if self._forgotten.at([job.job_id]):
                return False
            with making_room("the labels of a job"), replacing(path, mode=0o600) as temporary:
                pq.write_table(table, temporary)
        return True

    def _remove(self, name: str) -> None:
        _delete(self._folder / name)
        self._settled.discard(name)
        self._on_ended(name)


def _delete(path: Path) -> None:
    """Remove a file or a folder; leftovers of a concurrent write are removed at the next sweep."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):
            path.unlink(missing_ok=True)


def _chunks(names: list[str]) -> Iterator[list[str]]:
    return (names[start : start + _AT_ONCE] for start in range(0, len(names), _AT_ONCE))


SMALL_BYTES = 8 * 2**20
"""A job is small if its features have at most this many bytes."""

WAIT_S = 10.0
"""How long a request waits until it is told to retry."""

_MODULE = "feature_store.results.job_process"
_LOOK_S = 0.25
_TOO_MUCH = (
    "labeling every image takes more memory or time than one job is given; download the questions (of=questions), and "
    "train a student on them with `labeler student`"
)


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


class ImageLabeler:
    """Labels the images of completed jobs, in one process for small jobs and one for large ones.

    Requesters take turns (api.fair_pool); threads and processes start with the first job.

    Args:
        order_of: returns a job's labeling instructions.
    """

    def __init__(self, home: Path, *, order_of: Callable[[JobRecord], LabelingOrder]) -> None:
        self._home = home
        self._order_of = order_of
        self._stopping = threading.Event()
        self._workers = {is_small: (FairPool("labeling", threads=1), JobProcess()) for is_small in (True, False)}

    def want(self, job: JobRecord, *, first: bool = False) -> Future[None] | None:
        """Start the labeling of a completed job unless it is done; its questions and answers are in its folder.

        Args:
            job: it may be labeled already.
            first: put it before jobs that no request waits for.

        Returns:
            The running labeling; None if there is nothing to do.

        Raises:
            BadData: its upload cannot be read.
        """
        folder = self._home / "jobs" / job.job_id
        if is_labelled(folder):
            return None
        size = feature_bytes(folder, job)
        pool, process = self._workers[size <= SMALL_BYTES]
        return pool.submit(job.created_by, partial(self._label, job, size, process), key=job.job_id, first=first)

    def wait(self, job: JobRecord) -> None:
        """Wait until all results of a job are made.

        Raises:
            Unavailable: it takes longer than a request waits.
            LabelerError: the stored reason why they cannot be made.
        """
        folder = self._home / "jobs" / job.job_id
        labeling = self.want(job, first=True)
        if labeling is not None:
            with suppress(TimeoutError, CancelledError):
                labeling.result(WAIT_S)
        with suppress(FileNotFoundError):
            if (folder / IMAGE_FAILURE).stat().st_size:
                raise read_failure(folder / IMAGE_FAILURE)
        if is_made(folder):
            return
        raise being_labeled(folder)

    def stop(self) -> None:
        """End every labeling process; missing results are made at the next request."""
        self._stopping.set()
        for pool, process in self._workers.values():
            pool.stop()
            process.end()

    def _label(self, job: JobRecord, size: int, process: JobProcess) -> None:
        try:
            self._have_labeled(job, size, process)
        except Exception:
            # A defect in one job must not stop the others.
            log.exception("the images of a job could not be labeled", extra={"job_id": job.job_id})

    def _have_labeled(self, job: JobRecord, size: int, process: JobProcess) -> None:
        folder = self._home / "jobs" / job.job_id
        if is_labelled(folder):
            return
        try:
            order = self._order_of(job).model_dump(mode="json")
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


class JobProcess:
    """A process that works on one job after the other; an order starts it if it is not running."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def carry_out(self, order: bytes, *, is_over: Callable[[], bool]) -> int | None:
        """Send an order and wait for its exit code; None if the process has ended or `is_over` says so."""
        if self._process is None:
            self._process = start_process(_MODULE, stdin=subprocess.PIPE, answers=True)
        orders, answers = self._process.stdin, self._process.stdout
        assert orders is not None and answers is not None  # noqa: S101, PT018  # pipes were asked for
        try:
            orders.write(order + b"\n")
            orders.flush()
            poll = select.poll()
            poll.register(answers, select.POLLIN)
            while not poll.poll(1000 * _LOOK_S):
                if is_over():
                    return None
            return int(answers.readline())
        except (BrokenPipeError, ValueError):
            self.end()
            return None

    def end(self) -> None:
        """Kill the process."""
        if self._process is not None:
            self._process.kill()
            with suppress(BrokenPipeError):
                self._process.communicate()
        self._process = None
