"""An agent's answers to proposals: a yes with its price set aside, or a no because its budget does not cover it.

    proposal --keep--> willing, every round reserved  --take--> the round's reservation pays for its answer
                           |
                           +--release, withdraw--> what was not answered is given back ("lapsed").

A yes and its reservations are one transaction, so an agent that is asked again after a crash says the same. Only the
agent gives a reservation back, from its own journal: it is still reserved, so nothing was answered under it, and
nothing ever will be. Rounds of one task and size cost the same, so an answer takes the promise that ends first.

What a site refused by its policy or its ledger is kept for its people, too (`note_refusal`). Two more classes record
what the answers have told of the site's budgets (`ToldAmounts`), and what each requester has taken of them
(`RequesterShares`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Final, Literal

from sqlalchemy import Connection, Row, bindparam, func, literal_column, select, update

from labeler.budget import UNBOUNDED_NANO, NothingLeft
from labeler.errors import PolicyRefusal
from labeler.ledger.database import Database, insert_rows, select_rows, update_rows
from labeler.ledger.ledger import Charge, Ledger
from labeler.ledger.schema import (
    ledger_reservations,
    promised_rounds,
    proposal_answers,
    requester_sums,
    site_refusals,
    taken_by,
    told_amounts,
)
from labeler.task import Level

MOST: Final = 100
MOST_OF_ONE: Final = 10
DAY: Final = timedelta(days=1)


@dataclass(frozen=True)
class Proposed:
    """The proposal that an answer is about.

    Attributes:
        digest: of the proposal (labeler.messages.bodies).
        until: its deadline.
        at: time of the answer.
    """

    digest: str
    job_id: str
    task_digest: str
    until: datetime
    at: datetime


@dataclass(frozen=True)
class Said:
    """The answer to one proposal.

    Attributes:
        answer: "willing", or "declined" for lack of budget.
        until: end of a yes; earlier if the proposal was withdrawn.
    """

    answer: Literal["willing", "declined"]
    until: datetime


def promise_name(digest: str, number: int) -> str:
    """Return the ledger's name of a round's price that was set aside for a proposal."""
    return f"promise-{digest}/{number}"


class PromiseStore:
    """The answers to proposals and their reservations. Every writing method can join a transaction by `connection`.

    Attributes:
        told: what the answers have told of the site's budgets.
    """

    def __init__(self, database: Database, ledger: Ledger) -> None:
        self._database = database
        self._ledger = ledger
        self.told = ToldAmounts()

    def said(self, digest: str, *, connection: Connection | None = None) -> Said | None:
        """Return the answer to a proposal, or None."""
        with self._database.reading(connection) as joined:
            row = select_rows(joined, proposal_answers, digest=digest).first()
        return None if row is None else Said(row.answer, row.until)

    def keep(
        self,
        about: Proposed,
        rounds: Sequence[tuple[int, Mapping[Level, int]]],
        *,
        account: str,
        connection: Connection | None = None,
    ) -> None:
        """Answer yes: set the price of every round aside, all of them or none.

        Args:
            about: a proposal that has no answer yet.
            rounds: queries and price in nano-units of mu^2 per level, of each round.

        Raises:
            BudgetExceeded: the account does not cover all of them; nothing is set aside.
        """
        with self._database.writing(connection) as joined:
            self._say(about, "willing", joined)
            for number, (num_queries, amounts) in enumerate(rounds):
                name = promise_name(about.digest, number)
                charges = [Charge(account, level, amount) for level, amount in amounts.items()]
                self._ledger.reserve(name, charges, detail={"proposed": about.job_id}, connection=joined)
                row = {"reservation_id": name, "digest": about.digest, "task_digest": about.task_digest}
                insert_rows(joined, promised_rounds, row | {"num_queries": num_queries, "amounts": dict(amounts)})

    def decline(self, about: Proposed, *, connection: Connection | None = None) -> None:
        """Remember that the budget did not cover a proposal."""
        with self._database.writing(connection) as joined:
            if self.said(about.digest, connection=joined) is None:
                self._say(about, "declined", joined)

    def take(
        self, task_digest: str, num_queries: int, amounts: Mapping[Level, int], *, connection: Connection
    ) -> str | None:
        """Return the reservation that pays for a round of this task, size and price; None if none was promised.

        It is handed out once, in the transaction that posts it.
        """
        fitting = [
            (one.until, one.reservation_id)
            for one in _open(connection)
            if (one.task_digest, one.num_queries, one.amounts) == (task_digest, num_queries, dict(amounts))
        ]
        return min(fitting)[1] if fitting else None

    def open_queries(self, *, task_digest: str | None = None, connection: Connection | None = None) -> int:
        """Count queries, of all tasks or of one, that were promised, and neither answered nor given back."""
        with self._database.reading(connection) as joined:
            return sum(one.num_queries for one in _open(joined) if task_digest in (None, one.task_digest))

    def release(self, at: datetime) -> int:
        """Give back promises that have expired unanswered; return the number of rounds."""
        with self._database.read() as connection:
            if not any(one.until < at for one in _open(connection)):
                return 0
        with self._database.write() as connection:
            return self._lapse([one for one in _open(connection) if one.until < at], connection)

    def withdraw(self, job_id: str, at: datetime, *, connection: Connection | None = None) -> int:
        """Give back what was promised for a job that asks nothing more; return the number of rounds."""
        with self._database.writing(connection) as joined:
            lapsed = self._lapse([one for one in _open(joined) if one.job_id == job_id], joined)
            if lapsed:
                joined.execute(
                    update(proposal_answers)
                    .where(proposal_answers.c.job_id == job_id, proposal_answers.c.until > at)
                    .values(until=at)
                )
            return lapsed

    def _say(self, about: Proposed, answer: str, held: Connection) -> None:
        row = {"digest": about.digest, "job_id": about.job_id, "task_digest": about.task_digest, "answer": answer}
        insert_rows(held, proposal_answers, row | {"until": about.until, "answered_at": about.at})

    def _lapse(self, rounds: Sequence[Row[Any]], connection: Connection) -> int:
        for one in rounds:
            self._ledger.void(one.reservation_id, NothingLeft(one.reservation_id, "lapsed"), connection=connection)
        for digest in {one.digest for one in rounds}:
            self.told.give_back(digest, connection)
        return len(rounds)


def _open(connection: Connection) -> Sequence[Row[Any]]:
    """Return promised rounds that are still reserved, with the job and the deadline of each."""
    return connection.execute(_OPEN).all()


_OPEN = (
    select(promised_rounds, proposal_answers.c.job_id, proposal_answers.c.until)
    .join(proposal_answers, proposal_answers.c.digest == promised_rounds.c.digest)
    .join(ledger_reservations, ledger_reservations.c.reservation_id == promised_rounds.c.reservation_id)
    .where(ledger_reservations.c.state == literal_column("'reserved'"))  # as the index of few rows has it
    .order_by(promised_rounds.c.reservation_id)
)


@dataclass(frozen=True)
class Compared:
    """A bound of a site, and the amount that an answer would compare with it; nano-units.

    Attributes:
        scale: name of the bound.
        bound: secret.
        taken: the part of it that is charged or set aside now.
        amount: `taken` plus the price.
    """

    scale: str
    bound: int
    taken: int
    amount: int

    @property
    def is_covered(self) -> bool:
        """Return whether the bound allows it."""
        return self.amount <= self.bound

    def __repr__(self) -> str:
        return f"Compared({self.scale!r})"


class ToldAmounts:
    """A limit on what an agent's answers reveal of its budgets without a charge, against a search for what is left.

    A site's bounds are private: the cap of each account, and a requester's share of it. What was taken of them is not
    secret, since the coordinator keeps the same charges. So an answer to a proposal tells one thing of each bound. A
    yes tells that an amount (`taken` plus the price) is within it; a no, that it is beyond. Together the answers place
    a bound in an interval. It is at least `taken` and at least the largest amount that was covered. It is less than the
    smallest amount that was not.

    An answer about an amount outside the interval follows from earlier ones, whichever requester got those. It is given
    as often as it is asked for. An answer inside the interval is news, and is kept here. News is paid or free.

        for a price     a yes, while as much is taken: what is charged or set aside is known to be covered.
        for nothing     a no; and a yes whose price was given back, while less than its amount is taken.

    News for nothing is limited in 24 hours: `MOST_OF_ONE` for one name, and `MOST` in all, where each name counts at
    most `MOST_OF_ONE`. A proposal that would be news is refused once this number of amounts lies above what is taken
    now. A refusal follows from earlier answers and charges, never from the bound, so it tells nothing.

    **What is learned in a day.** One name learns at most `MOST_OF_ONE` times that an amount is beyond a bound. All
    names together learn it at most `MOST` times. Amounts known to be covered for nothing are limited in the same way
    while they lie above what is taken. A yes counts once its price is given back. So a requester with n prices set
    aside at once may learn that n amounts are covered, and then learns nothing new for a day after giving them back.
    These n are worth one amount: the largest implies the others.

    **Why honest requesters are not refused.** A job of price p is news only if `taken` + p is beyond everything that
    was covered. An amount told for nothing and above `taken` then lies within p of it. Jobs of one price give one
    such amount, however many are cancelled; other jobs give only amounts that differ by less than p. And no requester
    can close a site: covered amounts are covered for all, and one name counts as `MOST_OF_ONE` towards `MOST`.

    Every method joins a transaction.
    """

    def check(self, asked: Sequence[Compared], requester: str, at: datetime, connection: Connection) -> None:
        """Refuse an answer that would tell more for nothing than a day allows.

        Raises:
            PolicyRefusal: the day's limit is reached.
        """
        for one in asked:
            if not self._is_news(one, connection):
                continue
            above = {"of_scale": one.scale, "of_bound": one.bound, "taken": one.taken, "since": at - DAY}
            of_each = Counter(connection.execute(_FOR_NOTHING, above).scalars())
            own, everybody = of_each[requester], sum(min(MOST_OF_ONE, many) for many in of_each.values())
            if own >= MOST_OF_ONE or everybody >= MOST:
                whose, most = ("to one requester", MOST_OF_ONE) if own >= MOST_OF_ONE else ("to all", MOST)
                raise PolicyRefusal(
                    f"the site says {whose} at most {most} times in 24 hours for nothing what its budget covers: by "
                    "declining, or by a yes that leads to no round. Ask for less than was covered before, or tomorrow"
                )

    def note(
        self, digest: str, asked: Sequence[Compared], requester: str, at: datetime, connection: Connection
    ) -> None:
        """Record the new facts in an answer: all amounts of a yes; of a no, those up to the first bound that fails.

        Args:
            digest: of the answered proposal.
            asked: in the order in which they are checked.
        """
        is_yes = all(one.is_covered for one in asked)
        for one in asked:
            if self._is_news(one, connection):
                row = {"digest": digest, "scale": one.scale, "bound": one.bound, "amount": one.amount}
                row |= {"requester": requester, "told_at": at, "for_nothing": int(not is_yes)}
                insert_rows(connection, told_amounts, row)
            if not one.is_covered:
                return

    def give_back(self, digest: str, connection: Connection) -> None:
        """Count a yes as told for nothing, because its price was given back, in whole or in part."""
        update_rows(connection, told_amounts, {"for_nothing": 1}, digest=digest, for_nothing=0)

    def _is_news(self, one: Compared, connection: Connection) -> bool:
        of_bound = {"of_scale": one.scale, "of_bound": one.bound}
        covered = connection.execute(_COVERED, of_bound).scalar()
        beyond = connection.execute(_BEYOND, of_bound).scalar()
        return max(one.taken, covered or 0) < one.amount and (beyond is None or one.amount < beyond)


# Built once: building a statement costs several times as much as running it.
_told = told_amounts.c
_of_bound = (_told.scale == bindparam("of_scale"), _told.bound == bindparam("of_bound"))
_COVERED = select(func.max(_told.amount)).where(*_of_bound, _told.amount <= bindparam("of_bound"))
_FOR_NOTHING = select(_told.requester).where(
    *_of_bound, _told.amount > bindparam("taken"), _told.told_at >= bindparam("since"), _told.for_nothing == 1
)
_BEYOND = select(func.min(_told.amount)).where(*_of_bound, _told.amount > bindparam("of_bound"))


class RequesterShares:
    """The part of an agent's budget that each requester has taken: every price that was set aside or charged, by name.

        reserved, posted    counts for the requester it was set aside for
        void                given back, counts for nobody

    A name is the coordinator's word, and one requester may have several. So this divides a budget fairly among
    requesters only if the coordinator is honest about them. It protects no record: the caps of the accounts do that,
    whatever names are given. Jobs without a name share the empty one. Every method joins a transaction.
    """

    def note(
        self,
        requester: str,
        reservations: Sequence[tuple[str, Mapping[Level, int]]],
        *,
        life_nano: int,
        connection: Connection,
    ) -> None:
        """Record for whom prices were set aside or charged, in the same transaction.

        Args:
            reservations: the ledger's name of each, and its amounts in nano-units of mu^2.
            life_nano: the most that each takes of any record's votes for life.
        """
        rows: list[dict[str, Any]] = [
            {
                "reservation_id": name,
                "requester": requester,
                "instance_nano": amounts.get("instance", 0),
                "agent_nano": amounts.get("agent", 0),
                "life_nano": life_nano,
            }
            for name, amounts in reservations
        ]
        insert_rows(connection, taken_by, *rows)
        more = Counter[str]()
        for row in rows:
            # Prices without a finite value are counted only: a sum of many would exceed 64 bits.
            is_bounded = row["agent_nano"] < UNBOUNDED_NANO
            more.update({name: row[name] for name in ("instance_nano", "life_nano")})
            more.update({"agent_nano": row["agent_nano"] * is_bounded, "unbounded": int(not is_bounded)})
        known = select_rows(connection, requester_sums, requester=requester).first()
        if known is None:
            insert_rows(connection, requester_sums, {"requester": requester, **dict.fromkeys(_SUMS, 0), **more})
        else:
            sums = {name: more[name] + getattr(known, name) for name in _SUMS}
            update_rows(connection, requester_sums, sums, requester=requester)

    def requesters(self, *, connection: Connection) -> list[str]:
        """Return everybody for whom something was ever set aside."""
        return list(
            connection.execute(select(requester_sums.c.requester).order_by(requester_sums.c.requester)).scalars()
        )

    def taken(self, requester: str, *, connection: Connection) -> tuple[dict[Level, int], int]:
        """Return what a requester has taken at each level, and the most it has taken of any record's votes for life."""
        row = select_rows(connection, requester_sums, requester=requester).first()
        if row is None:
            return {"instance": 0, "agent": 0}, 0
        unbounded = UNBOUNDED_NANO if row.unbounded else 0
        return {"instance": row.instance_nano, "agent": row.agent_nano + unbounded}, row.life_nano


_SUMS = ("instance_nano", "agent_nano", "unbounded", "life_nano")


MAX_REFUSALS_PER_DAY: Final = 100
MAX_REFUSALS_OF_ONE: Final = 25
"""Most refusals that are kept in 24 hours, of all requesters and of one: nobody fills a site's disk, and one name
leaves room for what others were refused. Later ones are refused in the same words and not kept."""


@dataclass(frozen=True)
class SiteRefusal:
    """One request that the site refused by its policy or its ledger, without asking a person, as it was sent.

    Attributes:
        job_id, requester: as a proposal named them; empty for a round that was asked without one.
        name: of the task, by the requester.
        reason: `problem_type` of the error.
    """

    task_digest: str
    job_id: str
    name: str
    requester: str
    reason: str
    sentence: str
    at: datetime


def note_refusal(database: Database, no: SiteRefusal, digest: str, *, connection: Connection | None = None) -> None:
    """Remember that the site refused a request: once, however often it is asked, within the limits of a day.

    Nothing else is written, so a refusal charges nothing, sets nothing aside and changes no later answer.

    Args:
        digest: of the proposal, or of the round.
    """
    with database.reading(connection) as joined:
        if select_rows(joined, site_refusals, digest=digest).first() is not None:
            return
        today = Counter(joined.execute(_REFUSED_SINCE, {"since": no.at - DAY}).scalars())
    if today[no.requester] >= MAX_REFUSALS_OF_ONE or today.total() >= MAX_REFUSALS_PER_DAY:
        return
    row = {"digest": digest, "task_digest": no.task_digest, "job_id": no.job_id, "name": no.name}
    row |= {"requester": no.requester, "reason": no.reason, "sentence": no.sentence}
    with database.writing(connection) as joined:
        insert_rows(joined, site_refusals, row | {"refused_at": no.at})


_REFUSED_SINCE = select(site_refusals.c.requester).where(site_refusals.c.refused_at >= bindparam("since"))


def refused_by_site(
    connection: Connection, *, last: int | None = None, until: datetime | None = None
) -> list[SiteRefusal]:
    """Return what the site refused by its policy or its ledger, the last first.

    Args:
        last: most of them; None for all.
        until: none that came later.
    """
    no = site_refusals.c
    query = select(no.task_digest, no.job_id, no.name, no.requester, no.reason, no.sentence, no.refused_at)
    if until is not None:
        query = query.where(no.refused_at <= until)
    rows = connection.execute(query.order_by(no.refused_at.desc(), no.digest).limit(last))
    return [SiteRefusal(*row) for row in rows]
