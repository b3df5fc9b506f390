"""Fair queues: turns of requesters, and turns of rounds to have their winners found.

**Requesters** take turns: a few jobs of each run at a time, and further ones wait behind the requester's own. The same
queue orders previews of prices, choosing and labeling (api.fair_pool).

Parties work through their mail in order, so a requester that submits a hundred jobs at once would put all of them
before another's. A job holds a place from its admission until it has ended, and at most for a short time. A job that
waits for a person, or for an absent party, does not keep its requester's other jobs waiting.

**Winners.** Talliers find the winners of some rounds at a time, and a round that fails goes to the end of the queue.
Three talliers must compute together, so they are all asked at once. If one has answered and another has not, all are
asked again: a tallier that died has no partners left to compute with. Rounds that are due together are asked for
together, up to `AT_ONCE`, and the talliers compute them in one run (workers.winner.session). A round whose turn fails
or takes too long makes room for the next. So a round that cannot be computed delays others by no more than its turn.
All of this may be lost: talliers answer the same however often they are asked.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Final

PLACES = 4
"""Jobs of one requester that run at a time."""

HELD_S = 10.0
"""Longest time for which a job keeps its place."""


@dataclass(frozen=True)
class FairQueue:
    """Keys that wait and keys that have a place; every method returns another queue.

    Attributes:
        places: per owner.
        held_s: longest time for which a key keeps its place.
        waiting: owner -> its waiting keys, in order; owners in the order of their turns.
        held: key -> (owner, when it got its place).
    """

    places: int = PLACES
    held_s: float = HELD_S
    waiting: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    held: Mapping[str, tuple[str, float]] = field(default_factory=dict)

    def put(self, owner: str, key: str, *, first: bool = False) -> FairQueue:
        """Let a key wait for its turn; a key that waits or has a place already changes nothing.

        Args:
            first: before all others, even if it waits already.
        """
        queue = self.waiting.get(owner, ())
        if key in self.held or (key in queue and not first):
            return self
        if first:
            lane = {owner: (key, *(one for one in queue if one != key))}
            return replace(self, waiting=lane | {one: keys for one, keys in self.waiting.items() if one != owner})
        return replace(self, waiting={**self.waiting, owner: (*queue, key)})

    def leave(self, key: str) -> FairQueue:
        """Remove a key that has ended or is no longer wanted; its owner's later keys go behind everybody else's."""
        waiting = {owner: tuple(one for one in queue if one != key) for owner, queue in self.waiting.items()}
        held = dict(self.held)
        owner, _ = held.pop(key, ("", 0.0))
        if owner in waiting:
            waiting[owner] = waiting.pop(owner)
        return replace(self, waiting={owner: queue for owner, queue in waiting.items() if queue}, held=held)

    def take(self, now_s: float, *, most: int | None = None) -> tuple[FairQueue, tuple[str, ...]]:
        """Return the keys whose turn it is now: one of each owner, then a second of each, up to its places.

        Args:
            most: most keys; None for no limit.
        """
        if not self.waiting:
            return self, ()
        held = {key: place for key, place in self.held.items() if now_s - place[1] < self.held_s}
        counts = Counter(owner for owner, _ in held.values())
        waiting = dict(self.waiting)
        taken: list[str] = []
        while len(taken) != most and (owner := next((one for one in waiting if counts[one] < self.places), None)):
            key, *left = waiting.pop(owner)
            if left:
                waiting[owner] = tuple(left)  # behind all other owners
            counts[owner] += 1
            held[key] = (owner, now_s)
            taken.append(key)
        return replace(self, waiting=waiting, held=held), tuple(taken)

    def next_place_s(self) -> float | None:
        """Return when a place becomes free without an event, if a key waits for one."""
        return min((since + self.held_s for _, since in self.held.values()), default=None) if self.waiting else None


AT_ONCE: Final = 64
"""Most rounds that have their turn at the same time."""


@dataclass(frozen=True)
class QueuedRound:
    """A round that the talliers were asked for.

    Attributes:
        asked_at_s: when it was last asked for.
        limit_s: the longest turn.
        answered_at_s: when some talliers, but not all, were first seen to have answered.
    """

    asked_at_s: float
    limit_s: float
    answered_at_s: float | None = None


@dataclass(frozen=True)
class WinnerQueue:
    """The rounds that wait for their winners; those that have their turn come first.

    Attributes:
        waiting: round digests in order.
        failed_at_s: when the turn of one of them last failed.
        turns: those of the first `AT_ONCE` that were asked for.
    """

    waiting: tuple[str, ...] = ()
    failed_at_s: Mapping[str, float] = field(default_factory=dict)
    turns: Mapping[str, QueuedRound] = field(default_factory=dict)


def ask_for_turn(
    line: WinnerQueue, round_digest: str, now_s: float, *, num_answers: int, limit_s: float, ask_again_s: float
) -> tuple[WinnerQueue, bool]:
    """Return the queue, and whether to ask all talliers for the winners of a round now.

    Args:
        round_digest: a round whose charge is posted and whose winners are not all known.
        now_s: seconds that never run backwards.
        num_answers: talliers that have answered.
        limit_s: the longest turn.
        ask_again_s: pause after a failure, and patience with talliers that have not answered when others have.
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
    return replace(line, turns={**line.turns, round_digest: QueuedRound(now_s, limit_s)}), True


def turn_failed(line: WinnerQueue, round_digest: str, now_s: float) -> tuple[WinnerQueue, str | None]:
    """End a round's turn because a tallier could not compute its winners this time.

    Returns:
        The queue, and a round that may now be asked for if the failed one had its turn; else None.
    """
    if round_digest not in line.turns:
        return line, None
    line = _rotate(line, round_digest, now_s)
    return line, line.waiting[:AT_ONCE][-1]


def leave_line(line: WinnerQueue, round_digests: Collection[str]) -> tuple[WinnerQueue, tuple[str, ...]]:
    """Remove rounds that need no winners any more.

    Returns:
        The queue, and the rounds whose turn has just begun.
    """
    gone = set(round_digests)
    if not gone.intersection(line.waiting):
        return line, ()
    before = set(line.waiting[:AT_ONCE])
    waiting = tuple(one for one in line.waiting if one not in gone)
    failed = {one: at for one, at in line.failed_at_s.items() if one not in gone}
    turns = {one: turn for one, turn in line.turns.items() if one not in gone}
    return WinnerQueue(waiting, failed, turns), tuple(one for one in waiting[:AT_ONCE] if one not in before)


def _rotate(line: WinnerQueue, round_digest: str, now_s: float) -> WinnerQueue:
    return WinnerQueue(
        waiting=(*(one for one in line.waiting if one != round_digest), round_digest),
        failed_at_s={**line.failed_at_s, round_digest: now_s},
        turns={one: turn for one, turn in line.turns.items() if one != round_digest},
    )
