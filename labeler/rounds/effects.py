"""A job as all of its drivers see it: its states, its rounds, and the events and effects of its machine.

What the coordinator's machine is told (events) and what it wants done (effects) are frozen records, and nothing else.
An effect is a `Store`, durable before anything else of the same step happens; a `Send`, carried out after that and
allowed to be lost; a `Compute`, whose result comes back as an event; or a word to whoever drives. Whoever drives makes
all stores of a step durable together, then sends.

`JobRun` is one job as the machine sees it: what the journal keeps of it, and a little that may be forgotten.
Everything under "memory" may be lost: then everybody is asked once more, and whoever is asked twice answers twice the
same. Everything else is in the journal and read from there after a restart.

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
"""How far a job is; see ARCHITECTURE."""

UNFINISHED: Final[tuple[JobState, ...]] = ("queued", "collecting", "tallying")

FINISHED: Final[frozenset[JobState]] = frozenset({"completed", "failed", "refused", "cancelled", "expired"})
"""From which no job goes on."""

RoundState = Literal["waiting", "asked", "agreed", "posted", "opened"]
"""How far one round of a job is, in this order."""

AskedStrategy = Literal["all", "random", "clustered", "spectral"]
"""How a requester may have questions chosen among public images; see `feature_store.query_selection`."""

Strategy = Literal["all", "random", "clustered", "spectral", "weights"]
"""How questions are chosen: as asked, or as a method that asks for a model needs it."""

StudentKind = Literal["planned", "followed", "pooled", "blended"]
"""What learns from the answers; see `feature_store.students.student`."""

STUDENT_KINDS: Final[tuple[StudentKind, ...]] = get_args(StudentKind)

MOST_SPECTRAL_GROUPS: Final = 500
"""As many groups as strategy `spectral` makes: each takes an eigenvector, and time grows with their square."""


def check_selection(strategy: AskedStrategy, count: int | None) -> None:
    """Refuse a choice of questions that cannot be made, whatever the images are.

    Raises:
        ValueError: no count where one is needed, or more groups than the strategy makes.
    """
    if strategy != "all" and count is None:
        raise ValueError(f"strategy {strategy!r} needs count, how many questions to ask")
    if strategy == "spectral" and count is not None and count > MOST_SPECTRAL_GROUPS:
        raise ValueError(
            f"strategy 'spectral' makes at most {MOST_SPECTRAL_GROUPS} groups, found count {count}; strategy "
            "'clustered' makes more"
        )


class AnswerStatus(StrEnum):
    """Why a query has the label it has."""

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
        wall_s: unix time in seconds, for deadlines that others were told.
        steady_s: seconds that never run backwards, for pauses.
    """

    wall_s: float
    steady_s: float


@dataclass(frozen=True)
class Party:
    """An enrolled party whose keys are in force, as the machine needs it.

    Attributes:
        tallier: which tallier it is, from 0; None for an agent.
        is_heard: it has polled once, so mail for it does not pile up unread.
    """

    party_id: str
    tallier: int | None
    verify_key: str
    seal_key: str
    is_heard: bool = False


@dataclass(frozen=True)
class ProposalReply:
    """What an agent said last of a job before it was asked.

    Attributes:
        answer: "willing"; "declined", for good; "later", where it may be proposed again.
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
    """How long a machine waits.

    Attributes:
        patience_s: how long a round that has its quorum, or cannot reach it, waits for the agents still missing.
        ask_again_s: after how long somebody who has not answered is asked again; longer while their mail piles up.
    """

    patience_s: float
    ask_again_s: float


# Events.


@dataclass(frozen=True)
class Tick:
    """Time has passed, or something about the job was changed by others.

    Attributes:
        mail: party id -> messages that wait in its mail; absent parties have none.
    """

    mail: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class PartiesChanged:
    """Who is enrolled now, by id; only those whose keys are in force."""

    parties: Mapping[str, Party]


@dataclass(frozen=True)
class Admitted:
    """It is this job's turn among those of its requester."""


@dataclass(frozen=True)
class QuestionsPrepared:
    """The questions are there: (round number, batch digest, round digest) of every round of `JobRun.untied`."""

    batches: tuple[tuple[int, str, str], ...]


@dataclass(frozen=True)
class BodiesMade:
    """What a round would send has been made, and fits into messages."""

    number: int


@dataclass(frozen=True)
class ReplyCame:
    """An agent has said whether it will."""

    agent_id: str
    task_digest: str
    said: ProposalReply


@dataclass(frozen=True)
class ShareCame:
    """An agent's sealed share for a tallier has come by."""

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
    """What a tallier holds: agent id -> sharing id in hexadecimal."""

    round_digest: str
    task_digest: str
    tallier_id: str
    holdings: Mapping[str, str]


@dataclass(frozen=True)
class RefusalCame:
    """A party does not do what it was asked."""

    round_digest: str
    task_digest: str
    party_id: str
    sentence: str
    is_final: bool


@dataclass(frozen=True)
class SumCame:
    """A tallier's sum, or the winners it found.

    Attributes:
        kind: of release that it belongs to.
        stated: the round digest and tallier number that stand in the body.
        data: the body; secret until all are put together.
    """

    round_digest: str
    task_digest: str
    tallier_id: str
    kind: Literal["histogram", "winner"]
    stated: tuple[str, int]
    data: bytes = field(repr=False)


@dataclass(frozen=True)
class TurnGranted:
    """The talliers are to be asked for the winners of this round now."""

    round_digest: str


@dataclass(frozen=True)
class Opened:
    """What the sums of a round, put together, release."""

    number: int
    release: Release = field(repr=False)


@dataclass(frozen=True)
class Failed:
    """Something that was computed or stored for the job cannot be; for good.

    Attributes:
        number: of the round whose messages cannot be made; None where it is something else.
    """

    error: LabelerError
    number: int | None = None


@dataclass(frozen=True)
class Stored:
    """What the last step stored is durable."""


@dataclass(frozen=True)
class Ended:
    """Somebody else ended the job."""

    state: JobState


MessageEvent = ReplyCame | ShareCame | AgentDone | HoldingsCame | RefusalCame | SumCame
Event = (
    MessageEvent
    | Tick
    | PartiesChanged
    | Admitted
    | QuestionsPrepared
    | BodiesMade
    | TurnGranted
    | Opened
    | Failed
    | Stored
    | Ended
)


# Effects that are stored.


@dataclass(frozen=True)
class StoreBatches:
    """Tie rounds to their questions."""

    batches: tuple[tuple[int, str, str], ...]


@dataclass(frozen=True)
class StoreReply:
    """Keep what an agent said."""

    agent_id: str
    said: ProposalReply


@dataclass(frozen=True)
class ReserveRounds:
    """Fix whom the job asks, and put one charge per round, of those alone, in the place of the whole job's."""

    agents: tuple[str, ...]


@dataclass(frozen=True)
class Begin:
    """Fix whose shares a round takes, and note that it is asked; from here on nobody can say that nothing left.

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
    """Keep what a tallier holds."""

    number: int
    tallier_id: str
    holdings: Mapping[str, str]


@dataclass(frozen=True)
class StoreRefusal:
    """Keep why a party does not answer."""

    number: int
    party_id: str
    sentence: str
    is_final: bool


@dataclass(frozen=True)
class FixContributors:
    """Fix who is summed; the job is tallying."""

    number: int
    contributors: tuple[str, ...]


@dataclass(frozen=True)
class Post:
    """Charge a round for ever."""

    number: int
    num_queries: int
    contributors: tuple[str, ...]


@dataclass(frozen=True)
class StoreSum:
    """Keep a tallier's sum or winners."""

    number: int
    round_digest: str
    tallier_id: str
    data: bytes = field(repr=False)


@dataclass(frozen=True)
class StoreRelease:
    """Store what was opened, and the job's next state with it."""

    number: int
    release: Release = field(repr=False)
    following: JobState


@dataclass(frozen=True)
class Complete:
    """Every round is opened, and the job does not say so yet."""


@dataclass(frozen=True)
class End:
    """End the job otherwise: what may have left stays charged, what did not is given back."""

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
    """Ask agents whether they will."""

    agents: tuple[str, ...]


@dataclass(frozen=True)
class SendWithdrawn:
    """Tell agents that what was not asked of this job will not be."""

    agents: tuple[str, ...]


@dataclass(frozen=True)
class OpenAt:
    """Tell talliers of a round."""

    number: int
    talliers: tuple[str, ...]


@dataclass(frozen=True)
class SendAsks:
    """Ask agents for their shares."""

    number: int
    agents: tuple[str, ...]


@dataclass(frozen=True)
class Relay:
    """Pass the share that has come on to its tallier."""


@dataclass(frozen=True)
class AskForSums:
    """Ask talliers for their sums, or for the winners."""

    number: int
    talliers: tuple[str, ...]


@dataclass(frozen=True)
class TellSettled:
    """Tell agents that nobody misses anything of these rounds any more."""

    numbers: tuple[int, ...]


@dataclass(frozen=True)
class Tell:
    """Whoever watches the job may look again."""


Send = SendProposals | SendWithdrawn | OpenAt | SendAsks | Relay | AskForSums | TellSettled | Tell


# Effects whose result comes back as an event, and words to whoever drives.


@dataclass(frozen=True)
class RequestSlot:
    """Wait for the job's turn among those of its requester: `Admitted`."""


@dataclass(frozen=True)
class Prepare:
    """Look for the questions, and ask whoever makes them: `QuestionsPrepared` or `Failed`, or nothing yet."""


@dataclass(frozen=True)
class MakeBodies:
    """Make what a round would send: `BodiesMade` or `Failed`."""

    number: int


@dataclass(frozen=True)
class Unshard:
    """Open the sums of a round: `Opened` or `Failed`."""

    number: int
    answers: tuple[bytes, ...] = field(repr=False)


@dataclass(frozen=True)
class AskForTurn:
    """Ask whether it is this round's turn to have its winners found: `TurnGranted`, or nothing yet.

    Attributes:
        num_answers: talliers that have answered.
        limit_s: how long a turn lasts at most.
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
    """Rounds that need no winners any more; the job's place is free where it has ended."""

    round_digests: tuple[str, ...]
    has_ended: bool


@dataclass(frozen=True)
class Refuse:
    """The message that came is not taken; nothing of the step counts."""

    error: LabelerError


@dataclass(frozen=True)
class WaitUntil:
    """Nothing is to be done before this moment unless something happens."""

    steady_s: float


Compute = RequestSlot | Prepare | MakeBodies | Unshard | AskForTurn
Effect = Store | Send | Compute | TurnFailed | ReleaseSlot | Refuse | WaitUntil


@dataclass(frozen=True)
class RoundRun:
    """One round of a job.

    Attributes:
        number, first_query, num_queries: its place in the job and in the task.
        state: waiting > asked > agreed > posted > opened.
        batch_digest, round_digest: empty until the questions are prepared; of a step of training also until the steps
            before it have opened the model that it is asked with.
        participants: agent id -> the key its shares are signed with; empty until fixed, then for ever the same.
        holdings: tallier id -> agent id -> sharing id, as last reported.
        refusals: party id -> its reason.
        final: those of them that will not answer when asked again.
        contributors: who is summed; empty until fixed, then for ever the same.
        has_shares: a share of it was passed on, or was about to be.
        sums: tallier id -> its sum or winners; secret, and gone once it is opened.
        opened: what it has released, where later rounds are asked about it; None elsewhere.
        done: memory: agents that have said that they sent all shares of it.
        is_made: memory: what it sends has been made and fits.
        decided_at_s: memory: since when its quorum is reached, or lost.
        gone_at_s: memory: agent id -> since when it is known to have other keys.
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
        """Agents of which every tallier holds a share of the same split; nobody while a tallier has not reported."""
        reports = [self.holdings.get(tallier_id) for tallier_id in tallier_ids]
        if not reports or any(report is None for report in reports):
            return frozenset()
        common = set((reports[0] or {}).items())
        for report in reports[1:]:
            common &= set((report or {}).items())
        return frozenset(agent for agent, _ in common)


@dataclass(frozen=True)
class JobRun:
    """A job; see the module.

    Attributes:
        job_id, task, num_queries, expires_at_s: as submitted; the deadline in unix time.
        participants: the agents of its task, in the task's order.
        rounds: its rounds in order; each is asked once the one before is charged, and charged once that one is opened.
        answers: agent id -> what it said before it was asked.
        asked: whom it asks, fixed once for ever; None while that is open.
        parties: who is enrolled now, by id.
        requester: who submitted it, for people at the sites; empty where that is nobody's name.
        is_simulated: noise from a known seed is expected, and every release says so; never in a service.
        is_admitted: memory: it has had its turn among the jobs of its requester.
        looks_ahead: memory: the next round is asked while one is summed.
        is_storing: memory: a step was taken that has to be durable before the next.
        decided_at_s: memory: since when it is settled whom it asks, or that it asks nobody.
        asked_at_s: memory: (whom, of what) -> when it was last asked.
        mail: memory: how much mail waited with whom at the last tick.
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
        """The first round that is not opened."""
        return next((one for one in self.rounds if one.state != "opened"), None)

    @property
    def untied(self) -> tuple[int, ...]:
        """Rounds that are to be tied to their questions now.

        All of them at once. Of steps of training the one that comes next: its model is part of what it asks, and known
        once those before it are opened.
        """
        current = () if self.current is None else (self.current,)
        wanted = current if self.task.traits.is_sampled else self.rounds
        return tuple(one.number for one in wanted if not one.round_digest)

    @property
    def agents(self) -> tuple[str, ...]:
        """Whom it asks: those that were willing; before that is fixed nobody."""
        return self.asked or ()

    def round_with(self, round_digest: str) -> RoundRun | None:
        """The round of a digest."""
        return next((one for one in self.rounds if one.round_digest == round_digest and round_digest), None)

    def model_asked(self, one: RoundRun) -> NDArray[np.float64] | None:
        """The public model that a step of training begins from, of what the steps before it have opened; else None.

        Raises:
            BadData: one of them is not opened, or not a step.
        """
        if not self.task.traits.is_sampled:
            return None
        before = [other.opened for other in self.rounds[: one.number]]
        opened = [release for release in before if release is not None]
        if len(opened) < len(before):
            raise BadData("a step of training is asked before those that it follows from are opened")
        return model_before(self.task, opened)

    def round_value(self, one: RoundRun) -> Round:
        """A round as messages name it."""
        return round_with(self.task, one.batch_digest, one.num_queries)


@dataclass
class Standing:
    """How the agents of a task stand to a job now, each in exactly one list.

    Attributes:
        willing: they have said yes.
        declined: they will not, or cannot: their keys were revoked.
        silent: they have not said anything yet, or their yes has ended.
        later: they have said: not yet.
    """

    willing: list[str] = field(default_factory=list)
    declined: list[str] = field(default_factory=list)
    silent: list[str] = field(default_factory=list)
    later: list[str] = field(default_factory=list)

    @property
    def open(self) -> list[str]:
        """Who may still say yes."""
        return [*self.silent, *self.later]


def stand(job: JobRun, *, wall_s: float) -> Standing:
    """How the agents of a job's task stand to it; a yes that ended before `wall_s` is none."""
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
