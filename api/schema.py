"""Requests and answers of the REST API, version 1, shared by the server, the client and the OpenAPI document.

Requests refuse unknown fields, so that a misspelt setting never falls back to a default. Prices are epsilons for people
and nano-units of mu^2 (see labeler.budget) for programs; `null` means that no finite bound exists.

More than 600 lines: it is one document, the content of /openapi.json.
"""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from feature_store.results import FileFormat, current_format
from labeler.invitation import MAX_CERTIFICATES, TOKEN_PATTERN
from labeler.rounds.effects import FINISHED as FINISHED
from labeler.rounds.effects import JobState as JobState
from labeler.settings import PlainNumbers
from labeler.solving import ClassName, QuestionChoice, WantedTask
from labeler.solving import LifeRequest as LifeRequest
from labeler.task import MOST_CLASSES, Level, Printable
from labeler.untrusted import ENROLLED_NAME, MOST_PROBE_CHARACTERS

Role = Literal["admin", "requester", "viewer"]
PartyRole = Literal["agent", "tallier"]
LabelFormat = Annotated[FileFormat, BeforeValidator(current_format)]
"""A name of a released version is read as the name it has now."""
LabelsOf = Literal["images", "questions"]
"""Every public image, asked about or not; or the questions and what was released for each."""

PlainFloat = Annotated[float, Field(strict=True)]
"""A number; a text that looks like one is refused (labeler.settings)."""

Name = Annotated[str, Field(min_length=1, max_length=500)]
"""Of an image or a vector."""

KEY = "[!-~]{1,200}"
"""The pattern of an idempotency key."""

MAX_SYNCHRONOUS_QUERIES = 64
MAX_THUMBNAILS = 48


class Request(PlainNumbers):
    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)


class View(BaseModel):
    model_config = ConfigDict(frozen=True)


class TaskRequest(WantedTask):
    """The terms all parties agree on. Give `sigma_votes` or `epsilon` (the noise is then computed for that price)."""

    classes: Annotated[tuple[ClassName, ...], Field(min_length=2, max_length=MOST_CLASSES)] | None = None
    epsilon: Annotated[float, Field(gt=0, le=1e6, allow_inf_nan=False)] | None = None
    max_queries: Annotated[int, Field(ge=1, le=1_000_000)]
    backbone_fingerprint: Annotated[str, Field(max_length=200)] | None = None
    agents: (
        Annotated[tuple[Annotated[str, Field(min_length=1, max_length=200)], ...], Field(max_length=10_000)] | None
    ) = None
    """Ids of the agents that take part; all that are enrolled now, when absent."""


class LifeView(View):
    """Terms of a task of votes for life; its epsilon covers all such jobs together, ever."""

    budget_nano: int
    vote_nano: int
    """The cost of one vote under the task's noise to an image."""
    votes: int
    """How many such votes an image has in its life."""
    most_votes: int
    """How many it casts in one job, where it is near enough: all of them or none."""
    least_similarity: float
    means: str


class PriceView(View):
    """The price of a number of a task's queries."""

    queries: int
    delta: float
    instance_epsilon: float | None
    agent_epsilon: float | None
    instance_charge_nano: int | None
    agent_charge_nano: int | None
    instance_question_nano: int | None = None
    """One question's share of it, rounded up; null where the method has no such share: the job is priced once."""
    agent_question_nano: int | None = None
    person_epsilon: float | None = None
    """For all records of one person at one agent; null where the task does not bound how many vote. Charged nowhere."""
    records_per_person: int | None = None
    group_epsilon: float | None = None
    """For any `group_size` records of all agents together; null where the task names none. Charged nowhere."""
    group_size: int | None = None
    one_record: str | None = None
    """For methods that train: which bound on what one record changes the price is for, in words."""
    reason: str = ""
    """Why a level has no finite price, where one has none."""
    colluding_agents: int | None = None
    """How many participants may know their own noise, as readers or colluders, before the price stops holding."""
    holds_against: str = ""
    """The same in words: against whom the price holds."""
    participant_epsilon: float | None = None
    """The instance-level price against one participant that reads the release and subtracts its own noise."""
    life: LifeView | None = None
    """Where the instance-level price is of everything that is ever asked with votes for life."""
    dishonest_talliers: int | None = None
    """Where the talliers add the noise, how many of the three may be dishonest; null where the agents add it."""


class TaskView(View):
    """A task as it is kept: immutable."""

    task_id: str
    """The digest."""
    task: dict[str, Any]
    participants: tuple[str, ...]
    created_at: datetime
    queries_left: int
    price: PriceView
    """Of all its queries."""
    created_by: str = ""
    """Id of the token that made it."""
    shared_with: tuple[str, ...] = ()
    """Ids of the tokens that may submit into it too; told to its creator and to administrators."""


class ShareRequest(Request):
    """Let another requester submit into a task."""

    token_id: Annotated[str, Field(min_length=1, max_length=100)]
    """Id of their token, which `GET /v1/whoami` shows to its holder."""


class Selection(QuestionChoice):
    """The choice of images to ask about; choosing costs no privacy."""

    count: Annotated[int, Field(ge=1, le=1_000_000)] | None = None
    seed: Annotated[int, Field(ge=0, le=2**31)] = 0


class EstimateRequest(Request):
    """A request for the price of a job, before anything is asked: name a task, or describe one."""

    task_id: Annotated[str, Field(pattern="^[0-9a-f]{64}$")] | None = None
    task: TaskRequest | None = None
    queries: Annotated[int, Field(ge=1, le=1_000_000)] | None = None
    records: Annotated[int, Field(ge=1, le=2**40)] | None = None
    """Private images of all agents together, as far as you know: for `expected_accuracy` where records choose."""

    @model_validator(mode="after")
    def _one_task(self) -> EstimateRequest:
        if (self.task_id is None) == (self.task is None):
            raise ValueError("give exactly one of task_id and task")
        return self


class AccountAfter(View):
    """One account as it would stand after a job."""

    account: str
    level: Level
    asked_nano: int | None
    """Null where the level has no finite price; only an account without a cap takes that."""
    left_nano: int | None
    """Before the job; null where the account has no cap."""
    enough: bool


class ExpectedAccuracy(View):
    """The share of a job's labels that can be expected to be right, from public facts and the noise alone.

    Between `low`, where private images are of another kind than the public ones, and `high`, where they are alike; null
    where nothing can be said, with the reason. `records` is the number of private images that was assumed.
    """

    low: float | None = None
    high: float | None = None
    reason: str = ""
    records: int | None = None


class EstimateView(View):
    """The price of a job, and whether the budgets would cover it now. Nothing was charged."""

    price: PriceView
    sigma_votes: float
    total_sigma_votes: float
    quorum: int
    affordable: bool
    accounts: tuple[AccountAfter, ...]
    refusal: str = ""
    queries_that_fit: int | None = None
    """How many queries the budgets cover, where they cover fewer than were asked; null where fewer would not help."""
    jobs_left: int | None = None
    """How many such jobs the tightest account still covers; null where nothing limits them."""
    expected_accuracy: ExpectedAccuracy | None = None
    """Null only in answers of earlier versions."""
    warning: str = ""
    """Where noise drowns the votes: which epsilon, or how many private images, would do."""
    noise_hint: str = ""
    """Where less noise would do at the same price, were it added by the talliers and not by the agents."""


Probe = Annotated[str, Field(max_length=MOST_PROBE_CHARACTERS)]
"""The published probe's features as text (`Shard.probe`), where their owner made them and not this program."""


class JobRequest(Request):
    """A labeling job. Images come in a form (files, zip, Parquet); feature vectors in the request, or in Parquet."""

    task_id: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
    name: Annotated[Printable, Field(max_length=200)] = ""
    selection: Selection = Selection()
    deadline_s: Annotated[float, Field(gt=0, le=30 * 86_400, allow_inf_nan=False)] | None = None
    features: Annotated[list[list[PlainFloat]], Field(max_length=100_000)] | None = None
    query_ids: Annotated[list[Name], Field(max_length=100_000)] | None = None
    backbone_fingerprint: Annotated[str, Field(max_length=200)] | None = None
    probe: Annotated[Probe | None, Field(exclude_if=lambda probe: probe is None)] = None


class Problem(View):
    """RFC 9457: why a request was refused. `type` is stable; other members say more, by type."""

    model_config = ConfigDict(frozen=True, extra="allow")

    type: str
    title: str
    status: int
    detail: str
    instance: str = ""


class RoundView(View):
    """One batch of a job."""

    number: int
    queries: int
    state: Literal["waiting", "asked", "agreed", "posted", "opened", "not-asked", "given-up"]
    """The last two of a job that ended: nobody was asked, or it was asked and never opened."""
    answered: tuple[str, ...] = ()
    """Agents that are in the sum, once that is fixed; nobody while shares come in, since when an agent answers
    follows from its records."""
    waiting_for: tuple[str, ...] = ()
    """Agents that were asked and have not refused, while shares come in."""
    refused: dict[str, str] = {}
    """Agent id -> its reason."""


class Refusal(View):
    """A party's refusal: one for each reason, however many batches it was given for."""

    party_id: str
    reason: str
    rounds: tuple[int, ...]


class WaitingFor(View):
    """An agent that a job waits for."""

    agent_id: str
    reason: Literal["answer", "approval", "later", "share"]
    """Whether it will take part (a person there has to approve the task, or it said: not now), or its share."""


class CostView(View):
    """The cost of a job so far: its rounds that are charged for good. Null where that has no finite bound."""

    questions: int
    instance_nano: int | None
    agent_nano: int | None
    instance_epsilon: float | None
    """About one private image; with votes for life, what all such jobs are together."""
    agent_epsilon: float | None
    """About one agent's whole collection."""


class PassedOver(View):
    """A file of an upload that is no image, and why; a whole folder ends with a slash."""

    source: str
    reason: str


class JobView(View):
    """A job and how far it has come."""

    job_id: str
    task_id: str
    name: str
    task_name: str = ""
    """Of the task; `name` is the job's own, and may be empty."""
    evaluates: bool = False
    """Its question is a released model, and its result an evaluation; no image gets a label."""
    state: JobState
    stage: str
    """In words, what the job waits for."""
    queries: int
    queries_done: int
    images: int
    selection: Selection
    price: PriceView
    cost: CostView | None = None
    """Null only in answers of earlier versions."""
    created_at: datetime
    updated_at: datetime
    expires_at: datetime
    created_by: str
    rounds: tuple[RoundView, ...] = ()
    refusals: tuple[Refusal, ...] = ()
    """Who refused, over all rounds; what every page and command counts."""
    waiting_for: tuple[WaitingFor, ...] = ()
    """Agents whose word or share is missing; nobody once the job has ended."""
    declined: dict[str, str] = {}
    """Agent id -> why it takes no part; it is not asked and not charged."""
    problem: Problem | None = None
    ledger_seq: int | None = None
    """The last entry that posted its charge."""
    ledger: str = ""
    """The state of its charge, in words."""
    version: int
    forgotten_at: datetime | None = None
    """When its images, questions and labels were deleted for good."""
    passed_over: int = 0
    """How many files of the upload are no images: leftovers of systems, and texts. In the answer to it alone."""
    passed_over_files: tuple[PassedOver, ...] = ()
    """The first of them."""


class InlineImage(Request):
    """One image file inside a JSON document."""

    name: Name
    """Becomes the `source` of its label; never a path."""
    data: Annotated[str, Field(json_schema_extra={"contentEncoding": "base64"})]
    """The file in base64 (RFC 4648, padded, without line breaks and without a `data:` prefix)."""


class LabelsRequest(Request):
    """A small synchronous request: up to 64 images or feature vectors. Images may also come as files of a form."""

    task_id: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
    images: Annotated[list[InlineImage], Field(min_length=1, max_length=MAX_SYNCHRONOUS_QUERIES)] | None = None
    features: Annotated[list[list[PlainFloat]], Field(min_length=1, max_length=MAX_SYNCHRONOUS_QUERIES)] | None = None
    query_ids: Annotated[list[Name], Field(max_length=MAX_SYNCHRONOUS_QUERIES)] | None = None
    backbone_fingerprint: Annotated[str, Field(min_length=1, max_length=200)] | None = None
    """Of the backbone that made the vectors. Images are embedded with the task's."""
    probe: Annotated[Probe | None, Field(exclude_if=lambda probe: probe is None)] = None
    wait_s: Annotated[float, Field(gt=0, le=60, allow_inf_nan=False)] = 30.0


class QueryBudget(View):
    """A question's share of the federation's budget, and the account's total after it."""

    account: str = "federation"
    level: Literal["instance"] = "instance"
    """Of `share_nano`, `total_nano` and `charge_nano`; the agent's level has members of its own."""
    share_kind: Literal["each", "running", "shared", "life"]
    """`each`: every question costs the same. `running`: what it added to the price of its round. `shared`: an
    attribution, because the job is priced once; its first question alone would cost the whole. `life`: the most that
    one private image could pay here, of its own budget for life."""
    share_nano: int | None
    """Nano-units of mu squared. Except for `life` the shares of a job add up to its charge. Null only where the level
    has no finite charge."""
    total_nano: int | None
    """What the account had posted after this question."""
    total_epsilon: float | None
    """That total at the account's delta, rounded up; null where something without a finite price was charged."""
    charge_nano: int
    """What the ledger charged for the question's round, and of `shared` for the whole job."""
    agent_share_nano: int | None
    agent_total_nano: int | None
    agent_total_epsilon: float | None


class LabelRow(QueryBudget):
    """One released answer. `noisy_votes` are released and paid for; null for the winner release.

    Of images, `label` and `confidence` are those of `/v1/jobs/{job_id}/labels`: what all answers of the request say
    together of this image, also where its own question has none. Of vectors, `label` is the released answer alone.
    Of attributes no one is the label: `label` is -1, and `noisy_votes` has a count for each.
    """

    query_id: str
    source: str
    label: int
    label_name: str | None
    confidence: float | None = None
    """Probability that `label` is right, as far as votes tell (docs/labels.md); null for vectors, attributes, and where
    nothing was answered."""
    status: Literal["answered", "abstained", "refused_budget", "failed_quorum"]
    noisy_votes: list[float] | None = None
    mu_squared: float | None = None
    """This question's share of one private image's budget; null where the method has no such share (`price`)."""


class ThumbnailsRequest(Request):
    """Small pictures of some of a job's own images, by the names that its labels give."""

    sources: Annotated[tuple[Name, ...], Field(min_length=1, max_length=MAX_THUMBNAILS)]


class Thumbnail(View):
    """One image, small."""

    source: str
    jpeg: str | None
    """Base64 of a JPEG that this service made; null where there is no such image, or it cannot be shown."""


class ThumbnailsView(View):
    """Pictures in the order of the request."""

    items: tuple[Thumbnail, ...]


class LabelsView(View):
    """The answer to a small synchronous request."""

    job_id: str
    state: JobState
    price: PriceView
    labels: tuple[LabelRow, ...] = ()
    passed_over: int = 0
    passed_over_files: tuple[PassedOver, ...] = ()
    """As of a job."""


class BalanceView(View):
    """One account at one level."""

    account: str
    level: Level
    cap_nano: int | None
    posted_nano: int
    reserved_nano: int
    left_nano: int | None
    delta: float
    cap_epsilon: float | None
    spent_epsilon: float | None
    """The joint epsilon of everything reserved and posted, at `delta`."""
    posted_epsilon: float | None = None
    """The joint epsilon of what was answered, at `delta`: so far."""
    left_epsilon: float | None = None
    """The epsilon of the largest further job that still fits, rounded down; null without a limit."""
    words: str = ""
    """The three in words."""
    left_fraction: float | None
    life_nano: int = 0
    """The part of it set aside for all votes for life together, however many are asked."""
    life_epsilon: float | None = None
    """The same as an epsilon at `delta`; null where nothing was set aside."""


class PersonView(View):
    """The cost of all answered jobs of one account for one person at one site."""

    account: str
    person_nano: int | None
    person_epsilon: float | None
    """Of all jobs together, rounded up, at `delta`; null where no bound is proved, and `reason` says why."""
    records_per_person: int | None
    """The most images of one person that a task let vote."""
    reason: str
    delta: float
    words: str
    """All of it in a sentence."""


class BudgetView(View):
    """All accounts of the coordinator."""

    accounts: tuple[BalanceView, ...]
    persons: tuple[PersonView, ...] = ()
    """One for each account: a person has no account, so this follows from the charged rounds and their tasks."""
    head_seq: int
    head_hash: str
    delta: float


class LedgerEntryView(View):
    """One entry of the ledger."""

    seq: int
    at: datetime
    kind: Literal["open", "cap", "reserve", "post", "answer", "void", "write-off"]
    account: str
    level: str
    reservation_id: str
    amount_nano: int
    spent_after_nano: int | None = None
    detail: dict[str, Any] = {}
    hash: str


class PartyRequest(Request):
    """Enrol an agent or a tallier with its public keys."""

    party_id: Annotated[str, Field(pattern=ENROLLED_NAME)]
    role: PartyRole
    verify_key: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
    seal_key: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
    tallier: Annotated[int, Field(ge=0, le=2)] | None = None
    """Which tallier it is, from 0; only for talliers."""


class KeysRequest(Request):
    """New public keys of a party."""

    verify_key: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
    seal_key: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]


class InvitationRequest(Request):
    """Invite a site to join under one name, as an agent or as a tallier."""

    party_id: Annotated[str, Field(pattern=ENROLLED_NAME)]
    role: PartyRole = "agent"
    tallier: Annotated[int, Field(ge=0, le=2)] | None = None
    """Which tallier it would be; the lowest number that is free, when absent."""
    rotate: bool = False
    """It is enrolled, and gets new keys and the talliers as they are now."""
    valid_days: Annotated[int, Field(ge=1, le=30)] = 7
    ca_certificates: Annotated[str, Field(max_length=MAX_CERTIFICATES)] = ""
    """PEM: authorities that vouch for the coordinator's certificate; the system's when empty."""


class InvitationView(View):
    """An invitation, as it is sent to a site; told once."""

    invitation_id: str
    party_id: str
    role: PartyRole
    expires_at: datetime
    phrase: str
    """Compare it by phone."""
    document: dict[str, Any]
    """The content of the file. Its `token` is a secret until it is used."""


class WithdrawnView(View):
    """The withdrawn invitations of a name, which were not used."""

    party_id: str
    withdrawn: int


class EnrolmentRequest(Request):
    """A site's own public keys, with the one-use token of its invitation, signed by those keys."""

    token: Annotated[str, Field(pattern=TOKEN_PATTERN)]
    party_id: Annotated[str, Field(pattern=ENROLLED_NAME)]
    role: PartyRole
    tallier: Annotated[int, Field(ge=0, le=2)] | None = None
    verify_key: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
    seal_key: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
    signature: Annotated[str, Field(pattern="^[0-9a-f]{128}$")]
    """By verify_key, over `labeler.invitation.enrolment_statement`."""


class EnrolmentView(View):
    """An enrolment: the party's keys are taken from now on."""

    party_id: str
    role: PartyRole
    tallier: int | None
    fingerprint: str
    roster_digest: str
    """Of the coordinator and the talliers as they are now; not the invitation's where one has changed since."""


class PartyView(View):
    """An agent or tallier as the coordinator knows it. Nothing in it depends on private records."""

    party_id: str
    role: PartyRole
    tallier: int | None
    verify_key: str
    seal_key: str
    fingerprint: str
    state: Literal["active", "revoked"]
    enrolled_at: datetime
    last_contact: datetime | None
    is_live: bool
    backbone_fingerprint: str | None = None
    classes: tuple[str, ...] = ()
    version: str = ""
    claim: str = ""
    """Its unproven claim about the coordinator's journal; its polls are refused while it makes one."""


class KeyChangeView(View):
    """Keys that an invitation may enrol, or has enrolled lately; neither its token nor its phrase."""

    party_id: str
    role: PartyRole
    is_rotation: bool
    """New keys for a party that is enrolled, and not a party that joins."""
    expires_at: datetime
    """Until then the invitation may be used, where it was not."""
    used_at: datetime | None = None


class PartiesView(View):
    """All enrolled parties, and whether enough are live."""

    coordinator_verify_key: str
    coordinator_seal_key: str
    parties: tuple[PartyView, ...]
    live_agents: int
    live_talliers: int
    talliers_needed: int
    has_quorum: bool
    key_changes: tuple[KeyChangeView, ...] = ()
    """Invitations that are open, and those used within the last week."""


class TokenRequest(Request):
    """A new access token."""

    name: Annotated[Printable, Field(min_length=1, max_length=100)]
    role: Role


class TokenView(View):
    """An access token; `token` is shown once, when it is made."""

    token_id: str
    name: str
    role: Role
    created_at: datetime
    revoked_at: datetime | None = None
    token: str | None = None


class Check(View):
    """One thing that must hold for the service to be ready."""

    name: str
    ok: bool
    detail: str = ""


class ReadinessView(View):
    """Readiness of the service: can jobs be taken, and what is missing."""

    ready: bool
    checks: tuple[Check, ...]
    version: str = ""
    """Of the service's program."""


class Page(View):
    """One page of a list; ask again with `after=next` for more."""

    next: str | None = None


class QueryBudgetView(QueryBudget):
    """One question of a job, and its budget."""

    job_id: str
    number: int
    """Its place in the job, from 0."""
    query_id: str
    source: str | None
    """Its image; null for a viewer, and where the job's files were deleted."""
    status: Literal["answered", "abstained", "refused_budget", "failed_quorum"]
    release: Literal["winner", "histogram"]


class QueryBudgetPage(Page):
    """Budgets of queries, newest first."""

    items: tuple[QueryBudgetView, ...]
    waiting: tuple[str, ...] = ()
    """Jobs without their rows here, because prices of their winners are being computed; ask with their `job_id`."""


class JobPage(Page):
    items: tuple[JobView, ...]


class TaskPage(Page):
    items: tuple[TaskView, ...]


class LedgerPage(Page):
    items: tuple[LedgerEntryView, ...]


class TokenPage(Page):
    items: tuple[TokenView, ...]
