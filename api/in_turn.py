"""Work of many names that takes a moment of a processor: in few threads of its own, one piece of each name at a time.

Who asks for many prices waits behind its own, the next name has its turn after one piece of each other at most, and
whoever looks something up waits for none of it. Prices that take seconds have a line of their own
(api.coordinator.long_prices), in which nobody else waits.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TypeVar

from anyio import CapacityLimiter, Lock, to_thread

from api.coordinator.long_prices import TOTAL, LongPrices

THREADS = 2

Answer = TypeVar("Answer")


class InTurn:
    """See the module. Used in one event loop."""

    def __init__(self, threads: int = THREADS) -> None:
        self._threads = threads
        self._limiter: CapacityLimiter | None = None
        self._turns: dict[str, Lock] = {}

    async def run(self, name: str, piece: Callable[[], Answer]) -> Answer:
        """Do a piece of work when it is its turn.

        Args:
            piece: called in a thread; what it raises is raised.
        """
        if self._limiter is None:  # belongs to the event loop that serves
            self._limiter = CapacityLimiter(self._threads)
        turn = self._turns.setdefault(name, Lock())
        try:
            async with turn:
                return await to_thread.run_sync(piece, limiter=self._limiter)
        finally:
            if not turn.locked() and self._turns.get(name) is turn:
                del self._turns[name]


class Pricing:
    """Prices of many tokens: those in closed form in turn, those that take seconds in their line.

    Args:
        long_prices: the line. Who waits in it has a thread of its own, and keeps none of the others'.
    """

    def __init__(self, long_prices: LongPrices) -> None:
        self._quick = InTurn()
        self._long = long_prices
        self._waiting: CapacityLimiter | None = None

    async def run(self, name: str, piece: Callable[[], Answer], *, is_long: bool = False) -> Answer:
        """Work out a price.

        Raises:
            TooManyRequests, PricesWait: see LongPrices.
        """
        if not is_long:
            return await self._quick.run(name, piece)
        if self._waiting is None:  # belongs to the event loop that serves
            # One more than may wait, so that who comes next is refused at once.
            self._waiting = CapacityLimiter(TOTAL + 1)
        return await to_thread.run_sync(partial(self._long.run, name, piece), limiter=self._waiting)
