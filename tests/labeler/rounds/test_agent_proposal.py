"""An agent's proposal machine: a yes is set aside before it is said, and a no for want of budget is remembered."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from labeler.errors import PolicyRefusal
from labeler.messages.bodies import Proposal, Refusal, TallierKey
from labeler.rounds import agent_proposal as machine
from labeler.rounds.agent import Refused
from labeler.rounds.agent_proposal import AgentProposal, step
from labeler.task import parse_task

TASK = parse_task(
    {
        "name": "t", "classes": ("a", "b"), "k": 3, "sigma_votes": 40.0, "delta": 1e-5, "max_queries": 2, "agents": 3,
        "backbone_fingerprint": "f",
    }
)  # fmt: skip
TALLIERS = tuple(TallierKey(f"tallier-{n}", f"{n + 10:064x}", f"{n + 20:064x}") for n in range(3))
NO = Refusal.of(PolicyRefusal("the site says no"))
PROPOSAL = Proposal("job", TASK, (2,), TALLIERS, 100.0)


def test_a_yes_is_set_aside_before_it_is_said_and_is_the_same_when_asked_again() -> None:
    state, (admit,) = step(AgentProposal(), machine.Proposed(PROPOSAL), 0.0)
    assert isinstance(admit, machine.AdmitProposal)
    state, (promise,) = step(state, machine.ProposalAdmitted(PROPOSAL), 0.0)
    assert isinstance(promise, machine.Promise)
    assert step(state, machine.ProposalAdmitted(PROPOSAL), 0.0) == (state, ())
    state, effects = step(state, machine.Promised(100.0), 0.0)
    assert effects == (machine.SayWilling(100.0),)
    assert step(state, machine.Proposed(PROPOSAL), 50.0)[1] == (machine.SayWilling(100.0),)
    (ended,) = step(state, machine.Proposed(PROPOSAL), 100.0)[1]
    assert isinstance(ended, machine.Decline)
    withdrawn, _ = step(state, machine.Withdrawn(), 40.0)
    assert isinstance(step(withdrawn, machine.Proposed(PROPOSAL), 50.0)[1][0], machine.Decline)


def test_a_no_for_want_of_budget_is_remembered_and_any_other_is_considered_anew() -> None:
    promising = AgentProposal(is_promising=True)
    declined, (said,) = step(promising, machine.NotCovered(NO), 0.0)
    assert isinstance(said, machine.Decline)
    assert isinstance(step(declined, machine.Proposed(PROPOSAL), 0.0)[1][0], machine.Decline)
    refused, _ = step(promising, Refused(NO), 0.0)
    assert isinstance(step(refused, machine.Proposed(PROPOSAL), 0.0)[1][0], machine.AdmitProposal)


def test_who_has_said_yes_says_it_again_where_the_same_proposal_is_not_admitted_a_second_time() -> None:
    # One mail may bring it twice, and of two looks at the policy the second may come out otherwise.
    willing = AgentProposal("willing", 100.0)
    assert step(willing, Refused(NO), 50.0) == (willing, (machine.SayWilling(100.0),))


@settings(max_examples=200, deadline=None)
@given(
    st.lists(
        st.sampled_from(
            [
                machine.Proposed(PROPOSAL), machine.ProposalAdmitted(PROPOSAL), Refused(NO),
                machine.Promised(100.0), machine.NotCovered(NO), machine.Withdrawn(),
            ]
        ),
        max_size=30,
    )
)  # fmt: skip
def test_nobody_is_told_yes_before_the_price_is_set_aside(events: list[Any]) -> None:
    state, is_promised = AgentProposal(), False
    for event in events:
        is_promised |= state.is_promising and isinstance(event, machine.Promised)
        state, effects = step(state, event, 0.0)
        assert not any(isinstance(one, machine.SayWilling) for one in effects) or is_promised
        assert not any(isinstance(one, machine.Promise) for one in effects) or not is_promised
