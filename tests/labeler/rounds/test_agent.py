"""An agent's machines: whatever comes in whatever order, charged once, stored before it leaves, silent in trouble.

And a yes to a proposal is set aside before it is said, and a no for want of budget is remembered.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from labeler.errors import PolicyRefusal
from labeler.messages.bodies import Ask, Proposal, RefusalBody, TallierKey
from labeler.rounds import agent as machine
from labeler.rounds import agent_proposal as proposals
from labeler.rounds.agent import ANSWERED_TO_OTHERS, NOT_KEPT, AgentRound, RoundEffect, RoundEvent, step
from labeler.tally import QueryBatch
from labeler.task import parse_task

TASK = parse_task(
    {
        "name": "t", "method": "knn", "classes": ("a", "b"), "k": 3, "sigma_votes": 40.0, "delta": 1e-5,
        "max_queries": 2, "agents": 3, "backbone_fingerprint": "f",
    }
)  # fmt: skip
TALLIERS = tuple(TallierKey(f"tallier-{n}", f"{n + 10:064x}", f"{n + 20:064x}") for n in range(3))
ASK = Ask(TASK, QueryBatch(np.ones((2, 4), dtype=np.int16)), TALLIERS, 100.0)
ROTATED = replace(ASK, talliers=TALLIERS[1:] + TALLIERS[:1])
NO = RefusalBody.of(PolicyRefusal("the site says no"))
BODIES = (b"1", b"2", b"3")

EVENTS: list[RoundEvent] = [
    machine.Asked(ASK), machine.Asked(ROTATED), machine.AskAdmitted(ASK), machine.AskAdmitted(ROTATED),
    machine.Refused(NO), machine.RoundCharged(ASK), machine.ChargeRefused(NO), machine.Computed(BODIES),
    machine.AnswerStored(), machine.AnswerFailed(), machine.RoundSettled(), machine.AskExpired(), machine.Woken(),
]  # fmt: skip


def run(events: list[RoundEvent], *, now: float = 0.0) -> tuple[AgentRound, list[list[RoundEffect]]]:
    state, seen = AgentRound(ASK.round.digest), []
    for event in events:
        state, effects = step(state, event, now)
        seen.append(list(effects))
    return state, seen


def kinds(effects: list[list[RoundEffect]]) -> list[type]:
    return [type(effect) for some in effects for effect in some]


ANSWERED: list[RoundEvent] = [
    machine.Asked(ASK), machine.AskAdmitted(ASK), machine.RoundCharged(ASK), machine.Computed(BODIES),
    machine.AnswerStored(),
]  # fmt: skip


def test_an_ask_is_admitted_charged_computed_stored_and_only_then_sent() -> None:
    state, effects = run(ANSWERED)
    assert kinds(effects) == [machine.Admit, machine.ChargeRound, machine.Compute, machine.Store, machine.SendStored]
    assert (state.stage, state.recipients) == ("stored", tuple((t.tallier_id, t.seal_key) for t in TALLIERS))
    assert state.ask is None


def test_asked_again_the_stored_bytes_are_sent_and_nothing_is_charged_or_computed() -> None:
    _, effects = run([*ANSWERED, machine.Asked(ASK), machine.AskAdmitted(ASK)])
    assert kinds(effects[-2:]) == [machine.Admit, machine.SendStored]


@pytest.mark.parametrize("answered", [ANSWERED[:3], ANSWERED[:4], ANSWERED])
def test_other_recipients_are_refused_from_the_charge_on(answered: list[RoundEvent]) -> None:
    _, effects = run([*answered, machine.AskAdmitted(ROTATED)])
    (refused,) = effects[-1]
    assert isinstance(refused, machine.RefuseAsk)
    assert refused.refusal.sentence == ANSWERED_TO_OTHERS


@pytest.mark.parametrize("end", [machine.RoundSettled(), machine.AskExpired()])
def test_what_is_settled_is_erased_and_refused_for_ever_in_one_sentence(end: RoundEvent) -> None:
    for before in (ANSWERED[:3], ANSWERED[:4], ANSWERED):
        state, effects = run(
            [*before, end, machine.Computed(BODIES), machine.AnswerStored(), machine.AskAdmitted(ASK), end]
        )
        assert state.stage == "erased"
        assert effects[len(before)] == [machine.Erase()]
        assert kinds(effects[len(before) + 1 :]) == [machine.RefuseAsk]
        (refused,) = effects[-2]
        assert isinstance(refused, machine.RefuseAsk)
        assert refused.refusal.sentence == NOT_KEPT


def test_settled_while_it_is_charged_it_is_erased_and_nothing_is_computed() -> None:
    state, effects = run([*ANSWERED[:2], machine.RoundSettled(), machine.RoundCharged(ASK)])
    assert (state.stage, effects[-1]) == ("erased", [machine.Erase()])
    refused, _ = run([*ANSWERED[:2], machine.RoundSettled(), machine.ChargeRefused(NO)])
    assert refused == AgentRound(ASK.round.digest)


def test_trouble_after_the_charge_waits_longer_each_time_and_says_nothing() -> None:
    events: list[RoundEvent] = ANSWERED[:3]
    for _ in range(8):
        events = [*events, machine.AnswerFailed(), machine.Woken()]
    _, effects = run(events)
    waits = [one.pause_s for some in effects for one in some if isinstance(one, machine.Wait)]
    assert waits == [0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0]
    assert set(kinds(effects)) == {machine.Admit, machine.ChargeRound, machine.Compute, machine.Wait}


def test_after_its_deadline_it_is_not_tried_any_more_and_a_later_ask_begins_anew() -> None:
    state, _ = run([*ANSWERED[:3], machine.AnswerFailed()])
    state, effects = step(state, machine.Woken(), 101.0)
    assert (effects, state.ask, state.stage) == ((), None, "charged")
    _, again = step(state, machine.AskAdmitted(ASK), 50.0)
    assert kinds([list(again)]) == [machine.Compute]


def test_an_ask_of_another_round_changes_nothing_whatever_came_of_it() -> None:
    other = replace(ASK, batch=QueryBatch(np.full((2, 4), 3, dtype=np.int16)))
    for before in (ANSWERED[:0], ANSWERED[:2], ANSWERED[:3], ANSWERED):
        state, _ = run(before)
        for event in (machine.Asked(other), machine.AskAdmitted(other), machine.RoundCharged(other)):
            assert step(state, event, 0.0) == (state, ())


def test_a_process_that_begins_with_a_charged_round_computes_it_once_it_is_asked() -> None:
    state = AgentRound(ASK.round.digest, "charged", machine.recipients_of(ASK))
    _, effects = step(state, machine.AskAdmitted(ASK), 0.0)
    assert kinds([list(effects)]) == [machine.Compute]


@settings(max_examples=300, deadline=None)
@given(st.lists(st.sampled_from(EVENTS), max_size=40))
def test_whatever_comes_in_whatever_order_the_rules_hold(events: list[RoundEvent]) -> None:
    state, charged, stored = AgentRound(ASK.round.digest), 0, 0
    for event in events:
        before = state
        state, effects = step(state, event, 0.0)
        found = {type(effect) for effect in effects}
        charged += before.stage == "new" and state.stage in ("charged", "erased")
        stored += before.stage != "stored" and state.stage == "stored"
        assert not (machine.ChargeRound in found and (before.stage != "new" or before.doing == "charge"))
        assert not (machine.SendStored in found and state.stage != "stored")
        assert not (found & {machine.Compute, machine.Store} and state.stage != "charged")
        assert not (isinstance(event, machine.AnswerFailed) and found - {machine.Wait})
        assert not (
            before.stage == "erased" and (state.stage != "erased" or found - {machine.Admit, machine.RefuseAsk})
        )
        assert not (
            before.stage == "stored" and found - {machine.Admit, machine.RefuseAsk, machine.SendStored, machine.Erase}
        )
    assert charged <= 1
    assert stored <= 1


@settings(max_examples=200, deadline=None)
@given(st.lists(st.sampled_from(EVENTS), max_size=40), st.binary(), st.binary())
def test_two_neighbouring_worlds_show_the_same_kinds_of_effects(
    events: list[RoundEvent], one: bytes, other: bytes
) -> None:
    def world(body: bytes) -> list[list[Any]]:
        with_bodies = [machine.Computed((body,)) if isinstance(e, machine.Computed) else e for e in events]
        return [[type(effect) for effect in effects] for effects in run(with_bodies)[1]]

    assert world(one) == world(other)


def test_what_is_sealed_does_not_print() -> None:
    assert "1" not in repr(machine.Computed(BODIES)) + repr(machine.Store(BODIES))


# Proposals.

PROPOSAL = Proposal("job", TASK, (2,), TALLIERS, 100.0)


def test_a_yes_is_set_aside_before_it_is_said_and_is_the_same_when_asked_again() -> None:
    state, (admit,) = proposals.step(proposals.AgentProposal(), proposals.JobProposed(PROPOSAL), 0.0)
    assert isinstance(admit, proposals.AdmitProposal)
    state, (promise,) = proposals.step(state, proposals.ProposalAdmitted(PROPOSAL), 0.0)
    assert isinstance(promise, proposals.Promise)
    assert proposals.step(state, proposals.ProposalAdmitted(PROPOSAL), 0.0) == (state, ())
    state, effects = proposals.step(state, proposals.Promised(100.0), 0.0)
    assert effects == (proposals.SayWilling(100.0),)
    assert proposals.step(state, proposals.JobProposed(PROPOSAL), 50.0)[1] == (proposals.SayWilling(100.0),)
    (ended,) = proposals.step(state, proposals.JobProposed(PROPOSAL), 100.0)[1]
    assert isinstance(ended, proposals.DeclineProposal)
    withdrawn, _ = proposals.step(state, proposals.ProposalWithdrawn(), 40.0)
    assert isinstance(proposals.step(withdrawn, proposals.JobProposed(PROPOSAL), 50.0)[1][0], proposals.DeclineProposal)


def test_a_no_for_want_of_budget_is_remembered_and_any_other_is_considered_anew() -> None:
    promising = proposals.AgentProposal(is_promising=True)
    declined, (said,) = proposals.step(promising, proposals.NotCovered(NO), 0.0)
    assert isinstance(said, proposals.DeclineProposal)
    assert isinstance(proposals.step(declined, proposals.JobProposed(PROPOSAL), 0.0)[1][0], proposals.DeclineProposal)
    refused, _ = proposals.step(promising, machine.Refused(NO), 0.0)
    assert isinstance(proposals.step(refused, proposals.JobProposed(PROPOSAL), 0.0)[1][0], proposals.AdmitProposal)


def test_who_has_said_yes_says_it_again_where_the_same_proposal_is_not_admitted_a_second_time() -> None:
    # One mail may bring it twice, and of two looks at the policy the second may come out otherwise.
    willing = proposals.AgentProposal("willing", 100.0)
    assert proposals.step(willing, machine.Refused(NO), 50.0) == (willing, (proposals.SayWilling(100.0),))


@settings(max_examples=200, deadline=None)
@given(
    st.lists(
        st.sampled_from(
            [
                proposals.JobProposed(PROPOSAL), proposals.ProposalAdmitted(PROPOSAL), machine.Refused(NO),
                proposals.Promised(100.0), proposals.NotCovered(NO), proposals.ProposalWithdrawn(),
            ]
        ),
        max_size=30,
    )
)  # fmt: skip
def test_nobody_is_told_yes_before_the_price_is_set_aside(events: list[Any]) -> None:
    state, is_promised = proposals.AgentProposal(), False
    for event in events:
        is_promised |= state.is_promising and isinstance(event, proposals.Promised)
        state, effects = proposals.step(state, event, 0.0)
        assert not any(isinstance(one, proposals.SayWilling) for one in effects) or is_promised
        assert not any(isinstance(one, proposals.Promise) for one in effects) or not is_promised
