"""An agent's public clock: when a turn that computed from records may send, by public facts of the site alone.

    start             a poll returns
    start + k T       all letters of the turn leave, in the order of the asks, and the next poll with them

T is a setting of the site (`tick_s`). k is planned before the work begins: the least whole number of ticks that covers
what has passed, and what the answers take over `max_records` drawn rows, with room (`ROOM`). Neither the records nor
any earlier round takes part. Work that is late all the same leaves at the next multiple of k T, so that it is seen to
be late, and not by how much. A turn that computed nothing from records leaves at once.

**What is left.** The chance that work over n records misses a plan for `max_records`, which depends on n. It is small
because the plan covers `max_records` and more. Nothing pads the work itself.

References:
    Ratliff, Vadhan (2024), A framework for differential privacy against timing attacks.
"""

from __future__ import annotations

import math
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Final

import numpy as np
from numpy.typing import NDArray

from feature_store.index.build import here
from feature_store.journal.lifetimes import LifetimeSpends, Spent
from feature_store.shard import Shard, drawn_like
from labeler.messages.rounds import Ask
from workers.agent.agent import Agent, as_it_is
from workers.voting.model_store import InMemoryModels

TICK_S: Final = 0.1
"""T, where the site's settings do not say otherwise."""

ROOM: Final = 1.5
"""By how much a plan exceeds what the work took over drawn rows."""

FIXED_S: Final = 0.02
"""What a plan adds for keeping, sealing and writing letters, whose amount follows from the ask."""

LIFE_RECORD_S: Final = 5e-5
"""What a plan adds for each record where votes for life write a row for each."""

WARM_ROWS, FEW_ROWS, MANY_ROWS = 16, 1024, 4096
"""Drawn rows on which work is timed: the first run loads what it needs, the others give a line over the records."""

_MOST_TIMED: Final = 10_000


class PublicClock:
    """See the module. Used by one thread.

    Args:
        tick_s: T.
        estimate_s: how long an answer takes over `max_records` drawn rows (`DrawnProbe.seconds`).
        started: when the newest poll returned, in seconds of `ticks`.
        ticks: seconds that only go up.
    """

    def __init__(
        self,
        *,
        tick_s: float,
        estimate_s: Callable[[Ask], float],
        started: Callable[[], float],
        ticks: Callable[[], float],
    ) -> None:
        self.tick_s = tick_s
        self.started = started
        self.ticks = ticks
        self._estimate_s = estimate_s

    def planned_s(self, asks: Iterable[Ask]) -> float:
        """What is planned for answers that are computed one after the other."""
        return FIXED_S + ROOM * sum(map(self._estimate_s, asks))

    def hold_s(self, planned_s: float) -> float:
        """k T: the least whole number of ticks that covers a plan, at least one."""
        return self.tick_s * max(1, math.ceil(planned_s / self.tick_s))

    def leaves_at(self, started: float, planned_s: float) -> float:
        """When a turn leaves whose work is done now: at start + k T, or where it is late at the next multiple."""
        hold_s = self.hold_s(planned_s)
        return started + hold_s * max(1, math.ceil((self.ticks() - started) / hold_s))


class DrawnProbe:
    """Times answers over drawn rows, at the first ask of a task and size: the site's records take no part.

    The ask is public, and so are the dimension, classes and `max_records` that the rows are drawn by. An answer over
    more rows than are drawn follows by a line.

    Args:
        shard: the shard that would answer; of it only public facts are read.
        engine, memory_limit_bytes: see Agent. Parts of a cluster are not asked; this process times in their place.
        clock: seconds that only go up.
    """

    def __init__(
        self,
        shard: Callable[[], Shard],
        *,
        engine: str = "auto",
        memory_limit_bytes: int | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._shard = shard
        self._engine = here(engine)
        self._memory_limit_bytes = memory_limit_bytes
        self._clock = clock
        self._facts: object = None
        self._agents: dict[int, Agent] = {}
        self._models = InMemoryModels()
        self._known: OrderedDict[tuple[str, int], float] = OrderedDict()

    def seconds(self, ask: Ask) -> float:
        """How long the answer takes over `max_records` drawn rows."""
        most = self._redrawn()
        key = (ask.task.digest, len(ask.batch))
        if key not in self._known:
            self._known[key] = self._timed(ask, most) + (most * LIFE_RECORD_S if ask.task.life is not None else 0.0)
            while len(self._known) > _MOST_TIMED:
                self._known.popitem(last=False)
        return self._known[key]

    def _redrawn(self) -> int:
        """The declared bound; where the shard was exchanged for another kind, rows like its own are drawn."""
        shard = self._shard()
        assert shard.max_records is not None  # noqa: S101  # an agent does not serve from another
        facts = (shard.max_records, shard.dimension, shard.classes, shard.has_attributes, shard.knows_persons)
        if facts != self._facts:
            self._known.clear()
            self._agents = {}
            for rows in {min(rows, shard.max_records) for rows in (WARM_ROWS, FEW_ROWS, MANY_ROWS)}:
                self._agents[rows] = Agent(
                    "probe",
                    drawn_like(shard, rows),
                    models=self._models,
                    engine=self._engine,
                    memory_limit_bytes=self._memory_limit_bytes,
                    spends=_NothingSpent(),
                )
            self._facts = facts
        return shard.max_records

    def _timed(self, ask: Ask, most: int) -> float:
        warm, *sizes = sorted(self._agents)
        self._once(ask, warm)
        sizes = sizes or [warm]
        took = {rows: self._once(ask, rows) for rows in sizes}
        few, many = sizes[0], sizes[-1]
        if few == many:
            return took[many] * most / many
        return took[many] + max(0.0, took[many] - took[few]) / (many - few) * (most - many)

    def _once(self, ask: Ask, rows: int) -> float:
        self._models.clear()
        begun = self._clock()
        self._agents[rows].computed(ask.task, ask.batch, key=bytes(32), seal=as_it_is)
        took = self._clock() - begun
        self._models.clear()
        return took


class _NothingSpent(LifetimeSpends):
    """What drawn images have spent: nothing, and no journal is asked."""

    def __init__(self) -> None:
        pass

    def spent(self, digests: NDArray[np.int64]) -> Spent:
        """See LifetimeSpends."""
        return Spent(0, np.zeros(len(digests), dtype=np.int64))
