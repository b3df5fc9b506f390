"""Events and effects of a round, and the states of a job.

More than 400 lines: a list of small frozen records, which all three machines and their drivers share.

The words for a job that everybody shares: its states, how questions are chosen, why one has the label it has.

What the coordinator's machine is told (events) and what it wants done (effects); frozen, and nothing else.

An effect is a `Store`, durable before anything else of the same step happens; a `Send`, carried out after that and
allowed to be lost; a `Compute`, whose result comes back as an event; or a word to whoever drives. Whoever drives makes
all stores of a step durable together, then sends.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final, Literal, get_args

from labeler.errors import LabelerError
from labeler.release import Release

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
class Said:
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
class Answered:
    """An agent has said whether it will."""

    agent_id: str
    task_digest: str
    said: Said


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


MessageEvent = Answered | ShareCame | AgentDone | HoldingsCame | RefusalCame | SumCame
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
class StoreSaid:
    """Keep what an agent said."""

    agent_id: str
    said: Said


@dataclass(frozen=True)
class Divide:
    """Fix whom the job asks, and put one charge per round, of those alone, in the place of the whole job's."""

    agents: tuple[str, ...]


@dataclass(frozen=True)
class Begin:
    """Fix whose shares a round takes, and note that it is asked; from here on nobody can say that nothing left.

    Attributes:
        participants: agent id -> the key its shares are signed with.
        is_asked: False where it was noted before and only the participants are missing.
    """

    number: int
    participants: Mapping[str, str]
    is_asked: bool = True


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
    | StoreSaid
    | Divide
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
class Enter:
    """Wait for the job's turn among those of its requester: `Admitted`."""


@dataclass(frozen=True)
class Prepare:
    """Look for the questions, and ask whoever makes them: `QuestionsPrepared` or `Failed`, or nothing yet."""


@dataclass(frozen=True)
class MakeBodies:
    """Make what a round would send: `BodiesMade` or `Failed`."""

    number: int


@dataclass(frozen=True)
class PutTogether:
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
class Leave:
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


Compute = Enter | Prepare | MakeBodies | PutTogether | AskForTurn
Effect = Store | Send | Compute | TurnFailed | Leave | Refuse | WaitUntil
