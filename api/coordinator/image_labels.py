"""The labels of every image of completed jobs: asked for here, made by processes of their own.

    somebody asks for them          that job, before any other
    its features are about to go    every job once, some at a time (api.coordinator.keeping)

A process learns from released answers and public features (feature_store.results.job_process), is bounded in
memory and time by the system, and writes files into the job's folder; this process holds nothing of them. Small jobs
share a process, one after the other, and wait for no large one. A job during which a process ends is tried once more in
a new one; where that ends too, a failure is written.
"""

from __future__ import annotations

import json
import logging
import select
import subprocess
import threading
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from api.coordinator.preparation import feature_bytes
from feature_store.results.job_process import DISK_IS_FULL, LabelingOrder
from feature_store.results.questions import IMAGE_FAILURE, IMAGE_LABELS, read_failure, write_failure
from labeler.errors import BadData, LabelerError, Unavailable
from labeler.ledger.jobs import JobRecord
from labeler.system.process_pool import start_process

log = logging.getLogger("labeler.coordinator")

SMALL_BYTES = 8 * 2**20
"""Features up to this many bytes make a job a small one."""

TOGETHER = 50
"""Small jobs that are taken at once, those of each requester in turn."""

WAIT_S = 10.0
"""How long a request waits; then it is told to come again."""

_MODULE = "feature_store.results.job_process"
_LOOK_S = 0.25
_TOO_MUCH = (
    "labelling every image takes more memory or time than one job is given; download the questions (of=questions), and "
    "train a student on them with `labeler student`"
)


def is_labelled(folder: Path) -> bool:
    """Whether a job has labels of its images, or never will."""
    return (folder / IMAGE_LABELS).exists() or (folder / IMAGE_FAILURE).exists()


@dataclass(frozen=True)
class _Wanted:
    """A job to label, and how many bytes of features it has."""

    job: JobRecord
    size: int


class ImageLabeller:
    """See the module. Its threads begin with the first job, and wait for processes.

    Args:
        order_of: what is to be made of a job.
    """

    def __init__(self, home: Path, *, order_of: Callable[[JobRecord], LabelingOrder]) -> None:
        self._home = home
        self._order_of = order_of
        self._bell = threading.Condition()
        self._waiting: dict[bool, OrderedDict[str, _Wanted]] = {True: OrderedDict(), False: OrderedDict()}
        self._busy: set[str] = set()
        self._threads: dict[bool, threading.Thread] = {}
        self._stopping = False

    def want(self, job: JobRecord, *, first: bool = False) -> None:
        """See that a completed job is labelled, whose questions and answers are in its folder.

        Args:
            job: of which it is not known whether it is.
            first: before those that nobody waits for.

        Raises:
            BadData: what was sent with it cannot be read.
        """
        with self._bell:
            if self._stopping or job.job_id in self._busy or is_labelled(self._folder(job)):
                return
            wanted = _Wanted(job, feature_bytes(self._folder(job), job))
            is_small = wanted.size <= SMALL_BYTES
            self._waiting[is_small].setdefault(job.job_id, wanted)
            if first:
                self._waiting[is_small].move_to_end(job.job_id, last=False)
            if is_small not in self._threads:
                self._threads[is_small] = threading.Thread(
                    target=self._work, args=(is_small,), name="labelling", daemon=True
                )
                self._threads[is_small].start()
            self._bell.notify_all()

    def wait(self, job: JobRecord) -> Path:
        """The file of a job's image labels, once it is there.

        Raises:
            Unavailable: it takes longer than a request waits.
            LabelerError: there are none, and why.
        """
        folder = self._folder(job)
        with self._bell:
            self._bell.wait_for(lambda: self._stopping or is_labelled(folder), WAIT_S)
        with suppress(FileNotFoundError):
            if (folder / IMAGE_FAILURE).stat().st_size:
                raise read_failure(folder / IMAGE_FAILURE)
        if (folder / IMAGE_LABELS).exists():
            return folder / IMAGE_LABELS
        raise Unavailable(f"the images of job {job.job_id} are being labelled; ask again in a moment")

    def stop(self) -> None:
        """End every process that labels; what is missing is made when it is next asked for."""
        with self._bell:
            self._stopping = True
            for waiting in self._waiting.values():
                waiting.clear()
            self._bell.notify_all()
        for thread in self._threads.values():
            thread.join(timeout=5.0)

    def _folder(self, job: JobRecord) -> Path:
        return self._home / "jobs" / job.job_id

    def _work(self, is_small: bool) -> None:
        process = _Process()
        try:
            while taken := self._take(is_small):
                for one in taken:
                    try:
                        self._label(one, process)
                    except Exception:
                        # A defect that one job meets must not stop the others.
                        log.exception("the images of a job could not be labelled", extra={"job_id": one.job.job_id})
                    finally:
                        with self._bell:
                            self._busy.discard(one.job.job_id)
                            self._bell.notify_all()  # whoever waits for it looks again
        finally:
            process.end()

    def _take(self, is_small: bool) -> list[_Wanted]:
        """The next jobs: one of each requester in turn; none at the end."""
        with self._bell:
            waiting = self._waiting[is_small]
            while not self._stopping and not waiting:
                self._bell.wait()
            if self._stopping:
                return []
            taken = _in_turns(list(waiting.values()))[: TOGETHER if is_small else 1]
            for one in taken:
                del waiting[one.job.job_id]
            self._busy.update(one.job.job_id for one in taken)
            return taken

    def _label(self, wanted: _Wanted, process: _Process) -> None:
        job, folder = wanted.job, self._folder(wanted.job)
        try:
            order = self._order_of(job).model_dump(mode="json")
        except LabelerError as error:
            write_failure(folder, error, name=IMAGE_FAILURE)
            return
        line = json.dumps({"order": order, "feature_bytes": wanted.size, "images": job.images}).encode()
        for _ in range(2):
            # The process may have had its day: it ends when it has waited long, or has spent what it was given.
            code = process.carry_out(line, is_over=lambda: self._stopping)
            if self._stopping or is_labelled(folder) or not folder.exists():
                return
            if code == DISK_IS_FULL:
                log.warning("labels of images wait for room on the disk", extra={"job_id": job.job_id})
                return
        log.warning("the images of a job cannot be labelled", extra={"job_id": job.job_id})
        with suppress(OSError):
            write_failure(folder, BadData(_TOO_MUCH), name=IMAGE_FAILURE)


class _Process:
    """A process that labels one job after the other; begun by an order, where none is there."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def carry_out(self, order: bytes, *, is_over: Callable[[], bool]) -> int | None:
        """Send an order and wait for its exit code; None where the process has ended, or it is over."""
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
        """End it at once."""
        if self._process is not None:
            self._process.kill()
            with suppress(BrokenPipeError):
                self._process.communicate()
        self._process = None


def _in_turns(waiting: list[_Wanted]) -> list[_Wanted]:
    """The jobs in their order, but the second of a requester after the first of everybody, and so on."""
    seen: dict[str, int] = {}
    ranked = []
    for place, one in enumerate(waiting):
        rank = seen.get(one.job.created_by, 0)
        seen[one.job.created_by] = rank + 1
        ranked.append((rank, place, one))
    return [one for _, _, one in sorted(ranked, key=lambda ranks: ranks[:2])]
