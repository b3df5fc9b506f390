"""Requesters take turns: one that submits many jobs at once waits behind its own."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from labeler.rounds.queues import HELD_S, PLACES, FairQueue


def waiting(*jobs: tuple[str, str]) -> FairQueue:
    queue = FairQueue()
    for requester, job_id in jobs:
        queue = queue.put(requester, job_id)
    return queue


def test_of_each_requester_a_few_jobs_begin_and_they_take_turns() -> None:
    queue = waiting(*(("loud", f"l{number}") for number in range(20)), ("quiet", "q0"), ("other", "o0"))
    queue, admitted = queue.take(0.0)
    assert admitted[:3] == ("l0", "q0", "o0")
    assert sorted(admitted) == sorted(["o0", "q0", *(f"l{number}" for number in range(PLACES))])
    queue, admitted = queue.take(1.0)
    assert admitted == ()
    # Another's new job waits for nobody, however many of the loud one's do.
    queue, admitted = queue.put("quiet", "q1").take(1.0)
    assert admitted == ("q1",)


def test_a_place_is_free_when_its_job_has_ended_and_in_any_case_after_a_moment() -> None:
    queue, _ = waiting(*(("loud", f"l{number}") for number in range(PLACES + 2))).take(0.0)
    queue, admitted = queue.leave("l1").take(1.0)
    assert admitted == (f"l{PLACES}",)
    assert queue.next_place_s() == HELD_S
    queue, admitted = queue.take(HELD_S)
    assert admitted == (f"l{PLACES + 1}",)
    assert queue.next_place_s() is None


def test_a_job_that_ended_while_it_waited_is_not_admitted() -> None:
    queue = waiting(("a", "a0"), ("a", "a1"))
    assert queue.leave("a0").take(0.0)[1] == ("a1",)


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 30)), max_size=60))
def test_everybody_is_admitted_once_and_in_order_of_their_own_jobs(jobs: list[tuple[str, int]]) -> None:
    queue = waiting(*((who, f"{who}{number}") for who, number in jobs))
    expected = list(dict.fromkeys(f"{who}{number}" for who, number in jobs))
    found: list[str] = []
    now_s = 0.0
    while queue.waiting:
        queue, admitted = queue.take(now_s)
        held = [place[0] for place in queue.held.values()]
        assert all(held.count(who) <= PLACES for who in held)
        found += admitted
        now_s += HELD_S
    for who in "abc":
        assert [one for one in found if one[0] == who] == [one for one in expected if one[0] == who]


def test_with_one_place_each_what_an_owner_sent_meanwhile_comes_behind_everybody_else() -> None:
    queue, taken = FairQueue(places=1).put("a", "a0").put("a", "a1").take(0.0, most=1)
    assert taken == ("a0",)
    queue, taken = queue.put("b", "b0").put("b", "b1").leave("a0").take(0.0, most=1)
    assert taken == ("b0",)
    assert queue.leave("b0").take(0.0, most=1)[1] == ("a1",)


def test_what_somebody_waits_for_comes_before_all_others() -> None:
    queue = waiting(("a", "a0"), ("b", "b0"), ("b", "b1")).put("b", "b1", first=True)
    assert queue.take(0.0, most=3)[1] == ("b1", "a0", "b0")
