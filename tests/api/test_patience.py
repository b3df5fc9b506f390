"""Waits that end when the server stops: each gives up by itself, and what it waited for is told to end."""

from __future__ import annotations

import asyncio

import pytest

from api.patience import Stopping


def test_whoever_waits_gives_up_when_the_server_stops_and_who_has_an_answer_gives_it() -> None:
    ended: list[str] = []

    async def wait() -> str:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            ended.append("told")
            raise
        return "too late"

    async def answer() -> str:
        return "answer"

    async def late() -> str:
        raise AssertionError("nobody begins to wait any more")

    async def run() -> None:
        stopping = Stopping()
        assert await stopping.unless(answer()) == "answer"
        waiting = [asyncio.ensure_future(stopping.unless(wait())) for _ in range(2)]
        await asyncio.sleep(0)
        stopping.set()
        assert await asyncio.wait_for(asyncio.gather(*waiting), 30) == [None, None]
        assert await stopping.unless(late()) is None

    asyncio.run(run())
    assert ended == ["told", "told"]


def test_an_answer_that_fails_or_is_given_up_is_no_end_of_the_server() -> None:
    async def slow() -> str:
        raise TimeoutError

    async def run() -> None:
        stopping = Stopping()
        with pytest.raises(TimeoutError):
            await stopping.unless(slow())
        waiting = asyncio.ensure_future(stopping.unless(asyncio.sleep(60)))
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        stopping.set()

    asyncio.run(run())


def test_the_server_may_say_twice_that_it_stops_while_somebody_still_gives_back_what_it_holds() -> None:
    async def hold() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0)

    async def run() -> None:
        stopping = Stopping()
        waiting = asyncio.ensure_future(stopping.unless(hold()))
        await asyncio.sleep(0)
        stopping.set()
        await asyncio.sleep(0)
        stopping.set()
        assert await asyncio.wait_for(waiting, 30) is None

    asyncio.run(run())
