"""The tallier's machine: whatever comes in whatever order, one sum, over held shares and a quorum of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from labeler.messages.bodies import OpenRound, SumRequest
from labeler.rounds import tallier as machine
from labeler.rounds.tallier import Came, TallierEffect, TallierEvent, TallierRound, TallierSite, step
from labeler.tally import Round

ROUND = Round("a" * 64, "b" * 64, num_queries=2, num_classes=3, quorum=2)
KEYS = {"a": f"{1:064x}", "b": f"{2:064x}", "c": f"{3:064x}"}
OPENING = OpenRound(ROUND, 1, KEYS, 100.0)
SITE = TallierSite()


def share(agent: str, version: int = 0, **changes: Any) -> Came:
    return replace(Came(agent, f"id {agent} {version}".encode(), f"print {agent} {version}".encode()), **changes)


def asked(*agents: str) -> machine.SumAsked:
    return machine.SumAsked(SumRequest(agents, ledger_seq=5, ledger_hash="e" * 64), SITE)


OPEN = machine.OpeningCame(OPENING, SITE)


def came(*shares: Came) -> machine.SharesCame:
    return machine.SharesCame(shares)


def run(*events: TallierEvent, now: float = 0.0) -> tuple[TallierRound, list[TallierEffect]]:
    state, effects = TallierRound(ROUND.digest), ()
    for event in events:
        state, effects = step(state, event, now)
    return state, list(effects)


def refusals(effects: list[TallierEffect]) -> list[str]:
    return [one.error.problem_type for one in effects if isinstance(one, machine.RefuseEvent)]


def declined(effects: list[TallierEffect]) -> list[str]:
    return [one.error.problem_type for one in effects if isinstance(one, machine.DeclineRequest)]


def test_a_round_is_opened_its_shares_are_held_and_it_is_summed_once() -> None:
    assert run(OPEN)[1] == [machine.Keep(OPENING), machine.Report()]
    assert run(OPEN, OPEN)[1] == [machine.Report()]
    state, effects = run(OPEN, came(share("a"), share("b")))
    assert effects == [machine.Hold("a", 0), machine.Hold("b", 1), machine.Report()]
    assert dict(state.sharing_ids) == {"a": b"id a 0", "b": b"id b 0"}
    wanted = frozenset({"a", "b"})
    assert run(OPEN, came(share("a"), share("b")), asked("a", "b"))[1] == [machine.Add(wanted)]
    state, effects = run(OPEN, came(share("a"), share("b"), share("c")), asked("a", "b"), machine.Added())
    assert effects == [machine.Fix(wanted), machine.SendSum()]
    assert set(state.sharing_ids) == wanted
    assert step(state, asked("a", "b"), 0.0) == (state, (machine.SendSum(),))


def test_a_second_sum_over_other_agents_is_refused_for_ever() -> None:
    shares = came(share("a"), share("b"), share("c"))
    for also in (asked("a", "b", "c"), asked("a", "c")):
        _, effects = run(OPEN, shares, asked("a", "b"), machine.Added(), also)
        assert declined(effects) == ["privacy-refusal"]
        assert machine.SendSum() not in effects
        # Also while the first is being added up.
        assert declined(run(OPEN, shares, asked("a", "b"), also)[1]) == ["privacy-refusal"]


@pytest.mark.parametrize(
    ("events", "problem"),
    [
        ((OPEN, asked("a")), "quorum-not-reached"),
        ((OPEN, came(share("a")), asked("a", "b")), "protocol-violation"),
        ((OPEN, came(share("a"), share("b"), share("b", 1)), asked("a", "b")), "protocol-violation"),
        ((OPEN, machine.OpeningCame(replace(OPENING, tallier=0), SITE)), "wrong-digest"),
        ((came(share("a")),), "wrong-digest"),
        ((OPEN, came(share("x"))), "protocol-violation"),
        ((OPEN, came(share("a", misfit="has another shape"))), "protocol-violation"),
        ((OPEN, machine.OpeningCame(OPENING, TallierSite(agents={"a": KEYS["a"]}))), "privacy-refusal"),
    ],
)
def test_what_may_not_be_is_refused_and_changes_nothing(events: tuple[TallierEvent, ...], problem: str) -> None:
    before, _ = run(*events[:-1])
    state, effects = run(*events)
    assert refusals(effects) == [problem]
    assert {type(one) for one in effects} <= {machine.RefuseEvent, machine.Report}
    assert state == before


@pytest.mark.parametrize(
    ("opened", "problem", "is_final"),
    [
        (
            machine.OpeningCame(replace(OPENING, round=replace(ROUND, batch_digest="d" * 64)), SITE),
            "wrong-digest",
            True,
        ),
        (machine.OpeningCame(replace(OPENING, expires_at=0.5), SITE), "protocol-violation", True),
        (machine.OpeningCame(OPENING, TallierSite(agents={"a": KEYS["a"]})), "privacy-refusal", True),
        (machine.OpeningCame(OPENING, TallierSite(max_open_bytes=8 * 2 * 3 * 3 - 1)), "too-large", True),
        (machine.OpeningCame(OPENING, TallierSite(open_rounds=1, max_open_rounds=1)), "unavailable", False),
        (machine.OpeningCame(OPENING, TallierSite(open_bytes=1, max_open_bytes=8 * 2 * 3 * 3)), "unavailable", False),
    ],
)
def test_a_round_that_cannot_be_opened_is_declined_to_who_asked(
    opened: machine.OpeningCame, problem: str, is_final: bool
) -> None:
    state, (effect,) = run(opened, now=1.0)
    assert state.stage == "unknown"
    assert isinstance(effect, machine.DeclineRequest)
    assert (effect.error.problem_type, effect.is_final) == (problem, is_final)


def test_an_old_or_odd_opening_of_a_round_that_is_open_declines_nothing() -> None:
    """The coordinator would end a job of which the sum is still made."""
    for before in (run(OPEN)[0], run(OPEN, came(share("a"), share("b")), asked("a", "b"), machine.Added())[0]):
        for late in (OPEN, machine.OpeningCame(replace(OPENING, expires_at=90.0), SITE)):
            after, effects = step(before, late, 101.0)
            assert after == before
            assert [type(one) for one in effects] == [machine.RefuseEvent, machine.Report]


def test_a_sum_over_an_agent_that_the_site_names_no_more_waits_for_its_people() -> None:
    held, _ = run(OPEN, came(share("a"), share("b")))
    narrowed = replace(asked("a", "b"), site=TallierSite(agents={"a": KEYS["a"]}))
    after, effects = step(held, narrowed, 0.0)
    assert after == held
    assert [(type(one), getattr(one, "is_final", None)) for one in effects] == [
        (machine.DeclineRequest, False),
        (machine.Report, None),
    ]


def test_who_sends_two_different_shares_is_excluded_for_good_unless_the_sum_is_made() -> None:
    state, effects = run(OPEN, came(share("a"), share("b")), came(share("a", 1)))
    assert machine.Exclude("a") in effects
    state, effects = run(OPEN, came(share("a"), share("b")), came(share("a", 1)), came(share("a")))
    assert refusals(effects) == ["duplicate-agent"]
    assert (state.excluded, set(state.sharing_ids)) == ({"a"}, {"b"})
    summed, effects = run(OPEN, came(share("a"), share("b")), asked("a", "b"), machine.Added(), came(share("a", 1)))
    assert refusals(effects) == ["duplicate-agent"]
    assert machine.Exclude("a") not in effects
    assert summed.excluded == frozenset()


def test_after_the_sum_a_retry_is_no_news_and_a_new_share_is_late() -> None:
    made = (OPEN, came(share("a"), share("b")), asked("a", "b"), machine.Added())
    assert run(*made, came(share("a")))[1] == [machine.Report()]
    assert refusals(run(*made, came(share("c")))[1]) == ["late-share"]


def test_a_round_ends_with_its_deadline_and_a_sum_a_week_later() -> None:
    opened, _ = run(OPEN)
    assert step(opened, machine.RoundExpired(), 100.0) == (opened, ())
    over, effects = step(opened, machine.RoundExpired(), 100.1)
    assert (over.stage, effects) == ("forgotten", (machine.Forget(),))
    fixed, _ = run(OPEN, came(share("a"), share("b")), asked("a", "b"), machine.Added())
    assert step(fixed, machine.RoundExpired(), 100.0 + machine.SUM_KEPT_S)[1] == ()
    gone, _ = step(fixed, machine.RoundExpired(), 100.1 + machine.SUM_KEPT_S)
    assert (gone.stage, gone.contributors) == ("forgotten", {"a", "b"})
    for event in (OPEN, came(share("a")), asked("a", "b")):
        again, effects = step(gone, event, 0.0)
        assert again == gone
        wanted = machine.RefuseEvent if isinstance(event, machine.SharesCame) else machine.DeclineRequest
        assert {type(one) for one in effects} == {wanted}


def test_a_sum_that_can_never_be_made_is_declined_for_good_and_nothing_is_kept_of_it() -> None:
    held = run(OPEN, came(share("a"), share("b")))[0]
    erased, _ = step(held, machine.RoundExpired(), 100.1)
    for gone in (erased, TallierRound(ROUND.digest)):
        after, effects = step(gone, asked("a", "b"), 200.0)
        assert after == gone
        assert declined(list(effects)) == ["protocol-violation"]


def test_who_looks_at_a_round_sees_no_share() -> None:
    state, _ = run(OPEN, came(share("a")))
    assert "id a" not in repr(state)


SHARES = [share(agent, version) for agent in ("a", "b", "c", "x") for version in (0, 1)]
EVENTS = st.one_of(
    st.just(OPEN),
    st.just(machine.OpeningCame(replace(OPENING, expires_at=50.0), SITE)),
    st.lists(st.sampled_from(SHARES), min_size=1, max_size=4).map(lambda some: came(*some)),
    st.sets(st.sampled_from("abc"), min_size=1).map(lambda some: asked(*sorted(some))),
    st.just(machine.Added()),
    st.just(machine.RoundExpired()),
)


@settings(max_examples=400, deadline=None)
@given(st.lists(st.tuples(EVENTS, st.sampled_from([0.0, 0.0, 0.0, 60.0, 200.0, 1e7])), max_size=40))
def test_whatever_comes_in_whatever_order_the_rules_hold(events: list[tuple[Any, float]]) -> None:
    state = TallierRound(ROUND.digest)
    held: dict[str, bytes] = {}
    added: set[frozenset[str]] = set()
    fixed: set[frozenset[str]] = set()
    is_over = False
    for event, now in events:
        state, effects = step(state, event, now)
        for effect in effects:
            match effect:
                case machine.Hold(agent, place):
                    assert agent not in held
                    held[agent] = event.shares[place].fingerprint
                case machine.Exclude(agent):
                    held.pop(agent, None)
                case machine.Add(contributors):
                    assert contributors <= held.keys()
                    assert len(contributors) >= ROUND.quorum
                    added.add(contributors)
                case machine.Fix(contributors):
                    fixed.add(contributors)
                case machine.SendSum():
                    assert state.contributors in fixed
                    assert not is_over
                case machine.Forget():
                    is_over = True
        assert len(added) <= 1
        assert fixed <= added
        assert not (is_over and state.stage != "forgotten")
