"""The promises of every mailbox, over redis-server (on PATH and of the wheel) and memory."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import pytest
import redis

from labeler.driver import mail_memory, mail_redis
from labeler.driver.mail import MAX_EVENTS, Letter, Mailbox
from labeler.driver.mail_memory import MemoryMailbox
from labeler.driver.mail_redis import RedisMailbox
from labeler.errors import InvalidSetting, ProtocolViolation, TooLarge
from labeler.messages import MAX_MESSAGE_BYTES
from tests.labeler.driver.conftest import Box, pending, send
from workers.up.redis_server import RedisServer

pytestmark = pytest.mark.process


@contextmanager
def opened(kind: str, servers: Callable[[str], RedisServer]) -> Iterator[Box]:
    if kind == "memory":
        memory = MemoryMailbox()
        yield Box(memory, lambda: memory, memory.empty)
        return
    server = servers(kind)
    with redis.Redis.from_url(server.url) as admin:
        admin.flushall()
        mailbox = RedisMailbox(server.url)
        yield Box(mailbox, lambda: RedisMailbox(server.url), admin.flushall)
        mailbox.close()


TWINS = ("redis on PATH", "the wheel's valkey", "memory")


@pytest.fixture(params=TWINS)
def box(request: pytest.FixtureRequest, servers: Callable[[str], RedisServer]) -> Iterator[Box]:
    with opened(request.param, servers) as found:
        yield found


# Mail


def test_mail_comes_in_order_to_its_recipient_only(box: Box) -> None:
    for number in range(3):
        send(box.mailbox, "site-1", bytes([number, 0, 255, 10]), message_id=f"coordinator:{number}")
    send(box.mailbox, "site-2", b"other", message_id="coordinator:9")
    assert [data for _, data in box.received("site-1")] == [bytes([number, 0, 255, 10]) for number in range(3)]
    assert [data for _, data in box.received("site-2")] == [b"other"]
    assert box.received("site-3") == []


def test_mail_stays_until_the_recipient_says_that_it_has_it(box: Box) -> None:
    for number in range(3):
        send(box.mailbox, "site-1", b"%d" % number, message_id=f"c:{number}")
    first = box.received("site-1")
    assert box.received("site-1") == first
    assert pending(box.mailbox, "site-1") == 3
    assert box.received("site-1", first[1][0]) == first[2:]
    assert pending(box.mailbox, "site-1") == 1
    assert box.received("site-1", first[2][0]) == []
    assert pending(box.mailbox, "site-1") == 0


def test_the_same_message_sent_twice_comes_once(box: Box) -> None:
    for _ in range(3):
        send(box.mailbox, "site-1", b"x", message_id="c:1")
    send(box.mailbox, "site-2", b"x", message_id="c:1")
    assert (pending(box.mailbox, "site-1"), pending(box.mailbox, "site-2")) == (1, 1)
    box.received("site-1", box.received("site-1")[0][0])
    send(box.mailbox, "site-1", b"x", message_id="c:1")
    assert pending(box.mailbox, "site-1") == 0


def test_many_messages_are_sent_in_order_each_once_and_watchers_are_told(box: Box) -> None:
    letters = [Letter("site-1", b"%d" % number, f"c:{number}") for number in range(3)]
    box.mailbox.send_all([*letters, letters[0], Letter("site-2", b"other", "c:9")], tell=["job-1"])
    assert [data for _, data in box.received("site-1")] == [b"0", b"1", b"2"]
    assert box.mailbox.all_pending(["site-1", "site-2", "site-3"]) == {"site-1": 3, "site-2": 1, "site-3": 0}
    told = box.waiting(lambda mailbox: mailbox.watch("job-1", "", 0.0))
    assert [has_ended for _, has_ended in told] == [False]
    box.mailbox.send_all([])
    box.mailbox.send_all([], tell=["job-1", "job-2"], ended=["job-2"])
    told = box.waiting(lambda mailbox: mailbox.watch("job-1", told[-1][0], 0.0))
    assert [has_ended for _, has_ended in told] == [False]
    told = box.waiting(lambda mailbox: mailbox.watch("job-2", "", 0.0))
    assert [has_ended for _, has_ended in told] == [True]


def test_of_many_messages_none_is_sent_where_one_is_too_large(box: Box) -> None:
    large = Letter("site-1", bytes(MAX_MESSAGE_BYTES + 1), "c:2")
    with pytest.raises(TooLarge):
        box.mailbox.send_all([Letter("site-1", b"x", "c:1"), large], tell=["job-1"])
    assert pending(box.mailbox, "site-1") == 0


def test_ids_that_join_to_the_same_text_are_two_messages(box: Box) -> None:
    send(box.mailbox, "a:b", b"x", message_id="c:1")
    send(box.mailbox, "a", b"x", message_id="b:c:1")
    assert (pending(box.mailbox, "a:b"), pending(box.mailbox, "a")) == (1, 1)


def test_many_senders_of_one_message_put_it_in_once(box: Box) -> None:
    threads = [
        threading.Thread(target=send, args=(box.mailbox, "site-1", b"x"), kwargs={"message_id": f"c:{number % 5}"})
        for number in range(40)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert pending(box.mailbox, "site-1") == 5


def test_a_waiting_recipient_gets_mail_when_it_comes_and_not_at_the_end_of_its_wait(box: Box) -> None:
    async def wait(mailbox: Mailbox) -> float:
        after = ""
        start = time.monotonic()
        for number in range(5):
            task = asyncio.create_task(mailbox.receive("site-1", after, 30.0))
            await asyncio.sleep(0.05)
            assert not task.done()
            send(mailbox, "site-1", b"x", message_id=f"c:{number}-{time.time_ns()}")
            ((after, _),) = await task
        return time.monotonic() - start

    assert box.waiting(wait) < 30.0


def test_a_recipient_without_mail_waits_as_long_as_it_said(box: Box) -> None:
    start = time.monotonic()
    assert box.received("site-1", "", 0.3) == []
    assert time.monotonic() - start >= 0.3


def test_hundreds_of_recipients_wait_at_once(box: Box) -> None:
    async def wait(mailbox: Mailbox) -> list[bytes]:
        tasks = [asyncio.create_task(mailbox.receive(f"site-{number}", "", 30.0)) for number in range(200)]
        await asyncio.sleep(0.5)
        for number in range(200):
            send(mailbox, f"site-{number}", b"%d" % number, message_id=f"c:{number}-{time.time_ns()}")
        return [mail[0][1] for mail in await asyncio.gather(*tasks)]

    assert box.waiting(wait) == [b"%d" % number for number in range(200)]


def test_no_more_messages_come_than_asked_for(box: Box) -> None:
    for number in range(20):
        send(box.mailbox, "site-1", b"x", message_id=f"c:{number}")
    assert len(box.received("site-1")) == 16
    assert len(box.waiting(lambda other: other.receive("site-1", "", 0.0, max_messages=3))) == 3


def test_an_answer_is_bounded_in_bytes_and_the_first_message_always_fits(box: Box) -> None:
    for number, size in enumerate((600, 300, 200, 5000, 10)):
        send(box.mailbox, "site-1", bytes([number]) * size, message_id=f"c:{number}")

    def sizes(after: str, wait_s: float) -> tuple[str, list[int]]:
        mail = box.waiting(lambda other: other.receive("site-1", after, wait_s, max_bytes=1000))
        return mail[-1][0], [len(data) for _, data in mail]

    after, first = sizes("", 0.0)
    after, second = sizes(after, 5.0)
    after, third = sizes(after, 0.0)
    after, last = sizes(after, 0.0)
    assert [first, second, third, last] == [[600, 300], [200], [5000], [10]]


def test_a_position_from_before_redis_was_emptied_misses_nothing(box: Box) -> None:
    """Its clock may have been set back as well: then new positions are lower than the one the recipient knows."""
    send(box.mailbox, "site-1", b"old", message_id="c:1")
    ((position, _),) = box.received("site-1")
    later = f"{int(position.partition('-')[0]) + 10**9}-0"
    box.empty()
    assert box.received("site-1", later) == []
    send(box.mailbox, "site-1", b"new", message_id="c:1")
    assert [data for _, data in box.received("site-1", later)] == [b"new"]
    assert pending(box.mailbox, "site-1") == 1


def test_mail_comes_to_a_recipient_that_was_waiting_when_redis_was_emptied(box: Box) -> None:
    async def wait(mailbox: Mailbox) -> list[tuple[str, bytes]]:
        send(mailbox, "site-1", b"old", message_id="c:1")
        ((after, _),) = await mailbox.receive("site-1", "", 0)
        task = asyncio.create_task(mailbox.receive("site-1", after, 30.0))
        await asyncio.sleep(0.1)
        await asyncio.to_thread(box.empty)
        send(mailbox, "site-1", b"new", message_id="c:1")
        return await task

    assert [data for _, data in box.waiting(wait)] == [b"new"]


def test_any_number_is_a_position_and_nothing_else(box: Box) -> None:
    assert box.received("site-1", "1-") == []
    for position in ("x", "-", "1-x", "-1-0", "1-2-3", "\u0661-0", "+1"):
        with pytest.raises(InvalidSetting, match="position"):
            box.received("site-1", position)
    for number, position in enumerate(("0", "5", f"{2**64}-0", "9" * 20 + "-" + "9" * 20)):
        send(box.mailbox, f"site-{number}", b"x", message_id="c:1")
        assert len(box.received(f"site-{number}", position)) == 1


def test_nobody_waits_longer_than_the_bound(box: Box) -> None:
    for wait_s in (-0.1, 30.1, float("nan")):
        with pytest.raises(InvalidSetting, match="wait_s"):
            box.received("site-1", "", wait_s)


def test_mail_that_is_too_large_or_for_nobody_is_refused(box: Box) -> None:
    with pytest.raises(TooLarge):
        send(box.mailbox, "site-1", bytes(MAX_MESSAGE_BYTES + 1), message_id="c:1")
    for recipient, message_id in (("", "c:1"), ("a\nb", "c:1"), ("a", ""), ("a", "c\r\n1")):
        with pytest.raises(ProtocolViolation):
            send(box.mailbox, recipient, b"x", message_id=message_id)


# Progress


def test_a_sign_of_life_counts_for_a_while(box: Box) -> None:
    assert not box.mailbox.is_alive("embedder")
    box.mailbox.show_life("embedder", for_s=60.0)
    assert box.mailbox.is_alive("embedder")
    assert not box.mailbox.is_alive("other")
    box.mailbox.show_life("embedder", for_s=0.2)
    time.sleep(0.3)
    assert not box.mailbox.is_alive("embedder")


def test_whoever_watches_a_job_sees_its_events_in_order(box: Box) -> None:
    for number in range(3):
        box.mailbox.send_all([], tell=["job-1"], ended=["job-1"] if number == 2 else [])
    events = box.waiting(lambda other: other.watch("job-1", "", 0.0))
    assert [has_ended for _, has_ended in events] == [False, False, True]
    assert box.waiting(lambda other: other.watch("job-1", events[1][0], 0.0)) == events[2:]
    # Several watch the same job: nobody takes events away from another.
    assert box.waiting(lambda other: other.watch("job-1", "", 0.0)) == events


def test_a_watcher_waits_for_the_next_event(box: Box) -> None:
    async def wait(mailbox: Mailbox) -> list[tuple[str, bool]]:
        tasks = [asyncio.create_task(mailbox.watch("job-1", "", 30.0)) for _ in range(3)]
        await asyncio.sleep(0.1)
        mailbox.send_all([], tell=["job-1"], ended=["job-1"])
        results = await asyncio.gather(*tasks)
        assert results[0] == results[1] == results[2]
        return results[0]

    assert [has_ended for _, has_ended in box.waiting(wait)] == [True]


def test_the_events_of_a_job_are_bounded(box: Box, monkeypatch: pytest.MonkeyPatch) -> None:
    for implementation in (mail_memory, mail_redis):
        monkeypatch.setattr(implementation, "EVENTS_AT_ONCE", 2 * MAX_EVENTS)
    for _ in range(MAX_EVENTS + 299):
        box.mailbox.send_all([], tell=["job-1"])
    box.mailbox.send_all([], tell=["job-1"], ended=["job-1"])
    kept = box.waiting(lambda other: other.watch("job-1", "", 0.0))
    assert MAX_EVENTS <= len(kept) < MAX_EVENTS + 200
    assert kept[-1][1]


# Ends


def test_a_recipient_that_goes_away_while_waiting_leaves_the_mailbox_usable(box: Box) -> None:
    async def leave(mailbox: Mailbox) -> list[tuple[str, bytes]]:
        for _ in range(5):
            task = asyncio.create_task(mailbox.receive("site-1", "", 2.0))
            await asyncio.sleep(0.05)
            task.cancel()
            with suppress(asyncio.CancelledError):  # redis-py swallows it while it connects: then the wait runs out
                await task
        send(mailbox, "site-1", b"x", message_id=f"c:{time.time_ns()}")
        return await mailbox.receive("site-1", "", 1.0)

    assert len(box.waiting(leave)) == 1
