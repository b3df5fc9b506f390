"""A fair queue: owners take turns, and what has to wait waits behind its owner's own.

Whoever submits a hundred jobs at once would else put all of them before another's. What is taken holds one of its
owner's places until it has ended, and no longer than `held_s`: a job that waits for a person, or for a party that is
away, does not keep its owner's other jobs waiting. This one queue decides whose turn it is wherever requesters share
something: rounds that begin (labeler.driver), prices, choosing and labeling (api.fair_pool).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

PLACES = 4
"""Jobs of one requester that are begun at a time."""

HELD_S = 10.0
"""A job keeps its place this long at most."""


@dataclass(frozen=True)
class FairQueue:
    """Who waits and who has a place; every method returns another queue.

    Attributes:
        places: of one owner at a time.
        held_s: how long one keeps its place at most.
        waiting: owner -> its keys that wait, in order; owners in the order of their turns.
        held: key -> (owner, since when it has its place).
    """

    places: int = PLACES
    held_s: float = HELD_S
    waiting: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    held: Mapping[str, tuple[str, float]] = field(default_factory=dict)

    def put(self, owner: str, key: str, *, first: bool = False) -> FairQueue:
        """Have a key wait for its turn; one that waits or has a place already changes nothing.

        Args:
            first: before all others, also where it waits already.
        """
        queue = self.waiting.get(owner, ())
        if key in self.held or (key in queue and not first):
            return self
        if first:
            lane = {owner: (key, *(one for one in queue if one != key))}
            return replace(self, waiting=lane | {one: keys for one, keys in self.waiting.items() if one != owner})
        return replace(self, waiting={**self.waiting, owner: (*queue, key)})

    def leave(self, key: str) -> FairQueue:
        """A key has ended, or is no longer wanted; what its owner sent meanwhile comes behind everybody else's."""
        waiting = {owner: tuple(one for one in queue if one != key) for owner, queue in self.waiting.items()}
        held = dict(self.held)
        owner, _ = held.pop(key, ("", 0.0))
        if owner in waiting:
            waiting[owner] = waiting.pop(owner)
        return replace(self, waiting={owner: queue for owner, queue in waiting.items() if queue}, held=held)

    def take(self, now_s: float, *, most: int | None = None) -> tuple[FairQueue, tuple[str, ...]]:
        """The keys whose turn it is now: one of each owner, then a second of each, as far as its places go.

        Args:
            most: keys; as many as there are, when None.
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
                waiting[owner] = tuple(left)  # behind everybody else
            counts[owner] += 1
            held[key] = (owner, now_s)
            taken.append(key)
        return replace(self, waiting=waiting, held=held), tuple(taken)

    def next_place_s(self) -> float | None:
        """When a place becomes free by itself, where somebody waits for one."""
        return min((since + self.held_s for _, since in self.held.values()), default=None) if self.waiting else None
