"""Requesters take turns: of each, a few jobs are begun at a time, and what has to wait waits behind its own.

Parties work through their mail in order, so a requester that submits a hundred jobs at once would put all of them
before another's. A job holds a place from its admission until it has ended, and no longer than a moment: one that waits
for a person, or for a party that is away, does not keep its requester's other jobs waiting.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

PLACES = 4
"""Jobs of one requester that are begun at a time."""

HELD_S = 10.0
"""A job keeps its place this long at most."""


@dataclass(frozen=True)
class Lanes:
    """Who waits and who has a place.

    Attributes:
        waiting: requester -> its jobs that wait, in order; requesters in the order of their turns.
        held: job id -> (requester, since when it has its place).
    """

    waiting: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    held: Mapping[str, tuple[str, float]] = field(default_factory=dict)


def enter(lanes: Lanes, requester: str, job_id: str) -> Lanes:
    """A job waits for its turn; one that waits or has a place already changes nothing."""
    queue = lanes.waiting.get(requester, ())
    if job_id in lanes.held or job_id in queue:
        return lanes
    return replace(lanes, waiting={**lanes.waiting, requester: (*queue, job_id)})


def leave(lanes: Lanes, job_id: str) -> Lanes:
    """A job has ended."""
    held = {one: place for one, place in lanes.held.items() if one != job_id}
    waiting = lanes.waiting
    if any(job_id in queue for queue in waiting.values()):
        cut = {who: tuple(one for one in queue if one != job_id) for who, queue in waiting.items()}
        waiting = {who: queue for who, queue in cut.items() if queue}
    return replace(lanes, waiting=waiting, held=held)


def admit(lanes: Lanes, now_s: float, *, places: int = PLACES) -> tuple[Lanes, tuple[str, ...]]:
    """The jobs whose turn it is now: one of each requester, then a second of each, as far as its places go."""
    if not lanes.waiting:
        return lanes, ()
    held = {job_id: place for job_id, place in lanes.held.items() if now_s - place[1] < HELD_S}
    counts: dict[str, int] = {}
    for requester, _ in held.values():
        counts[requester] = counts.get(requester, 0) + 1
    waiting = {requester: list(queue) for requester, queue in lanes.waiting.items()}
    admitted: list[str] = []
    while able := [who for who, queue in waiting.items() if queue and counts.get(who, 0) < places]:
        for requester in able:
            job_id = waiting[requester].pop(0)
            counts[requester] = counts.get(requester, 0) + 1
            held[job_id] = (requester, now_s)
            admitted.append(job_id)
    left = {requester: tuple(queue) for requester, queue in waiting.items() if queue}
    return Lanes(left, held), tuple(admitted)


def next_place_s(lanes: Lanes) -> float | None:
    """When a place becomes free by itself, where somebody waits for one."""
    return min((since + HELD_S for _, since in lanes.held.values()), default=None) if lanes.waiting else None
