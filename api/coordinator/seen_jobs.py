"""Jobs as they were shown last: whoever looks again at one that has not changed costs one row.

A view follows from the job, its rounds, its charges and what agents said, and each change of these raises the job's
version in the same transaction. So a view is kept under its version, and a job of another version is read again.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable

from api.schema import JobView
from feature_store.journal.jobs import JobRecord

MOST = 1024
MOST_ROUNDS = 64
"""A job of more rounds is read each time: what is remembered stays small."""


class SeenJobs:
    """Shared by all threads of a service.

    Args:
        read: a job as it stands, in one moment of the journal.
    """

    def __init__(self, read: Callable[[str], JobView]) -> None:
        self._read = read
        self._lock = threading.Lock()
        self._views: OrderedDict[str, JobView] = OrderedDict()

    def view(self, job: JobRecord) -> JobView:
        """A job whose row was read just now; another look is taken only where its version is another."""
        with self._lock:
            known = self._views.get(job.job_id)
        if known is not None and known.version == job.version:
            return known
        view = self._read(job.job_id)
        if len(view.rounds) <= MOST_ROUNDS:
            with self._lock:
                self._views[job.job_id] = view
                self._views.move_to_end(job.job_id)
                while len(self._views) > MOST:
                    self._views.popitem(last=False)
        return view
