"""Whose turn it is to have its winners computed: one round at a time, and a dead one holds up nobody."""

from __future__ import annotations

import pytest

from api.coordinator.winner_turns import WinnerTurns

LIMIT_S, AGAIN_S = 100.0, 2.0


class Line:
    """A line with a clock of its own."""

    def __init__(self) -> None:
        self.now = 0.0
        self.turns = WinnerTurns(clock=lambda: self.now)

    def ask(self, round_digest: str, *, answers: int = 0) -> bool:
        return self.turns.should_ask(
            round_digest, job_id=f"job of {round_digest}", num_answers=answers, limit_s=LIMIT_S, ask_again_s=AGAIN_S
        )


@pytest.fixture
def line() -> Line:
    return Line()


def test_one_round_is_asked_for_and_the_next_when_it_has_ended(line: Line) -> None:
    assert line.ask("a")
    assert not line.ask("a")
    assert not line.ask("b")
    assert not line.ask("c")
    assert line.turns.ended({"a"}) == "job of b"
    assert not line.ask("c")
    assert line.ask("b")
    # One that had no turn may end without disturbing anybody.
    assert line.turns.ended({"c"}) is None
    assert line.turns.ended({"b"}) is None


def test_a_round_that_fails_goes_to_the_end_of_the_line_and_comes_again_after_a_pause(line: Line) -> None:
    assert line.ask("a")
    assert not line.ask("b")
    assert line.turns.failed("a") == "job of b"
    # The other talliers report the same failure a moment later.
    assert line.turns.failed("a") is None
    assert line.ask("b")
    assert line.turns.failed("b") == "job of a"
    assert not line.ask("a")
    line.now = AGAIN_S
    assert line.ask("a")
    assert line.turns.failed("never asked for") is None


def test_a_round_alone_that_fails_is_asked_for_again_after_a_pause(line: Line) -> None:
    assert line.ask("a")
    line.turns.failed("a")
    assert not line.ask("a")
    line.now = AGAIN_S
    assert line.ask("a")


def test_where_one_tallier_has_answered_and_another_has_not_all_are_asked_again_after_a_while(line: Line) -> None:
    assert line.ask("a")
    line.now = 50.0
    assert not line.ask("a", answers=1)
    line.now = 51.9
    assert not line.ask("a", answers=2)
    line.now = 52.0
    assert line.ask("a", answers=2)
    assert not line.ask("a", answers=2)


def test_a_round_that_takes_longer_than_its_limit_makes_room(line: Line) -> None:
    assert line.ask("a")
    line.now = LIMIT_S
    assert not line.ask("b")
    line.now = LIMIT_S + 1
    assert line.ask("b")
    assert not line.ask("a")
