"""Waiting that ends when the server stops, so that a long poll or an event stream never holds up a shutdown."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import aclosing
from typing import Any, TypeVar

from fastapi import Request

T = TypeVar("T")


async def unless_stopping(request: Request, answer: Coroutine[Any, Any, T]) -> T | None:
    """The answer, or None when the server begins to stop first."""
    stopping: asyncio.Event = request.app.state.stopping
    asked = asyncio.ensure_future(answer)
    stopped = asyncio.ensure_future(stopping.wait())
    try:
        await asyncio.wait((asked, stopped), return_when=asyncio.FIRST_COMPLETED)
        return asked.result() if asked.done() else None
    finally:
        for task in (asked, stopped):
            task.cancel()
        await asyncio.gather(asked, stopped, return_exceptions=True)


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
