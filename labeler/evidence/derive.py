"""Conclusions from the facts of a journal: prices by the accountant, and counts. Equal facts give equal documents.

This module trusts no stated number that it can compute. The guarantee of a task comes from its fields. Spending is the
larger of two numbers: the ledger's charge, and today's price of a round of that size by the accountant.

The module also checks a document against its own facts and against a journal, and names the fields that differ.

A signature shows that a document was changed, but not where. So everything that follows from the facts is computed
again. If a journal is at hand, the facts are read from it again, as of the head that the document names. Every field
that differs is named by its place.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from decimal import ROUND_CEILING, ROUND_FLOOR, Decimal
from typing import Any, Final

from labeler.auditing import findings_of
from labeler.batching import person_spent, round_charges
from labeler.budget import UNBOUNDED_NANO, epsilon_spent
from labeler.errors import LabelerError
from labeler.evidence.document import (
    AccountFindings,
    AuditFinding,
    Cadence,
    Cohort,
    Evidence,
    Guarantee,
    Job,
    JournalFacts,
    Mechanism,
    RoundFacts,
    Software,
    TaskFacts,
    TaskFindings,
    Unit,
)
from labeler.methods import METHODS, contribution_in_words, proof_of, unit_in_words
from labeler.planning import METHOD, METHOD_OF_SAMPLES, Price, price
from labeler.setting import LEVELS
from labeler.task import Level, StatedLevel, Task, parse_task

SIGNIFICANT_DIGITS: Final = 6

UNITS: Final[dict[StatedLevel, tuple[Unit, str]]] = {
    "instance": ("image", "one record (one image) of one agent is added or removed"),
    "person": ("person", "all records of one person at one agent are added or removed; at two agents the two mus add"),
    "agent": ("agent", "everything that one agent contributes is replaced by nothing, its noise stays"),
}
"""The unit that people protect, for each level of the accountant."""

ACCOUNTING: Final = (
    f"{METHOD}: mu^2 adds up over rounds (Dong, Roth, Su 2022; fully adaptive: Smith, Thakurta 2022); derivation in "
    "labeler.accounting.integer and labeler.budget"
)

ACCOUNTING_OF_SAMPLES: Final = (
    f"{METHOD_OF_SAMPLES}: all steps of a task are one pair of mu^2 and a rest of at most 1e-28 of it, which add up; "
    "derivation in labeler.accounting.sampled and labeler.accounting.losses"
)

MEANING: Final = (
    (
        "refusals",
        "An agent refuses before any record is read, from the request, its policy, approvals, its own ledger and "
        "public facts of its shard. So that it refused, and its sentence, say nothing of a record. The words of "
        "refusals to a round that was asked are deleted with what the job sent; a document made before keeps them.",
    ),
    (
        "exports",
        "What left the agents' records are the releases of the rounds that were opened, once each. Labels, students, "
        "models and files in any format are made from these and from public images alone, at no further price; how "
        "often they were downloaded is not recorded and changes no guarantee.",
    ),
    (
        "repeats",
        "A question of a task is asked once. The same image may be asked about again as another question, and is paid "
        "for again as one.",
    ),
    (
        "chain",
        "Every charge, with its job, its accounts and the agents whose shares were summed, is an entry of a chain of "
        "hashes that was read from its first entry to the head named here; a journal that was cut, edited or replaced "
        "by an older copy gives no evidence. States of jobs, times of submission and the words of refusals lie in "
        "tables beside the chain: they agree with it, and rest on the party's word beyond that.",
    ),
    (
        "times",
        "Times are those of the journal's own clock, in UTC. Epsilon and delta are rounded up.",
    ),
)
"""Notes that every reader of a document of this format needs."""

AUDITED: Final = (
    "audits",
    "Attacks on the program that answers, by adversaries who know every other record and choose what the promise lets "
    "them choose; made-up and public records alone. What they proved is a lower bound at the stated confidence; that "
    "they were run, and what they counted, is in no journal and rests on the word of who signs.",
)

AGENT_ONLY: Final = (
    "agent",
    "This document is the agent's own: it was made from the agent's ledger, which is what the agent says of itself, "
    "and is shown to nobody else unless the agent hands it on. It names no record, no label, no count of records and "
    "no other agent.",
)


def derive(facts: JournalFacts, software: Software, *, states_persons: bool = True) -> Evidence:
    """Return the document of some facts.

    Args:
        states_persons: False for a document of a program that did not state what was spent of one person.
    """
    if not states_persons:
        accounts = tuple(one.model_copy(update={"is_written_off": False}) for one in facts.accounts)
        facts = facts.model_copy(update={"accounts": accounts})
    meaning = MEANING if facts.scope.party == "coordinator" else (*MEANING, AGENT_ONLY)
    meaning = (*meaning, AUDITED) if facts.audits else meaning
    audits = _audits(facts)
    count = sum(one.task is None for one in facts.tasks)
    unknown = [
        f"Of {count} of {len(facts.tasks)} tasks this journal keeps digest and charges only: they were declined. What "
        "they promised is not stated here; what was spent is, as charged."
    ]
    unknown = unknown if count else []
    return Evidence(
        software=software,
        facts=facts,
        tasks=tuple(_findings(one, float(facts.delta), states_persons=states_persons) for one in facts.tasks),
        accounts=tuple(
            AccountFindings(
                account=one.account,
                level=one.level,
                spent_epsilon=None
                if one.is_unpriced
                else bound(epsilon_spent(one.posted_nano + one.reserved_nano, float(facts.delta))),
                cap_epsilon=None if one.cap_nano is None else bound(epsilon_spent(one.cap_nano, float(facts.delta))),
            )
            for one in facts.accounts
        ),
        remarks=(
            *(
                f"Task {one.task[:12]}: an audit ({one.adversary}) proved more than is promised; what ran is not what "
                "was priced."
                for one in audits
                if one.is_above
            ),
            *unknown,
            *(remark for task in facts.tasks for remark in _remarks(task)),
        ),
        meaning=meaning,
        audits=audits,
        person=_person(facts) if states_persons else None,
    )


def bound(value: float | None) -> str | None:
    """Return a number as a decimal text not below it: six significant digits, rounded up; None for no bound."""
    if value is None or not math.isfinite(value):
        return None
    return _rounded(value, ROUND_CEILING)


def at_least(value: float) -> str:
    """Return a lower bound as a decimal text not above it: six significant digits, rounded down."""
    return _rounded(max(value, 0.0), ROUND_FLOOR)


def _rounded(value: float, rounding: str) -> str:
    exact = Decimal(value)
    if not exact:
        return "0"
    step = Decimal(1).scaleb(exact.adjusted() - SIGNIFICANT_DIGITS + 1)
    text = format(exact.quantize(step, rounding=rounding) if exact % step else exact, "f")
    return text.rstrip("0").rstrip(".") if "." in text else text


def _audits(facts: JournalFacts) -> tuple[AuditFinding, ...]:
    found = []
    for audit in facts.audits:
        follows = findings_of(audit)
        for attempt, one in zip(audit.attempts, follows.findings, strict=True):
            found.append(
                AuditFinding(
                    task=audit.task_digest,
                    adversary=attempt.adversary,
                    level=audit.level,
                    runs=1 if attempt.canaries else attempt.absent + attempt.present,
                    confidence=decimal(audit.confidence),
                    proved_epsilon=at_least(one.epsilon),
                    promised_epsilon=bound(follows.promised_epsilon) or "0",
                    proved_advantage=at_least(one.advantage_bound),
                    promised_advantage=bound(follows.promised_advantage) or "0",
                    is_above=one.is_above,
                )
            )
    return tuple(found)


def decimal(value: float) -> str:
    """Return a delta as all parties wrote it, in plain digits.

    The binary number that the accountant computes with may lie below it or above, by one part in 10^16 at most. An
    epsilon is enlarged by one part in 10^6 and a budget holds back one in 10^7 (labeler.accounting.integer, step 4;
    labeler.budget). Both outweigh that difference, so the statement holds for the decimal.
    """
    return format(Decimal(repr(value)), "f")


def task_of(facts: TaskFacts) -> Task | None:
    """Return the task if its fields are present and match its digest."""
    if facts.task is None:
        return None
    try:
        task = parse_task(facts.task)
    except LabelerError:
        return None
    return task if task.digest == facts.digest else None


def _charged_rounds(task: TaskFacts) -> list[RoundFacts]:
    """Return the rounds whose charge is final, in order of jobs."""
    return [one for job in task.jobs for one in job.rounds if one.charge == "posted"]


def spent_nano(task: Task | None, rounds: Iterable[RoundFacts], level: Level) -> int | None:
    """Return the cost of rounds at a level: per round the larger of its charge and its price; None without a bound.

    If the task is not known, only the charges count.
    """
    if task is not None and task.lifetime_budget is not None and level == "instance":
        # Each round is charged the minimum. The most that all may cost was set aside once, and equals the promise.
        return task.lifetime_budget.budget_nano if any(True for _ in rounds) else 0
    total = 0
    for one in rounds:
        is_charged = any(charge.level == level for charge in one.charges)
        price_now = (0 if is_charged else None) if task is None else _price_of(task, one).get(level)
        if price_now is None:
            return None
        total += max(price_now, _charged_nano(one, level))
    return None if total >= UNBOUNDED_NANO else total


def _price_of(task: Task, one: RoundFacts) -> dict[Level, int]:
    """Return a round's cost by today's accountant; the first step of a training pays for all."""
    return round_charges(task, one.questions, answered=one.first_question or 0)


def _charged_nano(one: RoundFacts, level: Level) -> int:
    """Return the largest charge of any account for a round, nano-units of mu^2."""
    return max((charge.nano for charge in one.charges if charge.level == level), default=0)


def _findings(facts: TaskFacts, delta: float, *, states_persons: bool) -> TaskFindings:
    task = task_of(facts)
    rounds = _charged_rounds(facts)
    stated = None if task is None else price(task)
    refused = Counter(
        refusal.agent
        for job in facts.jobs
        for refusal in (*job.refusals, *(r for one in job.rounds for r in one.refusals))
    )
    return TaskFindings(
        digest=facts.digest,
        mechanism=None if task is None or stated is None else _mechanism(task, stated),
        promised=()
        if task is None or stated is None
        else tuple(
            _guarantee(one.level, one.epsilon, task.delta, one.reason, participant=bound(one.participant_epsilon))
            for one in stated.stated
        ),
        spent=_spent(task, rounds, delta, states_persons=states_persons),
        cohort=_cohort(facts, rounds),
        cadence=_cadence(facts, rounds),
        refused=tuple(sorted(refused.items())),
    )


def _mechanism(task: Task, stated: Price) -> Mechanism:
    traits = METHODS[task.method]
    whose = "a share of each agent's" if task.noise_parties else "each agent's own"
    if task.dishonest_talliers is not None:
        whose = f"a share of each of the three talliers', of whom {task.dishonest_talliers} may be dishonest"
    proof, source = proof_of(task.method)
    return Mechanism(
        system=traits.system,
        source=source,
        contribution=contribution_in_words(task),
        release="the winning class of each question" if task.release == "winner" else f"the noisy sum of {traits.sums}",
        noise=(
            f"discrete Gaussian, {whose}; a standard deviation of {task.sigma_votes:.12g} {unit_in_words(task)} per "
            f"number that nobody can subtract, on a grid of {task.scale} units"
        ),
        proof=proof,
        accounting=ACCOUNTING if task.sampled is None else ACCOUNTING_OF_SAMPLES,
        colluding_agents=task.colluding_agents,
        talliers=task.talliers,
        quorum=task.quorum,
        holds_against=stated.holds_against,
    )


def _guarantee(
    level: StatedLevel, epsilon: float | None, delta: float, reason: str | None, *, participant: str | None = None
) -> Guarantee:
    unit, neighbours = UNITS[level]
    return Guarantee(
        unit=unit,
        neighbours=neighbours,
        epsilon=bound(epsilon),
        delta=decimal(delta),
        participant_epsilon=participant,
        reason=reason or "",
    )


def _person(facts: JournalFacts) -> Guarantee:
    """Return what all charged rounds of the document cost one person at one agent (`person_spent`).

    At a coordinator's, rounds that an agent was not asked for count for it, too.
    """
    rounds = ((task_of(task), one.questions, 1) for task in facts.tasks for one in _charged_rounds(task))
    spent = person_spent(rounds, is_complete=not any(one.is_written_off for one in facts.accounts))
    delta = float(facts.delta)
    return _guarantee("person", spent.epsilon(delta), delta, spent.reason)


def _spent(task: Task | None, rounds: list[RoundFacts], delta: float, *, states_persons: bool) -> tuple[Guarantee, ...]:
    delta = delta if task is None else task.delta
    found = []
    for level in LEVELS:
        nano = spent_nano(task, rounds, level)
        epsilon = None if nano is None else epsilon_spent(nano, delta)
        reason = "" if nano is not None else "no finite price can be proved at this level; charges were only recorded"
        found.append(_guarantee(level, epsilon, delta, reason))
    if states_persons and task is not None and task.records_per_person is not None:
        person = person_spent((task, one.questions, 1) for one in rounds)
        found.insert(1, _guarantee("person", person.epsilon(delta), delta, person.reason))
    return tuple(found)


def _cohort(facts: TaskFacts, rounds: list[RoundFacts]) -> Cohort:
    asked = [len(job.asked) for job in facts.jobs if job.asked]
    summed = [len(one.contributors) for one in rounds if one.contributors]
    return Cohort(
        participants=len(facts.participants),
        fewest_asked=min(asked, default=0),
        fewest_contributors=min(summed, default=0),
        most_contributors=max(summed, default=0),
    )


def _cadence(facts: TaskFacts, rounds: list[RoundFacts]) -> Cadence:
    times = sorted(one.posted_at for one in rounds)
    days = Counter(at[:10] for at in times)
    return Cadence(
        jobs=len(facts.jobs),
        jobs_completed=sum(job.state == "completed" for job in facts.jobs),
        rounds_charged=len(rounds),
        questions_charged=sum(one.questions for one in rounds),
        first_at=times[0] if times else "",
        last_at=times[-1] if times else "",
        days=len(days),
        most_rounds_in_a_day=max(days.values(), default=0),
        questions_asked_again=_asked_again(rounds),
        releases=sum(bool(one.release_digest) for one in rounds),
    )


def _asked_again(rounds: list[RoundFacts]) -> int:
    """Return how many question numbers lie in more than one of these rounds."""
    ranges = sorted((one.first_question, one.questions) for one in rounds if one.first_question is not None)
    again, end = 0, 0
    for first, count in ranges:
        again += max(0, min(end, first + count) - first)
        end = max(end, first + count)
    return again


def _remarks(facts: TaskFacts) -> list[str]:
    task, named = task_of(facts), facts.digest[:12]
    if task is None:
        return [] if facts.task is None else [f"The fields of task {named} are not those of its digest."]
    remarks = []
    rounds = _charged_rounds(facts)
    for level in LEVELS:
        price_of = {(one.questions, not one.first_question): _price_of(task, one).get(level, 0) for one in rounds}
        below = sum(0 < _charged_nano(one, level) < price_of[one.questions, not one.first_question] for one in rounds)
        if below:
            remarks.append(
                f"Task {named}: {below} of {len(rounds)} rounds were charged less at the {UNITS[level][0]} level than "
                "they cost by today's accountant; what was spent is stated by today's."
            )
    if again := _asked_again(rounds):
        remarks.append(f"Task {named}: {again} question numbers were charged more than once.")
    few = [one for one in rounds if one.contributors and len(one.contributors) < task.quorum]
    if few:
        remarks.append(f"Task {named}: {len(few)} rounds were summed over fewer agents than the quorum {task.quorum}.")
    return remarks


def software(version: str) -> Software:
    """Return the description of this program."""
    return Software(name="private-labeler", version=version)


MOST_DIFFERENCES: Final = 50

_BOUNDS: Final = frozenset(
    {
        "epsilon", "participant_epsilon", "spent_epsilon", "cap_epsilon",
        "proved_epsilon", "promised_epsilon", "proved_advantage", "promised_advantage",
    }
)  # fmt: skip
"""Fields computed with floating point: another machine may round the last digit up if this one does not."""


def contradictions(facts: JournalFacts) -> list[str]:
    """Return contradictions between some facts; empty if there are none.

    The chain of hashes says which accounts were charged for a round, and which agents were summed. The tables must
    agree.
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
    """Return every field of a document that differs from the expected one, by its place; at most MOST_DIFFERENCES.

    A bound may differ by one in its last digit: another machine's arithmetic may round differently.
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
    """Return the document that a document's own facts give."""
    return derive(document.facts, document.software, states_persons=document.person is not None)


def _in_job(job: Job, task: TaskFacts, facts: JournalFacts) -> Iterator[str]:
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


def _in_round(one: RoundFacts, asked: set[str], facts: JournalFacts) -> Iterator[str]:
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
    elif found != expected and not (place.rpartition(".")[2] in _BOUNDS and _is_near(found, expected)):
        yield place, found, expected


def _is_near(found: Any, expected: Any) -> bool:
    """Return whether two texts of a bound differ by one in the last digit that is kept."""
    if not isinstance(found, str) or not isinstance(expected, str):
        return False
    one, other = Decimal(found), Decimal(expected)
    return abs(one - other) <= Decimal(1).scaleb(max(one.adjusted(), other.adjusted()) - SIGNIFICANT_DIGITS + 1)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:60]}... ({len(text)} characters)"
