"""Work of many owners in a few threads: whose turn it is, and that nothing is done twice or goes on after a stop."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from api.fair_pool import FairPool


@pytest.fixture
def pool() -> Iterator[FairPool]:
    made = FairPool("test", threads=1)
    yield made
    made.stop()


def test_who_asks_for_much_waits_behind_its_own_and_each_piece_is_done_once(pool: FairPool) -> None:
    begun, may_go, done = threading.Event(), threading.Event(), list[str]()

    def held() -> None:
        begun.set()
        may_go.wait()
        done.append("greedy 0")

    asked = [pool.submit("greedy", held)]
    begun.wait()
    for owner, name in (("greedy", "greedy 1"), ("greedy", "greedy 2"), ("modest", "modest 0"), ("greedy", "greedy 1")):
        asked.append(pool.submit(owner, lambda name=name: done.append(name), key=name))  # type: ignore[misc]
    asked.append(pool.submit("late", lambda: done.append("awaited"), first=True))
    assert asked[2].cancel() or asked[2].running()
    may_go.set()
    for one in asked:
        if not one.cancelled():
            one.result()
    assert done == ["greedy 0", "awaited", "modest 0", "greedy 1"]


def test_two_owners_are_served_at_once_where_there_are_threads() -> None:
    both = threading.Barrier(2)
    pool = FairPool("test", threads=2)
    asked = [pool.submit(owner, both.wait) for owner in ("a", "b")]
    assert sorted(one.result() for one in asked) == [0, 1]
    pool.stop()


def test_what_a_piece_raises_is_raised_and_the_next_has_its_turn(pool: FairPool) -> None:
    with pytest.raises(ZeroDivisionError):
        pool.submit("somebody", lambda: 1 // 0).result()
    assert pool.submit("somebody", lambda: "done").result() == "done"


def test_a_pool_that_stops_begins_nothing_more(pool: FairPool) -> None:
    begun, may_go = threading.Event(), threading.Event()

    def held() -> None:
        begun.set()
        may_go.wait()

    first, second = pool.submit("a", held), pool.submit("b", held)
    begun.wait()
    second.add_done_callback(lambda _: may_go.set())  # the first ends once the stop has cancelled the second
    pool.stop(wait_s=240)
    assert first.done() and second.cancelled() and pool.submit("a", held).cancelled()  # noqa: PT018
