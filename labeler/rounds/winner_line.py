"""Whose turn it is: talliers find the winners of some rounds at a time, and one that fails goes to the end of the line.

Three talliers have to come to one computation together, so they are all asked at once, and asked again, all of them,
where one has answered and another has not: who died has nobody left to compute with. Rounds that are due together are
asked for together, up to `AT_ONCE`, and the talliers compute them in one go (workers.winner.session). A round whose
turn fails or takes too long makes room for the next, so that those that cannot be computed hold up nobody else for
longer than their turn. All of this may be lost: talliers answer the same however often they are asked.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Final

AT_ONCE: Final = 64
"""Rounds whose turn it is at the same time."""


@dataclass(frozen=True)
class Turn:
    """A round that the talliers were asked for.

    Attributes:
        asked_at_s: when, the last time.
        limit_s: how long its turn lasts at most.
        answered_at_s: when it was first seen that some talliers have answered and others have not.
    """

    asked_at_s: float
    limit_s: float
    answered_at_s: float | None = None


@dataclass(frozen=True)
class Line:
    """The rounds that wait for their winners, those whose turn it is first.

    Attributes:
        waiting: round digests in order.
        failed_at_s: when the turn of one of them last failed.
        turns: of the first `AT_ONCE` of them, those that were asked for.
    """

    waiting: tuple[str, ...] = ()
    failed_at_s: Mapping[str, float] = field(default_factory=dict)
    turns: Mapping[str, Turn] = field(default_factory=dict)


def ask_for_turn(
    line: Line, round_digest: str, now_s: float, *, num_answers: int, limit_s: float, ask_again_s: float
) -> tuple[Line, bool]:
    """Whether the talliers are to be asked for the winners of a round now, all of them.

    Args:
        round_digest: a round whose charge is posted and whose winners are not all there.
        now_s: seconds that never run backwards.
        num_answers: talliers that have answered.
        limit_s: how long its turn lasts at most.
        ask_again_s: pause after a failure, and patience with who has not answered when others have.
    """
    if round_digest not in line.waiting:
        line = replace(line, waiting=(*line.waiting, round_digest))
    for late in [one for one, turn in line.turns.items() if now_s - turn.asked_at_s > turn.limit_s]:
        line = _rotate(line, late, now_s)
    if round_digest not in line.waiting[:AT_ONCE]:
        return line, False
    turn = line.turns.get(round_digest)
    if turn is None:
        if now_s - line.failed_at_s.get(round_digest, now_s - ask_again_s) < ask_again_s:
            return line, False
    elif not num_answers:
        return line, False
    else:
        since_s = now_s if turn.answered_at_s is None else turn.answered_at_s
        line = replace(line, turns={**line.turns, round_digest: replace(turn, answered_at_s=since_s)})
        if now_s - since_s < ask_again_s:
            return line, False
    return replace(line, turns={**line.turns, round_digest: Turn(now_s, limit_s)}), True


def turn_failed(line: Line, round_digest: str, now_s: float) -> tuple[Line, str | None]:
    """A tallier could not compute the winners of a round this time.

    Returns:
        The line, and a round that may now be asked for, where the failed one had its turn; None where it had not.
    """
    if round_digest not in line.turns:
        return line, None
    line = _rotate(line, round_digest, now_s)
    return line, line.waiting[:AT_ONCE][-1]


def leave_line(line: Line, round_digests: Collection[str]) -> tuple[Line, tuple[str, ...]]:
    """These rounds need no winners any more.

    Returns:
        The line, and the rounds whose turn it is now and was not before.
    """
    gone = set(round_digests)
    if not gone.intersection(line.waiting):
        return line, ()
    before = set(line.waiting[:AT_ONCE])
    waiting = tuple(one for one in line.waiting if one not in gone)
    failed = {one: at for one, at in line.failed_at_s.items() if one not in gone}
    turns = {one: turn for one, turn in line.turns.items() if one not in gone}
    return Line(waiting, failed, turns), tuple(one for one in waiting[:AT_ONCE] if one not in before)


def _rotate(line: Line, round_digest: str, now_s: float) -> Line:
    return Line(
        waiting=(*(one for one in line.waiting if one != round_digest), round_digest),
        failed_at_s={**line.failed_at_s, round_digest: now_s},
        turns={one: turn for one, turn in line.turns.items() if one != round_digest},
    )
