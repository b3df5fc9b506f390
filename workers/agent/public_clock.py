"""An agent's public clock: when a turn that computed from records may send, by public facts of the site alone.

    start             a poll returns.
    start + k T       all letters of the turn leave, in the order of the asks, and the next poll with them.

T is a setting of the site (`tick_s`). k is planned before the work starts. It is the least whole number of ticks that
covers the time passed, and the time of the answers over `max_records` drawn rows, with room (`ROOM`). Neither the
records nor any earlier round takes part. Work that is late anyway leaves at the next of 2 k T, 4 k T, 8 k T and so on.
So an observer sees that it is late, and by how much only to a factor of two. A turn that computed nothing from records
leaves at once.

**The remaining leak** is the chance that work over n records misses a plan for `max_records`, which depends on n. It is
small because the plan covers `max_records` and more. A site may pad the work itself (`Padding`).

References:
    Ratliff, Vadhan (2024), A framework for differential privacy against timing attacks.
"""

from __future__ import annotations

import logging
import math
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from statistics import median
from typing import Final

import numpy as np
from numpy.typing import NDArray

from feature_store.index.build import here
from feature_store.shard import Shard
from labeler.errors import PrivacyRefusal
from labeler.ledger.lifetimes import LifetimeSpends, Spent
from labeler.messages.bodies import Ask
from labeler.randomness import KEY_BYTES
from labeler.records import ModelStore
from labeler.tally import QueryBatch
from labeler.task import Task
from workers.agent.agent import Agent, as_it_is
from workers.party.link import cause

log = logging.getLogger("labeler.agent")

TICK_S: Final = 0.1
"""T, where the site's settings do not say otherwise."""

ROOM: Final = 1.5
"""A plan is this many times the work's time over drawn rows."""

FIXED_S, BYTE_S = 0.02, 2e-8
"""Seconds that a plan adds for storing, sealing and writing letters: once, and for each byte of an answer."""

LIFE_RECORD_S: Final = 5e-5
"""Seconds that a plan adds for each record where votes for life write a row for each."""

WARM_ROWS, FEW_ROWS, MANY_ROWS = 16, 1024, 4096
"""Drawn rows on which work is timed: the first run loads what it needs, the others give a line over the records."""

SHORT_RUNS, SHORT_S = 5, 0.05
"""Runs over drawn rows repeat, up to this many, until they took this long together."""

LONG_S: Final = 0.25
"""From this time on the difference of two runs is not mostly chance."""

_MOST_TIMED: Final = 10_000
_MOST_PADDED: Final = 4


@dataclass
class TurnTimes:
    """The times of one turn of an agent's driver.

    Attributes:
        now: unix time in seconds.
        started: when its poll returned, in seconds that only go up.
        planned_s: planned end of its computations from records, counted from `started`; None where it computes nothing.
        admitted_s: what is planned for all that was admitted so far and is still to be computed.
        not_before, most_left_s: before when a stored answer that it sends may not leave (KeptAnswer).
    """

    now: float
    started: float = 0.0
    planned_s: float | None = None
    admitted_s: float = 0.0
    not_before: float = 0.0
    most_left_s: float = 0.0


class PublicClock:
    """A public clock; see the module. Used by one thread.

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
        self._tick_s = tick_s
        self._started = started
        self.ticks = ticks
        self._estimate_s = estimate_s

    def begin(self, now: float) -> TurnTimes:
        """Start a turn of the newest poll.

        Args:
            now: unix time in seconds.
        """
        return TurnTimes(now, started=self._started())

    def check_in_time(self, turn: TurnTimes, ask: Ask, ahead: Iterable[Ask]) -> None:
        """Refuse, before the charge, what would leave after its deadline; by the plan alone.

        Args:
            ahead: what is still to be computed before it, besides what was admitted in this turn.

        Raises:
            PrivacyRefusal: it would.
        """
        planned_s = turn.admitted_s + self._planned_s([ask])
        if turn.now + self._hold_s(self._passed_s(turn) + planned_s + self._planned_s(ahead)) > ask.expires_at:
            raise PrivacyRefusal(
                "this site sends answers only on its public clock, and this one would be sent after the round's "
                "deadline; nothing was charged. Ask with a later deadline, or about fewer images at once"
            )
        turn.admitted_s = planned_s

    def plan(self, turn: TurnTimes, asks: Iterable[Ask]) -> None:
        """Set, before a turn computes, the time until which it does."""
        try:
            planned_s = self._planned_s(asks)
        except Exception as error:
            # Only rounds that an earlier process has charged: this one plans before it admits and charges.
            log.error("how long an answer takes could not be planned", extra=cause(error))
            planned_s = 0.0
        turn.planned_s = self._passed_s(turn) + planned_s

    def left_s(self, turn: TurnTimes) -> float:
        """Return seconds until a turn that computes may leave, if its work were done now.

        That is start + k T, or, where it has passed, the next of 2 k T, 4 k T, 8 k T and so on.
        """
        hold_s, passed_s = self._hold_s(turn.planned_s or 0.0), self.ticks() - turn.started
        return math.ldexp(hold_s, max(0, math.ceil(math.log2(max(passed_s, hold_s) / hold_s)))) - passed_s

    def leaves_at(self, turn: TurnTimes, now: float) -> float:
        """Return when the results of a turn may leave, in ticks.

        Args:
            now: unix time in seconds.
        """
        moment = -math.inf if turn.planned_s is None else self.ticks() + self.left_s(turn)
        stored_s = min(turn.not_before - now, turn.most_left_s)
        return max(moment, self.ticks() + stored_s) if stored_s > 0 else moment

    def _planned_s(self, asks: Iterable[Ask]) -> float:
        found = [self._estimate_s(ask) for ask in asks]
        return FIXED_S + ROOM * sum(found) if found else 0.0

    def _passed_s(self, turn: TurnTimes) -> float:
        """Return the time passed in a turn, by public facts: computations count by their plan alone."""
        return self.ticks() - turn.started if turn.planned_s is None else turn.planned_s

    def _hold_s(self, planned_s: float) -> float:
        """Return k T: the least whole number of ticks that covers a plan, at least one."""
        return self._tick_s * max(1, math.ceil(planned_s / self._tick_s))


class DrawnProbe:
    """A probe that times answers over drawn rows, at the first ask of a kind of task and size, without the site's
    records.

    The ask is public, and so are the dimension, classes and `max_records` that the rows are drawn by. An answer over
    more rows than are drawn follows by a line.

    Args:
        shard: the shard that would answer; only its public facts are read.
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
        self._models = ModelStore()
        self._known: OrderedDict[tuple[str, int], float] = OrderedDict()

    def seconds(self, ask: Ask) -> float:
        """Return how long the answer takes over `max_records` drawn rows."""
        most = self._redrawn()
        key = (ask.task.kind, len(ask.batch))
        if key not in self._known:
            self._known[key] = self._timed(ask, most) + (
                most * LIFE_RECORD_S if ask.task.lifetime_budget is not None else 0.0
            )
            while len(self._known) > _MOST_TIMED:
                self._known.popitem(last=False)
        return self._known[key]

    def _redrawn(self) -> int:
        """Return the declared bound; redraw rows if the shard was exchanged for another kind."""
        shard = self._shard()
        assert shard.max_records is not None  # noqa: S101  # an agent does not serve from another
        facts = (shard.max_records, shard.dimension, shard.classes, shard.has_attributes, shard.knows_persons)
        if facts != self._facts:
            self._known.clear()
            self._agents = {}
            for rows in {min(rows, shard.max_records) for rows in (WARM_ROWS, FEW_ROWS, MANY_ROWS)}:
                self._agents[rows] = Agent(
                    "probe",
                    shard.drawn(rows),
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
        took = {rows: self._usual(ask, rows) for rows in sizes}
        few, many = sizes[0], sizes[-1]
        by_rows = took[many] * most / many
        if few == many:
            return by_rows
        line = took[many] + max(0.0, took[many] - took[few]) / (many - few) * (most - many)
        # The difference of two short times is mostly chance, and a line through them may be flat.
        return max(line, by_rows) if took[many] < LONG_S else line

    def _usual(self, ask: Ask, rows: int) -> float:
        """Return the median of a few runs where they are short: other work on the machine must not count for good."""
        took = [self._once(ask, rows)]
        while len(took) < SHORT_RUNS and sum(took) < SHORT_S:
            took.append(self._once(ask, rows))
        return median(took)

    def _once(self, ask: Ask, rows: int) -> float:
        self._models.clear()
        self._agents[rows].forget_index()  # the site's own index may have to be built, too
        begun = self._clock()
        answer = self._agents[rows].computed(ask.task, ask.batch, key=bytes(32), seal=as_it_is)
        took = self._clock() - begun
        self._models.clear()
        return took + BYTE_S * sum(map(len, answer.bodies))


class Padding:
    """Answers everything a second time, over drawn rows, and drops it, so that work follows from `max_records`.

    An agent calls it with the number of records it answers a task from. Of the most rows that a task lets take part
    (`most_rows`), it works on those that the agent has no record for, and at least on one.

    Args:
        shard: whose public facts rows are drawn by; it declares `max_records`.
        engine, memory_limit_bytes: see Agent.
    """

    def __init__(self, shard: Shard, *, engine: str = "auto", memory_limit_bytes: int | None = None) -> None:
        assert shard.max_records is not None  # noqa: S101  # an agent does not serve from another
        self._drawn = shard.drawn(shard.max_records)
        self._engine = here(engine)
        self._memory_limit_bytes = memory_limit_bytes
        self._agents: OrderedDict[int, Agent] = OrderedDict()

    def __call__(self, task: Task, batch: QueryBatch, own: int) -> None:
        """Answer over the missing rows; see the class.

        Args:
            own: records that the agent answers from.
        """
        most = min(len(self._drawn), task.traits.most_rows(task, self._drawn.dimension) or len(self._drawn))
        rows = max(1, most - min(own, most))
        if rows not in self._agents:
            self._agents[rows] = Agent(
                "padding",
                self._drawn.head(rows),
                models=ModelStore(),
                engine=self._engine,
                memory_limit_bytes=self._memory_limit_bytes,
                spends=_NothingSpent(),
            )
            if len(self._agents) > _MOST_PADDED:
                self._agents.popitem(last=False)
        agent = self._agents[rows]
        agent.computed(task, batch, key=bytes(KEY_BYTES), seal=as_it_is)
        agent.forget_models()


class _NothingSpent(LifetimeSpends):
    """Spends of drawn images: none, and no journal is read."""

    def __init__(self) -> None:
        pass

    def spent(self, digests: NDArray[np.int64]) -> Spent:
        """See LifetimeSpends."""
        return Spent(0, np.zeros(len(digests), dtype=np.int64))
