"""Who has not answered is asked again; the more mail waits with them, the later, so that load does not feed itself."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from api.coordinator.pace import Pace
from api.coordinator.schedule import LONGEST_PAUSE_S
from feature_store.mailbox.redis import RedisMailbox
from workers.redis_server import RedisServer

PAUSE_S = 5.0


@pytest.fixture
def mailbox(tmp_path: Path) -> Iterator[RedisMailbox]:
    with RedisServer(tmp_path / "redis") as server:
        mailbox = RedisMailbox(server.url)
        yield mailbox
        mailbox.close()


@pytest.fixture
def now() -> list[float]:
    """A clock that a test turns."""
    return [time.monotonic()]


def test_a_party_without_mail_is_asked_again_after_the_pause(mailbox: RedisMailbox, now: list[float]) -> None:
    pace = Pace(mailbox, ask_again_s=PAUSE_S, now=lambda: now[0])
    assert pace.is_due(("round", "east"), through=["east"])
    assert not pace.is_due(("round", "east"), through=["east"])
    now[0] += PAUSE_S + 0.1
    assert pace.is_due(("round", "east"), through=["east"])


def test_mail_on_its_way_makes_the_pause_longer_but_never_endless(mailbox: RedisMailbox, now: list[float]) -> None:
    pace = Pace(mailbox, ask_again_s=PAUSE_S, now=lambda: now[0])
    assert pace.is_due(("round", "east"), through=["east", "t0"])
    mailbox.send("t0", b"a share", message_id="east:1")
    mailbox.send("t0", b"another", message_id="west:1")
    now[0] += PAUSE_S + 0.1
    assert not pace.is_due(("round", "east"), through=["east", "t0"])
    assert pace.is_due(("round", "west"), through=["west"]), "the first time is always due"
    now[0] += 2 * PAUSE_S
    assert pace.is_due(("round", "east"), through=["east", "t0"])
    for number in range(100):
        mailbox.send("t0", b"many", message_id=f"north:{number}")
    now[0] += LONGEST_PAUSE_S + 0.1
    assert pace.is_due(("round", "east"), through=["east", "t0"])


def test_mail_that_is_gone_is_asked_for_at_the_usual_pace(mailbox: RedisMailbox, now: list[float]) -> None:
    """As after a Redis that forgot everything: what waited is lost, so nobody is waited for."""
    pace = Pace(mailbox, ask_again_s=PAUSE_S, now=lambda: now[0])
    mailbox.send("east", b"an ask", message_id="coordinator:1")
    assert pace.is_due(("round", "east"), through=["east"])
    now[0] += PAUSE_S + 0.1
    assert not pace.is_due(("round", "east"), through=["east"])
    mailbox._redis.flushall()
    now[0] += 1.0
    assert pace.is_due(("round", "east"), through=["east"])
