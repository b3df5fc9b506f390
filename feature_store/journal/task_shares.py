"""Whom a task is shared with: its creator may let other tokens submit into it, and may stop that again.

What was submitted meanwhile stays; a share says only who may submit and who may see the task.
"""

from __future__ import annotations

from collections.abc import Collection

from sqlalchemy import Connection, delete, insert, select

from feature_store.clock import Clock
from feature_store.journal.columns import check_moment, now_utc
from feature_store.journal.database import Database
from feature_store.journal.joining import reading, writing
from feature_store.journal.tasks import task_shares


class TaskShares:
    """All shares of a coordinator."""

    def __init__(self, database: Database, *, clock: Clock = now_utc) -> None:
        self._database = database
        self._clock = clock
        database.create(task_shares)

    def add(self, task_digest: str, token_id: str, *, connection: Connection | None = None) -> None:
        """Let a token submit into a task; a second time changes nothing."""
        with writing(self._database, connection) as joined:
            if not self.has(task_digest, token_id, connection=joined):
                row = {"task_digest": task_digest, "token_id": token_id, "shared_at": check_moment(self._clock())}
                joined.execute(insert(task_shares), row)

    def remove(self, task_digest: str, token_id: str) -> None:
        """Stop it; a second time changes nothing."""
        table = task_shares.c
        with self._database.write() as joined:
            joined.execute(delete(task_shares).where(table.task_digest == task_digest, table.token_id == token_id))

    def has(self, task_digest: str, token_id: str, *, connection: Connection | None = None) -> bool:
        """Whether a task is shared with a token."""
        table = task_shares.c
        query = select(table.token_id).where(table.task_digest == task_digest, table.token_id == token_id)
        with reading(self._database, connection) as joined:
            return joined.execute(query).first() is not None

    def of(self, task_digests: Collection[str]) -> dict[str, tuple[str, ...]]:
        """With which tokens each of some tasks is shared, in the order in which that was done."""
        table = task_shares.c
        query = select(table.task_digest, table.token_id).where(table.task_digest.in_(sorted(set(task_digests))))
        found: dict[str, list[str]] = {digest: [] for digest in task_digests}
        with self._database.read() as joined:
            for row in joined.execute(query.order_by(table.shared_at, table.token_id)):
                found[row.task_digest].append(row.token_id)
        return {digest: tuple(tokens) for digest, tokens in found.items()}
