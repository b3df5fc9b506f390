"""Tasks as they were made, and how many of their queries are taken: each query of a task is asked once."""

from __future__ import annotations

import json
import threading
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache

from sqlalchemy import (
    CheckConstraint,
    Column,
    Connection,
    ForeignKey,
    Index,
    Row,
    Text,
    insert,
    or_,
    select,
)

from feature_store.journal.by_ids import ByIds
from feature_store.journal.columns import WHOLE, Json, Moment, check_moment, json_text
from feature_store.journal.database import Database, strict_table
from feature_store.journal.joining import before, check_limit, cursor_text, reading, writing
from feature_store.journal.prepared import Prepared
from feature_store.journal.returned_queries import (
    give_back,
    returned_counts,
    returned_queries,
    returned_ranges,
    take_again,
)
from feature_store.journal.rules import forbid, keep
from labeler.errors import InvalidSetting, JournalBroken, NotFound, ProtocolViolation
from labeler.task import Task, parse_task

tasks = strict_table(
    "tasks",
    Column("digest", Text, primary_key=True),
    Column("body", Text, nullable=False),
    Column("participants", Json, nullable=False),
    Column("max_queries", WHOLE, nullable=False),
    Column("next_query", WHOLE, nullable=False),
    Column("created_at", Moment, nullable=False),
    Column("created_by", Text, nullable=False),
    CheckConstraint("next_query >= 0 AND next_query <= max_queries", name="queries"),
    Index(None, "created_at", "digest"),
)
keep(tasks, but=("next_query",))
forbid(
    tasks,
    "advance",
    on="UPDATE",
    when="NEW.next_query < OLD.next_query",
    because="a query of a task is given out once",
)

task_shares = strict_table(
    "task_shares",
    Column("task_digest", Text, ForeignKey("tasks.digest"), primary_key=True),
    Column("token_id", Text, primary_key=True),
    Column("shared_at", Moment, nullable=False),
    Index(None, "token_id"),
)
"""See feature_store.journal.task_shares."""

_TASKS = ByIds("SELECT digest, body, participants, next_query, created_at, created_by FROM tasks WHERE digest IN {ids}")
_ADVANCE = Prepared("UPDATE tasks SET next_query = :next_query WHERE digest = :digest")
_MOST_PARSED = 1024


@dataclass(frozen=True)
class TaskRecord:
    """A task as it is kept.

    Attributes:
        task: what all parties agree on.
        participants: ids of the agents that take part, as many as the task says, each once.
        created_at: when it was made.
        created_by: token id of who made it.
        next_query: number of the first query that is not given out yet.

    Raises:
        InvalidSetting: participants are not as many as the task says, or one is named twice.
    """

    task: Task
    participants: tuple[str, ...]
    created_at: datetime
    created_by: str
    next_query: int = 0

    def __post_init__(self) -> None:
        check_moment(self.created_at)
        if len(set(self.participants)) != len(self.participants) or len(self.participants) != self.task.agents:
            raise InvalidSetting(
                f"the task is for {self.task.agents} agents, each named once; found {len(self.participants)} names, "
                f"{len(set(self.participants))} of them different"
            )

    @property
    def digest(self) -> str:
        """Of the task."""
        return self.task.digest

    @property
    def queries_left(self) -> int:
        """How many were never given out; those that came back are beside them (`TaskStore.returned`)."""
        return self.task.max_queries - self.next_query

    @property
    def cursor(self) -> str:
        """The position of this task in a list; the next page begins after it."""
        return cursor_text(self.created_at, self.digest)


class TaskStore:
    """All tasks of a coordinator."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._lock = threading.Lock()
        self._made: dict[str, TaskRecord] = {}
        database.create(tasks, task_shares, returned_queries)

    def add(self, record: TaskRecord, *, connection: Connection | None = None) -> TaskRecord:
        """Keep a task; the same task again changes nothing.

        Returns:
            The task as it is kept: with the time and the queries given out of the first time.

        Raises:
            ProtocolViolation: it is known with other participants.
        """
        with writing(self._database, connection) as joined:
            row = joined.execute(select(tasks).where(tasks.c.digest == record.digest)).first()
            if row is None:
                joined.execute(
                    insert(tasks),
                    {
                        "digest": record.digest,
                        "body": json_text(record.task.model_dump(mode="json")),
                        "participants": list(record.participants),
                        "max_queries": record.task.max_queries,
                        "next_query": record.next_query,
                        "created_at": record.created_at,
                        "created_by": record.created_by,
                    },
                )
                if connection is None:
                    self._database.after_commit(lambda: self._remember({record.digest: record}))
                return record
        known = _record(row)
        if set(known.participants) != set(record.participants):
            raise ProtocolViolation(
                f"task {record.digest[:12]!r} is known with other participants, and a task never changes; "
                "give the new one another nonce or name"
            )
        return known

    def get(self, digest: str, *, connection: Connection | None = None) -> TaskRecord:
        """One task.

        Raises:
            NotFound: there is none of this digest.
            JournalBroken: what is stored is not the task of this digest.
        """
        found = self.get_all([digest], connection=connection).get(digest)
        if found is None:
            raise no_such_task(digest)
        return found

    def get_all(self, digests: Collection[str], *, connection: Connection | None = None) -> dict[str, TaskRecord]:
        """Several tasks at once, by digest; those that are not there are left out.

        Raises:
            JournalBroken: see `get`.
        """
        with reading(self._database, connection) as joined:
            found = {row[0]: _as_stored(*row) for row in _TASKS.all(joined, sorted(set(digests)))}
        if connection is None:  # else it may be of a transaction that is undone
            self._remember(found)
        return found

    def _remember(self, found: dict[str, TaskRecord]) -> None:
        with self._lock:
            self._made |= found
            while len(self._made) > _MOST_PARSED:
                self._made.pop(next(iter(self._made)))

    def made(self, digest: str) -> TaskRecord | None:
        """A task as it was made, without a look into the journal; None where it was not read yet.

        All of it holds for ever but `next_query`, which may have gone on since.
        """
        return self._made.get(digest)

    def list(self, *, after: str | None = None, limit: int = 100, open_to: str | None = None) -> list[TaskRecord]:
        """Tasks, newest first.

        Args:
            after: `cursor` of the last task of the page before.
            limit: most tasks returned, 1 to 1000.
            open_to: only those that this token made, or that are shared with it.

        Raises:
            InvalidSetting: `after` is no such cursor, or the limit is out of bounds.
        """
        query = select(tasks).order_by(tasks.c.created_at.desc(), tasks.c.digest.desc()).limit(check_limit(limit))
        if after is not None:
            query = query.where(before(after, tasks.c.created_at, tasks.c.digest))
        if open_to is not None:
            shared = select(task_shares.c.task_digest).where(task_shares.c.token_id == open_to)
            query = query.where(or_(tasks.c.created_by == open_to, tasks.c.digest.in_(shared)))
        with self._database.read() as connection:
            return [_record(row) for row in connection.execute(query)]

    def given_out(self) -> Iterator[Task]:
        """Every task of which queries were given out: something was charged for it, or may be."""
        with self._database.read() as connection:
            bodies = connection.execute(select(tasks.c.digest, tasks.c.body).where(tasks.c.next_query > 0)).all()
        return (_parsed(digest, body) for digest, body in bodies)

    def claim_queries(self, digest: str, count: int, *, connection: Connection | None = None) -> int:
        """Give out queries of a task in one run: such as came back, or the next. Each is asked once for ever.

        Args:
            count: how many, at least 1.
            connection: write transaction to join, so that nothing is given out for a job that is not kept.

        Returns:
            The number of the first; the others follow it.

        Raises:
            InvalidSetting: fewer are left, or the count is below 1.
            NotFound: there is no such task.
        """
        if type(count) is not int or count < 1:
            raise InvalidSetting("a job takes at least 1 query of its task")
        with writing(self._database, connection) as joined:
            record = self.get(digest, connection=joined)
            returned = returned_ranges(joined, digest)
            tail = returned[-1][1] if returned and sum(returned[-1]) == record.next_query else 0
            longest = max([record.queries_left + tail, *(size for _, size in returned)])
            if count > longest:
                left = record.queries_left + sum(size for _, size in returned)
                in_a_run = f" ({longest} of them in one run, as a job needs them)" if left != longest else ""
                raise InvalidSetting(
                    f"{count} queries were asked for, and only {left} of the {record.task.max_queries} of task "
                    f"{digest[:12]!r} are left{in_a_run}; ask fewer, or make a new task (another nonce), which is "
                    "priced by itself"
                )
            first, new = take_again(joined, digest, count, next_query=record.next_query) or (record.next_query, count)
            if new:
                _ADVANCE.run(joined, digest=digest, next_query=record.next_query + new)
        return first

    def give_back(self, digest: str, first_query: int, num_queries: int, *, connection: Connection) -> None:
        """Take back queries that were given out and never asked; see feature_store.journal.returned_queries.

        Raises:
            JournalBroken: they were asked, or may still be.
        """
        give_back(connection, digest, first_query, num_queries)

    def returned(self, digests: Collection[str]) -> dict[str, int]:
        """How many queries came back of each of some tasks; they can be asked beside `queries_left`."""
        with self._database.read() as joined:
            return returned_counts(joined, digests)


def no_such_task(digest: str) -> NotFound:
    """Said of a task that is not there, and in the same words of one that is somebody else's."""
    return NotFound(f"there is no task {digest[:64]!r}; make it first, or look at the list of tasks")


@lru_cache(maxsize=_MOST_PARSED)
def _parsed(digest: str, body: str) -> Task:
    """The task that a row stores; parsed and checked once for each text, which never changes."""
    task = parse_task(json.loads(body))
    if task.digest != digest:
        raise JournalBroken(
            f"what is stored as task {digest[:12]!r} has digest {task.digest[:12]!r}: it was changed, or written "
            "by a version that describes tasks differently. Restore the newest backup, or use that version"
        )
    return task


def _as_stored(
    digest: str, body: str, participants: str, next_query: int, created_at: str, created_by: str
) -> TaskRecord:
    return TaskRecord(
        task=_parsed(digest, body),
        participants=tuple(json.loads(participants)),
        created_at=datetime.fromisoformat(created_at),
        created_by=created_by,
        next_query=next_query,
    )


def _record(row: Row[tuple[object, ...]]) -> TaskRecord:
    return TaskRecord(
        task=_parsed(row.digest, row.body),
        participants=tuple(row.participants),
        created_at=row.created_at,
        created_by=row.created_by,
        next_query=row.next_query,
    )
