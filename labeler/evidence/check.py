"""Whether a document is what its facts say, and what a journal says; and which field is not.

A signature tells that somebody changed a document, not what. So everything that follows from the facts is computed
again, and where a journal is at hand the facts are read from it again, as of the head that the document names. Every
field that differs is named by its place.
"""

from __future__ import annotations

from collections.abc import Iterator
from decimal import Decimal
from typing import Any, Final

from labeler.evidence.derive import SIGNIFICANT_DIGITS, derive, task_of
from labeler.evidence.document import Evidence, Facts, Job, Round, TaskFacts

MOST_DIFFERENCES: Final = 50

_BOUNDS: Final = frozenset(
    {
        "epsilon", "participant_epsilon", "spent_epsilon", "cap_epsilon",
        "proved_epsilon", "promised_epsilon", "proved_advantage", "promised_advantage",
    }
)  # fmt: skip
"""Computed with floating point: another machine may round the last digit up where this one does not."""


def contradictions(facts: Facts) -> list[str]:
    """What cannot all be true in some facts; empty where nothing is.

    The chain of hashes says who was charged for which round, and who was summed. Tables beside it must agree.
    """
    found: list[str] = []
    known = {task.digest for task in facts.tasks}
    found += [
        f"task {audit.task_digest[:12]}: was audited, and is none of this document's"
        for audit in facts.audits
        if audit.task_digest not in known
    ]
    for task in facts.tasks:
        named = f"task {task.digest[:12]}"
        if task.task is not None and task_of(task) is None:
            found.append(f"{named}: its fields do not have its digest")
        for job in task.jobs:
            found += [f"{named}, {line}" for line in _in_job(job, task, facts)]
    return found


def differences(found: Evidence, expected: Evidence) -> list[str]:
    """Every field of a document that is not what was expected, by its place; at most MOST_DIFFERENCES.

    A bound may differ by one in its last digit: another machine's arithmetic may round where this one does not.
    """
    told: list[str] = []
    pairs = _unequal(found.model_dump(mode="json"), expected.model_dump(mode="json"), "")
    for place, one, other in pairs:
        if len(told) == MOST_DIFFERENCES:
            told.append("and more")
            break
        told.append(f"{place} is {_short(one)}, and should be {_short(other)}")
    return told


def rebuilt(document: Evidence) -> Evidence:
    """The document that a document's own facts give."""
    return derive(document.facts, document.software)


def _in_job(job: Job, task: TaskFacts, facts: Facts) -> Iterator[str]:
    asked, participants = set(job.asked), set(task.participants)
    if participants and not asked <= participants:
        yield f"job {job.job_id}: asked agents that are none of the task's"
    if job.rounds and job.state == "completed" and any(one.charge != "posted" for one in job.rounds):
        yield f"job {job.job_id}: completed, and not every round was charged for good"
    if job.rounds and job.state != "not known" and sum(one.questions for one in job.rounds) != job.questions:
        yield f"job {job.job_id}: its rounds do not hold its {job.questions} questions"
    for one in job.rounds:
        for line in _in_round(one, asked, facts):
            yield f"job {job.job_id}, round {one.number}: {line}"


def _in_round(one: Round, asked: set[str], facts: Facts) -> Iterator[str]:
    if (one.charge == "posted") != (one.posted_entry is not None) or (one.charge == "posted") != bool(one.posted_at):
        yield "a charge is final by an entry of the ledger"
    if one.posted_entry is not None and not 1 <= one.posted_entry <= facts.journal.entries:
        yield f"entry {one.posted_entry} is none of the chain's {facts.journal.entries}"
    if (one.charge == "none") != (not one.charges):
        yield "a charge has amounts, and no other round has"
    if one.release_digest and one.charge != "posted":
        yield "something was released that nobody had paid for"
    charged = {charge.account.removeprefix("agent:") for charge in one.charges} - {"federation"}
    if facts.scope.party == "coordinator" and one.charges and asked and charged != asked:
        yield "other agents were charged than were asked"
    if not set(one.contributors) <= charged:
        yield "an agent was summed that was not charged"


def _unequal(found: Any, expected: Any, place: str) -> Iterator[tuple[str, Any, Any]]:
    if isinstance(found, dict) and isinstance(expected, dict):
        for name in sorted(found.keys() | expected.keys()):
            yield from _unequal(found.get(name), expected.get(name), f"{place}.{name}" if place else name)
    elif isinstance(found, list) and isinstance(expected, list):
        if len(found) != len(expected):
            yield f"{place} (number of items)", len(found), len(expected)
        for number, (one, other) in enumerate(zip(found, expected, strict=False)):
            yield from _unequal(one, other, f"{place}[{number}]")
    elif found != expected and not (_is_bound(place) and _is_near(found, expected)):
        yield place, found, expected


def _is_bound(place: str) -> bool:
    return place.rpartition(".")[2] in _BOUNDS


def _is_near(found: Any, expected: Any) -> bool:
    """Whether two texts of a bound differ by one in the last digit that is kept."""
    if not isinstance(found, str) or not isinstance(expected, str):
        return False
    one, other = Decimal(found), Decimal(expected)
    return abs(one - other) <= Decimal(1).scaleb(max(one.adjusted(), other.adjusted()) - SIGNIFICANT_DIGITS + 1)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:60]}... ({len(text)} characters)"
