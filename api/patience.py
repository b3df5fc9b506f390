"""Waiting that ends when the server stops, so that a long poll or an event stream never holds up a shutdown."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import aclosing
from typing import Any, TypeVar

from fastapi import Request

T = TypeVar("T")


class Stopping:
    """Whether the server has begun to stop, and who waits until then; used on one event loop.

    Whoever waits does so in its own task, which is told by the limit of its time: a task for the wait and one for the
    end would cost each poll more than its mail.
    """

    def __init__(self) -> None:
        self._is_set = False
        self._limits: set[asyncio.Timeout] = set()

    def set(self) -> None:
        """The server begins to stop: whoever waits gives up. Said again, it is no news: a limit is moved once."""
        if self._is_set:
            return
        self._is_set = True
        for limit in self._limits:
            limit.reschedule(asyncio.get_running_loop().time())

    async def unless(self, answer: Coroutine[Any, Any, T]) -> T | None:
        """The answer, or None when the server begins to stop first."""
        if self._is_set:
            answer.close()
            return None
        limit = asyncio.timeout(None)
        try:
            async with limit:
                self._limits.add(limit)
                try:
                    return await answer
                finally:
                    self._limits.discard(limit)
        except TimeoutError:
            if limit.expired():
                return None
            raise


async def unless_stopping(request: Request, answer: Coroutine[Any, Any, T]) -> T | None:
    """The answer, or None when the server begins to stop first."""
    stopping: Stopping = request.app.state.stopping
    return await stopping.unless(answer)


async def until_stopping(request: Request, items: AsyncIterator[T]) -> AsyncIterator[T]:
    """The items, until there are no more or the server begins to stop."""
    ended = object()
    async with aclosing(_generator(items)) as source:
        while True:
            item = await unless_stopping(request, _next(source, ended))
            if item is None or item is ended:
                return
            yield item


async def _generator(items: AsyncIterator[T]) -> Any:
    async for item in items:
        yield item


async def _next(source: Any, ended: object) -> Any:
    return await anext(source, ended)
