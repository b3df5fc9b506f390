"""Stored tasks, the tokens they are shared with, and the queries taken from them: each query is asked once.

A query is paid for when an agent is asked, and asked once: its number ties it to one charge. Numbers of a round that
never left come back when its job has ended (`TaskStore.give_back`). The caller's word that nothing left is not enough.
The database refuses a range that touches a round whose job is not finished, or that was ever tied permanently to its
questions, which happens in the step that asks (`labeler.ledger.rounds`). A round of a finished job takes no step any
more, so nothing can leave under these numbers later either.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache
from typing import Any

from sqlalchemy import Connection, Row, delete, func, select

from labeler.errors import InvalidSetting, JournalBroken, NotFound, ProtocolViolation
from labeler.ledger.chain import time_text
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
from labeler.ledger.schema import json_text, returned_queries, task_shares, tasks
from labeler.system.clock import Clock
from labeler.task import Task, parse_task

_MOST_PARSED = 1024


@dataclass(frozen=True)
class TaskRecord:
    """A stored task.

    Attributes:
        task: what all parties agree on.
        participants: ids of the participating agents, as many as the task says, each once.
        created_at: when it was made.
        created_by: token id of its creator.
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
        time_text(self.created_at)  # refuses a time without a zone
        if len(set(self.participants)) != len(self.participants) or len(self.participants) != self.task.agents:
            raise InvalidSetting(
                f"the task is for {self.task.agents} agents, each named once; found {len(self.participants)} names, "
                f"{len(set(self.participants))} of them different"
            )

    @property
    def digest(self) -> str:
        """Return the digest of the task."""
        return self.task.digest

    @property
    def queries_left(self) -> int:
        """Return the number of queries never given out; returned ones are counted separately (`TaskStore.returned`)."""
        return self.task.max_queries - self.next_query

    @property
    def cursor(self) -> str:
        """Return the position of this task in a list; the next page begins after it."""
        return cursor_text(self.created_at, self.digest)


class TaskStore:
    """All tasks of a coordinator, and the tokens that each is shared with.

    The creator of a task may let other tokens submit into it, and may stop that again. Jobs that were submitted
    meanwhile stay; a share only says who may submit and who may see the task.

    Args:
        clock: the time now, with a time zone; for when a task was shared.
    """

    def __init__(self, database: Database, *, clock: Clock = now_utc) -> None:
        self._database = database
        self._clock = clock

    def add(self, record: TaskRecord, *, connection: Connection | None = None) -> TaskRecord:
        """Store a task; a repeat changes nothing.

        Returns:
            The stored task, with the creation time and the queries given out so far.

        Raises:
            ProtocolViolation: it is known with other participants.
        """
        with self._database.writing(connection) as joined:
            row = select_rows(joined, tasks, digest=record.digest).first()
            if row is None:
                insert_rows(
                    joined,
                    tasks,
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
                return record
        known = _record(row)
        if set(known.participants) != set(record.participants):
            raise ProtocolViolation(
                f"task {record.digest[:12]!r} is known with other participants, and a task never changes; "
                "give the new one another nonce or name"
            )
        return known

    def get(self, digest: str, *, connection: Connection | None = None) -> TaskRecord:
        """Return one task.

        Raises:
            NotFound: there is none of this digest.
            JournalBroken: the stored body is not the task of this digest.
        """
        found = self.get_all([digest], connection=connection).get(digest)
        if found is None:
            raise no_such_task(digest)
        return found

    def get_all(self, digests: Collection[str], *, connection: Connection | None = None) -> dict[str, TaskRecord]:
        """Return several tasks, by digest; missing ones are left out.

        Raises:
            JournalBroken: see `get`.
        """
        with self._database.reading(connection) as joined:
            return {row.digest: _record(row) for row in select_rows(joined, tasks, digest=sorted(set(digests)))}

    def list(self, *, after: str | None = None, limit: int = 100, open_to: str | None = None) -> list[TaskRecord]:
        """Return tasks, newest first.

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
        parts = [query]
        if open_to is not None:
            shared = query.join(task_shares, task_shares.c.task_digest == tasks.c.digest)
            parts = [query.where(tasks.c.created_by == open_to), shared.where(task_shares.c.token_id == open_to)]
        with self._database.read() as connection:
            found = {row.digest: _record(row) for one in parts for row in connection.execute(one)}
        return sorted(found.values(), key=lambda task: (task.created_at, task.digest), reverse=True)[:limit]

    def given_out(self) -> Iterator[Task]:
        """Iterate over tasks of which queries were given out: something was charged for them, or may be."""
        with self._database.read() as connection:
            bodies = connection.execute(select(tasks.c.digest, tasks.c.body).where(tasks.c.next_query > 0)).all()
        return (_parsed(digest, body) for digest, body in bodies)

    def claim_queries(self, digest: str, count: int, *, connection: Connection | None = None) -> int:
        """Give out a contiguous range of a task's queries, returned ones or the next ones. Each is asked at most once.

        Args:
            count: number of queries, at least 1.
            connection: write transaction to join, so that nothing is given out for a job that is not kept.

        Returns:
            The number of the first; the others follow it.

        Raises:
            InvalidSetting: fewer are left, or the count is below 1.
            NotFound: there is no such task.
        """
        if type(count) is not int or count < 1:
            raise InvalidSetting("a job takes at least 1 query of its task")
        with self._database.writing(connection) as joined:
            record = self.get(digest, connection=joined)
            returned = _ranges(joined, digest)
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
            for first, size in returned:  # the lowest that fit
                if size >= count:
                    _remove(joined, digest, first)
                    if size > count:
                        _return(joined, digest, first + count, size - count)
                    return first
            first, new = record.next_query, count
            if tail:  # the last range reaches up to the numbers never given out; extend it with new ones
                first, new = first - tail, count - tail
                _remove(joined, digest, first)
            next_query = record.next_query + new
            update_rows(joined, tasks, {"next_query": next_query}, digest=digest)
        return first

    def give_back(self, digest: str, first_query: int, num_queries: int, *, connection: Connection) -> None:
        """Take back queries that were given out and never asked; merge them with adjacent returned ranges.

        Raises:
            IntegrityError: they were asked, or may still be.
        """
        for first, size in _ranges(connection, digest):
            if first + size == first_query or first_query + num_queries == first:
                _remove(connection, digest, first)
                first_query, num_queries = min(first, first_query), size + num_queries
        _return(connection, digest, first_query, num_queries)

    def returned(self, digests: Collection[str]) -> dict[str, int]:
        """Return how many queries came back of each of some tasks; they add to `queries_left`."""
        table = returned_queries.c
        query = select(table.task_digest, func.sum(table.num_queries).label("total"))
        query = query.where(table.task_digest.in_(sorted(set(digests)))).group_by(table.task_digest)
        with self._database.read() as joined:
            found = {row.task_digest: int(row.total) for row in joined.execute(query)}
        return {digest: found.get(digest, 0) for digest in digests}

    # Shares.

    def share(self, task_digest: str, token_id: str) -> None:
        """Let a token submit into a task; a second time changes nothing."""
        with self._database.write() as joined:
            if not self.is_shared(task_digest, token_id, connection=joined):
                row = {"task_digest": task_digest, "token_id": token_id, "shared_at": self._clock()}
                insert_rows(joined, task_shares, row)

    def unshare(self, task_digest: str, token_id: str) -> None:
        """Stop sharing a task with a token; a second time changes nothing."""
        table = task_shares.c
        with self._database.write() as joined:
            joined.execute(delete(task_shares).where(table.task_digest == task_digest, table.token_id == token_id))

    def is_shared(self, task_digest: str, token_id: str, *, connection: Connection | None = None) -> bool:
        """Return whether a task is shared with a token."""
        with self._database.reading(connection) as joined:
            return select_rows(joined, task_shares, task_digest=task_digest, token_id=token_id).first() is not None

    def shared_with(self, task_digests: Collection[str]) -> dict[str, tuple[str, ...]]:
        """Return the tokens that each of some tasks is shared with, in the order in which that was done."""
        table = task_shares.c
        query = select(table.task_digest, table.token_id).where(table.task_digest.in_(sorted(set(task_digests))))
        found: dict[str, list[str]] = {digest: [] for digest in task_digests}
        with self._database.read() as joined:
            for row in joined.execute(query.order_by(table.shared_at, table.token_id)):
                found[row.task_digest].append(row.token_id)
        return {digest: tuple(tokens) for digest, tokens in found.items()}


def no_such_task(digest: str) -> NotFound:
    """Return the error for a missing task; a task of somebody else gets the same words."""
    return NotFound(f"there is no task {digest[:64]!r}; make it first, or look at the list of tasks")


@lru_cache(maxsize=_MOST_PARSED)
def _parsed(digest: str, body: str) -> Task:
    """Parse the task that a row stores; cached by text, which never changes."""
    task = parse_task(json.loads(body))
    if task.digest != digest:
        raise JournalBroken(
            f"what is stored as task {digest[:12]!r} has digest {task.digest[:12]!r}: it was changed. Restore "
            "the newest backup"
        )
    return task


def _record(row: Row[Any]) -> TaskRecord:
    return TaskRecord(
        task=_parsed(row.digest, row.body),
        participants=tuple(row.participants),
        created_at=row.created_at,
        created_by=row.created_by,
        next_query=row.next_query,
    )


def _ranges(connection: Connection, digest: str) -> list[tuple[int, int]]:
    """Return first number and length of the returned ranges of a task, in order, no two adjacent."""
    found = select_rows(connection, returned_queries, ("first_query",), task_digest=digest)
    return [(row.first_query, row.num_queries) for row in found]


def _return(connection: Connection, digest: str, first_query: int, num_queries: int) -> None:
    row = {"task_digest": digest, "first_query": first_query, "num_queries": num_queries}
    insert_rows(connection, returned_queries, row)


def _remove(connection: Connection, digest: str, first_query: int) -> None:
    table = returned_queries.c
    this = (table.task_digest == digest, table.first_query == first_query)
    connection.execute(delete(returned_queries).where(*this))
