"""Evidence from the journal of a home, and a check that a document agrees with a journal (labeler.evidence).

Making and checking only read; the process that owns the home may run.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from datetime import datetime
from importlib.metadata import version
from pathlib import Path

from feature_store.results.evidence import SignedEvidence, sign_evidence
from labeler.auditing import AuditFacts
from labeler.errors import Forged, InvalidSetting, LabelerError
from labeler.evidence.derive import contradictions, derive, differences, rebuilt, software
from labeler.evidence.document import JournalFacts
from labeler.ledger.chain import Head, time_of
from labeler.ledger.database import Connection, open_database
from labeler.ledger.evidence import EvidenceScope, agent_facts, coordinator_facts, forgotten
from labeler.ledger.ledger import Ledger
from labeler.system.clock import now_utc
from labeler.system.keys import PartyKeys
from workers.agent.policy import read_policy
from workers.homes.new import existing_journal
from workers.party.home import AGENT_FILE, ANCHOR_FILE, COORDINATOR_FILE, KEYS_FILE, POLICY_FILE, read_agent_config

PROGRAM = "private-labeler"


@dataclass(frozen=True)
class Checked:
    """The result of checking a document.

    Attributes:
        wrong: what does not hold, each in a sentence; empty where everything does.
        confirmed: what was checked and holds.
    """

    wrong: tuple[str, ...]
    confirmed: tuple[str, ...]


def make_evidence(home: Path, wanted: EvidenceScope, audits: Sequence[AuditFacts] = ()) -> SignedEvidence:
    """Verify the journal of a coordinator's or an agent's home, and sign what it says of a task or a period.

    Args:
        audits: of tasks in it, to include in the document.

    Raises:
        InvalidSetting: the home is neither's, or has no journal or no keys; an audit is of no task in it.
        JournalBroken, JournalBehind: the journal was cut, edited, or is an older copy; nothing is made of it.
        NotFound: there is no such task.
    """
    existing_journal(home)  # first, so that a mistyped home is not reported as one that lacks a key
    keys = PartyKeys.load(home / KEYS_FILE)
    with _reading(home) as connection:
        facts = _facts(home, connection, wanted, read_at=now_utc(), head=None)
    facts = facts.model_copy(update={"audits": tuple(audits)})
    if foreign := {one.task_digest for one in audits} - {one.digest for one in facts.tasks}:
        raise InvalidSetting(
            f"the audited task {min(foreign)[:12]} is none of those in this evidence; audit a task of its jobs (save "
            "what GET /v1/tasks/{id} answers, and run labeler audit on that file)"
        )
    return sign_evidence(derive(facts, software(version(PROGRAM))), keys)


def check_evidence(signed: SignedEvidence, *, verify_key: str | None = None, home: Path | None = None) -> Checked:
    """Check everything that can be checked: the signature, what follows from the facts, and agreement with a journal.

    Args:
        verify_key: of the party that should have signed; None takes the home's, else the file's own.
        home: with the journal it was made from, or a later copy of it.
    """
    wrong: list[str] = []
    confirmed: list[str] = []
    if home is not None:
        existing_journal(home)
    key = verify_key or (None if home is None else PartyKeys.load(home / KEYS_FILE).public.verify_key)
    try:
        signed.check(key)
        whose = "the key given" if verify_key else "the home's key" if home else "the key in it"
        unproven = "" if verify_key or home else "; the file alone cannot prove whose key that is"
        confirmed.append(f"it was signed with {whose} and not changed since{unproven}")
    except Forged as error:
        wrong.append(f"the signature: {error}")
    document = signed.evidence
    facts = document.facts
    against_itself = [*contradictions(facts), *differences(document, rebuilt(document))]
    wrong += against_itself
    if not against_itself:
        confirmed.append("every price, sum and count follows from its facts, computed again")
    if home is not None:
        try:
            with _reading(home) as connection:
                head = Head(facts.journal.entries, facts.journal.head)
                read_at = time_of(facts.journal.read_at)
                again = _facts(home, connection, EvidenceScope.of(facts.scope), read_at=read_at, head=head)
                again = _with_words(again, facts, forgotten(connection, facts))
                again = again.model_copy(update={"audits": facts.audits})  # no journal knows of audits
        except (LabelerError, ValueError) as error:
            wrong.append(f"the journal: {error}")
        else:
            told = differences(document, derive(again, document.software, states_persons=document.person is not None))
            wrong += [line for line in told if line not in wrong]
            if not told:
                confirmed.append(f"the journal says the same, its chain verified to entry {head.seq} and beyond")
    return Checked(tuple(wrong), tuple(confirmed))


def _with_words(again: JournalFacts, before: JournalFacts, gone: set[str]) -> JournalFacts:
    """Return facts with the refusals that a document has and the journal has deleted since: they cannot be compared."""
    said = {(job.job_id, one.number): one.refusals for task in before.tasks for job in task.jobs for one in job.rounds}
    tasks = []
    for task in again.tasks:
        jobs = [
            job.model_copy(
                update={
                    "rounds": tuple(
                        one.model_copy(update={"refusals": said.get((job.job_id, one.number), ())})
                        for one in job.rounds
                    )
                }
            )
            if job.job_id in gone
            else job
            for job in task.jobs
        ]
        tasks.append(task.model_copy(update={"jobs": tuple(jobs)}))
    return again.model_copy(update={"tasks": tuple(tasks)})


@contextmanager
def _reading(home: Path) -> Iterator[Connection]:
    if not (home / AGENT_FILE).exists() and not (home / COORDINATOR_FILE).exists():
        raise InvalidSetting(
            f"{home} is not the home of a coordinator or an agent; a tallier keeps sums but no prices, so its journal "
            "is evidence of none"
        )
    with closing(open_database(existing_journal(home), anchor=home / ANCHOR_FILE, read_only=True)) as database:
        Ledger(database, clock=now_utc)  # refuses a journal that is behind its anchor
        with database.read() as connection:
            yield connection


def _facts(
    home: Path, connection: Connection, wanted: EvidenceScope, *, read_at: datetime, head: Head | None
) -> JournalFacts:
    if (home / AGENT_FILE).exists():
        agent_id, delta = read_agent_config(home).agent_id, read_policy(home / POLICY_FILE).budget.delta
        return agent_facts(connection, wanted, agent_id=agent_id, delta=delta, read_at=read_at, head=head)
    from workers.serve import read_settings

    return coordinator_facts(connection, wanted, delta=read_settings(home).delta, read_at=read_at, head=head)
