"""The mailbox of Redis over real servers: what it stores, a server killed, full, of a wrong kind."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import redis

from labeler.driver.mail import MAX_MAIL, Letter
from labeler.driver.mail_redis import RedisMailbox
from labeler.errors import InvalidSetting, Unavailable, UnsafeStorage
from tests.labeler.driver.conftest import Box, pending, send
from workers.up.redis_server import RedisServer

pytestmark = pytest.mark.process


@pytest.fixture(scope="module", params=["redis on PATH", "the wheel's valkey"])
def server(request: pytest.FixtureRequest, servers: Callable[[str], RedisServer]) -> RedisServer:
    return servers(request.param)


@pytest.fixture
def admin(server: RedisServer) -> Iterator[redis.Redis]:
    """A view of the server as its operator has it: empty and alive at the beginning of each test."""
    server.start()
    with redis.Redis.from_url(server.url, decode_responses=True) as client:
        client.flushall()
        yield client


@pytest.fixture
def mailbox(server: RedisServer, admin: redis.Redis) -> Iterator[RedisMailbox]:
    mailbox = RedisMailbox(server.url)
    yield mailbox
    mailbox.close()


@pytest.fixture
def box(server: RedisServer, mailbox: RedisMailbox, admin: redis.Redis) -> Box:
    return Box(mailbox, lambda: RedisMailbox(server.url), admin.flushall)


@contextmanager
def configured(admin: redis.Redis, **settings: str) -> Iterator[None]:
    """The server has other settings meanwhile."""
    before = {name: admin.config_get(name)[name] for name in (one.replace("_", "-") for one in settings)}
    try:
        for name, value in settings.items():
            admin.config_set(name.replace("_", "-"), value)
        yield
    finally:
        for name, value in before.items():
            admin.config_set(name, value)


def test_what_came_together_with_the_awaited_message_comes_with_it_within_the_bound(
    box: Box, admin: redis.Redis
) -> None:
    async def wait(mailbox: RedisMailbox) -> list[int]:
        task = asyncio.create_task(mailbox.receive("site-1", "", 30.0, max_bytes=1000))
        await asyncio.sleep(0.1)
        with admin.pipeline(transaction=True) as steps:
            for size in (400, 500, 200):
                steps.xadd("mail:site-1", {"data": "x" * size})
            steps.execute()
        return [len(data) for _, data in await task]

    assert box.waiting(wait) == [400, 500]


def test_who_waits_is_handed_all_that_one_turn_sends_and_not_its_first_letter_alone(box: Box) -> None:
    """Else a tallier takes one share, says so, and begins again with the others."""
    letters = [Letter("site-1", b"x" * 5000, f"coordinator:{number}") for number in range(200)]

    async def wait(mailbox: RedisMailbox) -> int:
        task = asyncio.create_task(mailbox.receive("site-1", "", 30.0, max_messages=256))
        await asyncio.sleep(0.1)
        await asyncio.to_thread(mailbox.send_all, letters)
        return len(await task)

    assert box.waiting(wait) == len(letters)


def test_a_server_that_knows_no_script_is_told_it_and_each_letter_lies_there_once(
    mailbox: RedisMailbox, admin: redis.Redis
) -> None:
    """A restarted server has forgotten every script; the mail of a turn arrives all the same."""
    for turn in range(3):
        admin.script_flush()
        letters = [Letter(f"agent-{one}", b"mail", f"coordinator:{10 * turn + one}") for one in range(3)]
        mailbox.send_all(letters, tell=["job-1"])
        mailbox.send_all(letters)
        assert mailbox.all_pending([one.recipient for one in letters]) == {f"agent-{one}": turn + 1 for one in range(3)}


def test_mail_is_bounded_and_the_oldest_goes_first(mailbox: RedisMailbox, admin: redis.Redis) -> None:
    with admin.pipeline() as steps:
        for _ in range(MAX_MAIL + 500):
            steps.xadd("mail:site-1", {"data": "old"})
        steps.execute()
    send(mailbox, "site-1", b"new", message_id="c:1")
    assert MAX_MAIL <= pending(mailbox, "site-1") < MAX_MAIL + 200
    newest = admin.xrevrange("mail:site-1", count=1)
    assert newest[0][1] == {"data": "new"}


def test_whatever_is_left_lying_expires(mailbox: RedisMailbox, admin: redis.Redis) -> None:
    send(mailbox, "site-1", b"x", message_id="c:1")
    mailbox.send_all([], tell=["job-1"])
    keys = sorted(admin.keys("*"))
    assert keys == ["mail-seen:6:site-1:c:1", "mail:site-1", "progress:job-1"]
    assert all(0 < admin.ttl(key) <= 7 * 86_400 for key in keys)
    assert 0 < admin.ttl("mail-seen:6:site-1:c:1") <= 86_400


@pytest.mark.parametrize("policy", ["allkeys-lru", "volatile-ttl"])
@pytest.mark.parametrize("memory", ["0", "100mb"])
def test_redis_with_eviction_on_is_refused(mailbox: RedisMailbox, admin: redis.Redis, policy: str, memory: str) -> None:
    mailbox.check()
    told = f"'{policy}'.*set maxmemory-policy to noeviction"
    with configured(admin, maxmemory=memory, maxmemory_policy=policy), pytest.raises(UnsafeStorage, match=told):
        mailbox.check()
    mailbox.check()


def test_where_settings_may_not_be_read_eviction_is_noticed_all_the_same(
    server: RedisServer, admin: redis.Redis
) -> None:
    admin.acl_setuser("narrow", enabled=True, passwords=["+word"], keys=["*"], commands=["+@all", "-config"])
    mailbox = RedisMailbox(server.url.replace("unix://", "unix://narrow:word@"))
    try:
        mailbox.check()
        random = "allkeys-random"
        with configured(admin, maxmemory_policy=random), pytest.raises(UnsafeStorage, match=random):
            mailbox.check()
    finally:
        admin.acl_deluser("narrow")
        mailbox.close()


def test_a_full_redis_refuses_mail_and_keeps_what_it_has(box: Box, mailbox: RedisMailbox, admin: redis.Redis) -> None:
    send(mailbox, "site-1", b"kept", message_id="c:1")
    with configured(admin, maxmemory="1"):
        with pytest.raises(Unavailable, match=r"\((OutOfMemoryError|OOM)\).*give it more"):
            send(mailbox, "site-1", b"x", message_id="c:2")
        assert [data for _, data in box.received("site-1")] == [b"kept"]
    send(mailbox, "site-1", b"x", message_id="c:2")
    assert pending(mailbox, "site-1") == 2


def test_a_wrong_password_is_said_without_it(server: RedisServer, admin: redis.Redis) -> None:
    mailbox = RedisMailbox(server.url.replace("unix://", "unix://default:hunter2@"))
    with configured(admin, requirepass="other"), pytest.raises(Unavailable, match="AuthenticationError") as refused:
        mailbox.check()
    assert "hunter2" not in str(refused.value) + repr(mailbox)
    mailbox.close()


def test_redis_killed_and_started_again_serves_the_same_mailbox(server: RedisServer, box: Box) -> None:
    async def live(mailbox: RedisMailbox) -> None:
        send(mailbox, "site-1", b"lost", message_id="c:1")
        ((after, _),) = await mailbox.receive("site-1", "", 0.0)
        waiter = asyncio.create_task(mailbox.receive("site-1", after, 30.0))
        await asyncio.sleep(0.1)
        server.process.kill()
        server.process.wait()  # until then it counts as running, and is not started again
        start = time.monotonic()
        with pytest.raises(Unavailable, match="cannot be reached"):
            await waiter
        for call in (
            lambda: mailbox.check(),
            lambda: send(mailbox, "site-1", b"x", message_id="c:2"),
            lambda: pending(mailbox, "site-1"),
            lambda: mailbox.send_all([], tell=["job-1"]),
        ):
            with pytest.raises(Unavailable):
                call()
        with pytest.raises(Unavailable):
            await mailbox.watch("job-1", "", 0.0)
        assert time.monotonic() - start < 60.0  # none of them waits for the server to come back
        server.start()
        mailbox.check()
        assert await mailbox.receive("site-1", after, 0.0) == []
        send(mailbox, "site-1", b"asked again", message_id="c:1")
        assert [data for _, data in await mailbox.receive("site-1", after, 5.0)] == [b"asked again"]

    box.waiting(live)


@pytest.mark.parametrize("url", ["", "http://a", "redis:/x:y:z/q", "localhost:6379"])
def test_a_url_that_is_none_of_redis_is_refused(url: str) -> None:
    with pytest.raises(InvalidSetting, match="redis URL"):
        RedisMailbox(url)
