"""What an agent must not forget: which rounds it was charged for, for whom, and what people approved.

A round is charged once and answered once; what is sent again are the bytes that were stored then
(`feature_store.journal.agent_rounds`), so it does not matter here what the records are by now. The same round for other
talliers is refused for ever, since shares of one split that went to other hands could be put together. The charge and
the memory of it are one transaction: an agent cannot have answered what it did not pay for, nor pay for what it does
not remember.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from sqlalchemy import (
    CheckConstraint,
    Column,
    Connection,
    ForeignKey,
    Text,
    UniqueConstraint,
    delete,
    func,
    insert,
    select,
    update,
)

from feature_store.clock import Clock
from feature_store.journal.charges import Charge
from feature_store.journal.columns import WHOLE, Moment, check_moment, json_text, now_utc, one_of
from feature_store.journal.database import Database, strict_table
from feature_store.journal.day_count import DayCount
from feature_store.journal.joining import reading, writing
from feature_store.journal.ledger import Ledger
from feature_store.journal.ledger_tables import LEDGER_TABLES
from feature_store.journal.prepared import Prepared
from feature_store.journal.rules import forbid, keep, stay
from labeler.errors import AwaitingApproval, InvalidSetting, JournalBroken, NotFound, PrivacyRefusal
from labeler.rounds.agent import ANSWERED_TO_OTHERS
from labeler.task import Task, parse_task

MAX_WAITING = 100
"""Most tasks that wait for a person: what a coordinator asks must not fill a site's disk."""

WAITING_KEPT = timedelta(days=7)
"""How long a task waits; one that is still asked for after it waits anew."""

MAX_DECIDED = 500
"""Most decisions that are listed, the last ones."""

answered_rounds = strict_table(
    "answered_rounds",
    Column("round_digest", Text, primary_key=True),
    Column("shard_version", Text, nullable=False),
    Column("reservation_id", Text, nullable=False),
    Column("ledger_seq", WHOLE, ForeignKey("ledger_entries.seq"), nullable=False),
    Column("num_queries", WHOLE, nullable=False),
    Column("task_digest", Text, nullable=False),
    Column("recipients", Text, nullable=False),
    UniqueConstraint("reservation_id"),
    UniqueConstraint("ledger_seq"),
    CheckConstraint("num_queries >= 1", name="queries"),
)
keep(answered_rounds)
forbid(
    answered_rounds,
    "paid",
    on="INSERT",
    when="NOT EXISTS (SELECT 1 FROM ledger_entries WHERE ledger_entries.seq = NEW.ledger_seq "
    "AND ledger_entries.kind = 'post' AND ledger_entries.reservation_id = NEW.reservation_id)",
    because="an answer is paid for by an entry of the ledger",
)

task_approvals = strict_table(
    "task_approvals",
    Column("digest", Text, primary_key=True),
    Column("body", Text, nullable=False),
    Column("state", Text, nullable=False),
    Column("requested_at", Moment, nullable=False),
    Column("decided_at", Moment, nullable=True),
    CheckConstraint(one_of("state", ("waiting", "approved", "revoked")), name="state"),
    CheckConstraint("(state = 'waiting') = (decided_at IS NULL)", name="decided"),
)
stay(task_approvals, ("digest", "body", "requested_at"))


@dataclass(frozen=True)
class Decided:
    """A task about which a person has decided.

    Attributes:
        state: "approved", or "revoked" where it was refused or an approval taken back.
        requested_at, decided_at: when it was first asked for, and decided.
    """

    task: Task
    state: str
    requested_at: datetime
    decided_at: datetime


_KNOWN = Prepared("SELECT reservation_id, recipients FROM answered_rounds WHERE round_digest = :digest")
_ANSWERED = Prepared(insert(answered_rounds))
_APPROVED = Prepared("SELECT state FROM task_approvals WHERE digest = :digest")


class AgentMemory:
    """The memory of one agent, in its own journal.

    Args:
        clock: the time now, with a time zone; for when approvals were given. Charges take the ledger's time.
    """

    def __init__(self, database: Database, ledger: Ledger, *, clock: Clock = now_utc) -> None:
        self._database = database
        self._ledger = ledger
        self._clock = clock
        database.create(*LEDGER_TABLES, answered_rounds, task_approvals)
        self._counts = DayCount(database, answered_rounds)

    def charge(
        self,
        *,
        round_digest: str,
        shard_version: str,
        reservation_id: str,
        charges: Sequence[Charge],
        num_queries: int,
        task_digest: str,
        max_queries: int,
        recipients: Sequence[tuple[str, str]],
        is_promised: bool = False,
        connection: Connection | None = None,
    ) -> bool:
        """Pay for the answer to a round and remember it, durably, before anything is computed.

        A round that was charged before changes nothing, whatever the records are now. The
        rounds of one task hold at most `max_queries` queries together, so that what a person approved, and what the
        task's price covers, is an amount.

        Args:
            shard_version: of the records when the round was first charged; for the site's own eyes.
            reservation_id: names the charge in the ledger; pays for this round alone.
            charges: at least one.
            recipients: id and sealing key of each tallier that gets a share, in tallier order; kept for ever.
            is_promised: the reservation was made before, for a round of this price, and pays for this one.

        Returns:
            True where it was charged now, False where it had been before.

        Raises:
            PrivacyRefusal: the round was charged for other recipients, the task has too few queries left, or the
                reservation paid for something else.
            BudgetExceeded: an account has too little left; nothing was charged.
            InvalidSetting, NotFound, ProtocolViolation: see Ledger.reserve.
        """
        if type(num_queries) is not int or num_queries < 1:
            raise InvalidSetting("a round has at least 1 query")
        if not all(isinstance(value, str) and value for value in (round_digest, shard_version)):
            raise InvalidSetting("a round and the version of the records are named by texts that are not empty")
        sent_to = json_text([list(recipient) for recipient in recipients])
        with writing(self._database, connection) as joined:
            known = _KNOWN.first(joined, digest=round_digest)
            if known is not None and known[1] != sent_to:
                raise PrivacyRefusal(ANSWERED_TO_OTHERS)
            if known is not None:
                return False
            answered = self._counts.of_task(task_digest, joined) + num_queries
            if answered > max_queries:
                raise PrivacyRefusal(
                    f"the task has {max_queries} queries, and with this round {answered} of it would be answered; ask "
                    "in a new task"
                )
            if not is_promised and self._ledger.state(reservation_id, connection=joined) is not None:
                raise PrivacyRefusal(
                    f"reservation {reservation_id!r} has paid for something else, and pays for nothing more: one "
                    "charge is one round. Name the charge after the round"
                )
            self._ledger.reserve(reservation_id, charges, detail={"round": round_digest}, connection=joined)
            seq = self._ledger.post(reservation_id, detail={"round": round_digest}, connection=joined)
            _ANSWERED.run(
                joined,
                round_digest=round_digest,
                shard_version=shard_version,
                reservation_id=reservation_id,
                ledger_seq=seq,
                num_queries=num_queries,
                task_digest=task_digest,
                recipients=sent_to,
            )
            self._counts.add(task_digest, self._ledger.last_at(connection=joined), num_queries)
        return True

    def is_charged(self, round_digest: str) -> bool:
        """Whether the price of a round was ever taken."""
        return self.paid_by(round_digest) is not None

    def paid_by(self, round_digest: str, *, connection: Connection | None = None) -> str | None:
        """The reservation that paid for a round that was answered, or None."""
        with reading(self._database, connection) as joined:
            found = _KNOWN.first(joined, digest=round_digest)
        return None if found is None else str(found[0])

    def queries_of(self, task_digest: str, *, connection: Connection | None = None) -> int:
        """How many queries of a task were answered."""
        with reading(self._database, connection) as joined:
            return self._counts.of_task(task_digest, joined)

    def queries_since(self, moment: datetime, *, connection: Connection | None = None) -> int:
        """How many queries were charged at or after a moment, by the ledger's time, which never runs backwards.

        A clock that is set back makes `moment` earlier and the count larger: no day begins twice.
        """
        with reading(self._database, connection) as joined:
            return self._counts.since(moment, joined)

    # What a person at the site has to say.

    def request(self, task: Task, at: datetime, *, connection: Connection | None = None) -> None:
        """Ask for approval of a task; one that was asked for before, or decided, stays as it is.

        Raises:
            AwaitingApproval: so many tasks wait that no more are kept; those that nobody decides make room in a week.
        """
        with writing(self._database, connection) as joined:
            if self._approval(task.digest, joined) is not None:
                return
            is_waiting = task_approvals.c.state == "waiting"
            joined.execute(
                delete(task_approvals).where(
                    is_waiting, task_approvals.c.requested_at < check_moment(at) - WAITING_KEPT
                )
            )
            count = select(func.count()).select_from(task_approvals).where(is_waiting)
            if joined.execute(count).scalar_one() >= MAX_WAITING:
                raise AwaitingApproval(
                    f"{MAX_WAITING} tasks wait for a person at the site already, and no more are kept; it is asked "
                    "again by itself, and kept once some were approved, or were not for a week"
                )
            self._write_request(task, at, joined)

    def follow(self, task: Task, at: datetime, *, is_approved: bool, connection: Connection | None = None) -> None:
        """Write down what a person has decided about a task, also where it was never seen to wait."""
        with writing(self._database, connection) as joined:
            if self._approval(task.digest, joined) is None:
                self._write_request(task, at, joined)
            self._decide(task.digest, "approved" if is_approved else "revoked", joined)

    def decide_against(self, task: Task, at: datetime, *, connection: Connection | None = None) -> None:
        """Write down that a person has refused a task, where the journal does not say so yet."""
        with reading(self._database, connection) as joined:
            if self._approval(task.digest, joined) == "revoked":
                return
        self.follow(task, at, is_approved=False, connection=connection)

    def decided(self) -> list[Decided]:
        """Tasks about which a person has decided, the last decision first."""
        is_decided = task_approvals.c.state != "waiting"
        query = select(task_approvals).where(is_decided).order_by(task_approvals.c.decided_at.desc())
        with self._database.read() as joined:
            rows = joined.execute(query.limit(MAX_DECIDED)).all()
        return [Decided(parse_task(json.loads(row.body)), row.state, row.requested_at, row.decided_at) for row in rows]

    def approve(self, digest: str) -> None:
        """Let the agent answer a task.

        Raises:
            NotFound: nobody asked for it; a person approves what was shown.
        """
        self._decide(digest, "approved", None)

    def revoke_approval(self, digest: str) -> None:
        """Let the agent answer nothing more of a task, until it is approved again.

        Raises:
            NotFound: nobody asked for it.
        """
        self._decide(digest, "revoked", None)

    def is_approved(self, digest: str) -> bool:
        """Whether a person lets the agent answer a task."""
        with self._database.read() as joined:
            return self._approval(digest, joined) == "approved"

    def waiting(self) -> list[tuple[str, Task, datetime]]:
        """What still has to be decided, oldest first: digest, task, and when it was first asked for."""
        query = (
            select(task_approvals)
            .where(task_approvals.c.state == "waiting")
            .order_by(task_approvals.c.requested_at, task_approvals.c.digest)
        )
        with self._database.read() as joined:
            rows = joined.execute(query).all()
        found = [(row.digest, parse_task(json.loads(row.body)), row.requested_at) for row in rows]
        if any(task.digest != digest for digest, task, _ in found):
            raise JournalBroken("a task that waits for approval is not the one that was asked for; restore a backup")
        return found

    def _write_request(self, task: Task, at: datetime, connection: Connection) -> None:
        connection.execute(
            insert(task_approvals),
            {
                "digest": task.digest,
                "body": json_text(task.model_dump(mode="json")),
                "state": "waiting",
                "requested_at": check_moment(at),
            },
        )

    def _approval(self, digest: str, connection: Connection) -> str | None:
        found = _APPROVED.first(connection, digest=digest)
        return None if found is None else str(found[0])

    def _decide(self, digest: str, state: str, connection: Connection | None) -> None:
        with writing(self._database, connection) as joined:
            known = self._approval(digest, joined)
            if known is None:
                raise NotFound(f"no task {digest[:64]!r} waits for approval; look at the list of those that do")
            if known != state:
                joined.execute(
                    update(task_approvals)
                    .where(task_approvals.c.digest == digest)
                    .values(state=state, decided_at=check_moment(self._clock()))
                )
