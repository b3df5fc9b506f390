"""Queries of a task that were given out, never asked, and may be given out again.

A query is paid for when an agent is asked, and asked once: its number ties it to one charge. Numbers of a round that
never left come back when its job has ended. That nothing left of them is not the caller's word: the database refuses
a range that touches a round whose job is not finished, or that was ever tied to its questions for good, which happens
in the step that asks (`feature_store.journal.rounds`). A round of a finished job takes no step any more, so nothing
can leave of these numbers later either.
"""

from __future__ import annotations

from collections.abc import Collection

from sqlalchemy import CheckConstraint, Column, Connection, Text, delete, func, insert, select

from feature_store.journal.columns import WHOLE, one_of
from feature_store.journal.database import strict_table
from feature_store.journal.prepared import Prepared
from feature_store.journal.rules import forbid, stay
from labeler.rounds.effects import FINISHED

returned_queries = strict_table(
    "returned_queries",
    Column("task_digest", Text, primary_key=True),
    Column("first_query", WHOLE, primary_key=True, autoincrement=False),
    Column("num_queries", WHOLE, nullable=False),
    CheckConstraint("first_query >= 0 AND num_queries >= 1", name="range"),
)
stay(returned_queries, ("task_digest", "first_query", "num_queries"))
forbid(
    returned_queries,
    "unasked",
    on="INSERT",
    when="EXISTS (SELECT 1 FROM rounds JOIN jobs ON jobs.job_id = rounds.job_id "
    "WHERE jobs.task_digest = NEW.task_digest AND rounds.first_query < NEW.first_query + NEW.num_queries "
    "AND rounds.first_query + rounds.num_queries > NEW.first_query "
    f"AND (rounds.round_digest IS NOT NULL OR NOT ({one_of('jobs.state', FINISHED)})))",
    because="only queries that nobody was asked about come back",
)
forbid(
    returned_queries,
    "given",
    on="INSERT",
    when="NOT EXISTS (SELECT 1 FROM tasks WHERE tasks.digest = NEW.task_digest "
    "AND tasks.next_query >= NEW.first_query + NEW.num_queries)",
    because="only queries that were given out come back",
)
forbid(
    returned_queries,
    "once",
    on="INSERT",
    when="EXISTS (SELECT 1 FROM returned_queries AS other WHERE other.task_digest = NEW.task_digest "
    "AND other.first_query < NEW.first_query + NEW.num_queries "
    "AND other.first_query + other.num_queries > NEW.first_query)",
    because="a query comes back once",
)

Range = tuple[int, int]
"""First number, how many."""


_RANGES = Prepared("SELECT first_query, num_queries FROM returned_queries WHERE task_digest = :of ORDER BY first_query")


def returned_ranges(connection: Connection, task_digest: str) -> list[Range]:
    """What came back of a task, in order, no two ranges touching."""
    return [(first, count) for first, count in _RANGES.all(connection, of=task_digest)]


def returned_counts(connection: Connection, task_digests: Collection[str]) -> dict[str, int]:
    """How many queries came back of each of some tasks."""
    table = returned_queries.c
    query = select(table.task_digest, func.sum(table.num_queries).label("total"))
    query = query.where(table.task_digest.in_(sorted(set(task_digests)))).group_by(table.task_digest)
    found = {row.task_digest: int(row.total) for row in connection.execute(query)}
    return {digest: found.get(digest, 0) for digest in task_digests}


def give_back(connection: Connection, task_digest: str, first_query: int, num_queries: int) -> None:
    """Take a range back; with those that it touches it becomes one."""
    for first, count in returned_ranges(connection, task_digest):
        if first + count == first_query or first_query + num_queries == first:
            _remove(connection, task_digest, first)
            first_query, num_queries = min(first, first_query), count + num_queries
    row = {"task_digest": task_digest, "first_query": first_query, "num_queries": num_queries}
    connection.execute(insert(returned_queries), row)


def take_again(
    connection: Connection, task_digest: str, num_queries: int, *, next_query: int
) -> tuple[int, int] | None:
    """Give out queries that came back, the lowest that fit.

    Args:
        num_queries: how many, in one run.
        next_query: of the task: the first number never given out. The last range may reach up to it, and is then
            lengthened by new numbers.

    Returns:
        The first number, and how many of the run are new; None where no range will do.
    """
    found = returned_ranges(connection, task_digest)
    for first, count in found:
        if count >= num_queries:
            _remove(connection, task_digest, first)
            if count > num_queries:
                row = {"first_query": first + num_queries, "num_queries": count - num_queries}
                connection.execute(insert(returned_queries), {"task_digest": task_digest} | row)
            return first, 0
    if found and sum(found[-1]) == next_query:
        _remove(connection, task_digest, found[-1][0])
        return found[-1][0], num_queries - found[-1][1]
    return None


def _remove(connection: Connection, task_digest: str, first_query: int) -> None:
    table = returned_queries.c
    connection.execute(
        delete(returned_queries).where(table.task_digest == task_digest, table.first_query == first_query)
    )
