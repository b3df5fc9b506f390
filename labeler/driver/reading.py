"""Acquire: read jobs with work from the journal for each turn, and hold the plan of the turn's results.

The journal is the only truth. For an unfinished job, memory holds only what no journal needs: since when it waits,
which messages it has already used, and its pause after a failure. A driver that starts with nothing asks again.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Protocol

from labeler.driver.intake import Delivery, Incoming
from labeler.errors import LabelerError, NotFound
from labeler.ledger.chain import Head
from labeler.ledger.database import Connection, Database
from labeler.ledger.jobs import JobRecord, JobStore, RoundRecord
from labeler.ledger.parties import PartyRecord
from labeler.ledger.rounds import AggregateStore
from labeler.ledger.tasks import TaskRecord, TaskStore
from labeler.release import Release, release_from_bytes
from labeler.rounds import queues
from labeler.rounds.coordinator import LONGEST_PAUSE_S
from labeler.rounds.effects import JobFailed, JobRun, Now, Party, Patience, RoundRun, Send, Store
from labeler.rounds.queues import FairQueue

log = logging.getLogger("labeler.conductor")

_FIRST_PAUSE_S = 0.25


class PartyBook(Protocol):
    """The participants: `labeler.ledger.parties.PartyStore`, or a replacement with parties in its own process."""

    @property
    def version(self) -> int:
        """Return a value that differs whenever a party has changed."""

    def all(self) -> Sequence[PartyRecord]:
        """Return every party."""

    def answered(self, heads: Mapping[str, Head], *, connection: Connection) -> None:
        """Store the journal heads that came with agents' answers."""


@dataclass(frozen=True)
class LoadedJob:
    """A job as it was read.

    Attributes:
        record, rounds: its rows.
        run: the job as its machine takes it, with the part that only memory holds.
    """

    record: JobRecord
    task: TaskRecord
    rounds: tuple[RoundRecord, ...]
    run: JobRun


@dataclass
class Live:
    """The state of an unfinished job that only memory holds.

    Attributes:
        run: as its machine left it.
        due_s: when it is looked at without an event.
        pause_s: wait after its last failure; 0 if there is none.
        not_before_s: until when a wake does not shorten that wait.
        trouble: its last failure; None if it continues.
    """

    run: JobRun
    due_s: float = math.inf
    pause_s: float = 0.0
    not_before_s: float = 0.0
    trouble: Exception | None = None

    def pause(self, error: Exception, steady_s: float) -> None:
        """Let a job wait after a failure, longer each time; a wake does not shorten the wait."""
        if isinstance(error, LabelerError):
            log.warning("job waits", extra={"job_id": self.run.job_id, "problem": error.problem_type})
        else:
            log.error("job met a defect", extra={"job_id": self.run.job_id}, exc_info=error)
        self.trouble = error
        self.pause_s = min(2 * self.pause_s, LONGEST_PAUSE_S) if self.pause_s else _FIRST_PAUSE_S
        self.not_before_s = self.due_s = steady_s + self.pause_s


class Loader:
    """A reader of jobs: all of a turn in one read. It caches the releases of unfinished jobs, which never change.

    Args:
        requester_of: returns the name of a token's holder, by the token's id; not called for a job without submitter.
        is_simulated: noise from a known seed is expected.
    """

    def __init__(
        self,
        database: Database,
        tasks: TaskStore,
        jobs: JobStore,
        aggregates: AggregateStore,
        patience: Patience,
        *,
        requester_of: Callable[[str], str],
        is_simulated: bool = False,
    ) -> None:
        self._database = database
        self._tasks = tasks
        self._jobs = jobs
        self._aggregates = aggregates
        self._patience = patience
        self._requester_of = requester_of
        self._is_simulated = is_simulated
        self.live: dict[str, Live] = {}
        """Unfinished jobs that were read before."""
        self.of_round: dict[str, str] = {}
        """Round digest -> job, for these jobs."""

    def known_job(self, incoming: Incoming) -> str:
        """Return the job that a message is about, as far as memory knows."""
        return incoming.job_id or self.of_round.get(incoming.message.header.round_digest, "")

    def job_of(self, incoming: Incoming) -> str:
        """Return the job that a message is about; empty if no job has such a round."""
        known = self.known_job(incoming)
        if not known:
            with suppress(NotFound):
                known = self._jobs.round_of(incoming.message.header.round_digest).job_id
        return known

    def load(self, job_ids: Collection[str], parties: Mapping[str, Party]) -> dict[str, LoadedJob]:
        """Return stored jobs, with the part that memory holds; missing ones are left out."""
        if not job_ids:
            return {}
        with self._database.read() as connection:
            records = self._jobs.many(job_ids, connection=connection)
            ids = list(records)
            rounds = self._jobs.rounds_of(ids, connection=connection)
            answers = self._jobs.willingness.answers_of(ids, connection=connection)
            asked = self._jobs.willingness.asked_of(ids, connection=connection)
            tasks = self._tasks.get_all([record.task_digest for record in records.values()], connection=connection)
            posted = [one.round_digest for found in rounds.values() for one in found if one.state == "posted"]
            sums = self._aggregates.of_all(posted, connection=connection)
            opened = {
                one: self._opened(records[one], rounds[one], connection)
                for one in ids
                if tasks[records[one].task_digest].task.steps > 1
            }
        found = {}
        for job_id, record in records.items():
            task, before = tasks[record.task_digest], self.live.get(job_id)
            fresh = JobRun(
                job_id=job_id,
                task=task.task,
                participants=task.participants,
                num_queries=record.num_queries,
                expires_at_s=record.expires_at.timestamp(),
                patience=self._patience,
                state=record.state,
                rounds=tuple(_round_run(one, sums, opened.get(job_id, {})) for one in rounds[job_id]),
                answers=answers.get(job_id, {}),
                asked=asked.get(job_id),
                parties=parties,
                requester=self._requester_of(record.created_by) if before is None else before.run.requester,
                is_simulated=self._is_simulated,
            )
            run = fresh if before is None else _remembering(fresh, before.run)
            found[job_id] = LoadedJob(record, task, tuple(rounds[job_id]), run)
        return found

    def keep(self, run: JobRun) -> None:
        """Cache a job as its last step left it."""
        self.live.setdefault(run.job_id, Live(run)).run = run
        self.of_round |= {one.round_digest: run.job_id for one in run.rounds if one.round_digest}

    def forget(self, run: JobRun) -> None:
        """Drop a job from memory."""
        self.live.pop(run.job_id, None)
        for one in run.rounds:
            self.of_round.pop(one.round_digest, None)

    def _opened(
        self, record: JobRecord, rounds: Iterable[RoundRecord], connection: Connection
    ) -> Mapping[int, Release | None]:
        """Return what the steps of a training have opened, by round."""
        live = self.live.get(record.job_id)
        known: dict[int, Release | None] = {}
        if live is not None:
            known = {one.number: one.opened for one in live.run.rounds if one.opened is not None}
        for one in rounds:
            if one.number not in known and one.state == "opened":
                data = self._jobs.release(record.job_id, one.number, connection=connection)
                known[one.number] = None if data is None else release_from_bytes(data)
        return known


@dataclass
class TurnPlan:
    """The results of one turn, or of one piece of it; kept only once they are durable.

    Attributes:
        now: when the turn began.
        jobs: as they were read for it.
        runs: jobs as they are after their steps.
        stores, sends, relays: what is to be durable, and what leaves after that.
        taken, relayed: the highest number of each sender's messages to the coordinator, and to each tallier.
        heads: journal heads that came with agents' answers.
        looks: when each job is next looked at without an event.
        retries: jobs whose step met a defect or has to wait; nothing of that step is here.
        broken: jobs whose messages could not be written: why, and of which round.
        line, turns: the queues for finding winners, and for starting jobs.
        follow: rounds whose turn has come in this turn.
        answers: outcomes to report once everything is durable.
    """

    now: Now
    jobs: dict[str, LoadedJob]
    line: queues.WinnerQueue
    turns: FairQueue
    runs: dict[str, JobRun] = field(default_factory=dict)
    stores: dict[str, list[Store]] = field(default_factory=dict)
    sends: list[tuple[str, Send]] = field(default_factory=list)
    relays: list[Incoming] = field(default_factory=list)
    taken: dict[tuple[str, str], int] = field(default_factory=dict)
    relayed: dict[tuple[str, str], int] = field(default_factory=dict)
    heads: dict[str, Head] = field(default_factory=dict)
    looks: dict[str, float] = field(default_factory=dict)
    retries: dict[str, Exception] = field(default_factory=dict)
    broken: dict[str, JobFailed] = field(default_factory=dict)
    follow: list[str] = field(default_factory=list)
    answers: list[tuple[Delivery, int | LabelerError]] = field(default_factory=list)

    @property
    def is_stored(self) -> bool:
        """Return whether anything is to be made durable."""
        return bool(self.stores or self.taken or self.heads)

    def run_of(self, job_id: str) -> JobRun:
        """Return a job in its state so far in this turn."""
        return self.runs[job_id] if job_id in self.runs else self.jobs[job_id].run

    def draft(self, job_id: str) -> TurnPlan:
        """Return a plan for one step of one job; unless it is joined, nothing of it is kept."""
        return TurnPlan(self.now, self.jobs, self.line, self.turns, runs={job_id: self.run_of(job_id)})

    def join(self, draft: TurnPlan) -> None:
        """Add the results of a step to its turn."""
        self.runs |= draft.runs
        for job_id, stores in draft.stores.items():
            self.stores.setdefault(job_id, []).extend(stores)
        self.sends += draft.sends
        self.relays += draft.relays
        self.looks |= draft.looks
        self.line, self.turns = draft.line, draft.turns
        self.follow += draft.follow


def _round_run(
    one: RoundRecord, sums: Mapping[str, Mapping[str, bytes]], opened: Mapping[int, Release | None]
) -> RoundRun:
    return RoundRun(
        number=one.number,
        first_query=one.first_query,
        num_queries=one.num_queries,
        state=one.state,
        batch_digest=one.batch_digest,
        round_digest=one.round_digest,
        participants=one.participants,
        holdings=one.holdings,
        refusals=one.refusals,
        final=one.final_refusals,
        contributors=one.contributors,
        has_shares=one.has_shares,
        sums=sums.get(one.round_digest, {}),
        opened=opened.get(one.number),
    )


def _remembering(fresh: JobRun, known: JobRun) -> JobRun:
    """Return a job as the journal has it now, with the part that only memory holds."""
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


def parties_of(records: Iterable[PartyRecord]) -> dict[str, Party]:
    """Return the parties with active keys, as the machine needs them."""
    return {
        one.party_id: Party(one.party_id, one.tallier, one.verify_key, one.seal_key, one.last_contact is not None)
        for one in records
        if one.state == "active"
    }
