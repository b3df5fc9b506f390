"""An agent's answer to a proposed job, before anybody is charged, as a pure state machine.

           Proposed, admitted             Promised
    unheard -------------------> (promise) --------> willing     proposed again: the same yes, until its deadline.
                                    |
                                    +--- NotCovered -> declined  proposed again: the same no.
                                    +--- Refused: Decline; a repeated proposal is considered again.

The agent says yes only after the price is set aside durably. The yes ends at its deadline, or with the job. Nothing
here contains data of a record: the answer follows from the policy, the approvals and the budget of the site.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final, Literal, assert_never

from labeler.errors import BudgetExceeded, PrivacyRefusal
from labeler.messages.bodies import Proposal, RefusalBody
from labeler.rounds.agent import Refused

PROMISE_ENDED: Final = "what was promised to this job has ended; submit it again"
NOT_COVERED: Final = (
    "the site's budget does not cover this round; only the site can see how much is left (labeler agent budget)"
)
"""The only text that leaves the site if its budget is too small."""


@dataclass(frozen=True)
class AgentProposal:
    """One proposal at one agent.

    Attributes:
        stage: the durable answer; "unheard" if there is none yet, or only a no that is not stored.
        until: unix time in seconds at which a yes ends.
        is_promising: the price is being set aside.
    """

    stage: Literal["unheard", "willing", "declined"] = "unheard"
    until: float = 0.0
    is_promising: bool = False


@dataclass(frozen=True)
class JobProposed:
    """The coordinator proposes a job."""

    proposal: Proposal


@dataclass(frozen=True)
class ProposalAdmitted:
    """Shard, policy and approvals allow the job."""

    proposal: Proposal


@dataclass(frozen=True)
class Promised:
    """The price is set aside durably."""

    until: float


@dataclass(frozen=True)
class NotCovered:
    """The site's budget does not cover the job; this answer is stored."""

    refusal: RefusalBody


@dataclass(frozen=True)
class ProposalWithdrawn:
    """A yes has ended now, because nothing more of its job is asked."""


ProposalEvent = JobProposed | ProposalAdmitted | Refused | Promised | NotCovered | ProposalWithdrawn


@dataclass(frozen=True)
class AdmitProposal:
    """Check that shard, policy and approvals allow the job."""

    proposal: Proposal


@dataclass(frozen=True)
class Promise:
    """Set aside the price of all the job's rounds durably, or record that the budget does not cover it."""

    proposal: Proposal


@dataclass(frozen=True)
class SayWilling:
    """Say yes, until this unix time in seconds."""

    until: float


@dataclass(frozen=True)
class DeclineProposal:
    """Say no, or not yet."""

    refusal: RefusalBody


ProposalEffect = AdmitProposal | Promise | SayWilling | DeclineProposal


def step(state: AgentProposal, event: ProposalEvent, now: float) -> tuple[AgentProposal, tuple[ProposalEffect, ...]]:
    """Return the next state of a proposal, and its effects; see the module.

    Args:
        event: events may come in any order.
        now: unix time in seconds.
    """
    match event:
        case JobProposed(proposal):
            if state.stage == "unheard":
                return state, (AdmitProposal(proposal),)
            return state, (_said(state, now),)
        case ProposalAdmitted(proposal):
            if state.stage != "unheard":
                return state, (_said(state, now),)
            return (state, ()) if state.is_promising else (replace(state, is_promising=True), (Promise(proposal),))
        case Refused(refusal):
            if state.stage != "unheard":
                return state, (_said(state, now),)
            return replace(state, is_promising=False), (DeclineProposal(refusal),)
        case Promised(until):
            if not state.is_promising:
                return state, ()
            return AgentProposal("willing", until), (SayWilling(until),)
        case NotCovered(refusal):
            if not state.is_promising:
                return state, ()
            return AgentProposal("declined"), (DeclineProposal(refusal),)
        case ProposalWithdrawn():
            return (replace(state, until=min(state.until, now)) if state.stage == "willing" else state), ()
        case other:
            assert_never(other)


def _said(state: AgentProposal, now: float) -> ProposalEffect:
    if state.stage == "declined":
        return DeclineProposal(RefusalBody.of(BudgetExceeded(NOT_COVERED)))
    if state.until <= now:
        return DeclineProposal(RefusalBody.of(PrivacyRefusal(PROMISE_ENDED)))
    return SayWilling(state.until)
