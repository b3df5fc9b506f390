"""The rules an agent follows for every charged round, and the sentences with which it refuses.

An answer is computed once. Its bytes are stored durably before the first of them leaves. A repeated request gets the
stored bytes, whatever the records are by then. Once no tallier can miss them they are erased, with the round's key, and
the round is refused permanently. So what a round shows of an agent follows from one version of its records, for which
it was charged, and from public things. These are who asks, for whom, when, and whether everything has arrived. An
answer may be computed again after a crash between the charge and the storing. That changes nothing: nothing had left.

Every sentence here is the same whether records have changed or not.

The agent's part in a round is a pure state machine: it takes events and returns effects.

Its answer to a proposed job is a separate machine (labeler.rounds.agent_proposal). The stage of a round is durable; at
most one operation is under way besides.

           Asked, admitted            Charged               Computed, Stored
    new -------------------> (charge) --------> charged -------------------> stored
     ^                          | refused        |   ^ |                       |  asked again, admitted:
     +--------------------------+                |   +-+ Failed: Wait, then     |  Send the stored bytes
      Refuse, nothing charged                    |       Compute again         |
                                                 +---- Settled or Expired -----+
                                                                |  Erase
                                                                v
                                                             erased: Refuse from now on, in one sentence

The rules, and why they hold for every order of events (proved by reading `step`, tested with random events):

* **Of this round alone.** An ask of another round changes nothing, whatever its result.
* **Charged once.** `ChargeRound` is asked for in stage `new` only, and while none is under way. Its result
  `RoundCharged` leaves the stage permanently. A driver's charge is itself idempotent by the round, so a repeated
  `RoundCharged` charges nothing.
* **Stored before it leaves.** `SendStored` is asked for in stage `stored` only, and only `AnswerStored` leads there:
  the bytes are durable. It carries no bytes: its driver has only the stored ones to send.
* **One split.** `Compute` is asked for in stage `charged` only, and while none is under way; `Store` follows a
  `Computed` in stage `charged` only. After `AnswerStored` neither comes again.
* **After the charge it answers or is silent.** `AnswerFailed` leads to `Wait` and nothing else. A refusal after the
  charge follows a refused admission (public things), other recipients, or the erased stage. To the party that asked,
  the agent looks as if it were switched off. A round that waits for its next attempt delays no other.
* **No bit of a record.** Only `Computed` holds anything of a record, and its bodies are sealed and passed on unread. So
  two neighboring worlds with the same public events give the same effects, kind by kind. Whether an attempt fails may
  depend on the site's trouble (a full disk), which nothing outside can see.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final, Literal, assert_never

from labeler.errors import PrivacyRefusal
from labeler.messages.bodies import Ask, RefusalBody

Recipients = tuple[tuple[str, str], ...]
"""The recipients of an answer's shares: id and public sealing key of each tallier, in tallier order.

Shares of one answer always go to the same talliers in the same order. The split is a function of the round. So in
another order one tallier would see another share of the same split, and with all of them the noised ballot itself.
Another set of talliers could sum the round over other agents under the same noise.
"""

NOT_KEPT: Final = (
    "this agent was charged for this round before and keeps nothing of it any more: every tallier has confirmed it, or "
    "its deadline has passed. It is not answered again; ask in a new task (a new nonce), which is charged anew"
)
"""The refusal of a round whose key is erased."""

ANSWERED_TO_OTHERS: Final = (
    "this round was answered for other talliers, other keys of theirs, or in another order; shares of the same answer "
    "sent elsewhere could be put together. What was stored for the old ones is void and is never sealed anew. Ask in a "
    "new task (a new nonce), which is charged anew"
)
"""The refusal of a round for recipients other than those who got its shares."""


Stage = Literal["new", "charged", "stored", "erased"]
Doing = Literal["nothing", "charge", "compute", "store"]

FIRST_PAUSE_S: Final = 0.5
LONGEST_PAUSE_S: Final = 30.0
"""Pause between attempts at a charged answer: the first one, and the longest."""


@dataclass(frozen=True)
class AgentRound:
    """One round at one agent.

    Attributes:
        stage: the durable stage.
        recipients: for whom it was charged; empty before.
        doing: the effect that was asked for and has no result yet.
        ask: the charged ask while it has no stored answer; None if this process has not received it.
        attempts: number of failed attempts at an answer.
        is_waiting: for the moment of its next attempt.
        is_settled: it was settled while its charge was under way.
    """

    round_digest: str
    stage: Stage = "new"
    recipients: Recipients = ()
    doing: Doing = "nothing"
    ask: Ask | None = None
    attempts: int = 0
    is_waiting: bool = False
    is_settled: bool = False


# Events of a round.


@dataclass(frozen=True, eq=False)
class Asked:
    """The coordinator asks."""

    ask: Ask


@dataclass(frozen=True, eq=False)
class AskAdmitted:
    """Shard, policy and approvals allow what was asked."""

    ask: Ask


@dataclass(frozen=True)
class Refused:
    """The ask or proposal is invalid or not allowed."""

    refusal: RefusalBody


@dataclass(frozen=True, eq=False)
class RoundCharged:
    """The price is taken durably, now or before."""

    ask: Ask


@dataclass(frozen=True)
class ChargeRefused:
    """The ledger took nothing."""

    refusal: RefusalBody


@dataclass(frozen=True, repr=False)
class Computed:
    """An answer exists, sealed for each recipient; nothing of it is stored."""

    bodies: tuple[bytes, ...]

    def __repr__(self) -> str:
        return "Computed(<sealed>)"


@dataclass(frozen=True)
class AnswerStored:
    """The answer is durable."""


@dataclass(frozen=True)
class AnswerFailed:
    """An answer could not be made or stored: trouble at the site."""


@dataclass(frozen=True)
class RoundSettled:
    """Every party has what it needs of the round."""


@dataclass(frozen=True)
class AskExpired:
    """The time in which the round may be asked for is over."""


@dataclass(frozen=True)
class Woken:
    """The pause of a `Wait` is over."""


RoundEvent = (
    Asked
    | AskAdmitted
    | Refused
    | RoundCharged
    | ChargeRefused
    | Computed
    | AnswerStored
    | AnswerFailed
    | RoundSettled
    | AskExpired
    | Woken
)


# Effects of a round.


@dataclass(frozen=True, eq=False)
class Admit:
    """Check that shard, policy and approvals allow it; `is_charged` asks need not fit the shard as it is now."""

    ask: Ask
    is_charged: bool


@dataclass(frozen=True, eq=False)
class ChargeRound:
    """Take the price, draw the round's key and remember the recipients, in one durable step."""

    ask: Ask


@dataclass(frozen=True, eq=False)
class Compute:
    """Vote, add noise, split, seal."""

    ask: Ask


@dataclass(frozen=True, repr=False)
class Store:
    """Store the answer, encrypted under the round's key."""

    bodies: tuple[bytes, ...]

    def __repr__(self) -> str:
        return "Store(<sealed>)"


@dataclass(frozen=True)
class SendStored:
    """Send the stored bytes to the talliers, and a receipt to the coordinator."""


@dataclass(frozen=True)
class RefuseAsk:
    """Refuse the ask."""

    refusal: RefusalBody


@dataclass(frozen=True)
class Erase:
    """Erase key and answer permanently."""


@dataclass(frozen=True)
class Wait:
    """Return with `Woken` after this many seconds; other rounds continue meanwhile.

    A duration and not a time of day: a clock that is set back must not prolong it.
    """

    pause_s: float


RoundEffect = Admit | ChargeRound | Compute | Store | SendStored | RefuseAsk | Erase | Wait


def step(state: AgentRound, event: RoundEvent, now: float) -> tuple[AgentRound, tuple[RoundEffect, ...]]:
    """Return the next state of a round, and its effects; see the module.

    Args:
        event: events may come in any order.
        now: unix time in seconds.
    """
    match event:
        case Asked(ask) | AskAdmitted(ask) | RoundCharged(ask) if ask.round.digest != state.round_digest:
            return state, ()
        case Asked(ask):
            return state, (Admit(ask, is_charged=state.stage != "new"),)
        case Refused(refusal):
            return state, (RefuseAsk(refusal),)
        case AskAdmitted(ask):
            return _admitted(state, ask)
        case RoundCharged(ask):
            return _charged(state, ask)
        case ChargeRefused(refusal):
            if state.doing != "charge":
                return state, ()
            return replace(state, doing="nothing", is_settled=False), (RefuseAsk(refusal),)
        case Computed(bodies):
            if (state.stage, state.doing) != ("charged", "compute"):
                return state, ()
            return replace(state, doing="store"), (Store(bodies),)
        case AnswerStored():
            if (state.stage, state.doing) != ("charged", "store"):
                return state, ()
            done = replace(state, stage="stored", doing="nothing", ask=None, attempts=0, is_waiting=False)
            return done, (SendStored(),)
        case AnswerFailed():
            return _failed(state)
        case Woken():
            return _woken(state, now)
        case RoundSettled() | AskExpired():
            if state.doing == "charge":
                return replace(state, is_settled=True), ()
            return _erased(state) if state.stage in ("charged", "stored") else (state, ())
        case other:
            assert_never(other)


def recipients_of(ask: Ask) -> Recipients:
    """Return the recipients of an ask, in the stored form."""
    return tuple((tallier.tallier_id, tallier.seal_key) for tallier in ask.talliers)


def _admitted(state: AgentRound, ask: Ask) -> tuple[AgentRound, tuple[RoundEffect, ...]]:
    if state.stage == "erased":
        return state, (RefuseAsk(RefusalBody.of(PrivacyRefusal(NOT_KEPT))),)
    if state.stage == "new":
        if state.doing == "charge":
            return state, ()  # the answer to the ask that is being charged also answers this one
        return replace(state, doing="charge"), (ChargeRound(ask),)
    if recipients_of(ask) != state.recipients:
        return state, (RefuseAsk(RefusalBody.of(PrivacyRefusal(ANSWERED_TO_OTHERS))),)
    if state.stage == "stored":
        return state, (SendStored(),)
    state = replace(state, ask=ask)
    if state.doing != "nothing" or state.is_waiting:
        return state, ()  # under way, or waiting for its next attempt: repeated asks do not bring it forward
    return replace(state, doing="compute"), (Compute(ask),)


def _charged(state: AgentRound, ask: Ask) -> tuple[AgentRound, tuple[RoundEffect, ...]]:
    if (state.stage, state.doing) != ("new", "charge"):
        return state, ()
    charged = replace(state, stage="charged", doing="compute", recipients=recipients_of(ask), ask=ask)
    if state.is_settled:
        return _erased(replace(charged, is_settled=False))
    return charged, (Compute(ask),)


def _failed(state: AgentRound) -> tuple[AgentRound, tuple[RoundEffect, ...]]:
    if state.stage != "charged" or state.doing not in ("compute", "store"):
        return state, ()
    pause_s = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2.0 ** min(state.attempts, 10))
    return replace(state, doing="nothing", attempts=state.attempts + 1, is_waiting=True), (Wait(pause_s),)


def _woken(state: AgentRound, now: float) -> tuple[AgentRound, tuple[RoundEffect, ...]]:
    if state.stage != "charged" or state.doing != "nothing" or state.ask is None or not state.is_waiting:
        return state, ()
    if now > state.ask.expires_at:
        # Nobody waits for it any more; what is stored is erased when nobody may ask any more.
        return replace(state, ask=None, attempts=0, is_waiting=False), ()
    return replace(state, doing="compute", is_waiting=False), (Compute(state.ask),)


def _erased(state: AgentRound) -> tuple[AgentRound, tuple[RoundEffect, ...]]:
    return AgentRound(state.round_digest, "erased", state.recipients), (Erase(),)
