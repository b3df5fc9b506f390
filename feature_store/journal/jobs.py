"""Jobs and their rounds, as the coordinator keeps them: what a restarted process needs to go on.

A job's state is changed by compare-and-set, so that of two who end it one wins and both learn who. A finished job never
changes again. The steps of a round stand in `rounds`; whoever takes them calls `touch` in the same transaction.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from sqlalchemy import Connection, select

from feature_store.clock import Clock
from feature_store.journal import round_statements as sql
from feature_store.journal.chain import time_text
from feature_store.journal.columns import json_text, now_utc
from feature_store.journal.database import Database
from feature_store.journal.job_adding import add_job, add_key, known_key
from feature_store.journal.job_reading import read_jobs, read_rounds_of
from feature_store.journal.job_records import (
    Idempotency,
    JobRecord,
    JobState,
    RoundCharge,
    RoundRecord,
    RoundState,
    check_rounds,
)
from feature_store.journal.job_tables import (
    FINISHED,
    JOB_STATES,
    JOB_TABLES,
    jobs,
    rounds,
)
from feature_store.journal.joining import before, check_limit, reading, writing
from feature_store.journal.rounds import read_release, set_batches
from feature_store.journal.willingness import WillingnessStore
from labeler.errors import IdempotencyMismatch, InvalidSetting, NotFound, NotReady, ProtocolViolation, TryAgain

__all__ = ["FINISHED", "Idempotency", "JobRecord", "JobState", "JobStore", "RoundCharge", "RoundRecord", "RoundState"]


class JobStore:
    """All jobs of a coordinator. Every method that writes can join a transaction by `connection`.

    Args:
        clock: the time now, with a time zone; used for `updated_at`.
    """

    def __init__(self, database: Database, *, clock: Clock = now_utc) -> None:
        self._database = database
        self._clock = clock
        database.create(*JOB_TABLES)
        self.willingness = WillingnessStore(database)
        """What agents say of jobs before they are asked."""

    def add(
        self,
        job: JobRecord,
        rounds_of_job: Sequence[RoundRecord],
        *,
        idempotency: Idempotency | None = None,
        connection: Connection | None = None,
    ) -> JobRecord:
        """Keep a new job with its rounds and the key it was sent under, or nothing of it.

        Raises:
            InvalidSetting: the rounds are not the job's (see `check_rounds`).
            IdempotencyMismatch: the key made another job out of another request.
            TryAgain: the key made a job of the same request in the meantime; look at `known` again.
            ProtocolViolation: the job id is taken.
        """
        check_rounds(job, list(rounds_of_job))
        with writing(self._database, connection) as joined:
            if idempotency is not None:
                self._check_key(idempotency, job, joined)
            if job.job_id in read_jobs(joined, [job.job_id]):
                raise ProtocolViolation(f"there is a job {job.job_id!r} already; a new one needs another id")
            add_job(joined, job, rounds_of_job)
            for one in rounds_of_job:
                if one.round_digest:
                    set_batches(joined, job.job_id, [(one.number, one.batch_digest, one.round_digest)])
            if idempotency is not None:
                add_key(joined, idempotency)
            self._changed(job.job_id)
        return job

    def known(self, token_id: str, key: str, *, connection: Connection | None = None) -> Idempotency | None:
        """What a key was used for, or None; asked with the `connection` that adds the job, nobody comes between."""
        with reading(self._database, connection) as joined:
            return known_key(joined, token_id, key)

    def get(self, job_id: str, *, connection: Connection | None = None) -> JobRecord:
        """One job.

        Raises:
            NotFound: there is none of this id.
        """
        found = self.many([job_id], connection=connection).get(job_id)
        if found is None:
            raise no_such_job(job_id)
        return found

    def many(self, job_ids: Collection[str], *, connection: Connection | None = None) -> dict[str, JobRecord]:
        """Jobs by id; those that are not there are left out."""
        with reading(self._database, connection) as joined:
            return read_jobs(joined, job_ids)

    def unfinished(self) -> list[JobRecord]:
        """Every job that still has to be moved on, oldest first."""
        query = select(jobs).where(jobs.c.state.not_in(FINISHED)).order_by(jobs.c.created_at, jobs.c.job_id)
        with self._database.read() as joined:
            return [JobRecord(**row._mapping) for row in joined.execute(query)]

    def unfinished_ids(self) -> list[str]:
        """Ids of every job that still has to be moved on, oldest first."""
        with self._database.read() as connection:
            return [job_id for (job_id,) in sql.UNFINISHED_IDS.all(connection)]

    def move(self, job_id: str, state: JobState, *, connection: Connection) -> None:
        """Move a job that is known not to be finished; `change` for whoever does not know.

        Raises:
            NotReady: it is finished by now; nothing of the transaction is to be kept.
        """
        if sql.MOVE.run(connection, job_id=job_id, state=state, now=time_text(self._clock())) != 1:
            raise NotReady(f"job {job_id!r} was ended at the same time; look at it again")
        self._changed(job_id)

    def change(
        self,
        job_id: str,
        state: JobState,
        *,
        expected: Collection[JobState],
        problem: Mapping[str, Any] | None = None,
        connection: Connection | None = None,
    ) -> JobRecord:
        """Move a job to a state if it is in one of those expected; else nothing happens.

        Args:
            expected: states it is moved from; a finished job is never moved, whatever stands here.
            problem: why it ends (RFC 9457); left as it is where None.

        Returns:
            The job as it is now; compare its state to learn whether it was moved.

        Raises:
            NotFound: there is no such job.
            InvalidSetting: there is no such state.
        """
        unknown = {state, *expected} - set(JOB_STATES)
        if unknown:
            raise InvalidSetting(f"a job is {', '.join(JOB_STATES)}; found {min(unknown)!r}")
        why = None if problem is None else json_text(dict(problem))
        with writing(self._database, connection) as joined:
            before = self.get(job_id, connection=joined)
            if before.state in set(expected) - FINISHED and (before.state != state or problem is not None):
                now = time_text(self._clock())
                sql.CHANGE.run(joined, job_id=job_id, before=before.state, state=state, problem=why, now=now)
                self._changed(job_id)
            return self.get(job_id, connection=joined)

    def touch(self, job_id: str, *, connection: Connection | None = None) -> None:
        """Raise the version, so that watchers look again; a finished job stays as it is."""
        with writing(self._database, connection) as joined:
            sql.TOUCH.run(joined, job_id=job_id, now=time_text(self._clock()))
            self._changed(job_id)

    # The rounds of a job.

    def rounds(self, job_id: str, *, connection: Connection | None = None) -> list[RoundRecord]:
        """The rounds of a job in order; none where there is no such job."""
        return self.rounds_of([job_id], connection=connection)[job_id]

    def rounds_of(
        self, job_ids: Collection[str], *, connection: Connection | None = None
    ) -> dict[str, list[RoundRecord]]:
        """The rounds of several jobs at once, by job; an empty list where there is no such job."""
        with reading(self._database, connection) as joined:
            return read_rounds_of(joined, job_ids)

    def unasked(self, job_id: str, *, connection: Connection) -> list[tuple[int, int]]:
        """Queries (first number, how many) of the rounds of a job that were never tied to their questions for good.

        Rounds that an earlier version had tied to them before they were asked are left out.
        """
        waiting = (rounds.c.job_id == job_id, rounds.c.state == "waiting", rounds.c.round_digest.is_(None))
        query = select(rounds.c.first_query, rounds.c.num_queries).where(*waiting).order_by(rounds.c.number)
        return [(row.first_query, row.num_queries) for row in connection.execute(query)]

    def creators(self, job_ids: Collection[str]) -> dict[str, str]:
        """Token ids of who made some jobs, by job; those that are not there are left out."""
        query = select(jobs.c.job_id, jobs.c.created_by).where(jobs.c.job_id.in_(sorted(set(job_ids))))
        with self._database.read() as connection:
            return {row.job_id: row.created_by for row in connection.execute(query)}

    def round_of(self, round_digest: str) -> RoundRecord:
        """The round of a digest.

        Raises:
            NotFound: there is none.
        """
        with self._database.read() as joined:
            row = sql.LIVE_ROUND_OF.first(joined, digest=round_digest)
            if row is None:
                raise NotFound(f"there is no round {round_digest[:12]!r}")
            job_id, number = row
            return next(one for one in read_rounds_of(joined, [job_id])[job_id] if one.number == number)

    def release(self, job_id: str, number: int, *, connection: Connection | None = None) -> bytes | None:
        """What a round opened, or None."""
        with reading(self._database, connection) as joined:
            return read_release(joined, job_id, number)

    def list(
        self,
        *,
        after: str | None = None,
        limit: int = 100,
        states: Collection[JobState] | None = None,
        created_by: str | None = None,
    ) -> list[JobRecord]:
        """Jobs, newest first.

        Args:
            after: `cursor` of the last job of the page before.
            limit: most jobs returned, 1 to 1000.
            states: only jobs in one of these.
            created_by: only those that this token made.

        Raises:
            InvalidSetting: `after` is no such cursor, or the limit is out of bounds.
        """
        query = select(jobs).order_by(jobs.c.created_at.desc(), jobs.c.job_id.desc()).limit(check_limit(limit))
        if after is not None:
            query = query.where(before(after, jobs.c.created_at, jobs.c.job_id))
        if states is not None:
            query = query.where(jobs.c.state.in_(sorted(states)))
        if created_by is not None:
            query = query.where(jobs.c.created_by == created_by)
        with self._database.read() as connection:
            return [JobRecord(**row._mapping) for row in connection.execute(query)]

    def _changed(self, job_id: str) -> None:
        self._database.changed("job", job_id)

    def _check_key(self, idempotency: Idempotency, job: JobRecord, connection: Connection) -> None:
        if idempotency.job_id != job.job_id:
            raise InvalidSetting("an idempotency key names the job it is kept with")
        known = self.known(idempotency.token_id, idempotency.key, connection=connection)
        if known is None:
            return
        if known.body_digest != idempotency.body_digest:
            raise IdempotencyMismatch(
                f"this idempotency key made job {known.job_id!r} out of another request; use a new one for this"
            )
        raise TryAgain(f"the same request made job {known.job_id!r} at this moment; send it again to get that job")


def no_such_job(job_id: str) -> NotFound:
    """Said of a job that is not there, and in the same words of one that is somebody else's."""
    return NotFound(f"there is no job {job_id[:200]!r}; look at the list of jobs")
