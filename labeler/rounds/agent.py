"""What an agent keeps to for every round it was charged for, and the sentences with which it refuses.

An answer is computed once. Its bytes are stored, durably, before the first of them leaves, and whoever asks again is
sent the stored bytes, whatever the records are by then. Once no tallier can miss them they are erased, with the round's
key, and the round is refused for ever. So what a round shows of an agent follows from one version of its records, for
which it was charged, and from public things: who asks, for whom, when, and whether everything has arrived. That an
answer was computed again after a crash between the charge and the storing changes nothing of it: nothing had left.

Every sentence here is the same whether records have changed or not.

An agent's part in a round, as a pure machine: what has happened goes in, what is to happen out.

What it says of a job before that is the machine beside it (labeler.rounds.agent_proposal). Of a round its stage is
durable; beside it at most one thing is under way.

           Asked, admitted            Charged               Computed, Stored
    new -------------------> (charge) --------> charged -------------------> stored
     ^                          | refused        |   ^ |                       |  asked again, admitted:
     +--------------------------+                |   +-+ Failed: Wait, then     |  Send the stored bytes
      Refuse, nothing charged                    |       Compute again         |
                                                 +---- Settled or Expired -----+
                                                                |  Erase
                                                                v
                                                             erased, for ever: Refuse, in one sentence

The rules, and why they hold whatever comes in whatever order (proved by reading `step`, tested by chance):

* **Of this round alone.** An ask of another round changes nothing, whatever came of it.
* **Charged once.** `Charge` is asked for in stage `new` only, and while none is under way. Its result `Charged` leaves
  the stage for ever. A driver's charge is itself idempotent by the round, so a repeated `Charged` is none.
* **Stored before it leaves.** `SendStored` is asked for in stage `stored` only, and only `Stored` leads there: the
  bytes are durable. It carries no bytes: whoever carries it out has only the stored ones to send.
* **One split.** `Compute` is asked for in stage `charged` only, and while none is under way; `Store` follows a
  `Computed` in stage `charged` only. After `Stored` neither comes again.
* **After the charge it answers or is silent.** `Failed` leads to `Wait` and nothing else; a refusal after the
  charge follows a refused admission (public things), other recipients, or the erased stage. Whoever asked sees an agent
  that does not answer, as when it was switched off. A round that waits for its next attempt holds up no other.
* **No bit of a record.** No event holds anything of a record but `Computed`, whose bodies are sealed and handed on
  unread. So two neighbouring worlds that get the same public events give the same effects, kind by kind; whether an
  attempt fails may depend on the site's trouble (a full disk), which nothing outside can see.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final, Literal, assert_never

from labeler.errors import PrivacyRefusal
from labeler.messages.bodies import Ask, Refusal

Recipients = tuple[tuple[str, str], ...]
"""Who gets the shares of an answer: id and public sealing key of each tallier, in tallier order.

Shares of one answer always go to the same talliers in the same order. The split is a function of the round, so in
another order one tallier would see another share of the same split, and with all of them the noised ballot itself.
Another set of talliers could sum the round over other agents under the same noise.
"""

IN_PROCESS: Final[Recipients] = ()
"""The recipients where talliers are objects of the same process, handed their shares by number."""

NOT_KEPT: Final = (
    "this agent was charged for this round before and keeps nothing of it any more: every tallier has confirmed it, or "
    "its deadline has passed. It is not answered again; ask in a new task (a new nonce), which is charged anew"
)
"""Why a round is refused once its key is erased."""

ANSWERED_TO_OTHERS: Final = (
    "this round was answered for other talliers, other keys of theirs, or in another order; shares of the same answer "
    "sent elsewhere could be put together. What was stored for the old ones is void and is never sealed anew. Ask in a "
    "new task (a new nonce), which is charged anew"
)
"""Why a round is refused for other recipients than those who got its shares."""


Stage = Literal["new", "charged", "stored", "erased"]
Doing = Literal["nothing", "charge", "compute", "store"]

FIRST_PAUSE_S: Final = 0.5
LONGEST_PAUSE_S: Final = 30.0
"""Between attempts at an answer that was charged, the first time and in the end."""


@dataclass(frozen=True)
class AgentRound:
    """One round at one agent.

    Attributes:
        stage: what is durable of it.
        recipients: for whom it was charged; empty before.
        doing: what was asked for and has no result yet.
        ask: the charged ask while it has no stored answer; None where this process has not heard it.
        attempts: how often an answer could not be made.
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


# What has happened to a round.


@dataclass(frozen=True, eq=False)
class Asked:
    """The coordinator asks."""

    ask: Ask


@dataclass(frozen=True, eq=False)
class Admitted:
    """Shard, policy and approvals allow what was asked."""

    ask: Ask


@dataclass(frozen=True)
class Refused:
    """What was asked is not allowed, or no ask; for a proposal likewise."""

    refusal: Refusal


@dataclass(frozen=True, eq=False)
class Charged:
    """The price is taken durably, now or before."""

    ask: Ask


@dataclass(frozen=True)
class ChargeRefused:
    """The ledger took nothing."""

    refusal: Refusal


@dataclass(frozen=True, repr=False)
class Computed:
    """There is an answer, sealed for each recipient; nothing of it is stored."""

    bodies: tuple[bytes, ...]

    def __repr__(self) -> str:
        return "Computed(<sealed>)"


@dataclass(frozen=True)
class Stored:
    """The answer is durable."""


@dataclass(frozen=True)
class Failed:
    """An answer could not be made or stored: trouble of the site."""


@dataclass(frozen=True)
class Settled:
    """Nobody misses anything of the round any more."""


@dataclass(frozen=True)
class Expired:
    """Nobody may ask for the round any more."""


@dataclass(frozen=True)
class Woken:
    """The pause of a `Wait` is over."""


RoundEvent = (
    Asked | Admitted | Refused | Charged | ChargeRefused | Computed | Stored | Failed | Settled | Expired | Woken
)


# What is to happen to a round.


@dataclass(frozen=True, eq=False)
class Admit:
    """Look whether shard, policy and approvals allow it; `is_charged` ones need not fit the shard as it is now."""

    ask: Ask
    is_charged: bool


@dataclass(frozen=True, eq=False)
class Charge:
    """Take the price, draw the round's key, remember for whom: in one durable step."""

    ask: Ask


@dataclass(frozen=True, eq=False)
class Compute:
    """Vote, add noise, split, seal."""

    ask: Ask


@dataclass(frozen=True, repr=False)
class Store:
    """Keep the answer, encrypted under the round's key."""

    bodies: tuple[bytes, ...]

    def __repr__(self) -> str:
        return "Store(<sealed>)"


@dataclass(frozen=True)
class SendStored:
    """Send the stored bytes to the talliers, and a receipt to the coordinator."""


@dataclass(frozen=True)
class Refuse:
    """Say no."""

    refusal: Refusal


@dataclass(frozen=True)
class Erase:
    """Erase key and answer, for ever."""


@dataclass(frozen=True)
class Wait:
    """Come back with `Woken` after so many seconds; other rounds go on meanwhile.

    A pause and no moment: a clock that is set back must not make it long.
    """

    pause_s: float


RoundEffect = Admit | Charge | Compute | Store | SendStored | Refuse | Erase | Wait


def step(state: AgentRound, event: RoundEvent, now: float) -> tuple[AgentRound, tuple[RoundEffect, ...]]:
    """What becomes of a round, and what is to be done about it; see the module.

    Args:
        event: what has happened to it, in whatever order.
        now: unix time in seconds.
    """
    match event:
        case Asked(ask) | Admitted(ask) | Charged(ask) if ask.round.digest != state.round_digest:
            return state, ()
        case Asked(ask):
            return state, (Admit(ask, is_charged=state.stage != "new"),)
        case Refused(refusal):
            return state, (Refuse(refusal),)
        case Admitted(ask):
            return _admitted(state, ask)
        case Charged(ask):
            return _charged(state, ask)
        case ChargeRefused(refusal):
            if state.doing != "charge":
                return state, ()
            return replace(state, doing="nothing", is_settled=False), (Refuse(refusal),)
        case Computed(bodies):
            if (state.stage, state.doing) != ("charged", "compute"):
                return state, ()
            return replace(state, doing="store"), (Store(bodies),)
        case Stored():
            if (state.stage, state.doing) != ("charged", "store"):
                return state, ()
            done = replace(state, stage="stored", doing="nothing", ask=None, attempts=0, is_waiting=False)
            return done, (SendStored(),)
        case Failed():
            return _failed(state)
        case Woken():
            return _woken(state, now)
        case Settled() | Expired():
            if state.doing == "charge":
                return replace(state, is_settled=True), ()
            return _erased(state) if state.stage in ("charged", "stored") else (state, ())
        case other:
            assert_never(other)


def resume(state: AgentRound) -> tuple[AgentRound, tuple[RoundEffect, ...]]:
    """A round as a process begins with it, in which nothing is under way any more, and what is still owed of it.

    A round that was charged and has no stored answer is computed once it is asked for again: its queries are in the
    ask, and the coordinator asks until it has an answer. One whose ask is known is computed now.
    """
    begun = replace(state, doing="nothing", attempts=0, is_waiting=False, is_settled=False)
    if begun.stage == "charged" and begun.ask is not None:
        return replace(begun, doing="compute"), (Compute(begun.ask),)
    return begun, ()


def recipients_of(ask: Ask) -> Recipients:
    """Who gets the shares of an ask, as it is kept."""
    return tuple((tallier.tallier_id, tallier.seal_key) for tallier in ask.talliers)


def _admitted(state: AgentRound, ask: Ask) -> tuple[AgentRound, tuple[RoundEffect, ...]]:
    if state.stage == "erased":
        return state, (Refuse(Refusal.of(PrivacyRefusal(NOT_KEPT))),)
    if state.stage == "new":
        if state.doing == "charge":
            return state, ()  # the ask that is being charged is answered, and so is this one with it
        return replace(state, doing="charge"), (Charge(ask),)
    if recipients_of(ask) != state.recipients:
        return state, (Refuse(Refusal.of(PrivacyRefusal(ANSWERED_TO_OTHERS))),)
    if state.stage == "stored":
        return state, (SendStored(),)
    state = replace(state, ask=ask)
    if state.doing != "nothing" or state.is_waiting:
        return state, ()  # under way, or waiting for its next attempt: asking more often makes none come sooner
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
        # Nobody waits for it any more; what is kept of it is erased when nobody may ask any more.
        return replace(state, ask=None, attempts=0, is_waiting=False), ()
    return replace(state, doing="compute", is_waiting=False), (Compute(state.ask),)


def _erased(state: AgentRound) -> tuple[AgentRound, tuple[RoundEffect, ...]]:
    return AgentRound(state.round_digest, "erased", state.recipients), (Erase(),)
