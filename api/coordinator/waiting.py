"""What the mailroom waits for: work beside the event loop, and the driver's turn. A coordinator without a loop waits
for neither, because both have happened when they are asked for.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Protocol, TypeVar

from anyio import to_thread

T = TypeVar("T")


class Waiting(Protocol):
    """How a request waits."""

    async def aside(self, work: Callable[[], T]) -> T:
        """Do something that takes long, or writes."""
        ...

    async def told(self, ask: Callable[[Callable[[T], None]], None]) -> T:
        """Ask for something that somebody else will tell of, by the callable it is given."""
        ...


class InLoop:
    """Of a server: threads for what takes long, while the event loop goes on."""

    async def aside(self, work: Callable[[], T]) -> T:
        """See Waiting."""
        return await to_thread.run_sync(work)

    async def told(self, ask: Callable[[Callable[[T], None]], None]) -> T:
        """See Waiting."""
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[T] = loop.create_future()

        def settle(outcome: T) -> None:
            if not answer.done():
                answer.set_result(outcome)

        def tell(outcome: T) -> None:
            # From the driver's thread to whoever waits; nobody does once the loop has ended.
            if not loop.is_closed():
                loop.call_soon_threadsafe(settle, outcome)

        ask(tell)
        return await answer


class AtOnce:
    """Of one thread that does one thing after the other; `run` what waits so."""

    async def aside(self, work: Callable[[], T]) -> T:
        """See Waiting."""
        return work()

    async def told(self, ask: Callable[[Callable[[T], None]], None]) -> T:
        """See Waiting."""
        outcomes: list[T] = []
        ask(outcomes.append)
        return outcomes[0]

    @staticmethod
    def run(coroutine: Coroutine[Any, Any, T]) -> T:
        """What comes of something that never waits, without an event loop."""
        try:
            coroutine.send(None)
        except StopIteration as done:
            result: T = done.value
            return result
        coroutine.close()
        raise RuntimeError("nobody is there to wait for what this waits for")
