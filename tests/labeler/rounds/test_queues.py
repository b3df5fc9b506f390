"""Requesters take turns: one that submits many jobs at once waits behind its own.

So do rounds that have their winners computed: some at a time, and a dead one holds up nobody.
"""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from labeler.rounds import queues
from labeler.rounds.queues import HELD_S, PLACES, FairQueue, WinnerQueue, ask_for_turn, leave_line, turn_failed

LIMIT_S, AGAIN_S = 100.0, 2.0


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


@settings(deadline=None)
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


class Waiting:
    """A line with its clock."""

    def __init__(self) -> None:
        self.now = 0.0
        self.line = WinnerQueue()

    def ask(self, round_digest: str, *, answers: int = 0, limit_s: float = LIMIT_S) -> bool:
        self.line, is_granted = ask_for_turn(
            self.line, round_digest, self.now, num_answers=answers, limit_s=limit_s, ask_again_s=AGAIN_S
        )
        return is_granted

    def failed(self, round_digest: str) -> str | None:
        self.line, following = turn_failed(self.line, round_digest, self.now)
        return following

    def ended(self, round_digests: set[str]) -> tuple[str, ...]:
        self.line, following = leave_line(self.line, round_digests)
        return following


@pytest.fixture
def line(monkeypatch: pytest.MonkeyPatch) -> Waiting:
    """One round at a time, where the order shows best."""
    monkeypatch.setattr(queues, "AT_ONCE", 1)
    return Waiting()


def test_rounds_that_are_due_together_are_asked_for_together_up_to_a_bound() -> None:
    line = Waiting()
    names = [f"{number}" for number in range(queues.AT_ONCE + 2)]
    assert [line.ask(name) for name in names] == [True] * queues.AT_ONCE + [False] * 2
    # Asked for once; each that ends makes room for one, and none for those that had their turn already.
    assert not any(line.ask(name) for name in names)
    assert line.ended({names[0], names[3]}) == tuple(names[-2:])
    assert line.ask(names[-1])
    assert line.ended({names[1]}) == ()


def test_a_round_that_fails_among_others_makes_room_and_leaves_their_turns_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(queues, "AT_ONCE", 2)
    line = Waiting()
    assert [line.ask(name) for name in "abc"] == [True, True, False]
    assert line.failed("a") == "c"
    assert line.ask("c")
    assert not line.ask("b")
    line.now = AGAIN_S
    assert not line.ask("a")
    assert line.ended({"b"}) == ("a",)
    assert line.ask("a")


def test_one_round_is_asked_for_and_the_next_when_it_has_ended(line: Waiting) -> None:
    assert line.ask("a")
    assert not line.ask("a")
    assert not line.ask("b")
    assert not line.ask("c")
    assert line.ended({"a"}) == ("b",)
    assert not line.ask("c")
    assert line.ask("b")
    # One that had no turn may end without disturbing anybody.
    assert line.ended({"c"}) == ()
    assert line.ended({"b"}) == ()


def test_a_round_that_fails_goes_to_the_end_of_the_line_and_comes_again_after_a_pause(line: Waiting) -> None:
    assert line.ask("a")
    assert not line.ask("b")
    assert line.failed("a") == "b"
    # The other talliers report the same failure a moment later.
    assert line.failed("a") is None
    assert line.ask("b")
    assert line.failed("b") == "a"
    assert not line.ask("a")
    line.now = AGAIN_S
    assert line.ask("a")
    assert line.failed("never asked for") is None


def test_a_round_alone_that_fails_is_asked_for_again_after_a_pause(line: Waiting) -> None:
    assert line.ask("a")
    line.failed("a")
    assert not line.ask("a")
    line.now = AGAIN_S
    assert line.ask("a")


def test_where_one_tallier_has_answered_and_another_has_not_all_are_asked_again_after_a_while(line: Waiting) -> None:
    assert line.ask("a")
    line.now = 50.0
    assert not line.ask("a", answers=1)
    line.now = 51.9
    assert not line.ask("a", answers=2)
    line.now = 52.0
    assert line.ask("a", answers=2)
    assert not line.ask("a", answers=2)


def test_a_round_that_takes_longer_than_its_limit_makes_room(line: Waiting) -> None:
    assert line.ask("a")
    line.now = LIMIT_S
    assert not line.ask("b")
    line.now = LIMIT_S + 1
    assert line.ask("b")
    assert not line.ask("a")
