"""What an agent has said to proposals: a yes with its price set aside, or that its budget does not cover it.

    proposal --keep--> willing, every round reserved  --take--> the round's reservation pays for its answer
                           |
                           +--release, withdraw--> what was not answered is given back ("lapsed")

A yes and its reservations are one transaction, so asked again after a crash the agent says the same. A reservation is
given back by the agent alone, from its own journal: it is still reserved, so nothing was answered under it, and from
then on nothing will be. Rounds of one task and size cost the same, so an answer takes the promise that ends first.

What is open is kept in memory beside the journal, since it is looked through at every proposal and every ask: read
once, followed as it is written, and read anew when something that was written was undone (`Database.undone`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Literal

from sqlalchemy import (
    CheckConstraint,
    Column,
    Connection,
    ForeignKey,
    Text,
    insert,
    update,
)

from feature_store.journal.chain import time_of, time_text
from feature_store.journal.charges import Charge
from feature_store.journal.columns import WHOLE, Json, Moment, check_moment, json_text, one_of
from feature_store.journal.database import Database, strict_table
from feature_store.journal.joining import reading, writing
from feature_store.journal.ledger import Ledger
from feature_store.journal.ledger_tables import LEDGER_TABLES
from feature_store.journal.prepared import Prepared
from feature_store.journal.rules import keep
from feature_store.journal.told import ToldAmounts
from labeler.budget import NothingLeft
from labeler.task import Level

proposal_answers = strict_table(
    "proposal_answers",
    Column("digest", Text, primary_key=True),
    Column("job_id", Text, nullable=False),
    Column("task_digest", Text, nullable=False),
    Column("answer", Text, nullable=False),
    Column("until", Moment, nullable=False),
    Column("answered_at", Moment, nullable=False),
    CheckConstraint(one_of("answer", ("willing", "declined")), name="answer"),
)
keep(proposal_answers, but=("until",))

promised_rounds = strict_table(
    "promised_rounds",
    Column("reservation_id", Text, primary_key=True),
    Column("digest", Text, ForeignKey("proposal_answers.digest"), nullable=False),
    Column("task_digest", Text, nullable=False),
    Column("num_queries", WHOLE, nullable=False),
    Column("amounts", Json, nullable=False),
    CheckConstraint("num_queries >= 1", name="queries"),
)
keep(promised_rounds)


@dataclass(frozen=True)
class Proposed:
    """What an answer is about.

    Attributes:
        digest: of the proposal (labeler.messages.rounds).
        until: its deadline.
        at: when it is answered.
    """

    digest: str
    job_id: str
    task_digest: str
    until: datetime
    at: datetime


@dataclass(frozen=True)
class Said:
    """What was said to one proposal.

    Attributes:
        answer: "willing", or "declined" for want of budget.
        until: a yes holds until then; it is moved forward where the proposal was withdrawn.
    """

    answer: Literal["willing", "declined"]
    until: datetime


@dataclass(frozen=True)
class _Open:
    """A promised round whose reservation still stands."""

    reservation_id: str
    digest: str
    job_id: str
    task_digest: str
    num_queries: int
    amounts: Mapping[Level, int]
    until: datetime


@dataclass
class _Known:
    """What is kept in memory: open rounds, and how current they are."""

    undone: int
    open: dict[str, _Open]


_FIND = Prepared("SELECT answer, until FROM proposal_answers WHERE digest = :digest")
_ADD = Prepared(insert(proposal_answers))
_ADD_ROUND = Prepared(insert(promised_rounds))
_OPEN = Prepared("""
SELECT rounds.reservation_id, rounds.digest, said.job_id, rounds.task_digest, num_queries, amounts, until
FROM promised_rounds AS rounds JOIN proposal_answers AS said ON said.digest = rounds.digest
JOIN ledger_reservations AS reserved ON reserved.reservation_id = rounds.reservation_id
WHERE reserved.state = 'reserved' ORDER BY rounds.reservation_id""")


def promise_name(digest: str, number: int) -> str:
    """What the ledger calls the price of a round that was set aside for a proposal."""
    return f"promise-{digest}/{number}"


class PromiseStore:
    """See the module. Every method that writes can join a transaction by `connection`.

    Attributes:
        told: what the answers have told of the site's budgets.
    """

    def __init__(self, database: Database, ledger: Ledger) -> None:
        self._database = database
        self._ledger = ledger
        self.told = ToldAmounts(database)
        database.create(*LEDGER_TABLES, proposal_answers, promised_rounds)
        self._memory: _Known | None = None

    def said(self, digest: str, *, connection: Connection | None = None) -> Said | None:
        """What was said to a proposal, or None."""
        with reading(self._database, connection) as joined:
            row = _FIND.first(joined, digest=digest)
        return None if row is None else Said(row[0], time_of(row[1]))

    def keep(
        self,
        about: Proposed,
        rounds: Sequence[tuple[int, Mapping[Level, int]]],
        *,
        account: str,
        connection: Connection | None = None,
    ) -> None:
        """Say yes: set the price of every round aside, all of them or none.

        Args:
            about: a proposal that has no answer yet.
            rounds: queries and price in nano-units of mu^2 per level, of each round.

        Raises:
            BudgetExceeded: the account does not cover all of them; nothing is set aside.
        """
        with writing(self._database, connection) as joined:
            known = self._known(joined)
            self._say(about, "willing", joined)
            for number, (num_queries, amounts) in enumerate(rounds):
                name = promise_name(about.digest, number)
                charges = [Charge(account, level, amount) for level, amount in amounts.items()]
                self._ledger.reserve(name, charges, detail={"proposed": about.job_id}, connection=joined)
                _ADD_ROUND.run(
                    joined,
                    reservation_id=name,
                    digest=about.digest,
                    task_digest=about.task_digest,
                    num_queries=num_queries,
                    amounts=json_text(dict(amounts)),
                )
                known.open[name] = _Open(
                    name, about.digest, about.job_id, about.task_digest, num_queries, dict(amounts), about.until
                )

    def decline(self, about: Proposed, *, connection: Connection | None = None) -> None:
        """Remember that the budget did not cover a proposal."""
        with writing(self._database, connection) as joined:
            if self.said(about.digest, connection=joined) is None:
                self._say(about, "declined", joined)

    def take(
        self, task_digest: str, num_queries: int, amounts: Mapping[Level, int], *, connection: Connection
    ) -> str | None:
        """The reservation that pays for a round of this task, size and price; None where none was promised.

        It is handed out once, in a transaction in which it is posted.
        """
        known = self._known(connection)
        fitting = [
            (one.until, one.reservation_id)
            for one in known.open.values()
            if (one.task_digest, one.num_queries, one.amounts) == (task_digest, num_queries, amounts)
        ]
        if not fitting:
            return None
        _, name = min(fitting)
        del known.open[name]
        return name

    def open_queries(self, *, connection: Connection | None = None) -> int:
        """Queries that were promised, and neither answered nor given back."""
        with reading(self._database, connection) as joined:
            return sum(one.num_queries for one in self._known(joined).open.values())

    def release(self, at: datetime) -> int:
        """Give back what was promised until before now and not answered; how many rounds that were."""
        check_moment(at)
        if self._memory is None or self._memory.undone != self._database.undone:
            with self._database.read() as connection:
                self._known(connection)
        if self._memory is None or not any(one.until < at for one in self._memory.open.values()):
            return 0
        with self._database.write() as connection:
            known = self._known(connection)
            return self._lapse([one for one in known.open.values() if one.until < at], known, connection)

    def withdraw(self, job_id: str, at: datetime, *, connection: Connection | None = None) -> int:
        """Give back what was promised for a job of which nothing more is asked; how many rounds that were."""
        with writing(self._database, connection) as joined:
            known = self._known(joined)
            lapsed = self._lapse([one for one in known.open.values() if one.job_id == job_id], known, joined)
            if lapsed:
                joined.execute(
                    update(proposal_answers)
                    .where(proposal_answers.c.job_id == job_id, proposal_answers.c.until > check_moment(at))
                    .values(until=at)
                )
            return lapsed

    def _say(self, about: Proposed, answer: str, held: Connection) -> None:
        _ADD.run(
            held,
            digest=about.digest,
            job_id=about.job_id,
            task_digest=about.task_digest,
            answer=answer,
            until=time_text(about.until),
            answered_at=time_text(about.at),
        )

    def _lapse(self, rounds: Sequence[_Open], known: _Known, connection: Connection) -> int:
        for one in rounds:
            self._ledger.void(one.reservation_id, NothingLeft(one.reservation_id, "lapsed"), connection=connection)
            del known.open[one.reservation_id]
        for digest in {one.digest for one in rounds}:
            self.told.give_back(digest, connection)
        return len(rounds)

    def _known(self, connection: Connection) -> _Known:
        """What is in memory, read where it may not be what the journal holds."""
        if self._memory is None or self._memory.undone != self._database.undone:
            found = {
                row.reservation_id: _Open(
                    **row._asdict() | {"amounts": json.loads(row.amounts), "until": time_of(row.until)}
                )
                for row in _OPEN.named(connection)
            }
            self._memory = _Known(self._database.undone, found)
        return self._memory
