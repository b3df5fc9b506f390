"""Jobs as they are shown, kept until they change: whoever looks again costs no thread and no look into the journal.

A view follows from the job, its rounds, its charges, what agents said and whether it was forgotten. Each change of
these is told by the journal once it is durable, before anybody who waits for it is answered (`Database.changed`), and
drops the view. What is read while a job changes is shown, and not kept. A view is also dropped when it is old, so that
a process that lost its journal to another one does not show for ever what was.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from api.schema import FINISHED, JobView

MOST = 512
MOST_ROUNDS = 64
"""A job of more rounds is read each time: what is remembered stays small."""

FRESH_S = 5.0
"""How long a job that is not finished is shown without a look into the journal, although nobody told of a change."""


@dataclass(frozen=True)
class Seen:
    """A job as it is shown to whoever submitted it.

    Only its bytes are kept: as objects a view takes six times the room, and hardly anybody wants those.

    Attributes:
        job_id: the job.
        created_by: who submitted it.
        is_final: it has ended, so nothing of it changes any more.
        body: it as JSON.
    """

    job_id: str
    created_by: str
    is_final: bool
    body: bytes

    @classmethod
    def of(cls, view: JobView) -> Seen:
        """A view as it is kept."""
        return cls(view.job_id, view.created_by, view.state in FINISHED, view.model_dump_json().encode())

    @property
    def view(self) -> JobView:
        """It as objects, read anew each time."""
        return JobView.model_validate_json(self.body)


@dataclass(frozen=True)
class _Kept:
    seen: Seen
    until_s: float


@dataclass(eq=False)
class _Look:
    """A look into the journal that is under way."""

    is_overtaken: bool = False


class SeenJobs:
    """Shared by all threads of a service.

    Args:
        read: a job as it stands, in one moment of the journal.
        fresh_s: for how long any view is shown, where another process writes the journal and nobody tells of changes;
            None where this one does.
        steady: seconds that never run backwards.
    """

    def __init__(
        self,
        read: Callable[[str], JobView],
        *,
        fresh_s: float | None = None,
        steady: Callable[[], float] = time.monotonic,
    ) -> None:
        self._read = read
        self._fresh_s = fresh_s
        self._steady = steady
        self._lock = threading.Lock()
        self._kept: OrderedDict[str, _Kept] = OrderedDict()
        self._reading: dict[str, list[_Look]] = {}

    def changed(self, kind: str, name: str) -> None:
        """Hear of a change in the journal; see `Database.listen`."""
        if kind != "job":
            return
        with self._lock:
            self._kept.pop(name, None)
            for look in self._reading.get(name, ()):
                look.is_overtaken = True  # what it reads may be what was

    def at_once(self, job_id: str) -> Seen | None:
        """A job, where it is known without a look into the journal; None says nothing."""
        with self._lock:
            kept = self._kept.get(job_id)
        return kept.seen if kept is not None and self._steady() < kept.until_s else None

    def look(self, job_id: str) -> Seen:
        """A job; read where it is not known.

        Raises:
            NotFound: there is no such job.
        """
        known = self.at_once(job_id)
        if known is not None:
            return known
        look, began_s = _Look(), self._steady()
        with self._lock:
            self._reading.setdefault(job_id, []).append(look)
        try:
            view = self._read(job_id)
            seen = Seen.of(view)
            with self._lock:
                if not look.is_overtaken and len(view.rounds) <= MOST_ROUNDS:
                    self._keep(job_id, seen, began_s)
        finally:
            with self._lock:
                self._reading[job_id].remove(look)
                if not self._reading[job_id]:
                    del self._reading[job_id]
        return seen

    def _keep(self, job_id: str, seen: Seen, began_s: float) -> None:
        is_final = seen.is_final and self._fresh_s is None
        until_s = float("inf") if is_final else began_s + (FRESH_S if self._fresh_s is None else self._fresh_s)
        self._kept[job_id] = _Kept(seen, until_s)
        self._kept.move_to_end(job_id)
        while len(self._kept) > MOST:
            self._kept.popitem(last=False)
