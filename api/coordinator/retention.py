"""Retention: what deletes an ended job's data when it is old; see the table in docs/coordinator.md.

    ended without labels        its folder is removed at once, and work for it stops
    completed                   its results are made (api.coordinator.results); upload, features and questions are
                                removed after `questions_s`
    older than `labels_s`,      the folder is removed, with journal rows of its rounds that are no longer needed
    or forgotten on request     (labeler.ledger.jobs); charges, digests and releases stay permanently

Each sweep starts from the present files, not from events, so a crash between two steps costs nothing. A folder without
a job, left by a crash during submission, is removed after an hour.
"""

from __future__ import annotations

import logging
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

from api.coordinator.config import CoordinatorConfig
from api.coordinator.results import Results, is_labelled
from api.coordinator.stores import Stores
from feature_store.results.evaluations import EVALUATION
from feature_store.results.questions import IMAGE_FAILURE, IMAGE_LABELS, LABELS, QUESTIONS, STUDENT, UPLOAD, EmbedBoard
from labeler.errors import BadData, LabelerError, StorageFull
from labeler.ledger.jobs import FINISHED, JobRecord

log = logging.getLogger("labeler.coordinator")

SWEEP_S = 5.0
ORPHAN_S = 3600.0
"""Least age of a removed folder without a job: an upload is moved into its folder before its job is written."""

KEPT = frozenset({LABELS, IMAGE_LABELS, IMAGE_FAILURE, STUDENT, EVALUATION})
"""Files that stay when a completed job's upload, features and questions are removed."""

_AT_ONCE = 200


class RetentionThread:
    """See the module. One per service.

    Args:
        on_ended: called with the id of each job whose folder is found ended or was removed; may be called again.
    """

    def __init__(
        self,
        config: CoordinatorConfig,
        stores: Stores,
        results: Results,
        *,
        on_ended: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._folder = config.home / "jobs"
        self._board = EmbedBoard(config.home)
        self._retention = config.retention
        self._jobs, self._forgotten, self._clock = stores.jobs, stores.forgotten, stores.clock
        self._results = results
        self._on_ended = on_ended
        self._bell, self._stopping = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="retention", daemon=True)
        self._settled: set[str] = set()
        """Jobs of which only results are left, so that a sweep skips them."""

    def start(self) -> None:
        """Sweep every few seconds, and when woken, until `stop`."""
        self._thread.start()

    def stop(self) -> None:
        """Finish the current sweep."""
        self._stopping.set()
        self._bell.set()
        if self._thread.ident is not None:
            self._thread.join(timeout=10.0)

    def _run(self) -> None:
        while not self._stopping.is_set():
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
        with self._results.pen:
            self._remove(job_id)

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
            with self._results.pen:
                self._remove(job_id)

    def _keep(self, name: str, job: JobRecord | None, *, is_forgotten: bool) -> None:
        if job is None:
            with suppress(FileNotFoundError):
                if self._clock().timestamp() - (self._folder / name).stat().st_mtime < ORPHAN_S:
                    return
                log.warning("a folder without a job is removed", extra={"folder": name[:100]})
                with self._results.pen:
                    self._remove(name)
            return
        if job.state not in FINISHED:
            return
        if is_forgotten or job.state != "completed":
            with self._results.pen:
                self._remove(name)
            return
        self._compact(job)
        self._on_ended(name)

    def _compact(self, job: JobRecord) -> None:
        """Remove the sources of a completed job's results, after their time and once the results are made."""
        folder = self._folder / job.job_id
        try:
            if not self._results.write_labels(job):
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
                self._results.label(job)
                return
        with self._results.pen:
            for entry in list(os.scandir(folder)) if folder.exists() else []:
                if entry.name not in KEPT:
                    _delete(Path(entry.path))
        self._settled.add(job.job_id)

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
