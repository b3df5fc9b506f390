"""The thread in which the coordinator's driver takes its turns, and the maker of each job's questions.

The state machine (labeler.rounds.coordinator) decides what a job needs next. The driver (labeler.driver.coordinator)
carries out the steps of many jobs together. This module connects both to the service: its settings, home and prices.

Questions of a queued job are made by the embedder, by a chooser process, or here at once:

    images               -> The embedder makes features (feature_store.results.questions), then as for vectors.
    a few vectors        -> Chosen here and now: no process, no waiting.
    many, or clusters    -> A separate process, bounded in memory and time. Requesters take turns.

No state here needs to survive: the driver asks again for anything missing, and a restarted service begins again.
This process loads no learning library; the one that chooses clusters does, and ends with its job.
"""

from __future__ import annotations

import logging
import subprocess
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from api.coordinator.stores import Stores
from api.fair_pool import FairPool
from feature_store.backbones import read_spec
from feature_store.results.job_process import DISK_IS_FULL, QuestionRequest, write_questions
from feature_store.results.questions import (
    FAILURE,
    MAX_JOB_PIXELS,
    MAX_PIXELS,
    QUESTIONS,
    SHARD,
    UPLOAD,
    EmbedBoard,
    EmbedRequest,
    forget_progress,
    read_failure,
    read_questions,
    write_failure,
)
from labeler.driver.coordinator import CoordinatorDriver
from labeler.driver.mail import Mailbox
from labeler.driver.sending import PostOffice, Sender
from labeler.errors import BadData, LabelerError
from labeler.ledger.jobs import JobRecord
from labeler.rounds.effects import Patience
from labeler.system.files import making_room
from labeler.system.keys import PartyKeys
from labeler.system.process_pool import start_process
from labeler.task import Task

log = logging.getLogger("labeler.conductor")

_AFTER_DEFECT_S = 1.0


class CoordinatorThread:
    """See the module. One per service.

    Args:
        backbone_of: fingerprint -> the path or name that loads it, for messages.
        max_pixels, max_job_pixels: passed to the embedder; see `[limits]`.
        steady: seconds that never run backwards.
        requester_of: token id -> its holder's name, which a proposal tells the sites.
    """

    def __init__(
        self,
        *,
        home: Path,
        stores: Stores,
        keys: PartyKeys,
        mailbox: Mailbox,
        patience: Patience,
        backbone_of: Callable[[str], str | None] = lambda _: None,
        max_pixels: int = MAX_PIXELS,
        max_job_pixels: int = MAX_JOB_PIXELS,
        steady: Callable[[], float] = time.monotonic,
        requester_of: Callable[[str], str] = lambda _: "",
    ) -> None:
        self.questions = QuestionMaker(
            home,
            is_wanted=lambda job_id: stores.jobs.get(job_id).state == "queued",
            on_end=lambda job_id: self.driver.wake(job_id),
            backbone_of=backbone_of,
            max_pixels=max_pixels,
            max_job_pixels=max_job_pixels,
        )
        self.post_office = PostOffice(keys=keys, sequences=stores.sequences)
        self.driver = CoordinatorDriver(
            parties=stores.parties,
            sender=Sender(self.post_office, self.questions),
            mailbox=mailbox,
            questions=self.questions,
            settlement=stores.settlement,
            patience=patience,
            clock=stores.clock,
            steady=steady,
            requester_of=requester_of,
        )

        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="coordinator", daemon=True)

    def start(self) -> None:
        """Take turns until `stop`."""
        self._thread.start()

    def stop(self) -> None:
        """Finish the current turn, and end every process that makes questions."""
        self._stopping.set()
        if self._thread.ident is not None:
            self.driver.ring()
            self._thread.join(timeout=10.0)
        self.questions.stop()

    def _run(self) -> None:
        while not self._stopping.is_set():
            self.tick()
            if not self._stopping.is_set():
                self.driver.wait()
        self.driver.close()

    def tick(self) -> None:
        """Take one turn, and the turns that follow from its durable changes."""
        try:
            while self.driver.turn():
                pass
        except Exception:
            # The work is retried at a later turn; a defect must not end the thread.
            log.exception("a turn met a defect")
            time.sleep(_AFTER_DEFECT_S)


AT_ONCE_BYTES = 4 * 2**20
"""Up to this size of features we choose at once; for more, or for clusters, a process is started."""

PROCESSES = 2
"""Chooser processes at the same time, each for a different requester."""

_MODULE = "feature_store.results.job_process"
_LOOK_S = 0.25
_TOO_MUCH = (
    "choosing the questions takes more memory or time than one job is given; ask about fewer clusters "
    "(selection.count), or send fewer vectors"
)


class QuestionMaker:
    """The questions of jobs, in the jobs' folders (labeler.driver.stepping.Questions); see the module.

    Args:
        is_wanted: whether a job still waits for questions; work for other jobs stops.
        on_end: called with the job when its questions, or the reason it gets none, may be there.
        backbone_of, max_pixels, max_job_pixels: see CoordinatorThread.
    """

    def __init__(
        self,
        home: Path,
        *,
        is_wanted: Callable[[str], bool],
        on_end: Callable[[str], None],
        backbone_of: Callable[[str], str | None],
        max_pixels: int,
        max_job_pixels: int,
    ) -> None:
        self._jobs = home / "jobs"
        self._board = EmbedBoard(home)
        self._is_wanted = is_wanted
        self._on_end = on_end
        self._backbone_of = backbone_of
        self._max_pixels, self._max_job_pixels = max_pixels, max_job_pixels
        self._choosers = FairPool("choosing", threads=PROCESSES)
        self._stopping = threading.Event()

    def look(self, job: JobRecord, task: Task) -> NDArray[np.int16] | None:
        """Return the questions of a job; request them and return None while there are none.

        Raises:
            LabelerError: they cannot be made; TryAgain if they may be later.
        """
        path = self._jobs / job.job_id / QUESTIONS
        self._check_failure(job)
        if not path.exists():
            self.ask(job, task)
        return read_questions(path) if path.exists() else None

    def has_features(self, job: JobRecord, task: Task) -> bool:
        """Return whether a job's upload has features; request them if not.

        Raises:
            LabelerError: it cannot have any; TryAgain if it may later.
        """
        self._check_failure(job)
        if not self._lacks_features(job):
            return True
        self.ask(job, task)
        return False

    def read(self, job_id: str) -> NDArray[np.int16]:
        """Return the questions of a job that has them.

        Raises:
            BadData: the file cannot be read.
        """
        return read_questions(self._jobs / job_id / QUESTIONS)

    def ask(self, job: JobRecord, task: Task) -> None:
        """Request what is missing; from a few vectors, choose before returning. A repeated request changes nothing.

        Raises:
            LabelerError: questions cannot be made; TryAgain if they may be later.
        """
        folder = self._jobs / job.job_id
        fingerprint = task.backbone_fingerprint
        if self._lacks_features(job):
            request = EmbedRequest(
                fingerprint=fingerprint, max_pixels=self._max_pixels, max_job_pixels=self._max_job_pixels
            )
            with making_room("what the embedder is asked for"):
                self._board.put(job.created_by, job.job_id, request)
            return
        wanted = QuestionRequest.model_validate(
            {
                "strategy": job.strategy,
                "count": job.count,
                "seed": job.seed,
                "fingerprint": fingerprint,
                "backbone": self._name_of(fingerprint),
                "source": job.source,
            }
        )
        size = feature_bytes(folder, job)
        if size <= AT_ONCE_BYTES and job.strategy in ("all", "random"):
            with making_room("the questions of a job"):
                write_questions(folder, wanted)
            return
        self._choosers.submit(job.created_by, partial(self._choose, job.job_id, wanted, size), key=job.job_id)

    @property
    def waiting_for_embedder(self) -> int:
        """Return how many jobs cannot continue without an embedder."""
        return len(self._board.all_jobs())

    def withdraw(self, job_id: str) -> None:
        """Stop work for a job that has ended; the next sweep finds any work that this misses."""
        with suppress(OSError):
            self._board.withdraw(job_id)

    def stop(self) -> None:
        """End every process that chooses."""
        self._stopping.set()
        self._choosers.stop()

    def _lacks_features(self, job: JobRecord) -> bool:
        return job.source == "images" and not (self._jobs / job.job_id / SHARD).exists()

    def _check_failure(self, job: JobRecord) -> None:
        failure = self._jobs / job.job_id / FAILURE
        if failure.exists():
            raise read_failure(failure)

    def _choose(self, job_id: str, request: QuestionRequest, size: int) -> None:
        """Choose in a process, then call `on_end`; after a defect or on a full disk the driver asks again."""
        try:
            is_over = self._run_chooser(job_id, request, size)
        except Exception:
            log.exception("questions could not be chosen", extra={"job_id": job_id})
            return
        if is_over:
            self._on_end(job_id)

    def _run_chooser(self, job_id: str, request: QuestionRequest, size: int) -> bool:
        folder = self._jobs / job_id
        if (folder / QUESTIONS).exists() or not self._is_wanted(job_id):
            return True
        process = start_process(_MODULE, str(folder), request.model_dump_json(), str(size))
        try:
            while process.poll() is None:
                with suppress(subprocess.TimeoutExpired):
                    process.wait(_LOOK_S)
                if self._stopping.is_set() or not self._is_wanted(job_id):
                    return True
        finally:
            process.kill()
            process.wait()
            forget_progress(folder)
        if process.returncode == DISK_IS_FULL:
            log.warning("questions wait for room on the disk", extra={"job_id": job_id})
            return False
        if process.returncode:
            write_failure(folder, BadData(_TOO_MUCH))
        return True

    def _name_of(self, fingerprint: str) -> str:
        """Return the backbone's name for people; empty if only the requester has it."""
        loads = self._backbone_of(fingerprint)
        if loads is not None:
            with suppress(LabelerError):
                spec = read_spec(loads)
                return spec.architecture or spec.kind
        return ""


def feature_bytes(folder: Path, job: JobRecord) -> int:
    """Return the size of the features to choose from, in bytes.

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
