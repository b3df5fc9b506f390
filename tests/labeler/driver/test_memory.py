"""The mailbox in memory, by a clock that the test turns: what is kept is bounded."""

from __future__ import annotations

import asyncio

import pytest

from labeler.driver.mail import MAX_MAIL
from labeler.driver.mail_memory import MOST_SEEN, MemoryMailbox
from tests.labeler.driver.conftest import send

START = 1_700_000_000.0


@pytest.fixture
def now() -> list[float]:
    return [START]


@pytest.fixture
def mailbox(now: list[float]) -> MemoryMailbox:
    return MemoryMailbox(now=lambda: now[0])


def received(mailbox: MemoryMailbox, recipient: str, after: str = "") -> list[tuple[str, bytes]]:
    return asyncio.run(mailbox.receive(recipient, after, 0.0, max_messages=2 * MAX_MAIL))


def test_a_position_is_the_time_and_grows_while_the_clock_stands_or_goes_back(
    mailbox: MemoryMailbox, now: list[float]
) -> None:
    for number, seconds in enumerate((START, START, START - 100, START + 1)):
        now[0] = seconds
        send(mailbox, "site-1", b"x", message_id=f"c:{number}")
    ms = int(START * 1000)
    positions = [position for position, _ in received(mailbox, "site-1")]
    assert positions == [f"{ms}-0", f"{ms}-1", f"{ms}-2", f"{ms + 1000}-0"]


def test_mail_is_bounded_and_the_oldest_goes_first(mailbox: MemoryMailbox) -> None:
    for number in range(MAX_MAIL + 5):
        send(mailbox, "site-1", b"%d" % number, message_id=f"c:{number}")
    mail = [data for _, data in received(mailbox, "site-1")]
    assert (len(mail), mail[0], mail[-1]) == (MAX_MAIL, b"5", b"%d" % (MAX_MAIL + 4))


def test_of_so_many_messages_repeats_are_known_and_no_more(mailbox: MemoryMailbox) -> None:
    for number in range(MOST_SEEN + 1):
        send(mailbox, "site-1", b"x", message_id=f"c:{number}")
    for number in (0, MOST_SEEN):
        send(mailbox, "site-1", b"again", message_id=f"c:{number}")
    assert [data for _, data in received(mailbox, "site-1")].count(b"again") == 1


def test_what_it_holds_does_not_print(mailbox: MemoryMailbox) -> None:
    send(mailbox, "site-1", b"a sealed share", message_id="c:1")
    assert "share" not in repr(mailbox)
