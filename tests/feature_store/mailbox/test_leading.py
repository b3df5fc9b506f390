"""The mailbox of who leads: when mail lies in memory, when beside, and what survives."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Collection, Sequence

import pytest

from feature_store.mailbox import Letter, leading
from feature_store.mailbox.leading import THERE_S, LeadingMailbox
from feature_store.mailbox.memory import MemoryMailbox
from labeler.errors import Unavailable


class Beside(MemoryMailbox):
    """A mailbox that says what was put into it, and can be away."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: list[bytes] = []
        self.told: list[str] = []
        self.calls = 0
        self.is_away = False

    def send_all(self, letters: Sequence[Letter], *, tell: Collection[str] = (), ended: Collection[str] = ()) -> None:
        self.calls += 1
        self._reach()
        self.sent += [one.data for one in letters]
        self.told += tell
        super().send_all(letters, tell=tell, ended=ended)

    async def receive(
        self, recipient: str, after: str, wait_s: float, max_messages: int = 16, *, max_bytes: int = 2**20
    ) -> list[tuple[str, bytes]]:
        self._reach()
        return await super().receive(recipient, after, wait_s, max_messages, max_bytes=max_bytes)

    def _reach(self) -> None:
        if self.is_away:
            raise Unavailable("nobody answers")


@pytest.fixture
def now() -> list[float]:
    return [100.0]


@pytest.fixture
def beside() -> Beside:
    return Beside()


@pytest.fixture
def mailbox(beside: Beside, now: list[float]) -> LeadingMailbox:
    return LeadingMailbox(beside, steady=lambda: now[0])


def send(mailbox: LeadingMailbox, *numbers: int, to: str = "site-1", size: int = 1) -> None:
    mailbox.send_all([Letter(to, bytes([number]) * size, f"c:{number}") for number in numbers])


def received(mailbox: LeadingMailbox, after: str = "", *, who: str = "site-1") -> tuple[str, list[int]]:
    mail = asyncio.run(mailbox.receive(who, after, 0.0))
    return mail[-1][0] if mail else after, [data[0] for _, data in mail]


def test_mail_of_a_party_that_is_there_never_leaves_the_process(mailbox: LeadingMailbox, beside: Beside) -> None:
    assert received(mailbox) == ("", [])
    beside.is_away = True
    send(mailbox, 1, 2)
    after, found = received(mailbox)
    assert found == [1, 2]
    assert mailbox.all_pending(["site-1"]) == {"site-1": 2}
    assert received(mailbox, after) == (after, [])
    assert mailbox.pending("site-1") == 0
    assert beside.sent == []


def test_mail_of_a_party_that_goes_is_put_beside_and_comes_back_in_order_when_it_does(
    mailbox: LeadingMailbox, beside: Beside, now: list[float]
) -> None:
    received(mailbox)
    send(mailbox, 1, 2)
    now[0] += THERE_S - 0.1
    send(mailbox, 3)
    assert beside.sent == []
    now[0] += 0.2
    send(mailbox, 4)
    assert beside.sent == [b"\1", b"\2", b"\3", b"\4"]
    assert mailbox._memory.mail_bytes() == 0
    after, found = received(mailbox)
    assert (found, mailbox.pending("site-1"), beside.pending("site-1")) == ([1, 2, 3, 4], 4, 4)
    # Not before it has read all that lies there is anything put before it in memory.
    send(mailbox, 5)
    after, found = received(mailbox, after)
    assert (found, mailbox.pending("site-1"), beside.pending("site-1")) == ([5], 1, 1)
    after, found = received(mailbox, after)
    assert (found, mailbox.pending("site-1"), beside.pending("site-1")) == ([], 0, 0)
    send(mailbox, 6)
    assert received(mailbox, after)[1] == [6]
    assert beside.sent[5:] == []


def test_who_takes_mail_and_never_confirms_it_does_not_grow_memory(
    mailbox: LeadingMailbox, beside: Beside, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leading, "MOST_BYTES", 1000)
    for who in ("site-1", "site-2"):
        received(mailbox, who=who)
    for number in range(40):
        send(mailbox, number, size=100)
        received(mailbox)
        assert mailbox._memory.mail_bytes() <= 1000 + 16 * 100, "what is kept, and one answer to its poll"
    assert len(beside.sent) == 40
    send(mailbox, 99, to="site-2", size=100)
    assert received(mailbox, who="site-2")[1] == [99]


def test_what_lies_in_memory_survives_an_orderly_end_and_what_lies_beside_any(
    mailbox: LeadingMailbox, beside: Beside, now: list[float]
) -> None:
    received(mailbox)
    send(mailbox, 1)
    send(mailbox, 2, to="site-2")  # who has never asked
    killed = LeadingMailbox(beside, steady=lambda: now[0])
    assert (received(killed)[1], received(killed, who="site-2")[1]) == ([], [2])
    mailbox.close()
    later = LeadingMailbox(beside, steady=lambda: now[0])
    send(later, 3)
    # A position of the process before is later than anything here.
    assert received(later, f"{2**60}-0")[1] == [1, 3]


@pytest.mark.parametrize("is_beside", [False, True])
@pytest.mark.parametrize("ahead", ["000-0", "000-1", "500-7"])
def test_a_position_of_a_process_whose_clock_was_ahead_confirms_nothing_of_this_one(
    mailbox: LeadingMailbox, beside: Beside, ahead: str, *, is_beside: bool
) -> None:
    moment = [1_700_000_000.0]
    mailbox._memory._now = lambda: moment[0]
    after = f"1700000000{ahead}"
    if is_beside:
        send(mailbox, 1, 2)
    else:
        assert received(mailbox, after) == (after, [])
        send(mailbox, 1)
        moment[0] += 0.6
        send(mailbox, 2)
    after, found = received(mailbox, after)
    assert found == [1, 2]
    assert received(mailbox, after) == (after, [])
    assert mailbox.pending("site-1") == beside.pending("site-1") == 0


def test_while_nothing_can_be_put_beside_memory_keeps_what_it_has(
    mailbox: LeadingMailbox, beside: Beside, now: list[float]
) -> None:
    received(mailbox)
    received(mailbox, who="site-2")
    send(mailbox, 1)
    now[0] += 2 * THERE_S
    beside.is_away = True
    for who in ("site-1", "site-2"):
        with pytest.raises(Unavailable):
            send(mailbox, 2, to=who)
    after, found = received(mailbox)
    assert received(mailbox, who="site-2") == ("", []), "who comes back has nothing to look for there"
    send(mailbox, 3, to="site-2")
    assert received(mailbox, who="site-2")[1] == [3]
    assert found == [1]
    send(mailbox, 2)
    assert received(mailbox, after)[1] == [2]


def test_who_comes_while_its_mail_is_on_its_way_there_waits_for_it(
    mailbox: LeadingMailbox, beside: Beside, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else it would wait in memory for what lies beside."""
    has_looked, put = threading.Event(), beside.send_all
    look = beside.receive

    def slow(letters: Sequence[Letter], **changes: Collection[str]) -> None:
        assert has_looked.wait(60)
        put(letters, **changes)

    async def looking(*arguments: object, **changes: object) -> list[tuple[str, bytes]]:
        found = await look(*arguments, **changes)  # type: ignore[arg-type]
        has_looked.set()
        return found

    monkeypatch.setattr(beside, "send_all", slow)
    monkeypatch.setattr(beside, "receive", looking)
    sending = threading.Thread(target=send, args=(mailbox, 1))
    sending.start()
    while not mailbox._boxes:
        time.sleep(0.001)
    mail = asyncio.run(mailbox.receive("site-1", "", 20.0))
    sending.join()
    assert [data for _, data in mail] == [b"\1"]


def test_a_message_comes_once_whichever_way_it_went_first(
    mailbox: LeadingMailbox, beside: Beside, now: list[float]
) -> None:
    send(mailbox, 1)
    after, found = received(mailbox)
    after = received(mailbox, after)[0]
    send(mailbox, 1, 2)
    assert (found, received(mailbox, after)[1]) == ([1], [2])
    now[0] += 2 * THERE_S
    send(mailbox, 2)
    assert beside.sent == [b"\1"]


@pytest.mark.parametrize("is_followed", [False, True])
def test_followers_are_told_where_there_are_any_and_are_never_why_mail_is_not_sent(
    beside: Beside, *, is_followed: bool
) -> None:
    mailbox = LeadingMailbox(beside, is_followed=is_followed)
    received(mailbox)
    mailbox.send_all([], tell=["job-1"], ended=["job-1"])
    mailbox.publish("job-2", {"stage": "embedded"})
    beside.is_away = True
    mailbox.send_all([Letter("site-1", b"\7", "c:7")], tell=["job-1"])
    assert (beside.told, beside.calls) == ((["job-1"], 2) if is_followed else ([], 0))
    watched = asyncio.run(mailbox.watch("job-1", "", 0.0))
    assert [event for _, event in watched] == [{"changed": True, "ended": True}, {"changed": True}]
    assert bool(asyncio.run(beside.watch("job-2", "", 0.0))) == is_followed
    assert received(mailbox)[1] == [7]


def test_what_it_holds_does_not_print(mailbox: LeadingMailbox) -> None:
    send(mailbox, 1)
    assert repr(mailbox) == "LeadingMailbox(<redacted>)"
