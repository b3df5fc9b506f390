"""Who has not answered is asked again; the more mail waits with them, the later, so that load does not feed itself."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from api.coordinator.conductor import Conductor, Timing
from api.coordinator.schedule import LONGEST_PAUSE_S
from feature_store.mailbox import Mailbox
from tests.api.conftest import House
from workers.redis_server import RedisServer

PAUSE_S = 5.0


@pytest.fixture
def mailbox(tmp_path: Path) -> Iterator[Mailbox]:
    with RedisServer(tmp_path / "redis") as server:
        mailbox = Mailbox(server.url)
        yield mailbox
        mailbox.close()


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The conductor's monotonic clock, in one place."""
    clock = [time.monotonic()]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    return clock


def conductor(house: House, mailbox: Mailbox, *, ask_again_s: float) -> Conductor:
    return Conductor(
        home=house.config.home,
        database=house.database,
        ledger=house.ledger,
        tasks=house.tasks,
        jobs=house.jobs,
        aggregates=None,  # type: ignore[arg-type]  # nothing is summed here
        post_office=None,  # type: ignore[arg-type]  # nothing is sent here
        mailbox=mailbox,
        timing=Timing(patience_s=0.0, ask_again_s=ask_again_s),
        clock=house.clock,
    )


def test_a_party_without_mail_is_asked_again_after_the_pause(house: House, mailbox: Mailbox, now: list[float]) -> None:
    desk = conductor(house, mailbox, ask_again_s=PAUSE_S)
    assert desk._is_due(("round", "east"), through=["east"])
    assert not desk._is_due(("round", "east"), through=["east"])
    now[0] += PAUSE_S + 0.1
    assert desk._is_due(("round", "east"), through=["east"])


def test_mail_on_its_way_makes_the_pause_longer_but_never_endless(
    house: House, mailbox: Mailbox, now: list[float]
) -> None:
    desk = conductor(house, mailbox, ask_again_s=PAUSE_S)
    assert desk._is_due(("round", "east"), through=["east", "t0"])
    mailbox.send("t0", b"a share", message_id="east:1")
    mailbox.send("t0", b"another", message_id="west:1")
    now[0] += PAUSE_S + 0.1
    assert not desk._is_due(("round", "east"), through=["east", "t0"])
    assert desk._is_due(("round", "west"), through=["west"]), "the first time is always due"
    now[0] += 2 * PAUSE_S
    assert desk._is_due(("round", "east"), through=["east", "t0"])
    for number in range(100):
        mailbox.send("t0", b"many", message_id=f"north:{number}")
    now[0] += LONGEST_PAUSE_S + 0.1
    assert desk._is_due(("round", "east"), through=["east", "t0"])


def test_mail_that_is_gone_is_asked_for_at_the_usual_pace(house: House, mailbox: Mailbox, now: list[float]) -> None:
    """As after a Redis that forgot everything: what waited is lost, so nobody is waited for."""
    desk = conductor(house, mailbox, ask_again_s=PAUSE_S)
    mailbox.send("east", b"an ask", message_id="coordinator:1")
    assert desk._is_due(("round", "east"), through=["east"])
    now[0] += PAUSE_S + 0.1
    assert not desk._is_due(("round", "east"), through=["east"])
    mailbox._redis.flushall()
    now[0] += 1.0
    assert desk._is_due(("round", "east"), through=["east"])
