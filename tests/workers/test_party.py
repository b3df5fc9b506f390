"""The link of a party to its coordinator: what it believes, what it repeats, and what it refuses, over real HTTP."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx2
import pytest

from labeler.errors import (
    Forged,
    Interrupted,
    InvalidSetting,
    JournalBehind,
    NotEnrolled,
    ProtocolViolation,
    Replayed,
)
from labeler.ledger.database import Database, open_database
from labeler.ledger.ledger import Ledger
from labeler.ledger.sequences import Sequences
from labeler.messages import COORDINATOR
from labeler.messages.bodies import Mail, holdings_to_bytes
from labeler.system.clock import now_utc
from labeler.system.keys import PartyKeys, verify
from tests.processes import wait_until
from workers.party.coordinator import check_url
from workers.party.link import MAX_POST_BYTES, Draft, Outgoing, PartyLink, converse, parcels
from workers.service_process import tell_ready

DIGEST = "a" * 64
NOTHING = holdings_to_bytes({})
DRAFT = Draft("holdings", COORDINATOR, NOTHING, task_digest=DIGEST, round_digest=DIGEST)

MakeLink = Callable[..., PartyLink]


@pytest.fixture
def database(tmp_path: Path) -> Iterator[Database]:
    with open_database(tmp_path / "journal.db", allow_unsynced=True) as database:
        yield database


@pytest.fixture
def make_link(relay: Any, database: Database, tmp_path: Path) -> Iterator[MakeLink]:
    links: list[PartyLink] = []
    keys = PartyKeys.generate()
    relay.enrolled["me"] = keys.public

    def make(**changes: Any) -> PartyLink:
        options: dict[str, Any] = {
            "url": relay.url,
            "party_id": "me",
            "keys": keys,
            "coordinator_key": relay.keys.public.verify_key,
            "home": tmp_path,
            "ledger": Ledger(database, clock=now_utc),
            "facts": lambda: {"classes": ["a"]},
            "stop": threading.Event(),
            "wait_s": 0.0,
        }
        links.append(PartyLink(**options | changes))
        return links[-1]

    yield make
    for link in links:
        link.close()


class Pauses(threading.Event):
    """A stop signal under which pauses take no time; it is given at the one after the last.

    The thread that ends a running request waits for it too, in steps of `_WATCH_S`; that is no pause.
    """

    def __init__(self, *, most: int) -> None:
        super().__init__()
        self.most = most
        self.paused: list[float] = []

    def wait(self, timeout: float | None = None) -> bool:
        if threading.current_thread().name == "end of a request":
            return super().wait(timeout)
        self.paused.append(timeout or 0.0)
        if len(self.paused) > self.most:
            self.set()
        return self.is_set()


def open_all(link: PartyLink, relay: Any) -> list[bytes]:
    return [link.mail.open(message, relay.keys.public.verify_key) for message in link.poll()]


def test_mail_comes_once_it_is_handled_and_again_until_then(make_link: MakeLink, relay: Any) -> None:
    link = make_link()
    relay.send("ask", "me", b"one")
    assert open_all(link, relay) == [b"one"]
    assert open_all(link, relay) == [b"one"]
    link.answer([])
    assert open_all(link, relay) == []


def test_a_message_that_was_taken_is_dropped_after_a_restart(make_link: MakeLink, relay: Any) -> None:
    link = make_link()
    relay.send("ask", "me", b"one")
    messages = link.poll()
    link.mail.open(messages[0], relay.keys.public.verify_key)
    link.mail.note()
    link.mail.settle()
    again = make_link()
    relay.send("ask", "me", b"two")
    first, second = again.poll()
    with pytest.raises(Replayed):
        again.mail.open(first, relay.keys.public.verify_key)
    assert again.mail.open(second, relay.keys.public.verify_key) == b"two"


def test_a_message_for_somebody_else_is_skipped(make_link: MakeLink, relay: Any) -> None:
    relay.put("me", relay.sign("ask", "you", b"x"))
    assert make_link().poll() == []


def test_an_answer_that_another_coordinator_signed_is_refused(make_link: MakeLink) -> None:
    with pytest.raises(Forged):
        make_link(coordinator_key=PartyKeys.generate().public.verify_key).poll()


def test_a_post_whose_answer_was_lost_is_sent_with_new_numbers(make_link: MakeLink, relay: Any) -> None:
    relay.lost_answers = 1
    make_link().post([DRAFT, DRAFT])
    assert len(relay.inbox) == 4
    assert len({message.header.sequence for message in relay.inbox}) == 4


def test_a_number_that_was_seen_before_is_replaced(make_link: MakeLink, relay: Any, database: Database) -> None:
    relay._taken["me", COORDINATOR] = 2
    make_link(clock=lambda: datetime.fromtimestamp(0, tz=UTC)).post([DRAFT])
    assert [message.header.sequence for message in relay.inbox] == [3]


def test_a_letter_that_is_refused_takes_no_other_with_it(make_link: MakeLink, relay: Any) -> None:
    over = b'{"type": "urn:labeler:problem:wrong-digest", "detail": "the round is over"}'
    letters = [[DRAFT], [DRAFT, DRAFT], [DRAFT]]
    # The request as a whole, then its first letter by itself.
    relay.failures = [(422, {}, over), (422, {}, over)]
    errors = make_link().post_all(letters)
    assert [type(error) for error in errors] == [ProtocolViolation, type(None), type(None)]
    assert len(relay.inbox) == 3


def test_letters_go_whole_into_as_few_requests_as_they_fit(make_link: MakeLink, relay: Any) -> None:
    small, large = [DRAFT] * 3, [Draft("holdings", COORDINATOR, bytes(MAX_POST_BYTES), task_digest=DIGEST)]
    assert [len(one) for one in parcels([small] * 100)] == [85, 15]
    assert [len(one) for one in parcels([small, large, small, small])] == [1, 1, 2]
    assert list(parcels([])) == []
    assert make_link().post_all([small] * 100) == [None] * 100
    assert len(relay.inbox) == 300


def test_the_next_poll_travels_with_letters_where_the_coordinator_takes_it_so(make_link: MakeLink, relay: Any) -> None:
    link = make_link(wait_s=20.0)
    relay.send("ask", "me", b"one")
    assert open_all(link, relay) == [b"one"]
    relay.send("ask", "me", b"two")
    assert link.answer([[DRAFT], [DRAFT, DRAFT]]) == [None, None]
    assert (len(relay.inbox), relay.requests) == (3, {"poll": 1, "post": 1})
    assert [poll.after for poll in relay.polls] == ["", "1-0"], "what was handled is done with"
    assert relay.polls[1].wait_s <= 0.5, "who posts is soon told that it was taken"
    assert open_all(link, relay) == [b"two"]
    assert relay.requests == {"poll": 1, "post": 1}
    # Nothing is answered to it, so it comes again where it was not handled.
    assert open_all(link, relay) == [b"two"]
    # Where nothing comes in time, the party asks by itself; where nothing is to be said, likewise.
    link.answer([])
    link.wait_s = 0.0
    assert (link.answer([[DRAFT]]), link.poll(), link.answer([]), link.poll()) == ([None], [], [], [])
    assert relay.requests == {"poll": 4, "post": 2}


def test_a_post_that_polls_whose_answer_was_lost_is_sent_again_and_the_mail_comes(
    make_link: MakeLink, relay: Any
) -> None:
    link = make_link()
    link.poll()
    relay.send("ask", "me", b"one")
    relay.lost_answers = 1
    assert link.answer([[DRAFT]]) == [None]
    assert (len(relay.inbox), relay.requests["post"]) == (2, 2)
    assert open_all(link, relay) == [b"one"]


def test_where_a_post_that_polls_is_refused_each_letter_is_sent_by_itself(make_link: MakeLink, relay: Any) -> None:
    over = b'{"type": "urn:labeler:problem:wrong-digest", "detail": "the round is over"}'
    link = make_link()
    relay.send("ask", "me", b"one")
    link.poll()
    # With the poll, without it, then the first letter by itself.
    relay.failures = [(409, {}, over)] * 3
    errors = link.answer([[DRAFT], [DRAFT]])
    assert [type(error) for error in errors] == [ProtocolViolation, type(None)]
    assert link.poll() == [], "what was handled is done with"
    assert relay.requests == {"poll": 2, "post": 4}


def test_what_a_turn_has_opened_is_not_opened_again_and_is_written_with_the_next_transaction(
    make_link: MakeLink, relay: Any, database: Database
) -> None:
    link = make_link()
    relay.send("ask", "me", b"one")
    (message,) = link.poll()
    link.mail.open(message, relay.keys.public.verify_key)
    with pytest.raises(Replayed):
        link.mail.open(message, relay.keys.public.verify_key)
    link.mail.note()
    with pytest.raises(Replayed):
        link.mail.open(message, relay.keys.public.verify_key)
    with database.write() as connection:
        link.mail.write_noted(connection)
    assert Sequences(database).last(COORDINATOR, relay.keys.public.verify_key) == message.header.sequence


def test_trouble_that_passes_is_waited_for(make_link: MakeLink, relay: Any) -> None:
    relay.failures = [(503, {}, b""), (429, {"Retry-After": "7"}, b"{}"), (500, {}, b"\xff")]
    stop = Pauses(most=3)
    make_link(stop=stop).post([DRAFT])
    assert len(relay.inbox) == 1
    assert [pause >= 7 for pause in stop.paused] == [False, True, False]


@pytest.mark.process
def test_an_unreachable_coordinator_is_tried_until_told_to_stop(make_link: MakeLink) -> None:
    stop = Pauses(most=3)
    with pytest.raises(Interrupted):
        make_link(url="http://127.0.0.1:9", stop=stop).post([DRAFT])
    assert len(stop.paused) == 4


@pytest.mark.process
def test_the_first_poll_is_answered_at_once_and_tells_whoever_waits_that_the_party_is_ready(
    make_link: MakeLink, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As systemd hears it; told once, and nothing is passed on to what this process starts itself."""
    tell_ready()
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as bell:
        name = f"labeler-{os.getpid()}"
        bell.bind(f"\0{name}")
        bell.setblocking(False)
        monkeypatch.setenv("NOTIFY_SOCKET", f"@{name}")
        link = make_link(wait_s=60.0)
        with pytest.raises(BlockingIOError):
            bell.recv(100)
        assert link.poll() == []
        assert bell.recv(100) == f"READY=1\nMAINPID={os.getpid()}".encode()
        assert "NOTIFY_SOCKET" not in os.environ
        tell_ready()
        with pytest.raises(BlockingIOError):
            bell.recv(100)


def test_a_held_poll_ends_at_once_when_told_to_stop(make_link: MakeLink, relay: Any) -> None:
    stop = threading.Event()
    link = make_link(stop=stop, wait_s=30.0)
    link.poll()
    ending = threading.Thread(target=lambda: (relay.wait_for_poll(2), stop.set()))
    ending.start()
    with pytest.raises(Interrupted):  # and not the mail of a poll that was held to its end
        link.poll()
    ending.join()


@pytest.mark.parametrize(
    ("status", "body", "error"),
    [
        (403, b'{"type": "urn:labeler:problem:not-enrolled", "detail": "revoked"}', NotEnrolled),
        (403, b"<html>", NotEnrolled),
        (403, b'{"type": "urn:labeler:problem:forged", "detail": "x"}', Forged),
        (422, b'{"type": "urn:labeler:problem:wrong-digest", "detail": "the round is over"}', ProtocolViolation),
        (404, b"", ProtocolViolation),
    ],
)
def test_a_refusal_says_what_the_coordinator_said(
    make_link: MakeLink, relay: Any, status: int, body: bytes, error: type[Exception]
) -> None:
    relay.failures = [(status, {}, body)]
    with pytest.raises(error, match=f"answered {status}"):
        make_link().post([DRAFT])


def test_an_answer_that_is_no_mail_is_refused(make_link: MakeLink, relay: Any) -> None:
    relay.failures = [(200, {}, b""), (200, {}, b"<html>hello</html>")]
    link = make_link()
    for _ in range(2):
        with pytest.raises((ProtocolViolation, InvalidSetting)):
            link.poll()


def test_a_poll_tells_both_heads_and_the_facts(make_link: MakeLink, relay: Any, database: Database) -> None:
    ledger = Ledger(database, clock=now_utc)
    for cap in range(4):
        ledger.open_account("agent:me", "instance", cap)
    link = make_link(ledger=ledger)
    relay.head = (7, "c" * 64)
    link.poll()
    link.poll()
    assert [(poll.journal_seq, poll.coordinator_seq) for poll in relay.polls] == [(4, 0), (4, 7)]
    assert dict(relay.polls[0].facts) == {"classes": ["a"]}


def test_a_coordinator_that_lost_part_of_its_journal_is_left_alone(make_link: MakeLink, relay: Any) -> None:
    relay.head = (7, "c" * 64)
    make_link().poll()
    relay.head = (6, "d" * 64)
    relay.send("ask", "me", b"x")
    restarted = make_link()
    with pytest.raises(JournalBehind, match="ends at entry 6, and this party has seen entry 7"):
        restarted.poll()
    relay.head = (7, "d" * 64)
    with pytest.raises(JournalBehind):
        restarted.poll()
    relay.head = (8, "e" * 64)
    assert len(restarted.poll()) == 1


def test_a_poll_carries_the_coordinators_own_word_for_the_furthest_head(
    make_link: MakeLink, relay: Any, tmp_path: Path
) -> None:
    link = make_link()
    relay.head = (7, "c" * 64)
    link.poll()
    relay.head = (8, "d" * 64)
    link.poll()
    link.poll()
    make_link().poll()
    first, *others = relay.proofs
    assert first is None
    for proof in others:
        verify(proof, relay.keys.public.verify_key)
    assert [Mail.decode(proof.body).coordinator_seq for proof in others] == [7, 8, 8]
    assert (tmp_path / "coordinator.proof").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("damage", [b"", b"half of a message", b"\0" * 100_000])
def test_a_damaged_proof_is_left_out_and_made_anew(
    make_link: MakeLink, relay: Any, tmp_path: Path, damage: bytes
) -> None:
    relay.head = (7, "c" * 64)
    make_link().poll()
    (tmp_path / "coordinator.proof").write_bytes(damage)
    link = make_link()
    link.poll()
    link.poll()
    assert [proof is not None for proof in relay.proofs] == [False, False, True]


def test_a_conversation_outlives_what_goes_wrong_in_it(make_link: MakeLink, relay: Any, start: Any) -> None:
    handled: list[bytes] = []

    class Handling:
        due_in_s = None

        def tidy(self) -> None:
            """Do nothing."""

        def handle(self, mail: Any) -> list[Outgoing]:
            for message in mail:
                handled.append(link.mail.open(message, relay.keys.public.verify_key))
                if len(handled) == 1:
                    raise ProtocolViolation("the first time something is wrong")
            return []

        def sent(self, letters: Any, errors: Any) -> None:
            assert letters == errors == []
            link.mail.note()

    relay.failures = [(200, {}, b"no frames")]
    relay.send("ask", "me", b"one")

    def work(stop: threading.Event) -> None:
        nonlocal link
        link = make_link(stop=stop, wait_s=5.0)
        converse(link, Handling(), stop)

    link: PartyLink
    with start(work):
        wait_until(lambda: len(handled) == 2)
    assert handled == [b"one", b"one"]


@pytest.mark.parametrize(
    "url",
    [
        "http://example.org",
        "http://10.0.0.1:8000",
        "http://localhost.example.org",
        "ftp://127.0.0.1",
        "https://user:secret@example.org",
        "https://example.org/?token=1",
        "127.0.0.1:8000",
        "",
    ],
)
def test_addresses_that_would_give_messages_away_are_refused(url: str) -> None:
    with pytest.raises(InvalidSetting) as caught:
        check_url(url)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("url", ["https://example.org", "http://127.0.0.1:1", "http://[::1]:1", "http://localhost:1"])
def test_encrypted_and_local_addresses_are_taken(url: str) -> None:
    assert httpx2.URL(check_url(url)).host


def test_a_missing_certificate_file_is_refused(make_link: MakeLink, tmp_path: Path) -> None:
    with pytest.raises(InvalidSetting, match="ca_file"):
        make_link(ca_file=str(tmp_path / "none.pem"))


@pytest.mark.process
def test_a_certificate_is_checked_against_the_file_that_was_named(
    encrypted: tuple[str, Path], make_link: MakeLink, relay: Any
) -> None:
    url, certificate = encrypted
    make_link(url=url, ca_file=str(certificate)).post([DRAFT])
    assert len(relay.inbox) == 1


@pytest.mark.process
def test_a_certificate_nobody_vouches_for_is_never_accepted(
    make_link: MakeLink, relay: Any, encrypted: tuple[str, Path], caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(Interrupted):
        make_link(url=encrypted[0], stop=Pauses(most=1)).post([DRAFT])
    assert relay.inbox == []
    (said,) = [vars(one)["sentence"] for one in caplog.records if "cannot be reached" in one.getMessage()]
    assert "CERTIFICATE_VERIFY_FAILED" in said
