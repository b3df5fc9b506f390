"""Turns of rounds to have their winners computed: some rounds at a time, and a dead one holds up nobody."""

from __future__ import annotations

import pytest

from labeler.rounds import queues
from labeler.rounds.queues import WinnerQueue, ask_for_turn, leave_line, turn_failed

LIMIT_S, AGAIN_S = 100.0, 2.0


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
