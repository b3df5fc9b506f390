"""Requesters take turns: whoever submits many jobs at once waits behind its own."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from labeler.rounds.queues import HELD_S, PLACES, FairQueue, admit, enter, leave, next_place_s


def waiting(*jobs: tuple[str, str]) -> FairQueue:
    lanes = FairQueue()
    for requester, job_id in jobs:
        lanes = enter(lanes, requester, job_id)
    return lanes


def test_of_each_requester_a_few_jobs_begin_and_they_take_turns() -> None:
    lanes = waiting(*(("loud", f"l{number}") for number in range(20)), ("quiet", "q0"), ("other", "o0"))
    lanes, admitted = admit(lanes, 0.0)
    assert admitted[:3] == ("l0", "q0", "o0")
    assert sorted(admitted) == sorted(["o0", "q0", *(f"l{number}" for number in range(PLACES))])
    lanes, admitted = admit(lanes, 1.0)
    assert admitted == ()
    # Another's new job waits for nobody, however many of the loud one's do.
    lanes, admitted = admit(enter(lanes, "quiet", "q1"), 1.0)
    assert admitted == ("q1",)


def test_a_place_is_free_when_its_job_has_ended_and_in_any_case_after_a_moment() -> None:
    lanes, _ = admit(waiting(*(("loud", f"l{number}") for number in range(PLACES + 2))), 0.0)
    lanes, admitted = admit(leave(lanes, "l1"), 1.0)
    assert admitted == (f"l{PLACES}",)
    assert next_place_s(lanes) == HELD_S
    lanes, admitted = admit(lanes, HELD_S)
    assert admitted == (f"l{PLACES + 1}",)
    assert next_place_s(lanes) is None


def test_a_job_that_ended_while_it_waited_is_not_admitted() -> None:
    lanes = waiting(("a", "a0"), ("a", "a1"))
    assert admit(leave(lanes, "a0"), 0.0)[1] == ("a1",)


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 30)), max_size=60))
def test_everybody_is_admitted_once_and_in_order_of_their_own_jobs(jobs: list[tuple[str, int]]) -> None:
    lanes = waiting(*((who, f"{who}{number}") for who, number in jobs))
    expected = list(dict.fromkeys(f"{who}{number}" for who, number in jobs))
    found: list[str] = []
    now_s = 0.0
    while lanes.waiting:
        lanes, admitted = admit(lanes, now_s)
        held = [place[0] for place in lanes.held.values()]
        assert all(held.count(who) <= PLACES for who in held)
        found += admitted
        now_s += HELD_S
    for who in "abc":
        assert [one for one in found if one[0] == who] == [one for one in expected if one[0] == who]
