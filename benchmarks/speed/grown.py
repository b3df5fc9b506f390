"""A journal with a long history, made in seconds: the entries and rows that ordinary jobs would have left.

Every job holds its worst case at the federation, gives it back, and reserves and posts one round for the federation and
each agent, as the coordinator does. The chain's hashes are right and every sum holds: `Ledger.verify` accepts it. The
jobs have failed with their rounds unasked, which the tables' rules let no other program write in one step.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from labeler.ledger.chain import Head, entry_hash, salted, time_of, time_text
from labeler.ledger.database import Connection, Database, insert_rows, select_rows, update_rows
from labeler.ledger.ledger import SUMS_EVERY, Ledger
from labeler.ledger.rounds import FEDERATION
from labeler.ledger.schema import (
    jobs,
    ledger_accounts,
    ledger_entries,
    ledger_reservations,
    ledger_sums,
    rounds,
)
from labeler.setting import LEVELS

PERIOD: Final = timedelta(days=365)
_ROWS: Final = 20_000


def grow(database: Database, entries: int, *, agents: Sequence[str], task_digest: str = "", by: str = "tok-1") -> int:
    """Add at least this many entries to the ledger of a journal, and the jobs that made them; return how many jobs.

    Args:
        agents: names of agents' accounts, each open at both levels, as the federation's account is.
        task_digest: of the task that the jobs belong to; empty for no rows of jobs.
        by: id of the token that submitted them.
    """
    with database.write() as connection:
        history = _History(connection, Ledger(database, clock=lambda: datetime.now(UTC)).head(connection=connection))
        end = history.head.seq + entries
        accounts = [(account, level) for account in (FEDERATION, *agents) for level in LEVELS]
        whole = accounts[: len(LEVELS)]
        per_job = 2 * len(whole) + 2 * len(accounts)
        history.step = (datetime.now(UTC) - history.at) / (entries // per_job + 2)
        number = 0
        while history.head.seq < end:
            job_id = f"job-{history.head.seq:020x}"
            said = {"by": by, "job": job_id, "queries": 1, "task": task_digest}
            for name, of, ends, because in (
                (f"{job_id}/proposed", whole, "void", {"because": "divided"}),
                (f"{job_id}/0", accounts, "post", {"contributors": list(agents), "job": job_id, "queries": 1}),
            ):
                history.settle(name, of, said, ends, because)
            if task_digest:
                history.job(job_id, task_digest, by)
            history.at += max(history.step, timedelta())
            number += 1
        history.finish()
    return number


class _History:
    """The rows to be written next."""

    def __init__(self, connection: Connection, head: Head) -> None:
        self._connection = connection
        self.head = head
        last = select_rows(connection, ledger_entries, seq=head.seq).first()
        self.at = datetime.now(UTC) - PERIOD if last is None else time_of(last.at)
        self.step = timedelta()
        self._rows: dict[Any, list[dict[str, Any]]] = {}
        self._spent: Counter[tuple[str, str]] = Counter()
        self._posted: Counter[tuple[str, str]] = Counter()
        self._begun = {
            (row.account, row.level): (row.cap, row.spent, row.posted)
            for row in select_rows(connection, ledger_accounts)
        }

    def settle(
        self, name: str, of: Sequence[tuple[str, str]], said: dict[str, Any], ends: str, because: dict[str, Any]
    ) -> None:
        """Reserve one nano-unit of each account, and settle that."""
        first = self._append("reserve", name, of, said)
        self._spent.update(of)
        settled = self._append(ends, name, of, because)
        (self._posted.update if ends == "post" else self._spent.subtract)(of)
        self._add(
            ledger_reservations,
            {
                "reservation_id": name,
                "state": "posted" if ends == "post" else "void",
                "first_seq": first,
                "charges": len(of),
                "settled_seq": settled,
                "held": None,
            },
        )

    def job(self, job_id: str, task_digest: str, by: str) -> None:
        """Add the rows of a job that has failed."""
        moments = dict.fromkeys(("created_at", "updated_at", "expires_at"), self.at)
        counts = {"images": 1, "num_queries": 1, "first_query": 0, "count": None, "seed": 0, "version": 9}
        row = {"job_id": job_id, "task_digest": task_digest, "name": "", "state": "failed", "strategy": "all"}
        self._add(jobs, row | counts | moments | {"source": "features", "created_by": by, "problem": None})
        self._add(rounds, {"job_id": job_id, "number": 0, "first_query": 0, "num_queries": 1, "state": "waiting"})

    def finish(self) -> None:
        """Write what is left, and the sums of the accounts."""
        for table in list(self._rows):
            self._write(table)
        for (account, level), (_, spent, posted) in self._begun.items():
            sums = {"spent": spent + self._spent[account, level], "posted": posted + self._posted[account, level]}
            update_rows(self._connection, ledger_accounts, sums, account=account, level=level)

    def _append(self, kind: str, name: str, of: Sequence[tuple[str, str]], said: dict[str, Any]) -> int:
        before, at = self.head.seq, time_text(self.at)
        detail = salted(json.dumps(said, sort_keys=True, separators=(",", ":")))
        if before // SUMS_EVERY < (before + len(of)) // SUMS_EVERY:
            for (account, level), (cap, spent, posted) in self._begun.items():
                key = {"seq": before, "account": account, "level": level, "cap": cap}
                spent, posted = spent + self._spent[account, level], posted + self._posted[account, level]
                self._add(ledger_sums, key | {"spent": spent, "posted": posted})
        for account, level in of:
            entry: dict[str, Any] = {
                "seq": self.head.seq + 1, "at": at, "kind": kind, "account": account, "level": level,
                "reservation_id": name, "amount": 1, "detail": detail, "previous_hash": self.head.hash,
            }  # fmt: skip
            self.head = Head(entry["seq"], entry_hash(entry))
            self._add(ledger_entries, entry | {"hash": self.head.hash})
        return before + 1

    def _add(self, table: Any, row: dict[str, Any]) -> None:
        rows = self._rows.setdefault(table, [])
        rows.append(row)
        if len(rows) >= _ROWS and table is not rounds:  # a round refers to its job
            self._write(table)

    def _write(self, table: Any) -> None:
        for one in (jobs, rounds) if table in (jobs, rounds) else (table,):
            insert_rows(self._connection, one, *self._rows.pop(one, []))
