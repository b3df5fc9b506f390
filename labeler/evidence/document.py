"""The fields of an evidence document. Public facts and numbers that follow from them; nothing private has a field.

**Facts** were read from a verified journal: tasks as all parties agreed on them, the agents that were asked,
declined or were summed, charges with their times, digests of what was released. **Everything else follows** from
the facts by the accountant (`labeler.evidence.derive`), so a reader computes it again and trusts no number. Epsilon and
delta are decimal texts, rounded up, so the stated values hold.

An agent's journal knows things about its records (the version of its shard, what a record has spent). They have no
field. An agent's document names no other agent, because its journal knows none.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, SerializerFunctionWrapHandler, ValidationError, model_serializer

from labeler.auditing import AuditFacts
from labeler.errors import ProtocolViolation
from labeler.setting import StatedLevel
from labeler.settings import describe_validation
from labeler.untrusted import canonical_json

FORMAT: Final = "labeler-evidence/1"

Text = Annotated[str, Field(max_length=4_000)]
Digest = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
Moment = Annotated[str, Field(pattern=r"^[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}(\.[0-9]{1,6})?Z$")]
"""UTC."""
Count = Annotated[int, Field(ge=0, lt=2**63)]
Bound = Annotated[str, Field(pattern=r"^[0-9]{1,30}(\.[0-9]{1,400})?$")]
"""A decimal that is an upper bound."""


Unit = Literal["image", "person", "agent"]
"""The units that people protect."""


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, hide_input_in_errors=True)


_LEFT_OUT: Final = ("audits", "person", "is_written_off")


class _MayHaveAudits(_Part):
    """A part that is written without what earlier programs did not write, where there is nothing of it."""

    @model_serializer(mode="wrap")
    def _leave_out_no_audits(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return {name: value for name, value in dump(self).items() if name not in _LEFT_OUT or value}


class Scope(_Part):
    """The subject of a document.

    Attributes:
        party: role of the party whose journal was read.
        party_id: its name; "coordinator" for the coordinator.
        task: digest of the one task it is about; empty for all of a period.
        since, until: the period in which jobs were submitted (at an agent: rounds charged), the end excluded; empty
            if it is not bounded.
    """

    party: Literal["coordinator", "agent"]
    party_id: Text
    task: Annotated[str, Field(pattern="^([0-9a-f]{64})?$")] = ""
    since: Annotated[str, Field(max_length=40)] = ""
    until: Annotated[str, Field(max_length=40)] = ""


class Journal(_Part):
    """The extent of the journal when it was read, its chain of hashes checked from `first_entry` on.

    Attributes:
        first_entry: every entry, step and balance was checked from this entry on.
        entries: number of entries.
        head: hash of the last.
        read_at: time of reading; the facts are those of that moment.
        last_entry_at: when the last entry was written; empty if there is none.
    """

    first_entry: Literal[1] = 1
    entries: Count
    head: Digest
    read_at: Moment
    last_entry_at: Annotated[str, Field(max_length=40)] = ""


class AccountCharge(_Part):
    """One charge of one account, nano-units of mu^2."""

    account: Text
    level: Literal["instance", "agent"]
    nano: Count


class AgentRefusal(_Part):
    """An agent that did not answer, and its reply.

    Attributes:
        said: "declined" before anybody was asked, "later" if a person had not decided, "refused" when asked.
        reason: type of its refusal; empty if it is not kept.
        sentence: its own words.
    """

    agent: Text
    said: Literal["declined", "later", "refused"]
    reason: Text = ""
    sentence: Text = ""


class RoundFacts(_Part):
    """Questions asked together.

    Attributes:
        number: within the job.
        first_question: number of the first of them within the task; None if the journal does not know it.
        charge: state of its price; "none" if none was reserved for it alone.
        posted_entry, posted_at: the ledger's entry that made the charge final.
        charges: by account and level, as they are in the chain.
        contributors: agents whose shares were summed; in the chain. Empty if nothing was summed.
        refusals: agents that did not answer it.
        round_digest: names its messages and its noise.
        release_digest: SHA-256 of the stored release.
    """

    number: Count
    first_question: Count | None
    questions: Annotated[int, Field(ge=1, lt=2**63)]
    charge: Literal["none", "reserved", "posted", "void"]
    posted_entry: Count | None = None
    posted_at: Annotated[str, Field(max_length=40)] = ""
    charges: tuple[AccountCharge, ...] = ()
    contributors: tuple[Text, ...] = ()
    refusals: tuple[AgentRefusal, ...] = ()
    round_digest: Annotated[str, Field(pattern="^([0-9a-f]{64})?$")] = ""
    release_digest: Annotated[str, Field(pattern="^([0-9a-f]{64})?$")] = ""


class Job(_Part):
    """One labeling job.

    Attributes:
        state: how it ended, or "under way".
        problem: type of the problem it ended with; its words may name a requester's files and are left out.
        asked: agents that were asked; fixed before the first question left.
        refusals: agents that said no before anybody was asked.
        rounds: its batches.
    """

    job_id: Text
    state: Literal["completed", "failed", "refused", "cancelled", "expired", "under way", "not known"]
    problem: Text = ""
    submitted_at: Annotated[str, Field(max_length=40)] = ""
    questions: Count
    asked: tuple[Text, ...] = ()
    refusals: tuple[AgentRefusal, ...] = ()
    rounds: tuple[RoundFacts, ...] = ()


class TaskFacts(_Part):
    """A task and what was asked of it.

    Attributes:
        digest: the name by which every party knew it; SHA-256 of its fields.
        task: the fields; None if an agent's journal keeps only the digest.
        participants: agents of the task; empty if the journal does not know them.
        created_at: when it was made; empty if the journal does not know it.
        jobs: in the scope of the document.
    """

    digest: Digest
    task: dict[str, Any] | None
    participants: tuple[Text, ...] = ()
    created_at: Annotated[str, Field(max_length=40)] = ""
    jobs: tuple[Job, ...] = ()


class AccountFacts(_MayHaveAudits):
    """One account at one level, over the whole life of the journal.

    Attributes:
        account, level: identify the budget.
        cap_nano: nano-units of mu^2; None if charges are recorded and not limited.
        posted_nano, reserved_nano: final charges, and those that may become so.
        is_unpriced: something was charged that names another level and not this one, which had no finite price; so
            the sum of the charges bounds nothing.
        is_written_off: charges may have been forgotten (a copy was put back): nobody knows what they cost a person.
    """

    account: Text
    level: Literal["instance", "agent"]
    cap_nano: Count | None
    posted_nano: Count
    reserved_nano: Count
    is_unpriced: bool = False
    is_written_off: bool = False


class JournalFacts(_MayHaveAudits):
    """Everything that was read from a journal.

    Attributes:
        delta: at which the accounts' budgets are stated, from the party's settings; a decimal.
        accounts: those of the federation and of the participants of the tasks.
        audits: counts of attacks on the pipeline (labeler.auditing). No journal knows of them: they rest on the
            signer's word. Left out if there are none.
    """

    scope: Scope
    journal: Journal
    delta: Bound
    tasks: tuple[TaskFacts, ...] = ()
    accounts: tuple[AccountFacts, ...] = ()
    audits: Annotated[tuple[AuditFacts, ...], Field(max_length=100)] = ()


class Guarantee(_Part):
    """The guarantee to one unit.

    Attributes:
        unit: "image" (one record), "person" or "agent".
        neighbours: the meaning of "with or without it".
        epsilon, delta: decimals, rounded up; epsilon None if there is no bound.
        participant_epsilon: against one participant that reads the release; None if it is not stated or unbounded.
        reason: why there is no bound.
    """

    unit: Unit
    neighbours: Text
    epsilon: Bound | None
    delta: Bound
    participant_epsilon: Bound | None = None
    reason: Text = ""


class Mechanism(_Part):
    """The mechanism behind a guarantee, and the location of its proof.

    Attributes:
        system: its name in the papers.
        source: the paper, and the part of it that holds here.
        contribution: the contribution of each agent.
        noise: its kind, and the part of it that nobody can subtract.
        proof: the function whose docstring is the proof of sensitivity.
        accounting: how epsilon is computed, and the module with the derivation.
        colluding_agents: how many may pool what they know.
        talliers: how many hold shares.
        quorum: fewest agents for which anything is opened.
        holds_against: the adversaries for whom the guarantee holds.
    """

    system: Text
    source: Text
    contribution: Text
    release: Text
    noise: Text
    proof: Text
    accounting: Text
    colluding_agents: Count
    talliers: Count
    quorum: Count
    holds_against: Text


class Cohort(_Part):
    """The fewest and the most agents behind an answer, over rounds that were charged."""

    participants: Count
    fewest_asked: Count
    fewest_contributors: Count
    most_contributors: Count


class Cadence(_Part):
    """The frequency of questions.

    Attributes:
        jobs, jobs_completed: in the scope.
        rounds_charged, questions_charged: with final charges.
        first_at, last_at: of charges; empty if there are none.
        days: number of days on which something was charged.
        most_rounds_in_a_day: and the most on one of them.
        questions_asked_again: question numbers of a task that were charged more than once; must be 0.
        releases: number of opened rounds.
    """

    jobs: Count
    jobs_completed: Count
    rounds_charged: Count
    questions_charged: Count
    first_at: Annotated[str, Field(max_length=40)]
    last_at: Annotated[str, Field(max_length=40)]
    days: Count
    most_rounds_in_a_day: Count
    questions_asked_again: Count
    releases: Count


class TaskFindings(_Part):
    """The conclusions from the facts of one task.

    Attributes:
        mechanism: None if the task is not known.
        promised: the guarantees of all questions that the task may ever ask.
        spent: charges of the task in this scope, at the task's delta.
        cohort, cadence: see there.
        refused: agents that refused at least once, with their number of refusals.
    """

    digest: Digest
    mechanism: Mechanism | None
    promised: tuple[Guarantee, ...]
    spent: tuple[Guarantee, ...]
    cohort: Cohort
    cadence: Cadence
    refused: tuple[tuple[Text, Count], ...]


class AccountFindings(_Part):
    """The epsilon of an account's charges together, final and reserved, at the facts' delta; None without a bound.

    `cap_epsilon` is the largest it may reach; None if charges are recorded and not limited.
    """

    account: Text
    level: Literal["instance", "agent"]
    spent_epsilon: Bound | None
    cap_epsilon: Bound | None


class AuditFinding(_Part):
    """The result of one adversary of an audit, decimals: proved values rounded down, promised values rounded up.

    Attributes:
        task: digest of the task.
        level: the unit whose presence it told.
        runs: how many runs of the task it counted; 1 with many canaries.
        confidence: with which all findings of its audit hold together.
        proved_epsilon, promised_epsilon: at the task's delta.
        proved_advantage, promised_advantage: true minus false positives in telling which units took part.
        is_above: whether this refutes the promise.
    """

    task: Digest
    adversary: Text
    level: StatedLevel
    runs: Count
    confidence: Bound
    proved_epsilon: Bound
    promised_epsilon: Bound
    proved_advantage: Bound
    promised_advantage: Bound
    is_above: bool


class Software(_Part):
    """The program that made the document."""

    name: Text
    version: Text


class Evidence(_MayHaveAudits):
    """A whole document.

    Attributes:
        version: of the format.
        software: that made it.
        tasks, accounts: the conclusions.
        remarks: notes on these facts for a reader: contradictions that are no reason to refuse, such as a charge
            below today's price.
        audits: conclusions from the facts' audits.
        person: what all charged rounds in the document cost one person at one agent, over all its tasks; absent in
            documents of earlier programs.
        meaning: what refusals, exports, repeats and the chain say and do not say; fixed words of this format.
    """

    version: Literal["labeler-evidence/1"] = FORMAT
    software: Software
    facts: JournalFacts
    tasks: tuple[TaskFindings, ...]
    accounts: tuple[AccountFindings, ...]
    remarks: tuple[Text, ...]
    meaning: tuple[tuple[Text, Text], ...]
    audits: tuple[AuditFinding, ...] = ()
    person: Guarantee | None = None


def parse_evidence(data: bytes) -> Evidence:
    """Return a document from its JSON.

    Raises:
        ProtocolViolation: invalid; one sentence per field that is missing, unknown or out of bounds.
    """
    try:
        return Evidence.model_validate_json(data)
    except ValidationError as error:
        raise ProtocolViolation(describe_validation(error, "evidence")) from None


def canonical_bytes(document: Evidence) -> bytes:
    """Return the one spelling of a document, which is signed."""
    return canonical_json(document.model_dump(mode="json"))
