"""A job as all of its drivers see it: its states, its rounds, and the events and effects of its state machine.

Events (inputs of the coordinator's machine) and effects (its outputs) are frozen records, and nothing else. An effect
is one of four kinds. A `Store` is durable before anything else of the same step happens. A `Send` is carried out after
that and may be lost. The result of a `Compute` comes back as an event. All other effects are notes to the driver. A
driver makes all stores of a step durable together. Then it sends.

`JobRun` is one job as the machine sees it: what the journal keeps of it, and a little that may be forgotten.
Attributes marked "memory" may be lost. Then every party is asked once more, and its second answer equals the first.
All other attributes are in the journal, and are read from there after a restart.

More than 600 lines: a list of small frozen records, which the machine and its drivers share.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from labeler.errors import BadData, LabelerError
from labeler.linear_model import model_before
from labeler.release import Release
from labeler.tally import Round, round_with
from labeler.task import Task

JobState = Literal["queued", "collecting", "tallying", "completed", "failed", "refused", "cancelled", "expired"]
"""Progress of a job; see ARCHITECTURE."""

UNFINISHED: Final[tuple[JobState, ...]] = ("queued", "collecting", "tallying")

FINISHED: Final[frozenset[JobState]] = frozenset({"completed", "failed", "refused", "cancelled", "expired"})
"""The final states of a job."""

RoundState = Literal["waiting", "asked", "agreed", "posted", "opened"]
"""Progress of one round of a job, in this order."""

AskedStrategy = Literal["all", "random", "clustered", "spectral"]
"""Rules by which a requester may choose questions among public images; see `feature_store.query_selection`."""

Strategy = Literal["all", "random", "clustered", "spectral", "weights"]
"""Rules that choose questions: those of a requester, or `weights` for a method that asks for a model."""

StudentKind = Literal["planned", "followed", "pooled", "blended"]
"""Kinds of student that learn from the answers; see `feature_store.students.student`."""

STUDENT_KINDS: Final[tuple[StudentKind, ...]] = get_args(StudentKind)

MOST_SPECTRAL_GROUPS: Final = 500
"""The most groups that `spectral` makes. Each needs one eigenvector, and time grows with the square of their number."""


class AnswerStatus(StrEnum):
    """The reason for a query's label."""

    ANSWERED = "answered"
    ABSTAINED = "abstained"
    REFUSED_BUDGET = "refused_budget"
    FAILED_QUORUM = "failed_quorum"


ABSTAINED_LABEL: Final = -1
"""The label of a query without an answer."""


@dataclass(frozen=True)
class Now:
    """The moment of a step.

    Attributes:
        wall_s: unix time in seconds, for deadlines that other parties know.
        steady_s: seconds that never run backwards, for pauses.
    """

    wall_s: float
    steady_s: float


@dataclass(frozen=True)
class Party:
    """An enrolled party with active keys, as the machine needs it.

    Attributes:
        tallier: number of the tallier, from 0; None for an agent.
        is_heard: it has polled once, so its mail does not pile up unread.
    """

    party_id: str
    tallier: int | None
    verify_key: str
    seal_key: str
    is_heard: bool = False


@dataclass(frozen=True)
class ProposalReply:
    """An agent's latest reply to the proposal of a job.

    Attributes:
        answer: "willing"; "declined", which is final; or "later": the job may be proposed again.
        reason: problem type of its refusal; empty for a yes.
        sentence: for people; empty for a yes.
        until_s: unix time until which a yes holds.
    """

    answer: Literal["willing", "declined", "later"]
    reason: str = ""
    sentence: str = ""
    until_s: float | None = None


@dataclass(frozen=True)
class Patience:
    """Waiting times of the machine.

    Attributes:
        patience_s: how long a round waits for missing agents once it has its quorum or cannot reach it.
        ask_again_s: pause before a party that has not answered is asked again; longer while its mail piles up.
    """

    patience_s: float
    ask_again_s: float


# Events.


@dataclass(frozen=True)
class Tick:
    """Time has passed, or something else has changed the job.

    Attributes:
        mail: party id -> messages that wait in its mail; a party that is not listed has none.
    """

    mail: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class PartiesChanged:
    """The parties enrolled now, by id; only those with active keys."""

    parties: Mapping[str, Party]


@dataclass(frozen=True)
class JobAdmitted:
    """It is the job's turn among the jobs of its requester."""


@dataclass(frozen=True)
class QuestionsPrepared:
    """The questions exist: (round number, batch digest, round digest) of every round of `JobRun.untied`."""

    batches: tuple[tuple[int, str, str], ...]


@dataclass(frozen=True)
class BodiesMade:
    """The messages of a round have been made, and are small enough."""

    number: int


@dataclass(frozen=True)
class ReplyCame:
    """An agent has replied to the proposal."""

    agent_id: str
    task_digest: str
    said: ProposalReply


@dataclass(frozen=True)
class ShareCame:
    """An agent's sealed share for a tallier has arrived."""

    round_digest: str
    task_digest: str
    agent_id: str
    tallier_id: str


@dataclass(frozen=True)
class AgentDone:
    """An agent says that its shares are on their way."""

    round_digest: str
    task_digest: str
    agent_id: str


@dataclass(frozen=True)
class HoldingsCame:
    """A tallier reports the shares it holds: agent id -> sharing id in hexadecimal."""

    round_digest: str
    task_digest: str
    tallier_id: str
    holdings: Mapping[str, str]


@dataclass(frozen=True)
class RefusalCame:
    """A party refuses a request."""

    round_digest: str
    task_digest: str
    party_id: str
    sentence: str
    is_final: bool


@dataclass(frozen=True)
class SumCame:
    """A tallier's sum, or the winners it found.

    Attributes:
        kind: the kind of release that it belongs to.
        stated: the round digest and tallier number named in the body.
        data: the body; secret until all are combined.
    """

    round_digest: str
    task_digest: str
    tallier_id: str
    kind: Literal["histogram", "winner"]
    stated: tuple[str, int]
    data: bytes = field(repr=False)


@dataclass(frozen=True)
class TurnGranted:
    """It is time to ask the talliers for the winners of this round."""

    round_digest: str


@dataclass(frozen=True)
class ReleaseKnown:
    """The sums of a round are combined, so its release is known."""

    number: int
    release: Release = field(repr=False)


@dataclass(frozen=True)
class JobFailed:
    """Something could not be computed or stored for the job, and never can.

    Attributes:
        number: the round whose messages cannot be made; None for any other failure.
    """

    error: LabelerError
    number: int | None = None


@dataclass(frozen=True)
class StepStored:
    """The stores of the last step are durable."""


@dataclass(frozen=True)
class Ended:
    """The job was ended by somebody else."""

    state: JobState


MessageEvent = ReplyCame | ShareCame | AgentDone | HoldingsCame | RefusalCame | SumCame
Event = (
    MessageEvent
    | Tick
    | PartiesChanged
    | JobAdmitted
    | QuestionsPrepared
    | BodiesMade
    | TurnGranted
    | ReleaseKnown
    | JobFailed
    | StepStored
    | Ended
)


# Effects that are stored.


@dataclass(frozen=True)
class StoreBatches:
    """Tie rounds to their questions."""

    batches: tuple[tuple[int, str, str], ...]


@dataclass(frozen=True)
class StoreReply:
    """Store an agent's reply."""

    agent_id: str
    said: ProposalReply


@dataclass(frozen=True)
class ReserveRounds:
    """Fix the agents that the job asks, and replace the whole job's charge by one per round, for those agents only."""

    agents: tuple[str, ...]


@dataclass(frozen=True)
class Begin:
    """Fix the participants of a round, and record that it is asked.

    From then on nobody can state that nothing left its owner (`labeler.budget.NothingLeft`).

    Attributes:
        participants: agent id -> the key its shares are signed with.
    """

    number: int
    participants: Mapping[str, str]


@dataclass(frozen=True)
class StoreShareNote:
    """Note that a share of a round is passed on."""

    number: int


@dataclass(frozen=True)
class StoreHoldings:
    """Store which shares a tallier holds."""

    number: int
    tallier_id: str
    holdings: Mapping[str, str]


@dataclass(frozen=True)
class StoreRefusal:
    """Store why a party does not answer."""

    number: int
    party_id: str
    sentence: str
    is_final: bool


@dataclass(frozen=True)
class FixContributors:
    """Fix the summed agents; the job is now tallying."""

    number: int
    contributors: tuple[str, ...]


@dataclass(frozen=True)
class Post:
    """Charge a round permanently."""

    number: int
    num_queries: int
    contributors: tuple[str, ...]


@dataclass(frozen=True)
class StoreSum:
    """Store a tallier's sum or winners."""

    number: int
    round_digest: str
    tallier_id: str
    data: bytes = field(repr=False)


@dataclass(frozen=True)
class StoreRelease:
    """Store the release, and with it the job's next state."""

    number: int
    release: Release = field(repr=False)
    following: JobState


@dataclass(frozen=True)
class Complete:
    """Mark the job completed: every round is opened."""


@dataclass(frozen=True)
class End:
    """End the job in another way. The charge for everything that may have left stays; the rest is given back."""

    state: JobState
    error: LabelerError


Store = (
    StoreBatches
    | StoreReply
    | ReserveRounds
    | Begin
    | StoreShareNote
    | StoreHoldings
    | StoreRefusal
    | FixContributors
    | Post
    | StoreSum
    | StoreRelease
    | Complete
    | End
)


# Effects that leave.


@dataclass(frozen=True)
class SendProposals:
    """Propose the job to agents."""

    agents: tuple[str, ...]


@dataclass(frozen=True)
class SendWithdrawn:
    """Tell agents that the rest of this job will not be asked."""

    agents: tuple[str, ...]


@dataclass(frozen=True)
class OpenAt:
    """Announce a round to talliers."""

    number: int
    talliers: tuple[str, ...]


@dataclass(frozen=True)
class SendAsks:
    """Ask agents for their shares."""

    number: int
    agents: tuple[str, ...]


@dataclass(frozen=True)
class Relay:
    """Pass an arrived share on to its tallier."""


@dataclass(frozen=True)
class AskForSums:
    """Ask talliers for their sums, or for the winners."""

    number: int
    talliers: tuple[str, ...]


@dataclass(frozen=True)
class TellSettled:
    """Tell agents that every party has what it needs of these rounds."""

    numbers: tuple[int, ...]


@dataclass(frozen=True)
class Tell:
    """Notify watchers of the job."""


Send = SendProposals | SendWithdrawn | OpenAt | SendAsks | Relay | AskForSums | TellSettled | Tell


# Effects whose result comes back as an event, and notes to the driver.


@dataclass(frozen=True)
class RequestSlot:
    """Wait for the job's turn; first for its decoded images, if it `needs_features`. The result is `JobAdmitted`."""

    needs_features: bool


@dataclass(frozen=True)
class Prepare:
    """Look for the questions, and request them. The result is `QuestionsPrepared` or `JobFailed`, or nothing yet."""


@dataclass(frozen=True)
class MakeBodies:
    """Make the messages of a round. The result is `BodiesMade` or `JobFailed`."""

    number: int


@dataclass(frozen=True)
class Unshard:
    """Open the sums of a round. The result is `ReleaseKnown` or `JobFailed`."""

    number: int
    answers: tuple[bytes, ...] = field(repr=False)


@dataclass(frozen=True)
class AskForTurn:
    """Ask for this round's turn to have its winners found. The result is `TurnGranted`, or nothing yet.

    Attributes:
        num_answers: talliers that have answered.
        limit_s: the longest turn.
    """

    round_digest: str
    num_answers: int
    limit_s: float


@dataclass(frozen=True)
class TurnFailed:
    """A tallier could not find the winners of a round this time."""

    round_digest: str


@dataclass(frozen=True)
class ReleaseSlot:
    """Release rounds that need no winners any more, and the job's place if it has ended."""

    round_digests: tuple[str, ...]
    has_ended: bool


@dataclass(frozen=True)
class RefuseMessage:
    """Refuse the message. The step changes nothing."""

    error: LabelerError


@dataclass(frozen=True)
class WaitUntil:
    """Do nothing before this moment unless an event comes."""

    steady_s: float


Compute = RequestSlot | Prepare | MakeBodies | Unshard | AskForTurn
Effect = Store | Send | Compute | TurnFailed | ReleaseSlot | RefuseMessage | WaitUntil


@dataclass(frozen=True)
class RoundRun:
    """One round of a job.

    Attributes:
        number, first_query, num_queries: its place in the job and in the task.
        state: waiting > asked > agreed > posted > opened.
        batch_digest, round_digest: empty until the questions are prepared. A step of training is asked with a model, so
            its digests also stay empty until the earlier steps have opened that model.
        participants: agent id -> the key its shares are signed with; empty until fixed, then permanent.
        holdings: tallier id -> agent id -> sharing id, as last reported.
        refusals: party id -> its reason.
        final: the parties in `refusals` that will not answer when asked again.
        contributors: the summed agents; empty until fixed, then permanent.
        has_shares: a share of it was passed on, or was about to be.
        sums: tallier id -> its sum or winners; secret, and gone once it is opened.
        opened: its release, if later rounds are asked about it; else None.
        done: memory: agents that reported that they sent all their shares.
        is_made: memory: its messages have been made and are small enough.
        decided_at_s: memory: when its quorum was reached, or lost.
        gone_at_s: memory: agent id -> when it was found to have other keys.
    """

    number: int
    first_query: int
    num_queries: int
    state: RoundState = "waiting"
    batch_digest: str = ""
    round_digest: str = ""
    participants: Mapping[str, str] = field(default_factory=dict)
    holdings: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    refusals: Mapping[str, str] = field(default_factory=dict)
    final: frozenset[str] = frozenset()
    contributors: tuple[str, ...] = ()
    has_shares: bool = False
    sums: Mapping[str, bytes] = field(default_factory=dict, repr=False)
    opened: Release | None = None
    done: frozenset[str] = frozenset()
    is_made: bool = False
    decided_at_s: float | None = None
    gone_at_s: Mapping[str, float] = field(default_factory=dict)

    def held_by_all(self, tallier_ids: tuple[str, ...]) -> frozenset[str]:
        """Return the agents of which every tallier holds a share of the same split; none until all talliers report."""
        reports = [self.holdings.get(tallier_id) for tallier_id in tallier_ids]
        known = [set(report.items()) for report in reports if report is not None]
        if not reports or len(known) < len(reports):
            return frozenset()
        return frozenset(agent for agent, _ in set.intersection(*known))


@dataclass(frozen=True)
class JobRun:
    """A job; see the module.

    Attributes:
        job_id, task, num_queries, expires_at_s: as submitted; the deadline in unix time.
        participants: the agents of its task, in the task's order.
        rounds: its rounds in order. A round is asked once the previous one is charged, and charged once that is opened.
        answers: agent id -> its reply to the proposal.
        asked: the agents it asks, permanent once fixed; None until then.
        parties: the parties enrolled now, by id.
        requester: its submitter's name, for people at the sites; empty if there is none.
        is_simulated: noise from a known seed is expected, and every release says so; never in a service.
        is_admitted: memory: it has had its turn among the jobs of its requester.
        looks_ahead: memory: the next round is asked while one is summed.
        is_storing: memory: the last step has to be durable before the next.
        decided_at_s: memory: when the agents it asks were settled, even if there are none.
        asked_at_s: memory: (party, subject) -> when it was last asked.
        mail: memory: party id -> messages that waited at the last tick.
    """

    job_id: str
    task: Task
    participants: tuple[str, ...]
    num_queries: int
    expires_at_s: float
    patience: Patience
    state: JobState
    rounds: tuple[RoundRun, ...]
    answers: Mapping[str, ProposalReply] = field(default_factory=dict)
    asked: tuple[str, ...] | None = None
    parties: Mapping[str, Party] = field(default_factory=dict)
    requester: str = ""
    is_simulated: bool = False
    is_admitted: bool = False
    looks_ahead: bool = True
    is_storing: bool = False
    decided_at_s: float | None = None
    asked_at_s: Mapping[tuple[str, str], float] = field(default_factory=dict)
    mail: Mapping[str, int] = field(default_factory=dict)

    @property
    def current(self) -> RoundRun | None:
        """Return the first round that is not opened."""
        return next((one for one in self.rounds if one.state != "opened"), None)

    @property
    def untied(self) -> tuple[int, ...]:
        """Return the rounds to tie to their questions now.

        Usually these are all rounds at once. Steps of training are tied one by one: a step's question contains a
        model, which is known only when the earlier steps are opened.
        """
        current = () if self.current is None else (self.current,)
        wanted = current if self.task.steps > 1 else self.rounds
        return tuple(one.number for one in wanted if not one.round_digest)

    @property
    def agents(self) -> tuple[str, ...]:
        """Return the agents it asks, which were willing; none until they are fixed."""
        return self.asked or ()

    def round_with(self, round_digest: str) -> RoundRun | None:
        """Return the round with this digest; None if there is none."""
        return next((one for one in self.rounds if one.round_digest == round_digest and round_digest), None)

    def model_asked(self, one: RoundRun) -> NDArray[np.float64] | None:
        """Return the public model that a step of training starts from; None for other methods.

        It follows from what the earlier steps opened.

        Raises:
            BadData: an earlier round is not opened, or not a step of training.
        """
        if self.task.sampled is None:
            return None
        before = [other.opened for other in self.rounds[: one.number]]
        opened = [release for release in before if release is not None]
        if len(opened) < len(before):
            raise BadData("a step of training is asked before those that it follows from are opened")
        return model_before(self.task, opened)

    def round_value(self, one: RoundRun) -> Round:
        """Return a round as messages name it."""
        return round_with(self.task, one.batch_digest, one.num_queries)


@dataclass
class Standing:
    """The replies of a task's agents to a job now, each agent in exactly one list.

    Attributes:
        willing: they have said yes.
        declined: they said no, or cannot answer because their keys were revoked.
        silent: they have not replied yet, or their yes has ended.
        later: they replied "later".
    """

    willing: list[str] = field(default_factory=list)
    declined: list[str] = field(default_factory=list)
    silent: list[str] = field(default_factory=list)
    later: list[str] = field(default_factory=list)

    @property
    def open(self) -> list[str]:
        """Return the agents that may still say yes."""
        return [*self.silent, *self.later]


def stand(job: JobRun, *, wall_s: float) -> Standing:
    """Sort the agents of a job's task by their replies; a yes that ended before `wall_s` does not count."""
    found = Standing()
    for agent in job.participants:
        said, party = job.answers.get(agent), job.parties.get(agent)
        if party is None or (said is not None and said.answer == "declined"):
            found.declined.append(agent)
        elif said is not None and said.until_s is not None and said.until_s >= wall_s:
            found.willing.append(agent)
        elif said is not None and said.answer == "later":
            found.later.append(agent)
        else:
            found.silent.append(agent)
    return found
