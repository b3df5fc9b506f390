"""Jobs as they are shown, kept until they change: whoever looks again costs no thread and no look into the journal.

A view follows from the job, its rounds, its charges, what agents said and whether it was forgotten. Each change of
these is told by the journal once it is durable, before anybody who waits for it is answered (`Database.changed`), and
drops the view. What is read while a job changes is shown, and not kept. A view is also dropped when it is old, so that
a process that lost its journal to another one does not show for ever what was.

Whoever has submitted a job or looked at it looks again, and then it has changed, mostly. So a dropped view of a job
that goes on is read anew at once (`run`, in a thread of its own, many jobs in one statement), and the next look finds
it; its view is made of the rows only then. Until it is read there is none: nobody is shown what was before what
somebody has been shown.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

from api.schema import FINISHED, JobView
from feature_store.journal.jobs import no_such_job
from labeler.errors import LabelerError

log = logging.getLogger("labeler.coordinator")

MOST = 512
MOST_ROUNDS = 64
"""A job of more rounds is read each time: what is remembered stays small."""

MOST_AT_ONCE = 64
"""Jobs that are read in one statement."""

FRESH_S = 5.0
"""How long a job that is not finished is shown without a look into the journal, although nobody told of a change."""


@dataclass(frozen=True)
class Seen:
    """A job as it is shown to whoever submitted it.

    Only its bytes are kept: as objects a view takes six times the room, and hardly anybody wants those.

    Attributes:
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


class Unseen:
    """A job as it was read, of which a view is made when somebody looks: most are overtaken before.

    Args:
        is_final: it has ended, so nothing of it changes any more.
        num_rounds: how many rounds it has.
        is_small: its view is made in about a millisecond, so that an event loop may.
    """

    def __init__(self, *, is_final: bool, num_rounds: int, is_small: bool, make: Callable[[], JobView]) -> None:
        self.is_final = is_final
        self.num_rounds = num_rounds
        self._is_small = is_small
        self._make: Callable[[], JobView] | None = make
        self._seen: Seen | None = None

    @property
    def is_at_hand(self) -> bool:
        """Whether `seen` is made, or made soon."""
        return self._is_small or self._seen is not None

    @property
    def seen(self) -> Seen:
        """It as it is shown, made once. Two threads may both make it; what they make is equal."""
        make = self._make
        if make is not None:
            self._seen, self._make = Seen.of(make()), None
        assert self._seen is not None  # noqa: S101  # it is set before the way to make it goes
        return self._seen


@dataclass(frozen=True)
class _Kept:
    unseen: Unseen
    until_s: float


@dataclass(eq=False)
class _Look:
    """A look into the journal that is under way.

    Attributes:
        overtaken: jobs that have changed since it began: what it reads of them may be what was.
    """

    overtaken: set[str] = field(default_factory=set)


class SeenJobs:
    """Shared by all threads of a service.

    Args:
        read: jobs as they stand, by id, in one moment of the journal; those that are not there are left out.
        fresh_s: for how long any view is shown, where another process writes the journal and nobody tells of changes;
            None where this one does.
        steady: seconds that never run backwards.
    """

    def __init__(
        self,
        read: Callable[[Collection[str]], Mapping[str, Unseen]],
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
        self._stale: OrderedDict[str, None] = OrderedDict()
        self._news = threading.Event()

    def changed(self, kind: str, name: str) -> None:
        """Hear of a change in the journal; see `Database.listen`."""
        if kind != "job":
            return
        with self._lock:
            kept = self._kept.pop(name, None)
            looks = self._reading.get(name, ())
            for look in looks:
                look.overtaken.add(name)
            if looks or (kept is not None and not kept.unseen.is_final):
                self._want(name)

    def expect(self, job_id: str) -> None:
        """A job is about to be looked at for the first time."""
        with self._lock:
            self._want(job_id)

    def run(self, stopping: threading.Event) -> None:
        """Read anew what has changed, as soon as it has, until `stopping` is set and `ring` was called."""
        while True:
            self._news.wait()
            self._news.clear()
            if stopping.is_set():
                return
            try:
                self.refresh()
            except LabelerError as error:
                # Who looks is told so, or finds it readable again.
                log.info("jobs cannot be read anew now", extra={"problem": error.problem_type})
            except Exception:
                log.exception("jobs cannot be read anew")

    def ring(self) -> None:
        """End a wait of `run`."""
        self._news.set()

    def refresh(self) -> None:
        """Read jobs anew that somebody looks at and that have changed.

        Raises:
            LabelerError: the journal cannot be read.
        """
        while True:
            with self._lock:
                names = [self._stale.popitem(last=False)[0] for _ in range(min(len(self._stale), MOST_AT_ONCE))]
            if not names:
                return
            self._read_now(names)

    def at_once(self, job_id: str) -> Seen | None:
        """A job, where it is known without a look into the journal, or much work; None says nothing."""
        with self._lock:
            kept = self._kept.get(job_id)
        is_known = kept is not None and self._steady() < kept.until_s and kept.unseen.is_at_hand
        return kept.unseen.seen if kept is not None and is_known else None

    def look(self, job_id: str) -> Seen:
        """A job; read where it is not known.

        Raises:
            NotFound: there is no such job.
        """
        seen = self.at_once(job_id) or self.look_all([job_id]).get(job_id)
        if seen is None:
            raise no_such_job(job_id)
        return seen

    def look_all(self, job_ids: Collection[str]) -> dict[str, Seen]:
        """Jobs by id, read together now; those that are not there are left out."""
        return {job_id: one.seen for job_id, one in self._read_now(job_ids).items()}

    def _read_now(self, job_ids: Collection[str]) -> Mapping[str, Unseen]:
        look, began_s = _Look(), self._steady()
        with self._lock:
            for job_id in job_ids:
                self._reading.setdefault(job_id, []).append(look)
        try:
            found = self._read(job_ids)
            with self._lock:
                for job_id, one in found.items():
                    if job_id not in look.overtaken and one.num_rounds <= MOST_ROUNDS:
                        self._keep(job_id, one, began_s)
        finally:
            with self._lock:
                for job_id in job_ids:
                    self._reading[job_id].remove(look)
                    if not self._reading[job_id]:
                        del self._reading[job_id]
        return found

    def _want(self, job_id: str) -> None:
        self._stale[job_id] = None
        while len(self._stale) > MOST:
            self._stale.popitem(last=False)
        self._news.set()

    def _keep(self, job_id: str, one: Unseen, began_s: float) -> None:
        is_final = one.is_final and self._fresh_s is None
        until_s = float("inf") if is_final else began_s + (FRESH_S if self._fresh_s is None else self._fresh_s)
        self._kept[job_id] = _Kept(one, until_s)
        self._kept.move_to_end(job_id)
        while len(self._kept) > MOST:
            self._kept.popitem(last=False)
