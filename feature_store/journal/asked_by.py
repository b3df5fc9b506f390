"""Who asked for a task, as the coordinator says: names of requesters, for the people at the site who decide about it.

Nothing that protects a record rests on a name: it is the coordinator's word. What each has taken of the site's budget,
which a policy may bound, is kept apart (feature_store.journal.requester_shares).
"""

from __future__ import annotations

from datetime import datetime

from sqlalchemy import Column, Connection, Text, func, insert, select

from feature_store.journal.columns import Moment, check_moment
from feature_store.journal.database import Database, strict_table
from feature_store.journal.joining import reading, writing
from feature_store.journal.rules import keep
from labeler.errors import InvalidSetting

MAX_NAMES = 20
"""Of one task: what a coordinator says must not fill a site's disk."""

asked_by = strict_table(
    "asked_by",
    Column("task_digest", Text, primary_key=True),
    Column("requester", Text, primary_key=True),
    Column("first_at", Moment, nullable=False),
)
keep(asked_by)


class AskedBy:
    """The names, in the agent's own journal."""

    def __init__(self, database: Database) -> None:
        self._database = database
        database.create(asked_by)

    def note(self, task_digest: str, requester: str, at: datetime, *, connection: Connection | None = None) -> None:
        """Remember a name, unless it is known, empty, or one too many."""
        if not requester:
            return
        mine = asked_by.c.task_digest == task_digest
        with reading(self._database, connection) as joined:
            known = joined.execute(select(asked_by.c.requester).where(mine, asked_by.c.requester == requester)).first()
        if known is not None:
            return
        with writing(self._database, connection) as joined:
            count = joined.execute(select(func.count()).select_from(asked_by).where(mine)).scalar_one()
            if count < MAX_NAMES:
                row = {"task_digest": task_digest, "requester": requester, "first_at": check_moment(at)}
                joined.execute(insert(asked_by), row)


def requesters(database: Database) -> dict[str, list[str]]:
    """The names by task, in the order in which they were heard; of a journal that may only be looked at."""
    try:
        database.create(asked_by)
    except InvalidSetting:
        return {}
    found: dict[str, list[str]] = {}
    with database.read() as connection:
        query = select(asked_by.c.task_digest, asked_by.c.requester).order_by(asked_by.c.first_at, asked_by.c.requester)
        for digest, name in connection.execute(query):
            found.setdefault(digest, []).append(name)
    return found
