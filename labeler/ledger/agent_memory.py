r"""The durable memory of an agent: the rounds it was charged for, for whom and of which task, and people's approvals.

A round is charged once and answered once. A repeated request gets the bytes that were stored then (`JournalRounds`),
whatever the records are by now. The same round for other talliers is refused permanently, since shares of one split
that went to different recipients could be combined. The charge and the memory of it are one transaction: an agent
cannot have answered what it did not pay for, nor pay for what it does not remember.

An agent keeps each round in one of three states.

    charged --> stored --> erased     charged: paid for, nothing has left; its key lies in the folder of erasable keys.
        \____________________^       stored:  the bodies of its messages, encrypted under that key.
                                      erased:  final; the key is gone, so every copy of what was stored is noise.

A round is opened in the transaction that charges it, after its key is durable. The key is drawn at random and says
nothing of any other. An answer is durable before a byte of it leaves, and is never replaced, so a repeated request
gets the stored one. It is erased once the coordinator says that every tallier has what it needs, and at the latest
when nobody may ask any more. `answered_rounds` keeps permanently that the round was charged.

"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import partial
from typing import Literal

from sqlalchemy import Connection, bindparam, delete, func, literal_column, select, update

from labeler.batching import check_queries
from labeler.budget import LEAST_DELTA_OF_WINNERS
from labeler.errors import (
    AwaitingApproval,
    InvalidSetting,
    JournalBroken,
    PolicyRefusal,
    PrivacyRefusal,
)
from labeler.ledger.backup import UnusedKeys
from labeler.ledger.chain import time_of, time_text
from labeler.ledger.database import Database, insert_rows, now_utc, select_rows, update_rows
from labeler.ledger.ledger import Charge, Ledger
from labeler.ledger.promises import SiteRefusal, note_refusal
from labeler.ledger.schema import (
    agent_rounds,
    answered_rounds,
    answered_sums,
    answered_tasks,
    asked_by,
    json_text,
    ledger_entries,
    ledger_reservations,
    promised_rounds,
    proposal_answers,
    task_approvals,
)
from labeler.methods import least_delta
from labeler.rounds.agent import ANSWERED_TO_OTHERS, NOT_KEPT, Recipients
from labeler.system.clock import Clock
from labeler.system.erasable import ErasableKeys, lock_away, take_out
from labeler.task import Task, parse_task

MAX_WAITING = 100
"""Most tasks that wait for a person, so that a coordinator's requests cannot fill a site's disk."""

WAITING_KEPT = timedelta(days=7)
"""How long a task waits. If it is still asked for afterwards, it waits again from the start."""

MAX_DECIDED = 500
"""Most decisions that are listed, the latest ones."""

_AT_ONCE = 500

MAX_NAMES = 20
"""Most requester names kept per task, so that what a coordinator says cannot fill a site's disk."""


@dataclass(frozen=True)
class Decided:
    """A task about which a person has decided.

    Attributes:
        state: "approved", or "revoked" if it was refused or an approval was withdrawn.
        requested_at, decided_at: when it was first asked for, and decided.
    """

    task: Task
    state: str
    requested_at: datetime
    decided_at: datetime


class AgentMemory:
    """The memory of one agent, in its own journal.

    Args:
        clock: the time now, with a time zone; for when approvals were given. Charges take the ledger's time.
    """

    def __init__(self, database: Database, ledger: Ledger, *, clock: Clock = now_utc) -> None:
        self._database = database
        self._ledger = ledger
        self._clock = clock

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

        A round that was charged before changes nothing, whatever the records are now. The rounds of one task hold at
        most `max_queries` queries together, so a person's approval and the task's price cover a fixed amount.

        Args:
            shard_version: of the records when the round was first charged; shown only to the site.
            reservation_id: names the charge in the ledger; pays for this round alone.
            charges: at least one.
            recipients: id and sealing key of each tallier that gets a share, in tallier order; kept permanently.
            is_promised: the reservation was made earlier, for a round of this price, and pays for this one.

        Returns:
            True if it was charged now, False if it had been before.

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
        with self._database.writing(connection) as joined:
            known = select_rows(joined, answered_rounds, round_digest=round_digest).first()
            if known is not None and known.recipients != sent_to:
                raise PrivacyRefusal(ANSWERED_TO_OTHERS)
            if known is not None:
                return False
            answered = self.queries_of(task_digest, connection=joined) + num_queries
            check_queries(answered, max_queries)
            if not is_promised and self._ledger.state(reservation_id, connection=joined) is not None:
                raise PrivacyRefusal(
                    f"reservation {reservation_id!r} has paid for something else, and pays for nothing more: one "
                    "charge is one round. Name the charge after the round"
                )
            self._ledger.reserve(reservation_id, charges, detail={"round": round_digest}, connection=joined)
            seq = self._ledger.post(reservation_id, detail={"round": round_digest}, connection=joined)
            row = {
                "round_digest": round_digest,
                "shard_version": shard_version,
                "reservation_id": reservation_id,
                "ledger_seq": seq,
                "num_queries": num_queries,
                "task_digest": task_digest,
                "recipients": sent_to,
            }
            insert_rows(joined, answered_rounds, row)
            queries = _sum_up_to(seq, joined) + num_queries
            sums = {"ledger_seq": seq, "task_digest": task_digest, "queries": queries, "of_task": answered}
            insert_rows(joined, answered_sums, sums)
        return True

    def paid_by(self, round_digest: str, *, connection: Connection | None = None) -> str | None:
        """Return the reservation that paid for a round that was answered, or None."""
        with self._database.reading(connection) as joined:
            found = select_rows(joined, answered_rounds, round_digest=round_digest).first()
        return None if found is None else str(found.reservation_id)

    def queries_of(self, task_digest: str, *, connection: Connection | None = None) -> int:
        """Return the number of queries of a task that were answered."""
        with self._database.reading(connection) as joined:
            return int(joined.execute(_SUM_OF_TASK, {"digest": task_digest}).scalar() or 0)

    def queries_since(self, moment: datetime, *, connection: Connection | None = None) -> int:
        """Count queries charged at or after a moment, by the ledger's time, which never runs backwards.

        A clock that is set back makes `moment` earlier and the count larger, so no daily limit starts twice.
        """
        with self._database.reading(connection) as joined:
            end, before = joined.execute(_LAST).scalar() or 0, time_text(moment)

            def at(seq: int) -> str:
                return str(joined.execute(_AT, {"seq": seq}).scalar_one())

            # Times only rise with the numbers of entries, so halving finds the last entry before a moment.
            last = bisect_left(range(1, end + 1), before, key=at)
            return _sum_up_to(end, joined) - _sum_up_to(last, joined)

    # Decisions of people at the site.

    def request(self, task: Task, at: datetime) -> None:
        """Ask for approval of a task. A task that already waits or was decided stays as it is.

        Raises:
            AwaitingApproval: the list of waiting tasks is full; those that nobody decides make room in a week.
        """
        with self._database.write() as joined:
            if self._approval(task.digest, joined) is not None:
                return
            is_waiting = task_approvals.c.state == "waiting"
            joined.execute(delete(task_approvals).where(is_waiting, task_approvals.c.requested_at < at - WAITING_KEPT))
            count = select(func.count()).select_from(task_approvals).where(is_waiting)
            if joined.execute(count).scalar_one() >= MAX_WAITING:
                raise AwaitingApproval(
                    f"{MAX_WAITING} tasks wait for a person at the site already, and no more are kept; it is asked "
                    "again by itself, and kept once some were approved, or were not for a week"
                )
            self._write_request(task, at, joined)

    def follow(self, task: Task, at: datetime, *, is_approved: bool) -> None:
        """Record a person's decision about a task, even if the task never waited; again, it changes nothing."""
        state = "approved" if is_approved else "revoked"
        with self._database.read() as joined:
            if self._approval(task.digest, joined) == state:
                return
        with self._database.write() as joined:
            if self._approval(task.digest, joined) is None:
                self._write_request(task, at, joined)
            update_rows(joined, task_approvals, {"state": state, "decided_at": self._clock()}, digest=task.digest)

    def decided(self) -> list[Decided]:
        """Return the tasks about which a person has decided, the last decision first."""
        is_decided = task_approvals.c.state != "waiting"
        query = select(task_approvals).where(is_decided).order_by(task_approvals.c.decided_at.desc())
        with self._database.read() as joined:
            rows = joined.execute(query.limit(MAX_DECIDED)).all()
        return [Decided(parse_task(json.loads(row.body)), row.state, row.requested_at, row.decided_at) for row in rows]

    def is_approved(self, digest: str) -> bool:
        """Return whether a person lets the agent answer a task."""
        with self._database.read() as joined:
            return self._approval(digest, joined) == "approved"

    def waiting(self) -> list[tuple[str, Task, datetime]]:
        """Return undecided tasks, oldest first: digest, task, and when it was first asked for."""
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
        body = json_text(task.model_dump(mode="json"))
        row = {"digest": task.digest, "body": body, "state": "waiting", "requested_at": at}
        insert_rows(connection, task_approvals, row)

    def _approval(self, digest: str, connection: Connection) -> str | None:
        found = select_rows(connection, task_approvals, digest=digest).first()
        return None if found is None else str(found.state)

    def note_refusal(self, no: SiteRefusal, digest: str, *, connection: Connection | None = None) -> None:
        """Remember that the site refused a request; see `labeler.ledger.promises.note_refusal`."""
        note_refusal(self._database, no, digest, connection=connection)

    # What people read: who asks, and what was answered.

    def note_requester(
        self, task_digest: str, requester: str, at: datetime, *, connection: Connection | None = None
    ) -> None:
        """Remember who asked for a task, unless the name is empty, already known, or above the limit.

        The names protect no record, because they are only the coordinator's word. What each requester has taken of the
        site's budget, which a policy may bound, is kept in labeler.ledger.promises.RequesterShares.
        """
        if not requester:
            return
        with self._database.reading(connection) as joined:
            known = {row.requester for row in select_rows(joined, asked_by, task_digest=task_digest)}
        if requester in known or len(known) >= MAX_NAMES:
            return
        with self._database.writing(connection) as joined:
            insert_rows(joined, asked_by, {"task_digest": task_digest, "requester": requester, "first_at": at})

    def requesters(self) -> dict[str, list[str]]:
        """Return the names by task, in the order in which they were heard."""
        found: dict[str, list[str]] = {}
        query = select(asked_by.c.task_digest, asked_by.c.requester).order_by(asked_by.c.first_at, asked_by.c.requester)
        with self._database.read() as joined:
            for digest, name in joined.execute(query):
                found.setdefault(digest, []).append(name)
        return found

    def note_task(self, task: Task, at: datetime, *, connection: Connection) -> None:
        """Record a task in the transaction that charges the first of its rounds.

        So the site can always say what it answered: name, classes and method. Its budget bounds the number of rows.
        """
        if select_rows(connection, answered_tasks, digest=task.digest).first() is None:
            body = json_text(task.model_dump(mode="json"))
            insert_rows(connection, answered_tasks, {"digest": task.digest, "body": body, "first_at": at})


# Built once: building a statement costs several times as much as running it.
_sums = answered_sums.c
_SUM = select(_sums.queries).where(_sums.ledger_seq <= bindparam("seq")).order_by(_sums.ledger_seq.desc()).limit(1)
_SUM_OF_TASK = (
    select(_sums.of_task)
    .where(_sums.task_digest == bindparam("digest"))
    .order_by(_sums.task_digest.desc(), _sums.ledger_seq.desc())
    .limit(1)
)
_LAST = select(func.max(ledger_entries.c.seq))
_AT = select(ledger_entries.c.at).where(ledger_entries.c.seq == bindparam("seq"))


def _sum_up_to(seq: int, connection: Connection) -> int:
    """Return the queries of all rounds that were charged by an entry of at most this number."""
    return int(connection.execute(_SUM, {"seq": seq}).scalar() or 0)


def check_delta(connection: Connection, delta: float) -> None:
    """Refuse a delta at which one of the charges bounds nothing.

    A task is stored with its first charge, in the same transaction. So the largest "least delta" of the tasks is
    stored with the account that paid.

    Args:
        delta: of the site's policy.

    Raises:
        PolicyRefusal: an answer was given whose bound holds only at a larger delta.
    """
    if delta >= LEAST_DELTA_OF_WINNERS:
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
class ChargedRound:
    """One round that was charged.

    Attributes:
        job_id: the coordinator's name of the job if it was proposed first; else empty.
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


def answered(database: Database, *, last: int | None = None) -> tuple[list[ChargedRound], dict[str, Task]]:
    """Return the rounds that were charged, oldest first, and their tasks by digest.

    Reads one moment of a journal that another process may write.

    Args:
        last: the number of rounds, counted from the newest; None for every round.
    """
    rounds, entries, paid = answered_rounds.c, ledger_entries.c, ledger_reservations.c
    newest = select(rounds.ledger_seq).order_by(rounds.ledger_seq.desc()).limit(last).subquery()
    query = (
        select(*rounds, entries.at, entries.level, entries.amount, proposal_answers.c.job_id)
        .join(ledger_reservations, paid.reservation_id == rounds.reservation_id)
        .join(ledger_entries, entries.seq.between(paid.settled_seq, paid.settled_seq + paid.charges - 1))
        .outerjoin(promised_rounds, promised_rounds.c.reservation_id == rounds.reservation_id)
        .outerjoin(proposal_answers, proposal_answers.c.digest == promised_rounds.c.digest)
        .where(rounds.ledger_seq >= select(func.coalesce(func.min(newest.c.ledger_seq), 0)).scalar_subquery())
        .order_by(rounds.ledger_seq, entries.seq)
    )
    found: dict[str, ChargedRound] = {}
    tasks: dict[str, Task] = {}
    with database.read() as connection:
        for row in connection.execute(query):
            one = found.get(row.round_digest)
            found[row.round_digest] = ChargedRound(
                row.round_digest,
                row.task_digest,
                row.job_id or "",
                time_of(row.at),
                row.num_queries,
                {**(one.charges if one else {}), row.level: row.amount},
                tuple(str(name) for name, _ in json.loads(row.recipients)),
            )
        named = sorted({one.task_digest for one in found.values()})
        for start in range(0, len(named), _AT_ONCE):
            for task in select_rows(connection, answered_tasks, digest=named[start : start + _AT_ONCE]):
                tasks[task.digest] = parse_task(json.loads(task.body))
    return list(found.values()), tasks


def answered_by_price(connection: Connection) -> list[tuple[Task | None, int, int]]:
    """Return how many rounds of a task and a size were ever charged, as (task, queries, rounds).

    The task is None where it is not kept (`labeler.batching.person_spent` adds these up).
    """
    paid = answered_rounds.c
    query = select(paid.task_digest, paid.num_queries, func.count().label("rounds"))
    rows = connection.execute(query.group_by(paid.task_digest, paid.num_queries)).all()
    kept = select(answered_tasks.c.digest, answered_tasks.c.body)
    tasks = {digest: parse_task(json.loads(body)) for digest, body in connection.execute(kept)}
    return [(tasks.get(row.task_digest), row.num_queries, row.rounds) for row in rows]


@dataclass(frozen=True, repr=False)
class KeptAnswer:
    """The stored state of one round at an agent. Its bodies are sealed but private all the same, so it does not print.

    Attributes:
        recipients: for whom it was charged.
        leaves_at: unix time in seconds before which the stored answer may not leave; 0 if it may leave now.
        held_s: seconds until then when it was stored, so that a clock that is set back does not prolong the wait.
    """

    stage: Literal["charged", "stored", "erased"]
    recipients: Recipients
    bodies: tuple[bytes, ...] | None
    leaves_at: float = 0.0
    held_s: float = 0.0

    def __repr__(self) -> str:
        return f"KeptAnswer({self.stage!r}, <private>)"


_LEAVES = b"leaves at "
"""Prefix of the part of a stored answer that says when it may leave; a sealed body begins with random bytes."""

_IS_KEPT = agent_rounds.c.state != literal_column("'erased'")  # as the index of few rows has it
_KEPT = (
    select(answered_rounds.c.recipients, agent_rounds.c.state, agent_rounds.c.answer)
    .outerjoin_from(answered_rounds, agent_rounds, agent_rounds.c.round_digest == answered_rounds.c.round_digest)
    .where(answered_rounds.c.round_digest == bindparam("digest"))
)


def _kept_rounds(connection: Connection) -> set[str]:
    return set(connection.execute(select(agent_rounds.c.round_digest).where(_IS_KEPT)).scalars())


class JournalRounds:
    """An agent's stored rounds: rows in its journal, keys outside of it (labeler.rounds.agent)."""

    def __init__(self, database: Database, keys: ErasableKeys) -> None:
        self._database = database
        self._keys = keys
        self._unused = UnusedKeys(database, keys, endings=("",), needed=_kept_rounds)

    def open(self, rounds: Mapping[str, datetime], *, connection: Connection) -> None:
        """Open rounds that are charged in the same transaction; their keys are durable when this returns.

        Args:
            rounds: digests of rounds whose price `AgentMemory.charge` has just taken. The value is the moment after
                which nobody may ask for the round and everything is erased.
            connection: the transaction of the charge.
        """
        self._keys.draw_all(rounds)
        rows = [{"round_digest": digest, "state": "charged", "kept_until": until} for digest, until in rounds.items()]
        insert_rows(connection, agent_rounds, *rows)

    def kept(self, round_digest: str) -> KeptAnswer | None:
        """Return what is stored of a round; None if it was never charged."""
        with self._database.read() as joined:
            row = joined.execute(_KEPT, {"digest": round_digest}).first()
        if row is None:
            return None
        recipients: Recipients = tuple((tallier, key) for tallier, key in json.loads(row.recipients))
        key = self._keys.read(round_digest)
        if key is None or row.state not in ("charged", "stored"):
            return KeptAnswer("erased", recipients, None)
        if row.answer is None:
            return KeptAnswer("charged", recipients, None)
        bodies = take_out(key, round_digest, bytes(row.answer))
        if not (bodies and bodies[0].startswith(_LEAVES)):
            return KeptAnswer("stored", recipients, bodies)
        leaves_at, held_s = map(float, bodies[0].removeprefix(_LEAVES).split())
        return KeptAnswer("stored", recipients, bodies[1:], leaves_at, held_s)

    def unanswered_for_life(self) -> list[str]:
        """Return the digests of rounds of votes for life that are charged and have no stored answer yet."""
        paid = answered_rounds.c
        query = (
            select(paid.round_digest, answered_tasks.c.body)
            .join(agent_rounds, agent_rounds.c.round_digest == paid.round_digest)
            .join(answered_tasks, answered_tasks.c.digest == paid.task_digest)
            .where(_IS_KEPT, agent_rounds.c.state == "charged")
            .order_by(paid.ledger_seq)
        )
        with self._database.read() as connection:
            found = connection.execute(query).all()
        return [row.round_digest for row in found if json.loads(row.body).get("lifetime_budget") is not None]

    def is_stored(self, round_digest: str) -> bool:
        """Return whether the answer to a round is durable."""
        kept = self.kept(round_digest)
        return kept is not None and kept.stage == "stored"

    def key_of_charged(self, round_digest: str) -> bytes:
        """Return the 32 secret bytes of a round for noise, masks and storage; they stay the same until they are erased.

        The caller must know that the round is charged: this does not look into the journal.

        Raises:
            PrivacyRefusal: they are erased.
        """
        key = self._keys.read(round_digest)
        if key is None:
            raise PrivacyRefusal(NOT_KEPT)
        return key

    def store_new(
        self,
        round_digest: str,
        bodies: Sequence[bytes],
        *,
        connection: Connection,
        leaves_at: float = 0.0,
        held_s: float = 0.0,
    ) -> bool:
        """Store an answer within the caller's transaction and return whether it was stored; the first one stays.

        Args:
            leaves_at, held_s: when it may leave, also after a restart; see KeptAnswer. 0 means at once.

        Raises:
            PrivacyRefusal: the round is erased, or was never charged.
        """
        key = self._keys.read(round_digest)
        if key is None:
            raise PrivacyRefusal(NOT_KEPT)
        moment = (_LEAVES + f"{leaves_at!r} {held_s!r}".encode(),) if leaves_at else ()
        locked = lock_away(key, round_digest, (*moment, *bodies))
        stored = {"state": "stored", "answer": locked}
        return update_rows(connection, agent_rounds, stored, round_digest=round_digest, state="charged") == 1

    def erase_in(self, rounds: Collection[str], *, connection: Connection) -> None:
        """Erase the rows of rounds in this transaction, and all their keys at once after it is durable.

        If the process dies in between, `sweep` finds the key of an erased round. If a key could not be overwritten,
        `tidy` erases it.
        """
        if rounds:
            these = (agent_rounds.c.round_digest.in_(rounds), _IS_KEPT)
            connection.execute(update(agent_rounds).where(*these).values(state="erased", answer=None))
            self._database.after_commit(partial(self._keys.erase_all, tuple(rounds)))

    def over(self, now: datetime) -> list[str]:
        """Return every round that is kept although nobody may ask for it any more."""
        is_over = select(agent_rounds.c.round_digest).where(_IS_KEPT, agent_rounds.c.kept_until < now)
        with self._database.read() as connection:
            return sorted(connection.execute(is_over).scalars())

    def sweep(self) -> None:
        """Erase every key that opens nothing, and close every round whose key is gone; done when a process starts.

        A key without a round was drawn for a charge that never became durable. A key of an erased round is left when a
        process dies while it erases.
        """
        with self._database.read() as connection:
            alive = _kept_rounds(connection)
        with self._database.write() as connection:
            self.erase_in(sorted(alive.difference(self._keys.names())), connection=connection)
        self._unused.erase()

    def tidy(self) -> None:
        """Erase unused keys, for example of charges that a full disk did not keep; see UnusedKeys."""
        self._unused.erase_what_was_undone()

    def __repr__(self) -> str:
        return "JournalRounds(<private>)"
