"""Jobs and their rounds, as the coordinator keeps them: what a restarted process needs to continue.

A job's state is changed by compare-and-set: if two callers end it, one wins and both learn which. A finished job never
changes again. The steps of a round are in `rounds`; their caller calls `touch` in the same transaction.

Two more stores belong to a job: what agents say of it before they are asked (`WillingnessStore`), and, once it has
ended, that it was forgotten (`ForgottenJobs`).

More than 600 lines: a job, its rounds and what was said of them are read together and change together.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime, timedelta
from functools import cache
from typing import Any, Literal

from sqlalchemy import Connection, Select, Text, Update, bindparam, case, delete, func, insert, select, update
from sqlalchemy import cast as as_type

from labeler.errors import InvalidSetting, NotFound, NotReady, PrivacyRefusal, ProtocolViolation
from labeler.ledger.database import (
    Database,
    before,
    check_limit,
    cursor_text,
    insert_rows,
    now_utc,
    select_rows,
    update_rows,
)
from labeler.ledger.rounds import UNFINISHED, live_round, read_release, set_batches
from labeler.ledger.schema import (
    FINISHED,
    JOB_STATES,
    aggregate_shares,
    forgotten_jobs,
    idempotency_keys,
    job_answers,
    job_asked,
    jobs,
    ledger_reservations,
    planned_batches,
    round_holdings,
    round_participants,
    round_refusals,
    round_shares,
    rounds,
)
from labeler.rounds.effects import JobState as JobState
from labeler.rounds.effects import ProposalReply
from labeler.rounds.effects import RoundState as RoundState
from labeler.system.clock import Clock

__all__ = ["FINISHED", "Idempotency", "JobRecord", "JobState", "JobStore", "RoundCharge", "RoundRecord", "RoundState"]

Source = Literal["images", "features"]
Answers = Mapping[str, ProposalReply]
Because = Literal["asked", "age"]

_DAY, _SOON = timedelta(days=1), timedelta(minutes=1)
_UNPAID = ("refused", "failed", "cancelled", "expired")
_UNANSWERED = sorted(set(JOB_STATES) - {"completed"})


@dataclass(frozen=True)
class JobRecord:
    """A labeling job.

    Attributes:
        task_digest: of the task whose queries it asks.
        name: for people.
        state: progress of the job; the last five of JobState are final.
        images: number of images sent.
        num_queries: number of queries asked.
        first_query: number of the first of them within the task.
        strategy: the rule that chooses queries among the images.
        count: how many to choose, if the strategy needs it.
        seed: of the choice.
        source: what was sent.
        created_at, updated_at, expires_at: with a time zone.
        created_by: token id.
        problem: RFC 9457, why it ended; None while nothing is wrong.
        version: increases at every change.
    """

    job_id: str
    task_digest: str
    name: str
    state: JobState
    images: int
    num_queries: int
    first_query: int
    strategy: str
    count: int | None
    seed: int
    source: Source
    created_at: datetime
    updated_at: datetime
    expires_at: datetime
    created_by: str
    problem: dict[str, Any] | None = None
    version: int = 1

    @property
    def is_finished(self) -> bool:
        """Return whether the job never changes again."""
        return self.state in FINISHED

    @property
    def cursor(self) -> str:
        """Return the position of this job in a list; the next page begins after it."""
        return cursor_text(self.created_at, self.job_id)


@dataclass(frozen=True)
class RoundCharge:
    """The charge of one round in the ledger.

    Attributes:
        state: reserved, then posted or void (given back).
        seq: number of the first entry of that state.
    """

    state: Literal["reserved", "posted", "void"]
    seq: int


@dataclass(frozen=True)
class RoundRecord:
    """One batch of a job.

    Attributes:
        number: 0, 1, 2, ... within the job.
        first_query: number of its first query within the task.
        state: waiting > asked > agreed > posted > opened.
        batch_digest, round_digest: empty until the queries are embedded and, for a step of training, until its model is
            known. Then constant while the job lasts, and permanent once the queries were asked.
        contributors: the agents that are summed, sorted; empty until agreed on, then permanent.
        holdings: tallier id -> agent id -> sharing id in hexadecimal, as last reported.
        refusals: agent id -> its reason.
        final_refusals: those agents among them that will not answer when asked again.
        ledger_seq: the entry that posted the charge.
        participants: agent id -> key its shares must be signed with; empty until it is fixed, then permanent.
        has_shares: whether a share of it was passed on to a tallier, or was about to be.
        charge: the state of its charge in the ledger; None if nothing was reserved.
    """

    job_id: str
    number: int
    first_query: int
    num_queries: int
    state: RoundState = "waiting"
    batch_digest: str = ""
    round_digest: str = ""
    contributors: tuple[str, ...] = ()
    holdings: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    refusals: Mapping[str, str] = field(default_factory=dict)
    final_refusals: frozenset[str] = frozenset()
    ledger_seq: int | None = None
    participants: Mapping[str, str] = field(default_factory=dict)
    has_shares: bool = False
    charge: RoundCharge | None = None


@dataclass(frozen=True)
class Idempotency:
    """A requester's name for one request, so that sending it twice makes one job.

    Attributes:
        token_id: the token that the key belongs to.
        key: of the requester's choosing.
        body_digest: of the request, to detect another request under the same key.
        job_id: the job it made.
    """

    token_id: str
    key: str
    body_digest: str
    job_id: str


class JobStore:
    """All jobs of a coordinator. Every method that writes can join a transaction by `connection`.

    Args:
        clock: the time now, with a time zone; used for `updated_at`.
    """

    def __init__(self, database: Database, *, clock: Clock = now_utc) -> None:
        self._database = database
        self._clock = clock
        self.willingness = WillingnessStore(database)
        """The agents' replies to proposals of jobs."""

    def add(
        self,
        job: JobRecord,
        rounds_of_job: Sequence[RoundRecord],
        *,
        idempotency: Idempotency | None = None,
        connection: Connection | None = None,
    ) -> JobRecord:
        """Store a new job with its rounds and the key it was sent under, or nothing at all.

        Raises:
            InvalidSetting: the rounds are not the job's (each query of the job belongs to exactly one).
            ProtocolViolation: the job id is taken.
            IntegrityError: the key has made a job; look at `known` in the same transaction.
        """
        _check_rounds(job, rounds_of_job)
        with self._database.writing(connection) as joined:
            if job.job_id in self.many([job.job_id], connection=joined):
                raise ProtocolViolation(f"there is a job {job.job_id!r} already; a new one needs another id")
            insert_rows(joined, jobs, {column.name: getattr(job, column.name) for column in jobs.columns})
            names = ("job_id", "number", "first_query", "num_queries", "state")
            insert_rows(joined, rounds, *({name: getattr(one, name) for name in names} for one in rounds_of_job))
            for one in rounds_of_job:
                if one.round_digest:
                    set_batches(joined, job.job_id, [(one.number, one.batch_digest, one.round_digest)])
            if idempotency is not None:
                insert_rows(joined, idempotency_keys, asdict(idempotency))
        return job

    def known(self, token_id: str, key: str, *, connection: Connection | None = None) -> Idempotency | None:
        """Return the earlier use of a key, or None. Pass the `connection` that adds the job, to exclude a race."""
        with self._database.reading(connection) as joined:
            row = select_rows(joined, idempotency_keys, token_id=token_id, key=key).first()
        return None if row is None else Idempotency(**row._mapping)

    def get(self, job_id: str, *, connection: Connection | None = None) -> JobRecord:
        """Return one job.

        Raises:
            NotFound: there is none with this id.
        """
        with self._database.reading(connection) as joined:
            row = select_rows(joined, jobs, job_id=job_id).first()
        if row is None:
            raise no_such_job(job_id)
        return JobRecord(**row._mapping)

    def many(self, job_ids: Collection[str], *, connection: Connection | None = None) -> dict[str, JobRecord]:
        """Return jobs by id; missing ones are left out."""
        with self._database.reading(connection) as joined:
            rows = select_rows(joined, jobs, job_id=sorted(job_ids))
            return {row.job_id: JobRecord(**row._mapping) for row in rows}

    def unfinished(self) -> list[JobRecord]:
        """Return every unfinished job, oldest first."""
        query = select(jobs).where(UNFINISHED).order_by(jobs.c.created_at, jobs.c.job_id)
        with self._database.read() as joined:
            return [JobRecord(**row._mapping) for row in joined.execute(query)]

    def unfinished_ids(self) -> list[str]:
        """Return the ids of every unfinished job, oldest first."""
        with self._database.read() as connection:
            return list(connection.execute(_UNFINISHED_IDS).scalars())

    def move(self, job_id: str, state: JobState, *, connection: Connection) -> None:
        """Move a job that is known to be unfinished; otherwise use `change`.

        Raises:
            NotReady: it is finished by now; discard the transaction.
        """
        if not self._stamp(job_id, connection, state=state):
            raise NotReady(f"job {job_id!r} was ended at the same time; look at it again")

    def change(
        self,
        job_id: str,
        state: JobState,
        *,
        expected: Collection[JobState],
        problem: Mapping[str, Any] | None = None,
        connection: Connection | None = None,
    ) -> JobRecord:
        """Move a job to a state if it is in one of those expected; else change nothing.

        Args:
            expected: states it is moved from; a finished job is never moved, even if its state is listed.
            problem: why it ends (RFC 9457); None leaves it unchanged.

        Returns:
            The job as it is now; compare its state to learn whether it was moved.

        Raises:
            NotFound: there is no such job.
        """
        why = {} if problem is None else {"problem": dict(problem)}
        with self._database.writing(connection) as joined:
            before = self.get(job_id, connection=joined)
            if before.state in set(expected) - FINISHED and (before.state != state or why):
                self._stamp(job_id, joined, state=state, **why)
            return self.get(job_id, connection=joined)

    def touch(self, job_id: str, *, connection: Connection | None = None) -> None:
        """Increase the version, so that watchers look again; a finished job stays as it is."""
        with self._database.writing(connection) as joined:
            self._stamp(job_id, joined)

    def _stamp(self, job_id: str, connection: Connection, **values: Any) -> bool:
        """Change an unfinished job, its version and its time; return whether there was one."""
        stamped = {"of_job": job_id, "now": self._clock(), **values}
        return connection.execute(_stamp_statement(tuple(values)), stamped).rowcount == 1

    # The rounds of a job.

    def rounds(self, job_id: str, *, connection: Connection | None = None) -> list[RoundRecord]:
        """Return the rounds of a job in order; none if there is no such job."""
        return self.rounds_of([job_id], connection=connection)[job_id]

    def rounds_of(
        self, job_ids: Collection[str], *, connection: Connection | None = None
    ) -> dict[str, list[RoundRecord]]:
        """Return the rounds of several jobs, by job; an empty list if there is no such job."""
        with self._database.reading(connection) as joined:
            return _rounds_of(joined, job_ids)

    def unasked(self, job_id: str, *, connection: Connection) -> list[tuple[int, int]]:
        """Return queries (first number, count) of a job's rounds that were never tied to their questions for good."""
        waiting = (rounds.c.job_id == job_id, rounds.c.state == "waiting", rounds.c.round_digest.is_(None))
        query = select(rounds.c.first_query, rounds.c.num_queries).where(*waiting).order_by(rounds.c.number)
        return [(row.first_query, row.num_queries) for row in connection.execute(query)]

    def creators(self, job_ids: Collection[str]) -> dict[str, str]:
        """Return the token ids of the creators of some jobs, by job; missing jobs are left out."""
        query = select(jobs.c.job_id, jobs.c.created_by).where(jobs.c.job_id.in_(sorted(set(job_ids))))
        with self._database.read() as connection:
            return {row.job_id: row.created_by for row in connection.execute(query)}

    def round_of(self, round_digest: str) -> RoundRecord:
        """Return the round with a digest.

        Raises:
            NotFound: there is none.
        """
        with self._database.read() as joined:
            row = next(iter(live_round(joined, round_digest)), None)
            if row is None:
                raise NotFound(f"there is no round {round_digest[:12]!r}")
            return next(one for one in self.rounds(row.job_id, connection=joined) if one.number == row.number)

    def release(self, job_id: str, number: int, *, connection: Connection | None = None) -> bytes | None:
        """Return the release of a round, or None."""
        with self._database.reading(connection) as joined:
            return read_release(joined, job_id, number)

    def list(
        self,
        *,
        after: str | None = None,
        limit: int = 100,
        states: Collection[JobState] | None = None,
        created_by: str | None = None,
    ) -> list[JobRecord]:
        """Return jobs, newest first.

        Args:
            after: `cursor` of the last job of the page before.
            limit: most jobs returned, 1 to 1000.
            states: only jobs in one of these.
            created_by: only jobs that this token made.

        Raises:
            InvalidSetting: `after` is no such cursor, or the limit is out of bounds.
        """
        query = select(jobs).order_by(jobs.c.created_at.desc(), jobs.c.job_id.desc()).limit(check_limit(limit))
        if after is not None:
            query = query.where(before(after, jobs.c.created_at, jobs.c.job_id))
        if created_by is not None:
            query = query.where(jobs.c.created_by == created_by)
        # One query a state, each of them a stretch of an index; a list of all jobs has another index.
        every = states is None and created_by is None
        of = (
            [query]
            if every
            else [query.where(jobs.c.state == one) for one in sorted(JOB_STATES if states is None else states)]
        )
        with self._database.read() as connection:
            found = [JobRecord(**row._mapping) for one in of for row in connection.execute(one)]
        return sorted(found, key=lambda job: (job.created_at, job.job_id), reverse=True)[:limit]


class WillingnessStore:
    """The agents' replies to the proposal of a job, and the agents that the job then asks.

    Every method that writes can join a transaction by `connection`.
    """

    def __init__(self, database: Database) -> None:
        self._database = database

    def answers(self, job_id: str, *, connection: Connection | None = None) -> dict[str, ProposalReply]:
        """Return agent id -> its last reply."""
        return self.answers_of([job_id], connection=connection).get(job_id, {})

    def answers_of(
        self, job_ids: Collection[str], *, connection: Connection | None = None
    ) -> dict[str, dict[str, ProposalReply]]:
        """Return job id -> agent id -> its last reply; jobs without replies are left out."""
        found: dict[str, dict[str, ProposalReply]] = {}
        with self._database.reading(connection) as joined:
            for row in select_rows(joined, job_answers, job_id=sorted(job_ids)):
                until_s = None if row.until is None else row.until.timestamp()
                found.setdefault(row.job_id, {})[row.agent_id] = ProposalReply(
                    row.answer, row.reason, row.sentence, until_s
                )
        return found

    def report(self, job_id: str, agent_id: str, said: ProposalReply, *, connection: Connection | None = None) -> bool:
        """Store an agent's reply in place of its earlier one; return whether it differs."""
        until = None if said.until_s is None else datetime.fromtimestamp(said.until_s, UTC)
        values = {"answer": said.answer, "reason": said.reason, "sentence": said.sentence, "until": until}
        this = {"job_id": job_id, "agent_id": agent_id}
        with self._database.writing(connection) as joined:
            known = select_rows(joined, job_answers, **this).first()
            if known is None:
                insert_rows(joined, job_answers, this | values)
            elif dict(known._mapping) == this | values:
                return False
            else:
                update_rows(joined, job_answers, values, **this)
            return True

    def asked(self, job_id: str, *, connection: Connection | None = None) -> tuple[str, ...] | None:
        """Return the agents that a job asks; None while that is open."""
        return self.asked_of([job_id], connection=connection).get(job_id)

    def asked_of(self, job_ids: Collection[str], *, connection: Connection | None = None) -> dict[str, tuple[str, ...]]:
        """Return `asked` of several jobs at once; undecided jobs are left out."""
        with self._database.reading(connection) as joined:
            return {row.job_id: tuple(row.agents) for row in select_rows(joined, job_asked, job_id=sorted(job_ids))}

    def fix_asked(self, job_id: str, agents: Collection[str], *, connection: Connection | None = None) -> None:
        """Fix which agents a job asks, once and permanently.

        Raises:
            InvalidSetting: no agents were named.
            PrivacyRefusal: others were fixed before.
        """
        if not agents:
            raise InvalidSetting("a job asks at least one agent")
        with self._database.writing(connection) as joined:
            known = self.asked(job_id, connection=joined)
            if known is not None and known != tuple(agents):
                raise PrivacyRefusal(f"whom job {job_id!r} asks is fixed, and their charges with it")
            if known is None:
                insert_rows(joined, job_asked, {"job_id": job_id, "agents": list(agents)})

    def unasked_until(
        self, token_id: str, now: datetime, *, most: int, connection: Connection | None = None
    ) -> datetime | None:
        """Return when a token may have fewer than `most` jobs of 24 hours of which no agent was asked.

        Unfinished ones count, because all of them may yet end so. They may be asked at any time: then it is soon.

        Args:
            now: when the next one is submitted.

        Returns:
            None if that is so now.
        """
        was_asked = (
            select(rounds.c.job_id).where(rounds.c.job_id == jobs.c.job_id, rounds.c.state != "waiting").exists()
        )
        unasked = (
            select(jobs.c.created_at, jobs.c.state.not_in(_UNPAID).label("may_be_asked"))
            .where(jobs.c.created_by == token_id, jobs.c.created_at >= now - _DAY, jobs.c.state.in_(_UNANSWERED))
            .where(~was_asked)
            .order_by(jobs.c.created_at.desc())
            .limit(most)
            .subquery()
        )
        may_be_asked = func.sum(case((unasked.c.may_be_asked, 1), else_=0))
        with self._database.reading(connection) as joined:
            count, first, waiting = joined.execute(
                select(func.count(), func.min(unasked.c.created_at), may_be_asked)
            ).one()
        if count < most:
            return None
        return now + _SOON if waiting else first + _DAY


class ForgottenJobs:
    """Ended jobs that were forgotten: what was sent, asked and downloaded of them is gone; their charges stay.

    The row comes before anything is removed and stays permanently. So if a process dies in the middle, a later sweep
    finishes: every sweep removes files of the jobs in this table again. With the row goes what the journal no longer
    needs of the job's rounds: which tallier held which share, the words of refusals, and sums that were never opened.
    Entries of the ledger, batches, digests and releases stay, because they prove the chain and the accounts.
    """

    def __init__(self, database: Database, *, clock: Clock = now_utc) -> None:
        self._database = database
        self._clock = clock
        self._none_before: datetime | None = None
        """Every job that ended before this moment is forgotten: jobs that end later end after it."""

    def forget(self, job_id: str, because: Because, *, connection: Connection | None = None) -> None:
        """Record permanently that a job is forgotten, and drop what its rounds no longer need; idempotent.

        Args:
            job_id: a job that has ended.
            because: somebody asked for it, or its time was over.

        Raises:
            NotFound: there is no such job.
            NotReady: it has not ended.
        """
        with self._database.writing(connection) as joined:
            state = joined.execute(select(jobs.c.state).where(jobs.c.job_id == job_id)).scalar()
            if state is None:
                raise no_such_job(job_id)
            if state not in FINISHED:
                raise NotReady(f"job {job_id} is {state}; what it needs is kept until it has ended. Cancel it first")
            if self.at([job_id], connection=joined):
                return
            joined.execute(insert(forgotten_jobs), {"job_id": job_id, "at": self._clock(), "because": because})
            for table in (round_holdings, round_refusals):
                joined.execute(delete(table).where(table.c.job_id == job_id))
            digests = select(rounds.c.round_digest).where(rounds.c.job_id == job_id)
            unopened = aggregate_shares.c.round_digest.in_(digests) & aggregate_shares.c.data.is_not(None)
            joined.execute(update(aggregate_shares).where(unopened).values(data=None))

    def at(self, job_ids: Collection[str], *, connection: Connection | None = None) -> dict[str, datetime]:
        """Return when each of these jobs was forgotten; others are left out."""
        with self._database.reading(connection) as joined:
            rows = select_rows(joined, forgotten_jobs, job_id=sorted(job_ids))
            return {row.job_id: row.at for row in rows}

    def due(self, ended_before: datetime, *, limit: int = 100) -> list[str]:
        """Return jobs that ended before a moment and are not forgotten, the oldest first."""
        unfinished = sorted(set(JOB_STATES) - FINISHED)
        query = (
            select(jobs.c.job_id)
            # NOT IN, so that the index by time is taken: almost all jobs are finished.
            .where(jobs.c.updated_at < ended_before, jobs.c.state.not_in(unfinished))
            .where(~select(forgotten_jobs.c.job_id).where(forgotten_jobs.c.job_id == jobs.c.job_id).exists())
            .order_by(jobs.c.updated_at, jobs.c.job_id)
            .limit(limit)
        )
        if self._none_before is not None:
            query = query.where(jobs.c.updated_at >= self._none_before)
        with self._database.read() as connection:
            found = list(connection.execute(query).scalars())
        if not found:
            self._none_before = ended_before
        return found


def no_such_job(job_id: str) -> NotFound:
    """Return the error for a missing job; a job of somebody else gets the same words."""
    return NotFound(f"there is no job {job_id[:200]!r}; look at the list of jobs")


# Statements are built once: building one costs several times as much as running it.

_UNFINISHED_IDS = select(jobs.c.job_id).where(UNFINISHED).order_by(jobs.c.created_at, jobs.c.job_id)


@cache
def _stamp_statement(names: tuple[str, ...]) -> Update:
    """Return the statement that sets some columns of an unfinished job, its version and its time."""
    now = bindparam("now", type_=jobs.c.updated_at.type)
    later = case((jobs.c.updated_at < now, now), else_=jobs.c.updated_at)  # a clock set back makes none older
    stamped = {"version": jobs.c.version + 1, "updated_at": later} | {name: bindparam(name) for name in names}
    return update(jobs).where(jobs.c.job_id == bindparam("of_job"), UNFINISHED).values(stamped)


@cache
def _rounds_query() -> Select[Any]:
    """Return the query for rounds of jobs with their plan, shares and charge."""
    # Until the agents of a job are fixed, one reservation, JOB/proposed, covers all its rounds.
    own, whole = ledger_reservations.alias("own"), ledger_reservations.alias("whole")
    planned, who, shared = planned_batches.c, round_participants.c, round_shares.c
    return (
        select(
            rounds,
            func.coalesce(rounds.c.batch_digest, planned.batch_digest, "").label("batch"),
            func.coalesce(rounds.c.round_digest, planned.round_digest, "").label("digest"),
            who.verify_keys,
            shared.number.is_not(None).label("has_shares"),
            func.coalesce(own.c.state, whole.c.state).label("charged"),
            func.coalesce(own.c.settled_seq, own.c.first_seq, whole.c.settled_seq, whole.c.first_seq).label(
                "charged_seq"
            ),
        )
        .outerjoin(planned_batches, (planned.job_id == rounds.c.job_id) & (planned.number == rounds.c.number))
        .outerjoin(round_participants, (who.job_id == rounds.c.job_id) & (who.number == rounds.c.number))
        .outerjoin(round_shares, (shared.job_id == rounds.c.job_id) & (shared.number == rounds.c.number))
        .outerjoin(own, own.c.reservation_id == rounds.c.job_id + "/" + as_type(rounds.c.number, Text))
        .outerjoin(whole, whole.c.reservation_id == rounds.c.job_id + "/proposed")
        .where(rounds.c.job_id.in_(bindparam("ids", expanding=True)))
        .order_by(rounds.c.job_id, rounds.c.number)
    )


def _rounds_of(connection: Connection, job_ids: Collection[str]) -> dict[str, list[RoundRecord]]:
    """Return the rounds of jobs in order, by job; an empty list if there is no such job."""
    ids = sorted(set(job_ids))
    found: dict[str, list[RoundRecord]] = {job_id: [] for job_id in job_ids}
    holdings: dict[tuple[str, int], dict[str, Mapping[str, str]]] = {}
    for row in select_rows(connection, round_holdings, job_id=ids):
        holdings.setdefault((row.job_id, row.number), {})[row.tallier_id] = row.holdings
    refusals: dict[tuple[str, int], dict[str, str]] = {}
    final: dict[tuple[str, int], set[str]] = {}
    for row in select_rows(connection, round_refusals, job_id=ids):
        refusals.setdefault((row.job_id, row.number), {})[row.agent_id] = row.sentence
        if row.kind == "final":
            final.setdefault((row.job_id, row.number), set()).add(row.agent_id)
    for row in connection.execute(_rounds_query(), {"ids": ids}):
        here = (row.job_id, row.number)
        found[row.job_id].append(
            RoundRecord(
                job_id=row.job_id,
                number=row.number,
                first_query=row.first_query,
                num_queries=row.num_queries,
                state=row.state,
                batch_digest=row.batch,
                round_digest=row.digest,
                contributors=tuple(row.contributors or ()),
                participants=row.verify_keys or {},
                holdings=holdings.get(here, {}),
                refusals=refusals.get(here, {}),
                final_refusals=frozenset(final.get(here, ())),
                ledger_seq=row.ledger_seq,
                has_shares=bool(row.has_shares),
                charge=None if row.charged is None else RoundCharge(row.charged, row.charged_seq),
            )
        )
    return found


def _check_rounds(job: JobRecord, rounds: Sequence[RoundRecord]) -> None:
    """Refuse rounds that are not a job's: each query of the job belongs to exactly one of them.

    Raises:
        InvalidSetting: a round of another job, one that has begun, or queries left out, twice or beyond the job's.
    """
    following = job.first_query
    for number, one in enumerate(rounds):
        if one.job_id != job.job_id or one.number != number or one.state != "waiting":
            raise InvalidSetting("the rounds of a new job are its own, numbered from 0, and waiting")
        if one.first_query != following:
            raise InvalidSetting("the rounds of a job follow each other: each query belongs to exactly one")
        following += one.num_queries
    if rounds and following != job.first_query + job.num_queries:
        raise InvalidSetting(
            f"the rounds of a job hold its {job.num_queries} queries, found {following - job.first_query}"
        )
    if not rounds and not job.is_finished:
        raise InvalidSetting("a job that is not finished has at least one round")
