"""The facts of an agent's own journal for an evidence document (labeler.evidence), for that agent's people.

It says what the agent was charged for, when and at what price, and what it declined for want of budget. The version of
its shard, what a record has spent and what it answered are not read.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime
from typing import Any

from sqlalchemy import Connection, select

from labeler.errors import JournalBroken, NotFound
from labeler.evidence.derive import decimal
from labeler.evidence.document import Facts, Job, Refusal, Round, TaskFacts
from labeler.ledger.agent_memory import check_delta
from labeler.ledger.chain import Head, time_of
from labeler.ledger.evidence import Chain, Wanted, read_chain, without_contradiction
from labeler.ledger.schema import (
    answered_rounds,
    answered_tasks,
    promised_rounds,
    proposal_answers,
    task_approvals,
)

UNNAMED = "not known"
"""The job of a round that was charged without a promise: an agent is told of rounds, and of jobs by proposals alone."""


def agent_facts(
    connection: Connection, wanted: Wanted, *, agent_id: str, delta: float, read_at: datetime, head: Head | None = None
) -> Facts:
    """Everything a document says of an agent's journal; see `labeler.ledger.evidence.coordinator_facts`.

    Args:
        delta: of the site's policy.

    Raises:
        JournalBroken, JournalBehind: see there.
        PolicyRefusal: at that delta nothing can be said of what was spent.
        NotFound: the task was never asked of this agent.
    """
    check_delta(connection, delta)
    chain = read_chain(connection, read_at=read_at, head=head)
    promised = _promised(connection)
    by_task: dict[str, dict[str, list[Round]]] = {wanted.task: {}} if wanted.task else {}
    query = select(answered_rounds).where(answered_rounds.c.ledger_seq <= chain.journal.entries)
    known = set()
    for row in connection.execute(query.order_by(answered_rounds.c.ledger_seq)).mappings():
        known.add(row["reservation_id"])
        found = _round(dict(row), chain)
        if wanted.holds(time_of(found.posted_at)) and wanted.task in ("", row["task_digest"]):
            job = promised.get(row["reservation_id"], UNNAMED)
            by_task.setdefault(row["task_digest"], {}).setdefault(job, []).append(found)
    _check_all_there(chain, known)
    declined = _declined(connection, wanted, chain)
    for digest in declined:
        by_task.setdefault(digest, {})
    facts = Facts(
        scope=wanted.scope("agent", agent_id),
        journal=chain.journal,
        delta=decimal(delta),
        tasks=tuple(
            TaskFacts(
                digest=digest,
                task=_fields(connection, digest),
                jobs=(
                    *(_job(job, agent_id, of) for job, of in jobs.items()),
                    *_refused(agent_id, declined.get(digest)),
                ),
            )
            for digest, jobs in by_task.items()
        ),
        accounts=chain.accounts,
    )
    if wanted.task and not facts.tasks[0].jobs:
        raise NotFound(f"task {wanted.task[:64]!r} was never asked of this agent; see `labeler agent tasks`")
    return without_contradiction(facts)


def _round(row: Mapping[str, Any], chain: Chain) -> Round:
    charged = chain.reservations.get(row["reservation_id"])
    said = None if charged is None else charged.settled.get("round")
    if charged is None or charged.settled_seq != row["ledger_seq"] or said not in (None, row["round_digest"]):
        raise JournalBroken(
            f"a round that this agent remembers is not the one that entry {row['ledger_seq']} of its ledger paid for. "
            "No evidence is made of it; restore the newest backup, and find out who wrote to the journal"
        )
    return Round(
        number=0,
        first_question=None,
        questions=row["num_queries"],
        charge="posted",
        posted_entry=charged.settled_seq,
        posted_at=charged.settled_at,
        charges=charged.charges,
        round_digest=row["round_digest"],
    )


def _check_all_there(chain: Chain, known: set[str]) -> None:
    """Refuse a journal that forgot a round which its ledger paid for."""
    paid = [
        name for name, charged in chain.reservations.items() if charged.state == "posted" and "round" in charged.settled
    ]
    missing = [name for name in paid if name not in known]
    if missing:
        raise JournalBroken(
            f"the ledger paid for {len(missing)} rounds that this agent has forgotten, the first as {missing[0]!r}: "
            "a row was removed. Restore the newest backup, and find out who wrote to the journal"
        )


def _job(job_id: str, agent_id: str, rounds: list[Round]) -> Job:
    numbered = tuple(one.model_copy(update={"number": number}) for number, one in enumerate(rounds))
    return Job(
        job_id=job_id,
        state="not known",
        questions=sum(one.questions for one in numbered),
        asked=(agent_id,),
        rounds=numbered,
    )


def _refused(agent_id: str, job_ids: list[str] | None) -> tuple[Job, ...]:
    said = Refusal(agent=agent_id, said="declined", reason="budget-exceeded", sentence="the budget did not cover it")
    return tuple(Job(job_id=job, state="not known", questions=0, refusals=(said,)) for job in job_ids or ())


def _promised(connection: Connection) -> dict[str, str]:
    """The job of each promised round."""
    query = select(promised_rounds.c.reservation_id, proposal_answers.c.job_id).join(
        proposal_answers, proposal_answers.c.digest == promised_rounds.c.digest
    )
    return {row.reservation_id: row.job_id for row in connection.execute(query)}


def _declined(connection: Connection, wanted: Wanted, chain: Chain) -> dict[str, list[str]]:
    table = proposal_answers.c
    query = select(table.job_id, table.task_digest, table.answered_at).where(table.answer == "declined")
    found: dict[str, list[str]] = {}
    for row in connection.execute(query.order_by(table.answered_at, table.job_id)):
        is_wanted = wanted.holds(row.answered_at) and wanted.task in ("", row.task_digest)
        if is_wanted and row.answered_at <= time_of(chain.journal.read_at):
            found.setdefault(row.task_digest, []).append(row.job_id)
    return found


def _fields(connection: Connection, digest: str) -> dict[str, Any] | None:
    """The task: as it was written down with its first charge, or as a person decided about it."""
    # One that waits is forgotten after a week, and a document must not depend on when it is checked.
    decided = (task_approvals.c.digest == digest, task_approvals.c.state != "waiting")
    charged = select(answered_tasks.c.body).where(answered_tasks.c.digest == digest)
    body = connection.execute(charged).scalar()
    if body is None:
        body = connection.execute(select(task_approvals.c.body).where(*decided)).scalar()
    return None if body is None else dict(json.loads(body))
