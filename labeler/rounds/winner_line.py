"""Whose turn it is: talliers find the winners of one round at a time, and one that fails goes to the end of the line.

Three talliers have to come to one job together, so they are all asked at once, and asked again, all of them, where one
has answered and another has not: who died has nobody left to compute with. A round whose turn fails or takes too long
makes room for the next, so that one that cannot be computed holds up nobody else. All of this may be lost: talliers
answer the same however often they are asked.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace


@dataclass(frozen=True)
class Line:
    """The rounds that wait for their winners, the one whose turn it is first.

    Attributes:
        waiting: round digests in order.
        failed_at_s: when the turn of one of them last failed.
        asked_at_s: when the first was asked for; None while it was not.
        answered_at_s: when it was first seen that some talliers have answered and others have not.
        limit_s: how long the turn lasts at most.
    """

    waiting: tuple[str, ...] = ()
    failed_at_s: Mapping[str, float] = field(default_factory=dict)
    asked_at_s: float | None = None
    answered_at_s: float | None = None
    limit_s: float = 0.0


def ask_for_turn(
    line: Line, round_digest: str, now_s: float, *, num_answers: int, limit_s: float, ask_again_s: float
) -> tuple[Line, bool]:
    """Whether the talliers are to be asked for the winners of a round now, all of them.

    Args:
        line: as it is.
        round_digest: a round whose charge is posted and whose winners are not all there.
        now_s: seconds that never run backwards.
        num_answers: talliers that have answered.
        limit_s: how long its turn lasts at most.
        ask_again_s: pause after a failure, and patience with who has not answered when others have.
    """
    if round_digest not in line.waiting:
        line = replace(line, waiting=(*line.waiting, round_digest))
    if line.asked_at_s is not None and now_s - line.asked_at_s > line.limit_s:
        line = _rotate(line, now_s)
    if line.waiting[0] != round_digest:
        return line, False
    if line.asked_at_s is None:
        if now_s - line.failed_at_s.get(round_digest, now_s - ask_again_s) < ask_again_s:
            return line, False
    elif not num_answers:
        return line, False
    else:
        since_s = now_s if line.answered_at_s is None else line.answered_at_s
        line = replace(line, answered_at_s=since_s)
        if now_s - since_s < ask_again_s:
            return line, False
    return replace(line, asked_at_s=now_s, answered_at_s=None, limit_s=limit_s), True


def turn_failed(line: Line, round_digest: str, now_s: float) -> tuple[Line, str | None]:
    """A tallier could not compute the winners of a round this time.

    Returns:
        The line, and the round whose turn it is now, where the failed one had it; None where it had not.
    """
    if not line.waiting or line.waiting[0] != round_digest or line.asked_at_s is None:
        return line, None
    line = _rotate(line, now_s)
    return line, line.waiting[0]


def leave_line(line: Line, round_digests: Collection[str]) -> tuple[Line, str | None]:
    """These rounds need no winners any more.

    Returns:
        The line, and the round whose turn it is now, where one of these had it; None where none had.
    """
    gone = set(round_digests)
    if not gone.intersection(line.waiting):
        return line, None
    had_turn = line.waiting[0] in gone
    waiting = tuple(one for one in line.waiting if one not in gone)
    failed = {one: at for one, at in line.failed_at_s.items() if one not in gone}
    line = replace(line, waiting=waiting, failed_at_s=failed)
    if not had_turn:
        return line, None
    return replace(line, asked_at_s=None, answered_at_s=None), waiting[0] if waiting else None


def _rotate(line: Line, now_s: float) -> Line:
    first = line.waiting[0]
    return replace(
        line,
        waiting=(*line.waiting[1:], first),
        failed_at_s={**line.failed_at_s, first: now_s},
        asked_at_s=None,
        answered_at_s=None,
    )
