"""What an agent has said to proposals: a yes with its price set aside, or that its budget does not cover it.

    proposal --keep--> willing, every round reserved  --take--> the round's reservation pays for its answer
                           |
                           +--release, withdraw--> what was not answered is given back ("lapsed")

A yes and its reservations are one transaction, so asked again after a crash the agent says the same. A reservation is
given back by the agent alone, from its own journal: it is still reserved, so nothing was answered under it, and from
then on nothing will be. Rounds of one task and size cost the same, so an answer takes the promise that ends first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal

from sqlalchemy import CheckConstraint, Column, Connection, ForeignKey, Table, Text, func, insert, select, update

from feature_store.journal.charges import Charge
from feature_store.journal.columns import WHOLE, Json, Moment, check_moment, one_of
from feature_store.journal.database import Database, metadata
from feature_store.journal.joining import reading, writing
from feature_store.journal.ledger import Ledger
from feature_store.journal.ledger_tables import LEDGER_TABLES, ledger_reservations
from feature_store.journal.rules import remain, stay
from labeler.budget import NothingLeft
from labeler.task import Level

proposal_answers = Table(
    "proposal_answers",
    metadata,
    Column("digest", Text, primary_key=True),
    Column("job_id", Text, nullable=False),
    Column("task_digest", Text, nullable=False),
    Column("answer", Text, nullable=False),
    Column("until", Moment, nullable=False),
    Column("answered_at", Moment, nullable=False),
    CheckConstraint(one_of("answer", ("willing", "declined")), name="answer"),
    sqlite_strict=True,
)
stay(proposal_answers, ("digest", "job_id", "task_digest", "answer", "answered_at"))
remain(proposal_answers)

promised_rounds = Table(
    "promised_rounds",
    metadata,
    Column("reservation_id", Text, primary_key=True),
    Column("digest", Text, ForeignKey("proposal_answers.digest"), nullable=False),
    Column("task_digest", Text, nullable=False),
    Column("num_queries", WHOLE, nullable=False),
    Column("amounts", Json, nullable=False),
    CheckConstraint("num_queries >= 1", name="queries"),
    sqlite_strict=True,
)
stay(promised_rounds, ("reservation_id", "digest", "task_digest", "num_queries", "amounts"))
remain(promised_rounds)


@dataclass(frozen=True)
class Proposed:
    """What an answer is about.

    Attributes:
        digest: of the proposal (labeler.proposals).
        job_id, task_digest: of it.
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


class PromiseStore:
    """See the module. Every method that writes can join a transaction by `connection`.

    Args:
        database: the agent's journal.
        ledger: of the same journal.
    """

    def __init__(self, database: Database, ledger: Ledger) -> None:
        self._database = database
        self._ledger = ledger
        database.create(*LEDGER_TABLES, proposal_answers, promised_rounds)

    def said(self, digest: str, *, connection: Connection | None = None) -> Said | None:
        """What was said to a proposal, or None."""
        query = select(proposal_answers.c.answer, proposal_answers.c.until).where(proposal_answers.c.digest == digest)
        with reading(self._database, connection) as joined:
            row = joined.execute(query).first()
        return None if row is None else Said(row.answer, row.until)

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
            account: of the agent.
            connection: write transaction to join.

        Raises:
            BudgetExceeded: the account does not cover all of them; nothing is set aside.
        """
        with writing(self._database, connection) as joined:
            self._say(about, "willing", joined)
            for number, (num_queries, amounts) in enumerate(rounds):
                name = f"promise-{about.digest}/{number}"
                charges = [Charge(account, level, amount) for level, amount in amounts.items()]
                self._ledger.reserve(name, charges, detail={"proposed": about.job_id}, connection=joined)
                joined.execute(
                    insert(promised_rounds),
                    {
                        "reservation_id": name,
                        "digest": about.digest,
                        "task_digest": about.task_digest,
                        "num_queries": num_queries,
                        "amounts": dict(amounts),
                    },
                )

    def decline(self, about: Proposed) -> None:
        """Remember that the budget did not cover a proposal."""
        with self._database.write() as connection:
            if self.said(about.digest, connection=connection) is None:
                self._say(about, "declined", connection)

    def take(
        self, task_digest: str, num_queries: int, amounts: Mapping[Level, int], *, connection: Connection
    ) -> str | None:
        """The reservation that pays for a round of this task, size and price; None where none was promised."""
        found = connection.execute(
            self._open()
            .where(promised_rounds.c.task_digest == task_digest, promised_rounds.c.num_queries == num_queries)
            .order_by(proposal_answers.c.until, promised_rounds.c.reservation_id)
        )
        return next((row.reservation_id for row in found if row.amounts == dict(amounts)), None)

    def open_queries(self, *, connection: Connection | None = None) -> int:
        """Queries that were promised, and neither answered nor given back."""
        with reading(self._database, connection) as joined:
            return sum(row.num_queries for row in joined.execute(self._open()))

    def release(self, at: datetime) -> int:
        """Give back what was promised until before now and not answered; how many rounds that were."""
        late = proposal_answers.c.until < check_moment(at)
        with self._database.read() as connection:
            if connection.execute(self._open().where(late)).first() is None:
                return 0
        with self._database.write() as connection:
            return self._lapse(self._open().where(late), connection)

    def withdraw(self, job_id: str, at: datetime) -> int:
        """Give back what was promised for a job of which nothing more is asked; how many rounds that were."""
        with self._database.write() as connection:
            lapsed = self._lapse(self._open().where(proposal_answers.c.job_id == job_id), connection)
            if lapsed:
                connection.execute(
                    update(proposal_answers)
                    .where(proposal_answers.c.job_id == job_id, proposal_answers.c.until > check_moment(at))
                    .values(until=at)
                )
            return lapsed

    def unused_since(self, moment: datetime, *, connection: Connection | None = None) -> int:
        """How many proposals since then told something about the budget for nothing: declined, or never asked about."""
        given_back = (
            select(promised_rounds.c.digest)
            .join(ledger_reservations, ledger_reservations.c.reservation_id == promised_rounds.c.reservation_id)
            .where(ledger_reservations.c.state == "void")
        )
        table = proposal_answers
        query = select(func.count()).where(
            table.c.answered_at >= check_moment(moment),
            (table.c.answer == "declined") | table.c.digest.in_(given_back),
        )
        with reading(self._database, connection) as joined:
            return int(joined.execute(query).scalar_one())

    def _say(self, about: Proposed, answer: str, held: Connection) -> None:
        held.execute(
            insert(proposal_answers),
            {
                "digest": about.digest,
                "job_id": about.job_id,
                "task_digest": about.task_digest,
                "answer": answer,
                "until": check_moment(about.until),
                "answered_at": check_moment(about.at),
            },
        )

    def _open(self) -> Any:
        """Promised rounds whose reservation still stands."""
        return (
            select(promised_rounds.c.reservation_id, promised_rounds.c.num_queries, promised_rounds.c.amounts)
            .join(proposal_answers, proposal_answers.c.digest == promised_rounds.c.digest)
            .join(ledger_reservations, ledger_reservations.c.reservation_id == promised_rounds.c.reservation_id)
            .where(ledger_reservations.c.state == "reserved")
        )

    def _lapse(self, query: Any, connection: Connection) -> int:
        names = [row.reservation_id for row in connection.execute(query)]
        for name in names:
            self._ledger.void(name, NothingLeft(name, "lapsed"), connection=connection)
        return len(names)
