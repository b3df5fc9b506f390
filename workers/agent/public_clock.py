"""An agent's public clock: when a turn that computed from records may send, by public facts of the site alone.

    start             a poll returns.
    start + k T       all letters of the turn leave, in the order of the asks, and the next poll with them.

T is a setting of the site (`tick_s`). k is planned before the work starts. It is the least whole number of ticks that
covers the time passed, and the time of the answers over `max_records` drawn rows, with room (`ROOM`). Neither the
records nor the answer of any earlier round takes part. A plan belongs to what is asked: to the kind of task, and to the
questions with the model in them, whose values may decide how long an answer takes. So every ask is timed by itself,
before it is charged, and for at most `PROBE_S`. Work that is late anyway leaves at the next of 2 k T, 4 k T, 8 k T and
so on. So an observer sees that it is late, and by how much only to a factor of two. A turn that computed nothing from
records leaves at once.

**The remaining leak** is the chance that work over n records misses a plan for `max_records`, which depends on n. It is
small because the plan covers `max_records` and more. Padding the work with drawn rows would not hide it where a site's
own rows take longer than those.

References:
    Ratliff, Vadhan (2024), A framework for differential privacy against timing attacks.
"""

from __future__ import annotations

import hashlib
import logging
import math
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from typing import Final

import numpy as np
from numpy.typing import NDArray

from feature_store.index.build import local_engine
from feature_store.index.exact_index import every_query_tied
from feature_store.shard import Shard
from labeler.errors import PrivacyRefusal
from labeler.ledger.lifetimes import LifetimeSpends, Spent
from labeler.messages.bodies import Ask
from labeler.randomness import KEY_BYTES
from labeler.records import ModelStore
from labeler.tally import QueryBatch
from workers.agent.agent import Agent, as_it_is
from workers.learning.steps import first_steps
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

PROBE_S: Final = 20.0
"""Seconds for which an ask is timed at most. What cannot be told in that time is refused before the charge."""

ROWS: Final = (16, 32, 64, 256, 1024, 4096)
"""Drawn rows on which work may be timed: the fewest, and the most for which there surely is time; a line goes on."""

_SHARE: Final = 5
"""All steps or questions are timed if those of the fewest rows take at most this part of the time there is."""

SHORT_RUNS, SHORT_S = 3, 0.02
"""Runs over drawn rows repeat, up to this many, until they took this long together."""

LONG_S: Final = 0.25
"""From this time on the difference of two runs is not mostly chance."""

_MOST_TIMED: Final = 10_000


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
            PrivacyRefusal: it would, or cannot be timed (`DrawnProbe.seconds`).
        """
        before_s = turn.admitted_s + self._planned_s(ahead)
        self._check_deadline(turn, ask, before_s)  # what is late anyway is not timed
        own_s = self._planned_s([ask])
        self._check_deadline(turn, ask, before_s + own_s)
        turn.admitted_s += own_s

    def _check_deadline(self, turn: TurnTimes, ask: Ask, planned_s: float) -> None:
        if turn.now + self._hold_s(self._passed_s(turn) + planned_s) > ask.expires_at:
            raise PrivacyRefusal(
                "this site sends answers only on its public clock, and this one would be sent after the round's "
                "deadline; nothing was charged. Ask with a later deadline, or about fewer images at once"
            )

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
    """A probe that times answers over drawn rows, without the site's records.

    The ask is public, and so are the dimension, classes and `max_records` that the rows are drawn by. An answer over
    more rows than are drawn follows by a line, and one with more steps or questions than are timed in proportion.

    **Ties.** Drawn rows never tie, and a requester may choose questions that do. So what searches is timed twice, the
    second time with every query settled as if it tied (`every_query_tied`), and the longer time counts. A plan covers
    the most work that ties can cause (`feature_store.index.engine_faiss`), and no answer is late because of them.

    **Bounded.** The first run is of few rows and one step, or one question where there may be any number; the size of a
    message bounds all else. No run takes more times the last one than it is larger, so each begins only if it surely
    ends in time.

    Args:
        shard: the shard that would answer; only its public facts are read.
        engine, memory_limit_bytes: see Agent. Parts of a cluster are not asked; this process times in their place.
        clock: seconds that only go up.
        now: unix time in seconds, for deadlines.
    """

    def __init__(
        self,
        shard: Callable[[], Shard],
        *,
        engine: str = "auto",
        memory_limit_bytes: int | None = None,
        clock: Callable[[], float] = time.perf_counter,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._shard = shard
        self._engine = local_engine(engine)
        self._memory_limit_bytes = memory_limit_bytes
        self._clock = clock
        self._now = now
        self._facts: object = None
        self._agents: dict[int, Agent] = {}
        self._models = ModelStore()
        self._known: OrderedDict[tuple[bytes, str], float] = OrderedDict()

    def seconds(self, ask: Ask) -> float:
        """Return how long the answer takes over `max_records` drawn rows; the same ask is timed once.

        Raises:
            PrivacyRefusal: that cannot be told within `PROBE_S`, and before the ask's deadline.
        """
        most = self._redrawn()
        key = (hashlib.sha256(ask.task.kind.encode()).digest(), ask.batch.digest)
        if key not in self._known:
            within_s = min(PROBE_S, ask.expires_at - self._now())
            questions = ask.task.traits.searches(len(ask.batch))
            found = self._timed(ask, most, within_s=within_s, questions=questions)
            self._known[key] = found + (most * LIFE_RECORD_S if ask.task.lifetime_budget is not None else 0.0)
            while len(self._known) > _MOST_TIMED:
                self._known.popitem(last=False)
        self._known.move_to_end(key)
        return self._known[key]

    def _redrawn(self) -> int:
        """Return the declared bound; redraw rows if the shard was exchanged for another kind."""
        shard = self._shard()
        assert shard.max_records is not None  # noqa: S101  # an agent does not serve from another
        facts = (shard.max_records, shard.dimension, shard.classes, shard.has_attributes, shard.knows_persons)
        if facts != self._facts:
            self._known.clear()
            self._agents = {}
            for rows in {min(rows, shard.max_records) for rows in ROWS}:
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

    def _timed(self, ask: Ask, most: int, *, within_s: float = PROBE_S, questions: int = 0) -> float:
        """Return the time of an answer over `most` rows.

        Args:
            questions: how many it has, if they may be asked a few at a time; else 0.
        """
        end = self._clock() + within_s
        least, *more = sorted(self._agents)
        whole, ways = 1, (False, True) if ask.task.traits.searched else (False,)

        def once(parts: int, rows: int, ways: tuple[bool, ...] = ways) -> float:
            nonlocal whole
            with first_steps(parts) as cut:
                some = _first(ask, parts) if questions else ask
                found = max(self._once(some, rows, is_tied=is_tied) for is_tied in ways)
            whole = max(questions, cut.whole, 1)
            return found

        took = {1: once(1, least, ways[-1:])}
        if len(ways) * took[1] <= end - self._clock():
            took = {1: once(1, least)}  # the first run loads what it needs
        sizes = [min(2**power, whole) for power in range(1, whole.bit_length() + 1)]
        while parts := _next_size(took, sizes, (end - self._clock()) / len(ways) / _SHARE):
            took[parts] = once(parts, least)
        timed = max(took)
        took = {least: took[timed]}
        while rows := _next_size(took, more, (end - self._clock()) / len(ways)):
            took[rows] = self._usual(partial(once, timed, rows))
        if more and len(took) == 1:
            raise PrivacyRefusal(
                f"this site times every answer before it is charged, for at most {PROBE_S:g} s and not beyond the "
                "round's deadline, and how long this one takes cannot be told in that time; nothing was charged. Ask "
                "with a later deadline, or about fewer images, classes or steps at once"
            )
        many = max(took)
        by_rows, line = took[many] * most / many, _line(took, most)
        # The difference of two short times is mostly chance, and a line through them may be flat.
        found = max(line, by_rows) if took[many] < LONG_S else line
        return found * max(1.0, whole / timed)

    def _usual(self, once: Callable[[], float]) -> float:
        """Return the median of a few runs where they are short: other work on the machine must not count for good."""
        took = [once()]
        while len(took) < SHORT_RUNS and sum(took) < SHORT_S:
            took.append(once())
        return median(took)

    def _once(self, ask: Ask, rows: int, *, is_tied: bool) -> float:
        self._models.clear()
        if self._memory_limit_bytes is None and ask.task.records_per_person is None:
            self._agents[rows].build_index()  # the site's own is there
        else:
            self._agents[rows].forget_index()  # the site's own may have to be built, too
        # A key that nobody can know: an order of search could else be found in which drawn rows take long.
        key = secrets.token_bytes(KEY_BYTES)
        begun = self._clock()
        with every_query_tied() if is_tied else nullcontext():
            answer = self._agents[rows].computed(ask.task, ask.batch, key=key, seal=as_it_is)
        took = self._clock() - begun
        self._models.clear()
        return took + BYTE_S * sum(map(len, answer.bodies))


def _first(ask: Ask, count: int) -> Ask:
    """Return an ask about the first of its questions."""
    return replace(ask, batch=QueryBatch(ask.batch.features[:count], ask.batch.first_query))


def _next_size(took: Mapping[int, float], sizes: Iterable[int], left_s: float) -> int | None:
    """Return the size that is timed next: the largest for which there surely is time; None where there is none.

    Work has a part that grows with its size and one that does not. So a run of three times the size takes at most three
    times as long, and about what a line through the last two times says.
    """
    last = max(took)

    def longest_s(size: int) -> float:
        in_proportion = took[last] * size / last
        return in_proportion if len(took) == 1 else min(in_proportion, ROOM * _line(took, size))

    return max((size for size in sizes if size > last and longest_s(size) <= left_s), default=None)


def _line(took: Mapping[int, float], size: int) -> float:
    """Return the time of a size by a line through the last two times; of one time in proportion."""
    *_, few, many = (0, *sorted(took))
    slope = max(0.0, took[many] - took.get(few, 0.0)) / (many - few)
    return took[many] + slope * (size - many)


class _NothingSpent(LifetimeSpends):
    """Spends of drawn images: none, and no journal is read."""

    def __init__(self) -> None:
        pass

    def spent(self, digests: NDArray[np.int64]) -> Spent:
        """See LifetimeSpends."""
        return Spent(0, np.zeros(len(digests), dtype=np.int64))
