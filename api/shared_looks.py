"""Who looks at the same time looks together: one read for all who wait, however many they are.

A look that begins while another is under way waits for the next one, because what is being read may be older than what
whoever asks has been shown already. So every answer is from a moment after its question, and under a load a look into
the journal costs a thread and a statement for many requesters, where it cost each of them its own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping
from typing import Generic, TypeVar

from anyio import CapacityLimiter, to_thread

LANES = 2
"""Reads at once, so that one that takes long keeps only those waiting that came with it."""

MOST = 64
"""Of one read."""

Shown = TypeVar("Shown")


class SharedLooks(Generic[Shown]):
    """See the module. Used in one event loop.

    Args:
        read: what is known of some names, by name; called in a thread. What it leaves out is not there.
    """

    def __init__(self, read: Callable[[Collection[str]], Mapping[str, Shown]], *, lanes: int = LANES) -> None:
        self._read = read
        self._lanes = lanes
        self._limiter: CapacityLimiter | None = None
        self._waiting: dict[str, list[asyncio.Future[Shown | None]]] = {}
        self._reading = 0
        self._tasks: set[asyncio.Task[None]] = set()

    async def look(self, name: str) -> Shown | None:
        """What a name stands for, read after this was called; None where it is not there.

        Raises:
            Exception: what `read` raised, to everybody of the same read.
        """
        waits: asyncio.Future[Shown | None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(name, []).append(waits)
        if self._reading < self._lanes:
            # A task of its own: whoever began it may go away, and the others are answered all the same.
            self._reading += 1
            task = asyncio.create_task(self._read_on())
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        return await waits

    async def _read_on(self) -> None:
        if self._limiter is None:  # belongs to the event loop that serves
            self._limiter = CapacityLimiter(self._lanes)
        try:
            while self._waiting:
                names = list(self._waiting)[:MOST]
                await self._read_for({name: self._waiting.pop(name) for name in names})
        finally:
            self._reading -= 1  # in the same step that finds nobody waiting, so that the next who waits is not missed

    async def _read_for(self, taken: Mapping[str, list[asyncio.Future[Shown | None]]]) -> None:
        try:
            found = await to_thread.run_sync(self._read, list(taken), limiter=self._limiter)
        except BaseException as error:
            for waits in taken.values():
                _settle(waits, error)
            if not isinstance(error, Exception):
                raise
            return
        for name, waits in taken.items():
            _settle(waits, found.get(name))


def _settle(some: list[asyncio.Future[Shown | None]], outcome: Shown | BaseException | None) -> None:
    for waits in some:
        if waits.done():  # whoever waited has gone
            continue
        if isinstance(outcome, BaseException):
            waits.set_exception(outcome)
        else:
            waits.set_result(outcome)
