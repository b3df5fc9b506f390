"""When the conductor looks at which job: every unfinished job has a time of its own.

A wake makes that time earlier and never later, and whoever is due is looked at before anybody a second time. So however
often one job is woken, it takes at most every other turn from the rest: whoever makes noise about a job of theirs
cannot keep another job waiting.

A job that could not go on waits ever longer, and a wake does not shorten that: what keeps failing must not spin.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

LONGEST_PAUSE_S = 30.0
_FIRST_PAUSE_S = 0.25


@dataclass
class _Place:
    """A job in the schedule: when it is looked at next, and how long it waits where it fails again."""

    due_at: float
    not_before: float = 0.0
    pause_s: float = _FIRST_PAUSE_S


class Schedule:
    """See the module. Shared by the conductor's thread and everybody who wakes it.

    Args:
        every_s: a job that nobody wakes is looked at this often, in seconds.
        clock: seconds that never run backwards.
    """

    def __init__(self, *, every_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._every_s = every_s
        self._clock = clock
        self._places: dict[str, _Place] = {}
        self._refreshed_at: float | None = None
        self._bell = threading.Condition()

    def __contains__(self, job_id: object) -> bool:
        return job_id in self._places

    def wake(self, job_id: str) -> None:
        """Look at a job as soon as may be: something about it has changed."""
        with self._bell:
            now = self._clock()
            place = self._places.setdefault(job_id, _Place(now))
            place.due_at = min(place.due_at, max(now, place.not_before))
            self._bell.notify()

    def ring(self) -> None:
        """End a `wait` at once, whether or not a job is due."""
        with self._bell:
            self._bell.notify()

    @property
    def wants_refresh(self) -> bool:
        """Whether it is time to say again which jobs are unfinished."""
        return self._refreshed_at is None or self._clock() - self._refreshed_at >= self._every_s

    def refresh(self, unfinished: Iterable[str]) -> None:
        """Every unfinished job has a place; one that ended meanwhile is looked at once more, to be forgotten."""
        with self._bell:
            now = self._refreshed_at = self._clock()
            alive = set(unfinished)
            for job_id in alive - self._places.keys():
                self._places[job_id] = _Place(now)
            for job_id in self._places.keys() - alive:
                self._places[job_id].due_at = min(self._places[job_id].due_at, now)

    def postpone_refresh(self) -> None:
        """The jobs could not be read now: try after the usual time again, and not at once."""
        self._refreshed_at = self._clock()

    def due(self) -> list[str]:
        """Every job whose time has come, the one that has waited longest first."""
        with self._bell:
            now = self._clock()
            found = [(place.due_at, job_id) for job_id, place in self._places.items() if place.due_at <= now]
        return [job_id for _, job_id in sorted(found)]

    def looking(self, job_id: str) -> None:
        """A look begins: what wakes the job from now on makes it due again, and is not lost."""
        with self._bell:
            place = self._places.setdefault(job_id, _Place(0.0))
            place.due_at = self._clock() + self._every_s

    def went_on(self, job_id: str) -> None:
        """The look did what could be done now."""
        with self._bell:
            if job_id in self._places:
                place = self._places[job_id]
                place.not_before, place.pause_s = 0.0, _FIRST_PAUSE_S

    def failed(self, job_id: str) -> None:
        """The look failed in a way that may pass: look again after a pause, each twice as long as the last."""
        with self._bell:
            if job_id in self._places:
                place = self._places[job_id]
                place.due_at = place.not_before = self._clock() + place.pause_s
                place.pause_s = min(2 * place.pause_s, LONGEST_PAUSE_S)

    def forget(self, job_id: str) -> None:
        """The job is over."""
        with self._bell:
            self._places.pop(job_id, None)

    def wait(self) -> None:
        """Wait until a job is due, the unfinished jobs are to be read again, or `ring`."""
        with self._bell:
            now = self._clock()
            times = [place.due_at for place in self._places.values()]
            times.append(now if self._refreshed_at is None else self._refreshed_at + self._every_s)
            self._bell.wait(max(0.0, min(times) - now))
