"""Who makes the questions of a queued job: the embedder, a process for choosing, or we ourselves at once.

    vectors, no clusters -> chosen from by the thread that took the submission
    images               -> the embedder makes features (feature_store.results.questions), then as for vectors
    a few vectors        -> chosen from here and now: no process, no waiting
    many, or clusters    -> a process of its own, bounded in memory and time; requesters take turns

Nothing here is remembered that matters: the conductor asks again for whatever is missing, and a restarted service
begins again. This process loads no learning library; the one that chooses clusters does, and ends with its job.
"""

from __future__ import annotations

import logging
import subprocess
import threading
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from feature_store.backbones import read_spec
from feature_store.results.job_process import DISK_IS_FULL, QuestionRequest, write_questions
from feature_store.results.questions import (
    MAX_JOB_PIXELS,
    MAX_PIXELS,
    QUESTIONS,
    SHARD,
    UPLOAD,
    EmbedBoard,
    EmbedRequest,
    lane_of,
    write_failure,
)
from labeler.errors import BadData, LabelerError
from labeler.ledger.jobs import JobRecord
from labeler.system.files import making_room
from labeler.system.process_pool import start_process
from labeler.task import Task

log = logging.getLogger("labeler.coordinator")

AT_SUBMISSION_BYTES = 64 * 2**20
"""Features up to this many bytes are chosen from by the thread that took them, two jobs at a time; not for clusters."""

AT_ONCE_BYTES = 2**20
"""Features up to this many bytes are chosen from at once; with more, or for clusters, a process is started."""

PROCESSES = 2
"""That choose at the same time, each for another requester."""

_MODULE = "feature_store.results.job_process"
_LOOK_S = 0.25
_MOST_TRIED = 1000
_TOO_MUCH = (
    "choosing the questions takes more memory or time than one job is given; ask about fewer clusters "
    "(selection.count), or send fewer vectors"
)


@dataclass(frozen=True)
class Bounds:
    """What the embedder is told about sizes; see `[limits]`."""

    max_pixels: int = MAX_PIXELS
    max_job_pixels: int = MAX_JOB_PIXELS


class Preparation:
    """See the module.

    Args:
        is_wanted: whether a job still waits for questions; work for others stops.
        on_end: called with the job when its questions, or a reason against them, may be there.
        backbone_of: fingerprint -> what loads it, for its name.
    """

    def __init__(
        self,
        home: Path,
        *,
        is_wanted: Callable[[str], bool],
        on_end: Callable[[str], None],
        backbone_of: Callable[[str], str | None] = lambda _: None,
        bounds: Bounds | None = None,
    ) -> None:
        self._home = home
        self._board = EmbedBoard(home)
        self._backbone_of = backbone_of
        self._bounds = bounds or Bounds()
        self._choosing = threading.BoundedSemaphore(PROCESSES)
        self._chooser = _Chooser(home, is_wanted=is_wanted, on_end=on_end)
        self._tried: OrderedDict[str, None] = OrderedDict()

    def begin(self, job: JobRecord, task: Task) -> None:
        """Choose from vectors that came with a submission, in the thread that took them: nobody has to wait for a look.

        Where that is not possible now, nothing happens: the conductor asks, as for everything that is missing.
        """
        folder = self._home / "jobs" / job.job_id
        try:
            with suppress(LabelerError, OSError):
                if _is_chosen_from_by_its_taker(job, feature_bytes(folder, job)) and self._choosing.acquire(
                    blocking=False
                ):
                    try:
                        write_questions(folder, self._wanted(job, task))
                    finally:
                        self._choosing.release()
        finally:
            self._note_tried(job.job_id)

    def step(self, job: JobRecord) -> str:
        """What a job waits for: "features" or "questions"."""
        waits = job.source == "images" and not (self._home / "jobs" / job.job_id / SHARD).exists()
        return "features" if waits else "questions"

    def ask(self, job: JobRecord, task: Task) -> None:
        """Ask for what is missing, again where it was asked before; a few vectors are chosen from before this returns.

        A job is in the journal, and asked for, before the thread that took it has chosen: many vectors are left to that
        thread until it has tried, or is asked for again because it is gone.

        Raises:
            LabelerError: there are no questions to be had; TryAgain where there may be later.
        """
        folder = self._home / "jobs" / job.job_id
        if self.step(job) == "features":
            request = EmbedRequest(
                fingerprint=task.backbone_fingerprint,
                max_pixels=self._bounds.max_pixels,
                max_job_pixels=self._bounds.max_job_pixels,
            )
            with making_room("what the embedder is asked for"):
                self._board.put(job.created_by, job.job_id, request)
            return
        wanted = self._wanted(job, task)
        size = feature_bytes(folder, job)
        if size <= AT_ONCE_BYTES and job.strategy in ("all", "random"):
            with making_room("the questions of a job"):
                write_questions(folder, wanted)
            return
        if _is_chosen_from_by_its_taker(job, size) and job.job_id not in self._tried:
            self._note_tried(job.job_id)
            return
        self._chooser.want(lane_of(job.created_by), job.job_id, wanted, size)

    def _note_tried(self, job_id: str) -> None:
        self._tried[job_id] = None
        while len(self._tried) > _MOST_TRIED:
            self._tried.popitem(last=False)

    @property
    def waiting_for_embedder(self) -> int:
        """How many jobs cannot go on without an embedder."""
        return len(self._board.all_jobs())

    def withdraw(self, job_id: str) -> None:
        """Whoever works for a job that has ended may stop; what is not said here is found by the next sweep."""
        with suppress(OSError):
            self._board.withdraw(job_id)

    def stop(self) -> None:
        """End every process that chooses."""
        self._chooser.stop()

    def _wanted(self, job: JobRecord, task: Task) -> QuestionRequest:
        return QuestionRequest.model_validate(
            {
                "strategy": job.strategy,
                "count": job.count,
                "seed": job.seed,
                "fingerprint": task.backbone_fingerprint,
                "backbone": self._name_of(task.backbone_fingerprint),
                "source": job.source,
            }
        )

    def _name_of(self, fingerprint: str) -> str:
        """The backbone in words, for people; empty for one that only the requester has."""
        loads = self._backbone_of(fingerprint)
        if loads is not None:
            with suppress(LabelerError):
                spec = read_spec(loads)
                return spec.architecture or spec.kind
        return ""


class _Chooser:
    """Processes that choose, a few at a time; requesters take turns, and have one each."""

    def __init__(self, home: Path, *, is_wanted: Callable[[str], bool], on_end: Callable[[str], None]) -> None:
        self._home = home
        self._is_wanted = is_wanted
        self._on_end = on_end
        self._bell = threading.Condition()
        self._lanes: OrderedDict[str, OrderedDict[str, tuple[QuestionRequest, int]]] = OrderedDict()
        self._busy: dict[str, str] = {}
        self._threads: list[threading.Thread] = []
        self._stopping = False

    def want(self, lane: str, job_id: str, request: QuestionRequest, size: int) -> None:
        """Put a job into its lane, unless it is there or at work."""
        with self._bell:
            if self._busy.get(lane) == job_id or self._stopping:
                return
            self._lanes.setdefault(lane, OrderedDict())[job_id] = (request, size)
            if len(self._threads) < PROCESSES:
                thread = threading.Thread(target=self._work, name="choosing", daemon=True)
                self._threads.append(thread)
                thread.start()
            self._bell.notify()

    def stop(self) -> None:
        with self._bell:
            self._stopping = True
            self._lanes.clear()
            self._bell.notify_all()
        for thread in self._threads:
            thread.join(timeout=5.0)

    def _work(self) -> None:
        while (taken := self._take()) is not None:
            lane, job_id, request, size = taken
            try:
                self._choose(job_id, request, size)
            except Exception:
                # One job that meets a defect must not stop the others; the conductor asks for it again.
                log.exception("questions could not be chosen", extra={"job_id": job_id})
            finally:
                with self._bell:
                    self._busy.pop(lane, None)
                    if lane in self._lanes:
                        self._lanes.move_to_end(lane)  # what it sent meanwhile comes behind everybody else
                    self._bell.notify()
            self._on_end(job_id)

    def _take(self) -> tuple[str, str, QuestionRequest, int] | None:
        """The next job of the lane whose turn it is; None at the end."""
        with self._bell:
            while not self._stopping:
                for lane, jobs in self._lanes.items():
                    if lane in self._busy:
                        continue
                    job_id, (request, size) = jobs.popitem(last=False)
                    del self._lanes[lane]
                    if jobs:
                        self._lanes[lane] = jobs  # behind everybody else
                    self._busy[lane] = job_id
                    return lane, job_id, request, size
                self._bell.wait()
        return None

    def _choose(self, job_id: str, request: QuestionRequest, size: int) -> None:
        folder = self._home / "jobs" / job_id
        if (folder / QUESTIONS).exists() or not self._is_wanted(job_id):
            return
        process = start_process(_MODULE, str(folder), request.model_dump_json(), str(size))
        try:
            while process.poll() is None:
                with suppress(subprocess.TimeoutExpired):
                    process.wait(_LOOK_S)
                if self._stopping or not self._is_wanted(job_id):
                    return
        finally:
            process.kill()
            process.wait()
        if process.returncode == DISK_IS_FULL:
            log.warning("questions wait for room on the disk", extra={"job_id": job_id})
        elif process.returncode:
            write_failure(folder, BadData(_TOO_MUCH))


def _is_chosen_from_by_its_taker(job: JobRecord, size: int) -> bool:
    """Whether the thread that takes a submission chooses from it; `size` is `feature_bytes`."""
    return job.source == "features" and job.strategy in ("all", "random") and size <= AT_SUBMISSION_BYTES


def feature_bytes(folder: Path, job: JobRecord) -> int:
    """How many bytes of features there are to choose from.

    Raises:
        BadData: the files cannot be read.
    """
    try:
        if job.source == "images":
            return sum(path.stat().st_size for path in (folder / SHARD).glob("*.npy"))
        schema = pq.read_schema(folder / UPLOAD)
        kind = schema.field("feature").type
        return 2 * job.images * int(getattr(kind, "list_size", 1))
    except (OSError, pa.ArrowException, KeyError):
        raise BadData("what was sent with the job cannot be read; submit it again") from None
