"""Who looks at the same time shares a read that began after they asked."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Collection, Coroutine
from functools import wraps
from typing import Any

import pytest

from api.shared_looks import MOST, SharedLooks
from labeler.errors import Unavailable


def in_a_loop(test: Callable[[], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    @wraps(test)
    def run() -> None:
        asyncio.run(asyncio.wait_for(test(), 30))

    return run


class Shelf:
    """What is read, with a gate: a read waits inside until it is let go."""

    def __init__(self) -> None:
        self.reads: list[list[str]] = []
        self.value = 0
        self.gate = threading.Semaphore(0)
        self.failure: Exception | None = None

    def read(self, names: Collection[str]) -> dict[str, int]:
        value = self.value
        self.reads.append(list(names))
        self.gate.acquire()
        if self.failure is not None:
            raise self.failure
        return {name: value for name in names if name != "nobody"}


async def began(shelf: Shelf, count: int) -> None:
    while len(shelf.reads) < count:
        await asyncio.sleep(0.001)


@in_a_loop
async def test_who_comes_while_a_read_is_under_way_shares_the_next_one_and_sees_what_is_newer() -> None:
    shelf = Shelf()
    looks = SharedLooks(shelf.read, lanes=1)
    first = asyncio.create_task(looks.look("a"))
    await began(shelf, 1)
    shelf.value = 1
    late = [asyncio.create_task(looks.look(name)) for name in ("a", "a", "b", "nobody")]
    await asyncio.sleep(0)
    shelf.gate.release(2)
    assert await first == 0
    assert await asyncio.gather(*late) == [1, 1, 1, None]
    assert shelf.reads == [["a"], ["a", "b", "nobody"]]
    shelf.gate.release()
    assert await looks.look("a") == 1, "a lane that has found nobody waiting begins again"


@in_a_loop
async def test_a_slow_read_keeps_only_those_waiting_that_came_with_it() -> None:
    shelf = Shelf()
    looks = SharedLooks(shelf.read, lanes=2)
    slow = asyncio.create_task(looks.look("slow"))
    await began(shelf, 1)
    quick = asyncio.create_task(looks.look("quick"))
    await began(shelf, 2)
    third = asyncio.create_task(looks.look("third"))
    await asyncio.sleep(0.01)
    assert len(shelf.reads) == 2, "as many reads at once as there are lanes"
    shelf.gate.release(3)
    assert await asyncio.gather(slow, quick, third) == [0, 0, 0]


@in_a_loop
async def test_who_goes_away_takes_nobody_along() -> None:
    shelf = Shelf()
    looks = SharedLooks(shelf.read, lanes=1)
    first = asyncio.create_task(looks.look("a"))
    await began(shelf, 1)
    second = asyncio.create_task(looks.look("b"))
    third = asyncio.create_task(looks.look("b"))
    await asyncio.sleep(0)
    first.cancel()
    second.cancel()
    await asyncio.gather(first, second, return_exceptions=True)
    shelf.gate.release(2)
    assert await third == 0


@in_a_loop
async def test_a_failure_reaches_all_of_its_read_and_nobody_of_the_next() -> None:
    shelf = Shelf()
    looks = SharedLooks(shelf.read, lanes=1)
    shelf.failure = Unavailable("the journal cannot be read now")
    some = [asyncio.create_task(looks.look(name)) for name in ("a", "b")]
    await began(shelf, 1)
    shelf.gate.release()
    for one in some:
        with pytest.raises(Unavailable):
            await one
    shelf.failure = None
    shelf.gate.release()
    assert await looks.look("a") == 0


@in_a_loop
async def test_one_read_is_bounded_however_many_wait() -> None:
    shelf = Shelf()
    looks = SharedLooks(shelf.read, lanes=1)
    some = [asyncio.create_task(looks.look(f"job-{number}")) for number in range(2 * MOST + 1)]
    await asyncio.sleep(0)
    shelf.gate.release(3)
    await asyncio.gather(*some)
    assert list(map(len, shelf.reads)) == [MOST, MOST, 1]
