"""What an agent has ever answered: every round with its task, its job and its price, for the people of its site.

A task is written down with the first of its rounds that is charged, so that the site can say for ever what it answered:
name, classes and method. Its size is bounded by the budget it is paid from. Rounds of versions before this have none.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import Column, Connection, Table, Text, insert, inspect, select

from feature_store.journal.agent_memory import answered_rounds
from feature_store.journal.chain import time_of
from feature_store.journal.columns import Moment, json_text
from feature_store.journal.database import Database, strict_table
from feature_store.journal.joining import writing
from feature_store.journal.ledger_tables import ledger_entries
from feature_store.journal.prepared import Prepared
from feature_store.journal.promises import promised_rounds, proposal_answers
from feature_store.journal.rules import keep
from labeler.budget import LEAST_DELTA_OF_WINNERS
from labeler.errors import InvalidSetting, PolicyRefusal
from labeler.methods.sensitivity import least_delta
from labeler.task import Task, parse_task

answered_tasks = strict_table(
    "answered_tasks",
    Column("digest", Text, primary_key=True),
    Column("body", Text, nullable=False),
    Column("first_at", Moment, nullable=False),
)
keep(answered_tasks)


_TASK_OF = Prepared("SELECT digest FROM answered_tasks WHERE digest = :digest")
_CHARGED_ONLY = Prepared(
    "SELECT kept.round_digest, asked.body FROM agent_rounds AS kept "
    "JOIN answered_rounds AS paid ON paid.round_digest = kept.round_digest "
    "JOIN answered_tasks AS asked ON asked.digest = paid.task_digest "
    "WHERE kept.state = 'charged' ORDER BY paid.ledger_seq"
)


class AnsweredTasks:
    """The tasks of which anything was answered, in the agent's own journal."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._known: set[str] = set()
        self._undone = database.undone
        database.create(answered_tasks)

    def note(self, task: Task, at: datetime, *, connection: Connection | None = None) -> None:
        """Write a task down with the first of its rounds that is charged, in the same transaction."""
        if self._undone != self._database.undone:
            # What was remembered may have been undone with its transaction.
            self._known.clear()
            self._undone = self._database.undone
        if task.digest in self._known:
            return
        with writing(self._database, connection) as joined:
            if _TASK_OF.first(joined, digest=task.digest) is None:
                body = json_text(task.model_dump(mode="json"))
                joined.execute(insert(answered_tasks), {"digest": task.digest, "body": body, "first_at": at})
        self._known.add(task.digest)

    def unanswered_for_life(self, *, connection: Connection) -> list[str]:
        """Rounds of votes for life that are charged and have no stored answer yet, by digest."""
        found = _CHARGED_ONLY.all(connection)
        return [digest for digest, body in found if json.loads(body).get("life") is not None]


def check_delta(connection: Connection, delta: float) -> None:
    """Refuse to state what was charged at a delta below which one of the charges bounds nothing.

    A task is kept with the first of its charges, in the same transaction, so the largest least delta of them is kept
    with the account that paid.

    Args:
        delta: of the site's policy.

    Raises:
        PolicyRefusal: something was answered that holds at a larger delta alone.
    """
    if delta >= LEAST_DELTA_OF_WINNERS or not inspect(connection).has_table(answered_tasks.name):
        return
    for body in connection.execute(select(answered_tasks.c.body)).scalars():
        task = parse_task(json.loads(body))
        if delta < least_delta(task):
            raise PolicyRefusal(
                f"budget.delta: task {task.name!r} was answered for a price that holds at delta {least_delta(task):g} "
                f"and above, and the policy says {delta:g}; at that delta nothing can be said of what was spent. Name "
                f"a delta of at least {least_delta(task):g}"
            )


@dataclass(frozen=True)
class AnsweredRound:
    """One round that was charged.

    Attributes:
        job_id: the coordinator's name of the job, where it was proposed before; empty elsewhere.
        charges: nano-units of mu^2 per level.
        talliers: who got a share each.
    """

    round_digest: str
    task_digest: str
    job_id: str
    at: datetime
    num_queries: int
    charges: Mapping[str, int]
    talliers: tuple[str, ...]


def answered(database: Database) -> tuple[list[AnsweredRound], dict[str, Task]]:
    """Every round that was charged, oldest first, and the tasks by digest, as far as they are known.

    Reads a journal that another process writes; one moment of it.
    """
    rounds, entries = answered_rounds.c, ledger_entries.c
    query = (
        select(*rounds, entries.at, entries.level, entries.amount, proposal_answers.c.job_id)
        .join(ledger_entries, (entries.reservation_id == rounds.reservation_id) & (entries.kind == "post"))
        .outerjoin(promised_rounds, promised_rounds.c.reservation_id == rounds.reservation_id)
        .outerjoin(proposal_answers, proposal_answers.c.digest == promised_rounds.c.digest)
        .order_by(rounds.ledger_seq, entries.seq)
    )
    has_tasks = _is_there(database, answered_tasks)
    found: dict[str, AnsweredRound] = {}
    tasks: dict[str, Task] = {}
    with database.read() as connection:
        for row in connection.execute(query):
            one = found.get(row.round_digest)
            found[row.round_digest] = AnsweredRound(
                row.round_digest,
                row.task_digest,
                row.job_id or "",
                time_of(row.at),
                row.num_queries,
                {**(one.charges if one else {}), row.level: row.amount},
                tuple(str(name) for name, _ in json.loads(row.recipients)),
            )
        if has_tasks:
            for digest, body in connection.execute(select(answered_tasks.c.digest, answered_tasks.c.body)):
                tasks[digest] = parse_task(json.loads(body))
    return list(found.values()), tasks


def _is_there(database: Database, table: Table) -> bool:
    """Whether a journal that is only looked at has a table; an agent of an earlier version has not made it."""
    try:
        database.create(table)
    except InvalidSetting:
        return False
    return True
