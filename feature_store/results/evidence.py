"""An evidence document as a signed file, and as a page to print.

The file has the document's canonical bytes and an Ed25519 signature of the party that made it:

    {"evidence": {...}, "signature": "...", "verify_key": "...", "version": "labeler-signed-evidence/1"}

The file has one spelling, so equal documents are equal files. The key in it says with what the signature was checked,
not whose it is: a reader gives the party's key, or compares its fingerprint with the one it knows.

The page is A4, readable in black and white, loading nothing and running nothing. It is made from the document alone and
says nothing that the document does not say. The template holds the look and what is the same on every page; this module
prepares what it fills in. Jinja2 escapes every text: names come from other organizations."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any, Final

from jinja2 import Environment

from feature_store.results.page_templates import count, figure_card, page_templates
from labeler.budget import epsilon_left, epsilon_spent, spent_in_words
from labeler.errors import Forged, ProtocolViolation, TooLarge
from labeler.evidence.derive import UNITS
from labeler.evidence.document import (
    FORMAT,
    AccountFacts,
    Evidence,
    Guarantee,
    Job,
    Mechanism,
    TaskFacts,
    TaskFindings,
    canonical_bytes,
    parse_evidence,
)
from labeler.system.keys import PartyKeys, verify_statement
from labeler.untrusted import canonical_json, check_public_key, hex_bytes, read_object

VERSION = "labeler-signed-evidence/1"
MAX_BYTES = 256 * 1024 * 1024


@dataclass(frozen=True)
class SignedEvidence:
    """A document and who says to have made it.

    Attributes:
        signature: 128 hexadecimal digits.
        verify_key: of the party, by its own word.
    """

    evidence: Evidence
    signature: str
    verify_key: str

    def to_bytes(self) -> bytes:
        """The file."""
        content = {
            "version": VERSION,
            "evidence": self.evidence.model_dump(mode="json"),
            "signature": self.signature,
            "verify_key": self.verify_key,
        }
        return canonical_json(content) + b"\n"

    def check(self, verify_key: str | None = None) -> None:
        """Check the signature, with the key of the file or with one that the reader knows.

        Raises:
            Forged: it does not hold, or the file was signed with another key.
        """
        if verify_key is not None and verify_key != self.verify_key:
            raise Forged(
                "the evidence was signed with another key than the one given; it is another party's, or the party has "
                "changed its keys since"
            )
        verify_statement(_statement(self.evidence), self.signature, self.verify_key)


def sign_evidence(evidence: Evidence, keys: PartyKeys) -> SignedEvidence:
    """Sign a document with the keys of the party whose journal it was read from."""
    return SignedEvidence(evidence, keys.sign_statement(_statement(evidence)), keys.public.verify_key)


def read_signed(data: bytes) -> SignedEvidence:
    """A file, read strictly; nothing is checked yet.

    Raises:
        TooLarge: longer than MAX_BYTES.
        ProtocolViolation: it is no evidence of this version, or not in its one spelling.
    """
    if len(data) > MAX_BYTES:
        raise TooLarge(f"a file of evidence has at most {MAX_BYTES} bytes, found {len(data)}")
    content = read_object(data, "a file of evidence", fields=("evidence", "signature", "verify_key"), version=VERSION)
    signed = SignedEvidence(
        parse_evidence(canonical_json(content["evidence"])),
        hex_bytes(content["signature"], 64, "the signature of evidence").hex(),
        check_public_key(content["verify_key"], "the key of evidence"),
    )
    if signed.to_bytes() != data:
        raise ProtocolViolation(
            "the file is not in the one spelling that evidence has (keys sorted, no blanks, one line break at its "
            "end); it was written again by something else. Take it from where it was made"
        )
    return signed


def _statement(evidence: Evidence) -> bytes:
    return FORMAT.encode() + b"\n" + canonical_bytes(evidence)


@dataclass(frozen=True)
class _Value:
    """The value of a name: words, or a digest, a key or a module to be read letter by letter."""

    text: str
    is_code: bool = False


_Pairs = list[tuple[str, _Value]]


def render_page(document: Evidence, *, verify_key: str = "", signature: str = "") -> str:
    """The page."""
    facts = document.facts
    who = "the coordinator" if facts.scope.party == "coordinator" else f"agent {facts.scope.party_id}"
    signed = [("Signed with key", _Value(verify_key, True)), ("Signature", _Value(signature, True))]
    return (
        _templates()
        .get_template("evidence.html.j2")
        .render(
            who=who,
            headline=_headline(document),
            cards=_cards(document),
            made=_made(document, who),
            remarks=document.remarks,
            tasks=[_task(one, found) for one, found in zip(facts.tasks, document.tasks, strict=False)],
            audits=[
                one.model_dump() | {"unit": f"one {UNITS[one.level][0]}", "runs": f"{one.runs:,}"}
                for one in document.audits
            ],
            confidence=", ".join(sorted({one.confidence for one in document.audits})),
            accounts=_accounts(document),
            person=_in_person(document),
            delta=facts.delta,
            meaning=[(name.capitalize(), _Value(words)) for name, words in document.meaning],
            signed=signed if signature else [],
        )
    )


@cache
def _templates() -> Environment:
    return page_templates("feature_store", "results")


def _headline(document: Evidence) -> str:
    facts = document.facts
    if not facts.tasks:
        return "Nothing was asked of anybody in this period."
    if len(facts.tasks) > 1:
        asked = sum(one.cadence.questions_charged for one in document.tasks)
        return f"{len(facts.tasks):,} tasks, {asked:,} questions answered and paid for. Each task's guarantee is below."
    [found] = document.tasks
    stated = next((one for one in found.promised if one.unit == "image"), None)
    if stated is None:
        return "The task is known here by its digest alone; what was spent of it is stated, as it was charged."
    if stated.epsilon is None:
        return f"No bound is proved for one image: {stated.reason}."
    return (
        f"Everything that this task may ever release is differentially private for one image: epsilon at most "
        f"{stated.epsilon}, delta {stated.delta}."
    )


def _cards(document: Evidence) -> list[dict[str, str]]:
    """Cards of the promises of the one task, or of how much several hold."""
    asked = sum(one.cadence.questions_charged for one in document.tasks)
    rounds = sum(one.cadence.rounds_charged for one in document.tasks)
    paid = figure_card("questions paid for", f"{asked:,}", f"in {count(rounds, 'round')}")
    if len(document.tasks) != 1:
        tasks = figure_card("tasks", f"{len(document.tasks):,}", "each with a guarantee of its own")
        return [tasks, paid] if document.tasks else []
    [found] = document.tasks
    promised = [
        figure_card(
            f"epsilon, one {one.unit}",
            "no bound" if one.epsilon is None else one.epsilon,
            "of all that may ever be asked" if one.epsilon is not None else "the reason is below",
        )
        for one in found.promised
    ]
    cohort = found.cohort
    behind = _fewest_and_most(cohort.fewest_contributors, cohort.most_contributors)
    together = figure_card("agents behind an answer", behind, f"of {cohort.participants:,}")
    return [*promised, paid, *([together] if cohort.most_contributors else [])]


def _made(document: Evidence, who: str) -> _Pairs:
    journal = document.facts.journal
    read = (
        f"verified from entry {journal.first_entry} to entry {journal.entries:,}: chain, steps and balances; read "
        f"{_moment(journal.read_at)}"
    )
    scope = document.facts.scope
    return [
        ("Made by", _Value(who)),
        ("About", _Value(("one task" if scope.task else "all tasks") + _period(scope.since, scope.until))),
        *([("Digest of the task", _Value(scope.task, True))] if scope.task else []),
        ("Journal", _Value(read)),
        ("Head of the chain", _Value(journal.head, True)),
        ("Program", _Value(f"{document.software.name} {document.software.version}")),
    ]


def _period(since: str, until: str) -> str:
    if not since and not until:
        return ""
    return f", from {_moment(since) or 'the beginning'} until {_moment(until) or 'now'}"


def _task(facts: TaskFacts, found: TaskFindings) -> dict[str, Any]:
    stated = found.promised or found.spent
    neighbours = "; ".join(f"one {one.unit}: {one.neighbours}" for one in stated)
    reasons = sorted({one.reason for one in stated if one.reason})
    return {
        "name": "" if facts.task is None else str(facts.task["name"]),
        "digest": facts.digest,
        "guarantees": _guarantees(found),
        "notes": [f"With or without {neighbours}.", *(f"{reason[:1].upper()}{reason[1:]}." for reason in reasons)],
        "mechanism": [] if found.mechanism is None else _mechanism(found.mechanism),
        "cadence": _cadence(facts, found),
        "jobs": [_job(job) for job in facts.jobs],
    }


def _guarantees(found: TaskFindings) -> list[dict[str, str]]:
    spent = {one.unit: one for one in found.spent}
    promised = {one.unit: one for one in found.promised}
    return [
        {
            "unit": f"one {one.unit}",
            "promised": _epsilon(promised.get(one.unit)),
            "participant": one.participant_epsilon or "",
            "spent": _epsilon(spent[one.unit]) if one.unit in spent else "",
            "delta": one.delta,
        }
        for one in found.promised or found.spent
    ]


def _epsilon(one: Guarantee | None) -> str:
    if one is None:
        return "not kept here"
    return "no bound" if one.epsilon is None else one.epsilon


def _mechanism(mechanism: Mechanism) -> _Pairs:
    return [
        ("Method", _Value(f"{mechanism.system}: each agent contributes {mechanism.contribution}")),
        ("After", _Value(mechanism.source)),
        ("Noise", _Value(mechanism.noise)),
        (
            "Opened",
            _Value(f"{mechanism.release}, by {mechanism.talliers} talliers of whom each holds a secret share"),
        ),
        ("Proof of sensitivity", _Value(mechanism.proof, True)),
        ("Accountant", _Value(mechanism.accounting)),
        ("Colluding agents assumed", _Value(str(mechanism.colluding_agents))),
        ("Quorum", _Value(f"{mechanism.quorum:,} agents; with fewer nothing is opened")),
        ("Holds against", _Value(mechanism.holds_against.removeprefix("Holds against ").rstrip("."))),
    ]


def _cadence(facts: TaskFacts, found: TaskFindings) -> _Pairs:
    cadence, cohort = found.cadence, found.cohort
    asked = sorted({agent for job in facts.jobs for agent in job.asked})
    refused = ", ".join(f"{agent} ({times}×)" for agent, times in found.refused)
    often = f"{count(cadence.jobs, 'job')}; nothing was charged"
    if cadence.rounds_charged:
        often = (
            f"{count(cadence.jobs, 'job')}, {count(cadence.rounds_charged, 'round')} on "
            f"{count(cadence.days, 'day')}, at most {cadence.most_rounds_in_a_day:,} a day; "
            f"{_moment(cadence.first_at)} to {_moment(cadence.last_at)}"
        )
    together = "no round was summed"
    if cohort.most_contributors:
        together = f"{_fewest_and_most(cohort.fewest_contributors, cohort.most_contributors)} agents"
        together += " in every round" * (cohort.fewest_contributors == cohort.most_contributors)
    questions = f"{cadence.questions_charged:,} paid for; {cadence.questions_asked_again:,} numbers asked again"
    return [
        ("Agents of the task", _Value(", ".join(facts.participants) or NOT_TOLD)),
        ("Were asked", _Value(", ".join(asked) or "nobody")),
        ("Refused", _Value(refused or "nobody")),
        *([("Summed together", _Value(together))] if cohort.participants else []),
        ("How often", _Value(often)),
        ("Questions", _Value(questions)),
        ("Released", _Value(f"{count(cadence.releases, 'round')} opened, once each")),
    ]


def _fewest_and_most(fewest: int, most: int) -> str:
    return f"{fewest:,}" if fewest == most else f"{fewest:,} to {most:,}"


def _job(job: Job) -> dict[str, Any]:
    refusals = [*job.refusals, *(refusal for one in job.rounds for refusal in one.refusals)]
    posted = [one for one in job.rounds if one.charge == "posted"]
    last = f", last {_moment(posted[-1].posted_at)}" if posted else ""
    return {
        "job_id": job.job_id if job.job_id != UNNAMED else f"name of the job: {NOT_TOLD}",
        "submitted": _moment(job.submitted_at),
        "state": NOT_TOLD
        if job.state == "not known"
        else job.state
        if not job.problem
        else f"{job.state}: {job.problem.rpartition(':')[2]}",
        "questions": f"{job.questions:,}",
        "asked": f"{len(job.asked):,}",
        "charged": f"{len(posted):,} of {count(len(job.rounds), 'round')}{last}" if posted else "nothing",
        "refusals": [
            f"{one.agent} {one.said}{': ' * bool(one.sentence or one.reason)}{one.sentence or one.reason}"
            for one in refusals
        ],
    }


NOT_TOLD: Final = "the agent is not told"
"""What an agent's page says of how a job ended: an agent learns of its own rounds alone."""

UNNAMED: Final = "not known"


def _in_person(document: Evidence) -> str:
    """Return what one person cost over all tasks of the document, in a sentence; empty if the document has it not."""
    one = document.person
    if one is None:
        return ""
    if one.epsilon is None:
        return f"One patient at one agent, all jobs of this document together: no bound is proved, since {one.reason}."
    most = max((int((task.task or {}).get("records_per_person") or 0) for task in document.facts.tasks), default=0)
    many = f" with at most {count(most, 'voting image')}" if most else ""
    return (
        f"One patient{many} at one agent, all jobs of this document together: epsilon at most {one.epsilon}, delta "
        f"{one.delta}."
    )


def _accounts(document: Evidence) -> list[dict[str, str]]:
    delta = float(document.facts.delta)
    return [
        {
            "account": one.account,
            "unit": f"one {UNITS[one.level][0]}",
            "spent": _spent_in_words(one, delta),
            "cap": found.cap_epsilon or "only recorded, not limited",
        }
        for one, found in zip(document.facts.accounts, document.accounts, strict=True)
    ]


def _spent_in_words(one: AccountFacts, delta: float) -> str:
    nanos = (one.posted_nano, one.posted_nano + one.reserved_nano)
    posted, spent = (None if one.is_unpriced else epsilon_spent(nano, delta) for nano in nanos)
    left = None if one.cap_nano is None else epsilon_left(one.cap_nano - nanos[1], delta)
    return spent_in_words(posted, spent, left)


def _moment(text: str) -> str:
    """A time to the minute."""
    return f"{text[:10]} {text[11:16]} UTC" if text else ""
