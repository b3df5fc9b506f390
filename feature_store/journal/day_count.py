"""How many queries an agent answered since a moment, and of each task, in memory beside the journal that keeps them.

Both are asked for at every proposal and every charge, and a sum over all that was ever answered would cost more each
day. They are read from the journal once, and again whenever something that was written was undone (`Database.undone`).
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from datetime import datetime, timedelta

from sqlalchemy import Connection, Table, func, select

from feature_store.journal.chain import time_text
from feature_store.journal.database import Database
from feature_store.journal.ledger_tables import ledger_entries

_MOST_KEPT = 100_000
_AHEAD = timedelta(days=2)


class DayCount:
    """See the module.

    Args:
        answered: its table of answered rounds.
    """

    def __init__(self, database: Database, answered: Table) -> None:
        self._database = database
        self._answered = answered
        self._undone = -1
        self._of_task: Counter[str] = Counter()
        self._from = ""
        self._times: list[str] = []
        self._sums: list[int] = []

    def of_task(self, task_digest: str, connection: Connection) -> int:
        """Queries of a task that were answered."""
        self._refresh(connection)
        return self._of_task[task_digest]

    def since(self, moment: datetime, connection: Connection) -> int:
        """Queries that were answered at or after a moment, by the ledger's time, which never runs backwards."""
        self._refresh(connection)
        text = time_text(moment)
        if not self._from or text < self._from or len(self._times) > _MOST_KEPT:
            self._load_times(time_text(moment - _AHEAD) if len(self._times) <= _MOST_KEPT else text, connection)
        first = bisect_left(self._times, text)
        total = self._sums[-1] if self._sums else 0
        return total - (self._sums[first - 1] if first else 0)

    def add(self, task_digest: str, at: str, num_queries: int) -> None:
        """A round was answered, in the transaction that is open.

        Args:
            at: the stored time of the ledger's entry that paid for it.
        """
        if self._undone != self._database.undone:
            return  # nothing is kept of what was; it is read when it is asked for
        self._of_task[task_digest] += num_queries
        if self._from:
            self._times.append(at)
            self._sums.append((self._sums[-1] if self._sums else 0) + num_queries)

    def _refresh(self, connection: Connection) -> None:
        if self._undone == self._database.undone:
            return
        table = self._answered.c
        query = select(table.task_digest, func.sum(table.num_queries)).group_by(table.task_digest)
        self._of_task = Counter({digest: int(count) for digest, count in connection.execute(query)})
        self._from, self._times, self._sums = "", [], []
        self._undone = self._database.undone

    def _load_times(self, begin: str, connection: Connection) -> None:
        table = self._answered.c
        query = (
            select(ledger_entries.c.at, table.num_queries)
            .join(ledger_entries, ledger_entries.c.seq == table.ledger_seq)
            .where(ledger_entries.c.at >= begin)
            .order_by(ledger_entries.c.seq)
        )
        self._from, self._times, self._sums = begin, [], []
        total = 0
        for at, count in connection.execute(query):
            total += int(count)
            self._times.append(at)
            self._sums.append(total)
