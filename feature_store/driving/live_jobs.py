"""Jobs that are not finished, in memory, as the journal has them; and when each is to be looked at again.

Nothing here is the truth: a driver that begins with nothing reads the unfinished jobs.
"""

from __future__ import annotations

import heapq
import logging
from collections import OrderedDict
from dataclasses import dataclass, replace

from feature_store.driving.intake import Incoming
from feature_store.driving.loading import Loaded
from labeler.errors import LabelerError, WrongDigest
from labeler.rounds.coordinator import LONGEST_PAUSE_S
from labeler.rounds.effects import UNFINISHED, Event
from labeler.rounds.job_state import JobRun

log = logging.getLogger("labeler.conductor")

_FIRST_PAUSE_S = 0.25
_OVER = 10_000
"""Rounds of ended jobs that are remembered, so that late messages of theirs cost no look into the journal."""


@dataclass
class Live:
    """A job in memory.

    Attributes:
        loaded: as it was read last.
        run: as its machine left it.
        due_s: when it is looked at by itself.
        pause_s: how long it waits after its last failure; 0 where it goes on.
        not_before_s: until when a wake does not shorten that.
        trouble: its last failure; None where it goes on.
    """

    loaded: Loaded
    run: JobRun
    due_s: float = 0.0
    pause_s: float = 0.0
    not_before_s: float = 0.0
    trouble: Exception | None = None


class LiveJobs:
    """See the module."""

    def __init__(self) -> None:
        self.jobs: dict[str, Live] = {}
        self.of_round: dict[str, str] = {}
        """The job of each round's digest."""
        self.stored: list[str] = []
        """Jobs whose last step is durable and that go on at once."""
        self.deferred: set[str] = set()
        """Jobs that are read again at their next look."""
        self.guests: list[str] = []
        """Jobs that were read because a message is about them."""
        self._over: OrderedDict[str, None] = OrderedDict()
        self._heap: list[tuple[float, str]] = []

    def know(self, fresh: Loaded) -> Live:
        """A job as the journal has it now, with what only memory holds of it."""
        job_id = fresh.run.job_id
        live = self.jobs.get(job_id)
        if live is None:
            live = self.jobs[job_id] = Live(fresh, fresh.run)
        else:
            live.loaded, live.run = fresh, _merged(fresh.run, live.run)
        self.note_rounds(fresh.run)
        return live

    def note_rounds(self, run: JobRun) -> None:
        """Remember which rounds are of this job."""
        for one in run.rounds:
            if one.round_digest:
                self.of_round[one.round_digest] = run.job_id

    def is_known(self, round_digest: str) -> bool:
        """Whether the job of a round is in memory, or was and has ended."""
        return round_digest in self.of_round or round_digest in self._over

    def job_of(self, incoming: Incoming) -> str | None:
        """The job that a message is about; None where it is not in memory.

        Raises:
            WrongDigest: its round is over.
        """
        digest = incoming.message.header.round_digest
        job_id = incoming.job_id or self.of_round.get(digest, "")
        if not job_id and digest in self._over:
            raise WrongDigest("the round is over, or was not begun; nothing more is taken for it")
        return job_id if job_id in self.jobs else None

    def forget(self, job_id: str, run: JobRun) -> list[str]:
        """Keep nothing more of a job that has ended; the digests of its rounds."""
        digests = [one.round_digest for one in run.rounds if one.round_digest]
        for digest in digests:
            self.of_round.pop(digest, None)
            if any(one.state != "waiting" for one in run.rounds):
                self._over[digest] = None
        while len(self._over) > _OVER:
            self._over.popitem(last=False)
        self.jobs.pop(job_id, None)
        self.deferred.discard(job_id)
        self.stored = [one for one in self.stored if one != job_id]
        return digests

    def due(self, steady_s: float) -> list[str]:
        """Jobs whose time has come; they are off the list."""
        found = []
        while self._heap and self._heap[0][0] <= steady_s:
            due_s, job_id = heapq.heappop(self._heap)
            live = self.jobs.get(job_id)
            if live is not None and live.due_s == due_s:
                found.append(job_id)
        return found

    def look_at(self, job_id: str, look_s: float) -> None:
        """Have a job looked at by itself at this moment."""
        live = self.jobs[job_id]
        if live.due_s != look_s:
            live.due_s = look_s
            heapq.heappush(self._heap, (look_s, job_id))

    def pause(self, job_id: str, error: Exception, steady_s: float) -> None:
        """A job that could not go on waits, ever longer, and a wake does not shorten that."""
        live = self.jobs.get(job_id)
        if live is None:
            return
        if isinstance(error, LabelerError):
            log.warning("job waits", extra={"job_id": job_id, "problem": error.problem_type})
        else:
            log.error("job met a defect", extra={"job_id": job_id}, exc_info=error)
        live.trouble = error
        live.pause_s = min(2 * live.pause_s, LONGEST_PAUSE_S) if live.pause_s else _FIRST_PAUSE_S
        live.not_before_s = live.due_s = steady_s + live.pause_s
        # What memory holds of it is not what the journal has: ahead of it, or waiting for what has become durable.
        self.deferred.add(job_id)
        heapq.heappush(self._heap, (live.due_s, job_id))

    def next_due_s(self) -> float | None:
        """When the next job is looked at by itself; None where there is none."""
        while self._heap:
            due_s, job_id = self._heap[0]
            live = self.jobs.get(job_id)
            if live is not None and live.due_s == due_s:
                return due_s
            heapq.heappop(self._heap)
        return None

    def see_off(self) -> tuple[list[tuple[str, JobRun]], list[str]]:
        """Of the jobs that were read for a message: those that are finished, and those that stay."""
        guests, self.guests = self.guests, []
        found = [(one, self.jobs[one].run) for one in guests if one in self.jobs]
        over = [(job_id, run) for job_id, run in found if run.state not in UNFINISHED]
        return over, [job_id for job_id, run in found if run.state in UNFINISHED]

    def in_turns(self, events: list[tuple[str, Event]]) -> list[tuple[str, Event]]:
        """The events with requesters taking turns, each requester's in order."""
        lanes: OrderedDict[str, list[tuple[str, Event]]] = OrderedDict()
        for job_id, event in events:
            live = self.jobs.get(job_id)
            if live is not None:
                lanes.setdefault(live.loaded.record.created_by, []).append((job_id, event))
        ordered: list[tuple[str, Event]] = []
        place = 0
        while len(ordered) < sum(map(len, lanes.values())):
            ordered += [lane[place] for lane in lanes.values() if place < len(lane)]
            place += 1
        return ordered


def _merged(fresh: JobRun, known: JobRun) -> JobRun:
    """A job as the journal has it now, with what only memory holds of it."""
    before = {one.number: one for one in known.rounds}
    rounds = tuple(
        replace(
            one,
            done=before[one.number].done,
            is_made=before[one.number].is_made,
            decided_at_s=before[one.number].decided_at_s,
            gone_at_s=before[one.number].gone_at_s,
        )
        if one.number in before and before[one.number].state == one.state
        else one
        for one in fresh.rounds
    )
    is_same = known.state == fresh.state
    return replace(
        fresh,
        rounds=rounds,
        is_admitted=known.is_admitted,
        looks_ahead=known.looks_ahead,
        decided_at_s=known.decided_at_s if is_same else None,
        asked_at_s=known.asked_at_s if is_same else {},
        mail=known.mail,
    )
