"""The facts of a coordinator's or an agent's journal, at one moment, for an evidence document (labeler.evidence).

For a coordinator, charges, accounts and contributors come from the chain; jobs, answers and digests come from the
tables, which must agree with the chain or no document is made. Read again later, as of the same head and moment, a
journal gives the same facts. A job that ended after that moment is read as "under way" then, with what the chain said.

Only the entries of the chain cannot be changed unseen, so evidence begins with them. `read_chain` returns every charge
as of one head: whose it is, how much, for which job, and how it was settled.

An agent's document tells its people what the agent was charged for, when and at what price, and what it refused by its
policy or its ledger. The version of its shard, what a record has spent and what it answered are not read.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Literal

from sqlalchemy import Connection, exists, select

from labeler.errors import InvalidSetting, JournalBehind, JournalBroken, NotFound, TooLarge
from labeler.evidence.derive import contradictions, decimal
from labeler.evidence.document import (
    AccountCharge,
    AccountFacts,
    AgentRefusal,
    Job,
    Journal,
    JournalFacts,
    RoundFacts,
    Scope,
    TaskFacts,
)
from labeler.ledger.agent_memory import check_delta
from labeler.ledger.chain import Head, time_of, time_text
from labeler.ledger.ledger import WRITTEN_OFF, hash_at
from labeler.ledger.promises import SiteRefusal, refused_by_site
from labeler.ledger.rounds import FEDERATION, agent_account, job_of, proposed_id, reservation_id
from labeler.ledger.schema import (
    FINISHED,
    answered_rounds,
    answered_tasks,
    forgotten_jobs,
    job_answers,
    job_asked,
    jobs,
    ledger_entries,
    promised_rounds,
    proposal_answers,
    releases,
    round_refusals,
    rounds,
    site_refusals,
    task_approvals,
    tasks,
)
from labeler.ledger.verification import verify_ledger
from labeler.setting import LEVELS
from labeler.task import Level

_RELEASES_AT_ONCE = 16
MAX_JOBS = 20_000
"""Most jobs of one document: nobody can check a longer one on paper."""


@dataclass(frozen=True)
class EvidenceScope:
    """The scope of the evidence that is asked for.

    Attributes:
        task: digest of one task; empty for all.
        since, until: the period in which jobs were submitted, the end excluded; None if it is not bounded.

    Raises:
        InvalidSetting: a period that ends before it begins, or has no time zone.
    """

    task: str = ""
    since: datetime | None = None
    until: datetime | None = None

    def __post_init__(self) -> None:
        if any(moment is not None and moment.tzinfo is None for moment in (self.since, self.until)):
            raise InvalidSetting("the period of evidence begins and ends at times with a time zone, such as Z for UTC")
        if self.since is not None and self.until is not None and self.since >= self.until:
            raise InvalidSetting("the period of evidence ends before it begins")

    @classmethod
    def of(cls, scope: Scope) -> EvidenceScope:
        """Return the scope of an existing document."""
        since, until = (time_of(text) if text else None for text in (scope.since, scope.until))
        return cls(scope.task, since, until)

    def scope(self, party: str, party_id: str) -> Scope:
        """Return the scope as a document states it."""
        since, until = ("" if at is None else time_text(at) for at in (self.since, self.until))
        return Scope.model_validate(
            {"party": party, "party_id": party_id, "task": self.task, "since": since, "until": until}
        )

    def holds(self, at: datetime) -> bool:
        """Return whether a moment lies in the period."""
        return (self.since is None or at >= self.since) and (self.until is None or at < self.until)


def coordinator_facts(
    connection: Connection, wanted: EvidenceScope, *, delta: float, read_at: datetime, head: Head | None = None
) -> JournalFacts:
    """Return everything a document says of a coordinator's journal.

    Args:
        connection: one moment of the journal.
        delta: at which the accounts are stated; of the coordinator's settings.
        read_at: the time now, or the moment of the document that is checked.
        head: of the document that is checked; None for all there is.

    Raises:
        JournalBroken: the chain does not hold, or a table contradicts it.
        JournalBehind: see `read_chain`.
        NotFound: the task does not exist.
    """
    chain = read_chain(connection, read_at=read_at, head=head)
    moment = time_of(chain.journal.read_at)
    found: dict[str, list[Job]] = {wanted.task: []} if wanted.task else {}
    query = select(jobs).where(jobs.c.created_at <= moment).order_by(jobs.c.created_at, jobs.c.job_id)
    if wanted.task:
        query = query.where(jobs.c.task_digest == wanted.task)
    rows = [dict(row) for row in connection.execute(query).mappings() if wanted.holds(row["created_at"])]
    if len(rows) > MAX_JOBS:
        raise TooLarge(f"{len(rows):,} jobs lie in this scope, and evidence is made of {MAX_JOBS:,}: shorten it")
    tables = _Tables.read(connection, [row["job_id"] for row in rows])
    _check_all_there(chain, connection)
    for row in rows:
        found.setdefault(row["task_digest"], []).append(_job(row, chain, tables, moment))
    facts_of_tasks = tuple(_task(connection, digest, of) for digest, of in found.items())
    named = {FEDERATION, *(agent_account(one) for task in facts_of_tasks for one in task.participants)}
    facts = JournalFacts(
        scope=wanted.scope("coordinator", "coordinator"),
        journal=chain.journal,
        delta=decimal(delta),
        tasks=facts_of_tasks,
        accounts=tuple(one for one in chain.accounts if one.account in named),
    )
    return without_contradiction(facts)


def forgotten(connection: Connection, facts: JournalFacts) -> set[str]:
    """Return jobs of a document whose refusal texts have been deleted since, with what they had sent."""
    gone = set(connection.execute(select(forgotten_jobs.c.job_id)).scalars())
    return gone & {job.job_id for task in facts.tasks for job in task.jobs}


@dataclass(frozen=True)
class _Tables:
    """The rows that belong to the jobs of a document, by job."""

    rounds: Mapping[str, list[Mapping[str, Any]]]
    asked: Mapping[str, tuple[str, ...]]
    answers: Mapping[str, list[Mapping[str, Any]]]
    refusals: Mapping[tuple[str, int], list[Mapping[str, Any]]]
    releases: Mapping[tuple[str, int], str]

    @classmethod
    def read(cls, connection: Connection, job_ids: Collection[str]) -> _Tables:
        wanted = set(job_ids)

        def rows_of(table: Any, *order: Any) -> list[Mapping[str, Any]]:
            rows = connection.execute(select(table).order_by(*order)).mappings()
            return [dict(row) for row in rows if row["job_id"] in wanted]

        by_round: dict[str, list[Mapping[str, Any]]] = {}
        for row in rows_of(rounds, rounds.c.job_id, rounds.c.number):
            by_round.setdefault(row["job_id"], []).append(row)
        answers: dict[str, list[Mapping[str, Any]]] = {}
        for row in rows_of(job_answers, job_answers.c.job_id, job_answers.c.agent_id):
            answers.setdefault(row["job_id"], []).append(row)
        refusals: dict[tuple[str, int], list[Mapping[str, Any]]] = {}
        for row in rows_of(round_refusals, round_refusals.c.job_id, round_refusals.c.agent_id):
            refusals.setdefault((row["job_id"], row["number"]), []).append(row)
        asked = {row["job_id"]: tuple(row["agents"]) for row in rows_of(job_asked, job_asked.c.job_id)}
        opened = {}
        columns = select(releases.c.job_id, releases.c.number, releases.c.data)
        # A few at a time: all releases together may not fit in memory.
        for opening in connection.execute(columns, execution_options={"yield_per": _RELEASES_AT_ONCE}):
            if opening.job_id in wanted:
                opened[opening.job_id, opening.number] = hashlib.sha256(bytes(opening.data)).hexdigest()
        return cls(by_round, asked, answers, refusals, opened)


def _job(row: Mapping[str, Any], chain: Chain, tables: _Tables, moment: datetime) -> Job:
    job_id = row["job_id"]
    is_over = row["state"] in FINISHED and row["updated_at"] <= moment
    found = tuple(_round(one, row, chain, tables, is_over=is_over) for one in tables.rounds.get(job_id, ()))
    was_asked = any(one.charge != "none" for one in found)
    answers = tables.answers.get(job_id, ()) if is_over else ()
    return Job(
        job_id=job_id,
        state=row["state"] if is_over else "under way",
        problem=str((row["problem"] or {}).get("type", "")) if is_over else "",
        submitted_at=time_text(row["created_at"]),
        questions=row["num_queries"],
        asked=tables.asked.get(job_id, ()) if was_asked else (),
        refusals=tuple(
            AgentRefusal(agent=one["agent_id"], said=one["answer"], reason=one["reason"], sentence=one["sentence"])
            for one in answers
            if one["answer"] in ("declined", "later")
        ),
        rounds=found,
    )


def _round(
    row: Mapping[str, Any], job: Mapping[str, Any], chain: Chain, tables: _Tables, *, is_over: bool
) -> RoundFacts:
    key = (row["job_id"], row["number"])
    name = reservation_id(*key)
    charged = chain.reservations.get(name)
    if charged is not None:
        _check_reserved(name, charged, row, job)
    is_final = charged is not None and charged.state == "posted"
    return RoundFacts(
        number=row["number"],
        first_question=row["first_query"],
        questions=row["num_queries"],
        charge="none" if charged is None else charged.state,
        posted_entry=charged.settled_seq if charged is not None and is_final else None,
        posted_at=charged.settled_at if charged is not None and is_final else "",
        charges=() if charged is None else charged.charges,
        contributors=_contributors(name, charged, row) if charged is not None and is_final else (),
        refusals=tuple(
            AgentRefusal(agent=one["agent_id"], said="refused", sentence=one["sentence"])
            for one in (tables.refusals.get(key, ()) if is_over else ())
        ),
        round_digest=(row["round_digest"] or "") if is_final else "",
        release_digest=tables.releases.get(key, "") if is_over else "",
    )


def _contributors(name: str, charged: RecordedReservation, row: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the summed agents as the chain names them; none if a round was paid for and failed."""
    kept = tuple(row["contributors"] or ())
    if "because" in charged.settled:
        return ()
    if "contributors" in charged.settled and tuple(charged.settled["contributors"]) != kept:
        raise _broken(
            f"the table of rounds says that {name} was summed over other agents than the ledger's entry "
            f"{charged.settled_seq} has"
        )
    return kept


def _check_reserved(name: str, charged: RecordedReservation, row: Mapping[str, Any], job: Mapping[str, Any]) -> None:
    said = {"task": job["task_digest"], "queries": row["num_queries"], "job": row["job_id"]}
    for key, value in said.items():
        if key in charged.reserved and charged.reserved[key] != value:
            raise _broken(f"the ledger reserved {name} for another {key} than the table of rounds has")


def _check_all_there(chain: Chain, connection: Connection) -> None:
    """Refuse a journal whose tables lack a round that the chain was charged for."""
    known = {reservation_id(*row) for row in connection.execute(select(rounds.c.job_id, rounds.c.number))}
    for name, charged in chain.reservations.items():
        job = charged.reserved.get("job")
        is_a_round = isinstance(job, str) and job_of(name) == job and name != proposed_id(job)
        if is_a_round and name not in known:
            raise _broken(
                f"the ledger holds a charge for round {name}, and the table of rounds does not: a row was removed"
            )


def _task(connection: Connection, digest: str, of: list[Job]) -> TaskFacts:
    row = connection.execute(select(tasks).where(tasks.c.digest == digest)).first()
    if row is None:
        raise NotFound(f"there is no task {digest[:64]!r}; look at the list of tasks, and give the whole digest")
    return TaskFacts(
        digest=digest,
        task=json.loads(row.body),
        participants=tuple(row.participants),
        created_at=time_text(row.created_at),
        jobs=tuple(of),
    )


@dataclass
class RecordedReservation:
    """One reservation as the chain records it.

    Attributes:
        charges: by account and level.
        reserved: detail of its first entry.
        settled_seq, settled_at, settled: entry, time and detail of its settlement.
    """

    charges: tuple[AccountCharge, ...]
    reserved: Mapping[str, Any]
    state: Literal["reserved", "posted", "void"] = "reserved"
    settled_seq: int | None = None
    settled_at: str = ""
    settled: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Chain:
    """A verified chain, read up to one entry.

    Attributes:
        journal: the head it was read up to.
        reservations: by their ids, in order.
        accounts: the sums of their entries.
    """

    journal: Journal
    reservations: Mapping[str, RecordedReservation]
    accounts: tuple[AccountFacts, ...]


_Key = tuple[str, Level]


@dataclass
class _Sums:
    cap: int | None = None
    reserved: int = 0
    posted: int = 0


def read_chain(connection: Connection, *, read_at: datetime, head: Head | None = None) -> Chain:
    """Verify a ledger from its first entry to its last, and read it up to a head.

    Args:
        connection: one moment of the journal.
        read_at: the time now.
        head: the last entry to read; None for all there is.

    Raises:
        JournalBroken: the chain does not hold, or a balance is not what the entries add up to.
        JournalBehind: the journal ends before `head`, or has another entry there.
    """
    end = verify_ledger(connection)
    until = end if head is None else head
    if until.seq > end.seq or hash_at(connection, until.seq) != until.hash:
        raise JournalBehind(
            f"this journal does not hold entry {until.seq} as the evidence names it: it ends with entry {end.seq}, is "
            "an older copy, or is another party's. Compare with the journal that the evidence was made from"
        )
    reservations: dict[str, RecordedReservation] = {}
    accounts: dict[_Key, _Sums] = {}
    last_at = ""
    query = select(ledger_entries).where(ledger_entries.c.seq <= until.seq).order_by(ledger_entries.c.seq)
    for row in connection.execute(query).mappings():
        _take(dict(row), reservations, accounts)
        last_at = row["at"]
    journal = Journal(
        entries=until.seq, head=until.hash, read_at=max(time_text(read_at), last_at), last_entry_at=last_at
    )
    unpriced = _unpriced(reservations)
    forgetful = (one for name, one in reservations.items() if name.startswith(WRITTEN_OFF) and one.state != "void")
    written_off = {charge.account for one in forgetful for charge in one.charges}
    found = tuple(
        AccountFacts(
            account=name,
            level=level,
            cap_nano=sums.cap,
            reserved_nano=sums.reserved,
            posted_nano=sums.posted,
            is_unpriced=(name, level) in unpriced,
            is_written_off=name in written_off,
        )
        for (name, level), sums in sorted(accounts.items())
    )
    return Chain(journal, reservations, found)


def _unpriced(reservations: Mapping[str, RecordedReservation]) -> set[_Key]:
    """Return accounts that paid for something that names another level and not this one: see `Ledger.charged_without`.

    Nothing bounds what was released there, whatever the entries of this level add up to.
    """
    named: dict[tuple[str, str], set[Level]] = {}
    for name, charged in reservations.items():
        if charged.state != "void":
            what = WRITTEN_OFF if name.startswith(WRITTEN_OFF) else name
            for charge in charged.charges:
                named.setdefault((charge.account, what), set()).add(charge.level)
    return {(account, level) for (account, _), levels in named.items() for level in LEVELS if level not in levels}


def _take(row: Mapping[str, Any], reservations: dict[str, RecordedReservation], accounts: dict[_Key, _Sums]) -> None:
    detail = json.loads(row["detail"])
    sums = accounts.setdefault((row["account"], row["level"]), _Sums())
    if row["kind"] in ("open", "cap"):
        sums.cap = detail["cap"]
        return
    name = row["reservation_id"]
    if row["kind"] == "reserve":
        charge = AccountCharge(account=row["account"], level=row["level"], nano=row["amount"])
        known = reservations.setdefault(name, RecordedReservation((), detail))
        known.charges = (*known.charges, charge)
        sums.reserved += row["amount"]
        return
    if row["kind"] == "answer":
        return
    known = reservations[name]
    is_posted = row["kind"] == "post"
    if known.state == "reserved":
        known.state, known.settled = ("posted" if is_posted else "void"), detail
        known.settled_seq, known.settled_at = row["seq"], row["at"]
    sums.reserved -= row["amount"]
    sums.posted += row["amount"] * is_posted


def without_contradiction(facts: JournalFacts) -> JournalFacts:
    """Return the facts unchanged if none contradicts the chain or another fact.

    Raises:
        JournalBroken: there is a contradiction.
    """
    wrong = contradictions(facts)
    if wrong:
        raise _broken(f"the journal contradicts itself in {len(wrong)} places, the first: {wrong[0]}")
    return facts


def _broken(what: str) -> JournalBroken:
    return JournalBroken(
        f"{what}. No evidence is made of it; restore the newest backup, and find out who wrote to the journal"
    )


UNNAMED = "not known"
"""Job name of a round that was charged without a promise: an agent learns of jobs only from proposals."""


def agent_facts(
    connection: Connection,
    wanted: EvidenceScope,
    *,
    agent_id: str,
    delta: float,
    read_at: datetime,
    head: Head | None = None,
) -> JournalFacts:
    """Return everything a document says of an agent's journal; see `labeler.ledger.evidence.coordinator_facts`.

    Args:
        delta: of the site's policy.

    Raises:
        JournalBroken, JournalBehind: see there.
        PolicyRefusal: at that delta no bound on what was spent holds.
        NotFound: the task was never asked of this agent.
    """
    check_delta(connection, delta)
    chain = read_chain(connection, read_at=read_at, head=head)
    promised = _promised(connection)
    by_task: dict[str, dict[str, list[RoundFacts]]] = {wanted.task: {}} if wanted.task else {}
    query = select(answered_rounds).where(answered_rounds.c.ledger_seq <= chain.journal.entries)
    known = set()
    for row in connection.execute(query.order_by(answered_rounds.c.ledger_seq)).mappings():
        known.add(row["reservation_id"])
        found = _round_charged(dict(row), chain)
        if wanted.holds(time_of(found.posted_at)) and wanted.task in ("", row["task_digest"]):
            job = promised.get(row["reservation_id"], UNNAMED)
            by_task.setdefault(row["task_digest"], {}).setdefault(job, []).append(found)
    _check_none_forgotten(chain, known)
    declined = _declined(connection, wanted, chain)
    refused: dict[str, list[SiteRefusal]] = {}
    for no in reversed(refused_by_site(connection, until=time_of(chain.journal.read_at))):
        if wanted.holds(no.at) and wanted.task in ("", no.task_digest):
            refused.setdefault(no.task_digest, []).append(no)
    for digest in (*declined, *refused):
        by_task.setdefault(digest, {})
    facts = JournalFacts(
        scope=wanted.scope("agent", agent_id),
        journal=chain.journal,
        delta=decimal(delta),
        tasks=tuple(
            TaskFacts(
                digest=digest,
                task=_fields(connection, digest),
                jobs=(
                    *(_job_of_agent(job, agent_id, of) for job, of in jobs.items()),
                    *_refused(agent_id, declined.get(digest)),
                    *_refused_by_site(agent_id, refused.get(digest, ())),
                ),
            )
            for digest, jobs in by_task.items()
        ),
        accounts=chain.accounts,
    )
    if wanted.task and not facts.tasks[0].jobs:
        raise NotFound(f"task {wanted.task[:64]!r} was never asked of this agent; see `labeler agent tasks`")
    return without_contradiction(facts)


def _round_charged(row: Mapping[str, Any], chain: Chain) -> RoundFacts:
    charged = chain.reservations.get(row["reservation_id"])
    said = None if charged is None else charged.settled.get("round")
    if charged is None or charged.settled_seq != row["ledger_seq"] or said not in (None, row["round_digest"]):
        raise _broken(
            f"a round that this agent remembers is not the one that entry {row['ledger_seq']} of its ledger paid for"
        )
    return RoundFacts(
        number=0,
        first_question=None,
        questions=row["num_queries"],
        charge="posted",
        posted_entry=charged.settled_seq,
        posted_at=charged.settled_at,
        charges=charged.charges,
        round_digest=row["round_digest"],
    )


def _check_none_forgotten(chain: Chain, known: set[str]) -> None:
    """Refuse a journal that forgot a round which its ledger paid for."""
    paid = [
        name for name, charged in chain.reservations.items() if charged.state == "posted" and "round" in charged.settled
    ]
    missing = [name for name in paid if name not in known]
    if missing:
        raise _broken(
            f"the ledger paid for {len(missing)} rounds that this agent has forgotten, the first as {missing[0]!r}: "
            "a row was removed"
        )


def _job_of_agent(job_id: str, agent_id: str, rounds: list[RoundFacts]) -> Job:
    numbered = tuple(one.model_copy(update={"number": number}) for number, one in enumerate(rounds))
    return Job(
        job_id=job_id,
        state="not known",
        questions=sum(one.questions for one in numbered),
        asked=(agent_id,),
        rounds=numbered,
    )


def _refused(agent_id: str, job_ids: list[str] | None) -> tuple[Job, ...]:
    said = AgentRefusal(
        agent=agent_id, said="declined", reason="budget-exceeded", sentence="the budget did not cover it"
    )
    return tuple(Job(job_id=job, state="not known", questions=0, refusals=(said,)) for job in job_ids or ())


def _refused_by_site(agent_id: str, found: Iterable[SiteRefusal]) -> tuple[Job, ...]:
    return tuple(
        Job(
            job_id=one.job_id or UNNAMED,
            state="not known",
            submitted_at=time_text(one.at),
            questions=0,
            refusals=(
                AgentRefusal(
                    agent=agent_id,
                    said="declined" if one.job_id else "refused",
                    reason=one.reason,
                    sentence=one.sentence[:4_000],
                ),
            ),
        )
        for one in found
    )


def _promised(connection: Connection) -> dict[str, str]:
    """Return the job of each promised round."""
    query = select(promised_rounds.c.reservation_id, proposal_answers.c.job_id).join(
        proposal_answers, proposal_answers.c.digest == promised_rounds.c.digest
    )
    return {row.reservation_id: row.job_id for row in connection.execute(query)}


def _declined(connection: Connection, wanted: EvidenceScope, chain: Chain) -> dict[str, list[str]]:
    table = proposal_answers.c
    # Those whose words are kept are among the refusals of the site (`refused_by_site`).
    is_kept = exists().where(site_refusals.c.digest == table.digest)
    query = select(table.job_id, table.task_digest, table.answered_at).where(table.answer == "declined", ~is_kept)
    found: dict[str, list[str]] = {}
    for row in connection.execute(query.order_by(table.answered_at, table.job_id)):
        is_wanted = wanted.holds(row.answered_at) and wanted.task in ("", row.task_digest)
        if is_wanted and row.answered_at <= time_of(chain.journal.read_at):
            found.setdefault(row.task_digest, []).append(row.job_id)
    return found


def _fields(connection: Connection, digest: str) -> dict[str, Any] | None:
    """Return the task: as stored with its first charge, or as a person decided about it."""
    # A waiting task is forgotten after a week, and a document must not depend on when it is checked.
    decided = (task_approvals.c.digest == digest, task_approvals.c.state != "waiting")
    charged = select(answered_tasks.c.body).where(answered_tasks.c.digest == digest)
    body = connection.execute(charged).scalar()
    if body is None:
        body = connection.execute(select(task_approvals.c.body).where(*decided)).scalar()
    return None if body is None else dict(json.loads(body))
