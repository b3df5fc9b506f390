"""Work that takes seconds of a processor, of many names: in few threads of its own, one piece of each name at a time.

A price of winners that nobody has asked for before takes a second, the noise for one some ten; anybody with a token may
ask for any. So who asks for many waits behind its own, the next name has its turn after one piece of each other at
most, and whoever looks something up waits for none of it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from anyio import CapacityLimiter, Lock, to_thread

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
