"""Which ended jobs were forgotten: what was sent, asked and downloaded of them is gone, their charges are not.

forgotten_jobs      one row per job, written before anything is removed, and kept for ever

The row comes first, so that whoever dies in the middle is followed by somebody who finishes: files of a job that stands
here are removed again at every sweep. With the row goes what the journal holds of the job's rounds that nobody needs
any more: who held which share, who refused in which words, and sums that were never opened. Entries of the ledger,
batches, digests and releases stay, because the chain and the accounts are proved by them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from datetime import datetime
from typing import Any, Literal

from sqlalchemy import CheckConstraint, Column, Connection, ForeignKey, Text, delete, insert, select, update

from feature_store.clock import Clock
from feature_store.journal.by_ids import ByIds
from feature_store.journal.columns import Moment, check_moment, now_utc, one_of
from feature_store.journal.database import Database, strict_table
from feature_store.journal.job_tables import (
    FINISHED,
    JOB_TABLES,
    aggregate_shares,
    jobs,
    round_holdings,
    round_refusals,
    rounds,
)
from feature_store.journal.joining import reading, writing
from feature_store.journal.rules import forbid, keep
from labeler.errors import NotFound, NotReady

Because = Literal["asked", "age"]

forgotten_jobs = strict_table(
    "forgotten_jobs",
    Column("job_id", Text, ForeignKey("jobs.job_id"), primary_key=True),
    Column("at", Moment, nullable=False),
    Column("because", Text, nullable=False),
    CheckConstraint(one_of("because", ("asked", "age")), name="because"),
)
keep(forgotten_jobs)
forbid(
    forgotten_jobs,
    "ended",
    on="INSERT",
    when=f"NOT EXISTS (SELECT 1 FROM jobs WHERE jobs.job_id = NEW.job_id AND {one_of('jobs.state', sorted(FINISHED))})",
    because="only a job that has ended is forgotten",
)


FORGOTTEN = ByIds("SELECT job_id, at FROM forgotten_jobs WHERE job_id IN {ids}")


def forgotten_in(rows: Iterable[Sequence[Any]]) -> dict[str, datetime]:
    """When each job was forgotten, out of rows of `FORGOTTEN`."""
    return {job_id: datetime.fromisoformat(at) for job_id, at in rows}


class ForgottenJobs:
    """The list of forgotten jobs, in the coordinator's journal."""

    def __init__(self, database: Database, *, clock: Clock = now_utc) -> None:
        self._database = database
        self._clock = clock
        database.create(*JOB_TABLES, forgotten_jobs)

    def forget(self, job_id: str, because: Because, *, connection: Connection | None = None) -> None:
        """Write down, for ever, that a job is forgotten, and drop what its rounds need no more; again: no change.

        Args:
            job_id: a job that has ended.
            because: somebody asked for it, or its time was over.

        Raises:
            NotFound: there is no such job.
            NotReady: it has not ended.
        """
        with writing(self._database, connection) as joined:
            state = joined.execute(select(jobs.c.state).where(jobs.c.job_id == job_id)).scalar()
            if state is None:
                raise NotFound(f"there is no job {job_id[:200]!r}; look at the list of jobs")
            if state not in FINISHED:
                raise NotReady(f"job {job_id} is {state}; what it needs is kept until it has ended. Cancel it first")
            if self.at([job_id], connection=joined):
                return
            joined.execute(
                insert(forgotten_jobs), {"job_id": job_id, "at": check_moment(self._clock()), "because": because}
            )
            for table in (round_holdings, round_refusals):
                joined.execute(delete(table).where(table.c.job_id == job_id))
            digests = select(rounds.c.round_digest).where(rounds.c.job_id == job_id)
            unopened = aggregate_shares.c.round_digest.in_(digests) & aggregate_shares.c.data.is_not(None)
            joined.execute(update(aggregate_shares).where(unopened).values(data=None))
            self._database.changed("job", job_id)

    def at(self, job_ids: Collection[str], *, connection: Connection | None = None) -> dict[str, datetime]:
        """When each of these jobs was forgotten; those that were not are left out."""
        with reading(self._database, connection) as joined:
            return forgotten_in(FORGOTTEN.all(joined, job_ids))

    def due(self, ended_before: datetime, *, limit: int = 100) -> list[str]:
        """Jobs that ended before a moment and are not forgotten, the oldest first."""
        query = (
            select(jobs.c.job_id)
            .where(jobs.c.state.in_(sorted(FINISHED)), jobs.c.updated_at < check_moment(ended_before))
            .where(jobs.c.job_id.not_in(select(forgotten_jobs.c.job_id)))
            .order_by(jobs.c.updated_at, jobs.c.job_id)
            .limit(limit)
        )
        with self._database.read() as connection:
            return list(connection.execute(query).scalars())
