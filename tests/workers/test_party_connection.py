"""One connection that stays open: used again, reopened where it was closed, bounded, ended at once, proxied."""

from __future__ import annotations

import os
import queue
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import Any

import pytest

from labeler.errors import Interrupted, InvalidSetting, ProtocolViolation, TooLarge, Unavailable
from labeler.ledger.chain import EMPTY, Anchor, Head
from labeler.messages import COORDINATOR, Message, frame
from labeler.messages.bodies import Mail
from labeler.system.keys import PartyKeys
from tests import doors
from tests.processes import wait_until
from workers.party import coordinator
from workers.party.coordinator import SYNC_EVERY_S, CoordinatorHttp, SeenState, Unreachable

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello"


def _received(connection: socket.socket) -> bytes:
    """Return the next bytes; the server ends with its client, and does not ask a closed connection again and again."""
    found = connection.recv(65536)
    if not found:
        raise ConnectionError("the client has gone")
    return found


class Server:
    """A server on loopback that answers as scripted: of each connection, a script of what to send after each request.

    Attributes:
        requests: heads and bodies, by connection.
        closed: how many connections it has closed.
    """

    def __init__(self, scripts: list[list[bytes]], *, reads_bodies: bool = True) -> None:
        self.requests: list[list[bytes]] = []
        self.closed = 0
        self._scripts = scripts
        self._reads_bodies = reads_bodies
        self._arrived: queue.SimpleQueue[socket.socket] = queue.SimpleQueue()
        self._open = ExitStack()
        self.port = self._open.enter_context(doors.opened(lambda theirs, _: self._arrived.put(theirs)))
        threading.Thread(target=self._run, name="door", daemon=True).start()

    def close(self) -> None:
        self._open.close()

    def _run(self) -> None:
        with suppress(OSError):
            for script in self._scripts:
                connection = self._arrived.get()
                with connection:
                    self.requests.append([])
                    for answer in script:
                        self.requests[-1].append(self._request(connection))
                        connection.sendall(answer)
                self.closed += 1

    def _request(self, connection: socket.socket) -> bytes:
        data = b""
        while b"\r\n\r\n" not in data:
            data += _received(connection)
        head, _, body = data.partition(b"\r\n\r\n")
        length = next(int(line[15:]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-length:"))
        while self._reads_bodies and len(body) < length:
            body += _received(connection)
        return head + b"\r\n\r\n" + body


Serve = Callable[..., tuple[Server, CoordinatorHttp]]


@pytest.fixture
def serve() -> Iterator[Serve]:
    opened: list[Any] = []

    def make(*scripts: list[bytes], path: str = "", **options: bool) -> tuple[Server, CoordinatorHttp]:
        server = Server(list(scripts), **options)
        address = f"http://{doors.HOST}:{server.port}{path}"
        connection = CoordinatorHttp(address, ca_file=None, read_timeout_s=60.0, stop=threading.Event())
        opened.extend((connection, server))
        return server, connection

    yield make
    for one in opened:
        one.close()


def post(connection: CoordinatorHttp, data: bytes = b"data") -> bytes:
    return connection.post("/v1/messages", data, media_type="text/plain")


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coordinator, "MAX_ANSWER_BYTES", 100)
    monkeypatch.setattr(coordinator, "_MAX_PROBLEM_BYTES", 20)


def test_many_requests_go_over_one_connection(serve: Serve) -> None:
    server, connection = serve([OK] * 3, path="/labels/")
    assert [post(connection) for _ in range(3)] == [b"hello"] * 3
    (requests,) = server.requests
    assert len(requests) == 3
    assert requests[0].startswith(b"POST /labels/v1/messages HTTP/1.1\r\n")
    assert b"Content-Type: text/plain" in requests[0]
    assert requests[0].endswith(b"\r\n\r\ndata")


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 50\r\n\r\nhello", Unreachable),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhel", Unreachable),
        (b"", Unreachable),
        (b"SSH-2.0-OpenSSH\r\n", Unreachable),
        (b"HTTP/1.1 429 Later\r\nRetry-After: 7\r\nContent-Length: 2\r\n\r\nno", Unreachable),
        (b"HTTP/1.1 302 There\r\nLocation: http://x/\r\nContent-Length: 0\r\n\r\n", ProtocolViolation),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 101\r\n\r\n" + b"x" * 101, TooLarge),
        (b"HTTP/1.1 200 OK\r\n\r\n" + b"x" * 101, TooLarge),
        (b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: 5\r\n\r\nhello", TooLarge),
        (b"HTTP/1.1 503 No\r\nContent-Length: 21\r\n\r\n" + b"x" * 21, TooLarge),
    ],
    ids=[
        "cut",
        "chunk cut",
        "nothing",
        "no HTTP",
        "later",
        "elsewhere",
        "long",
        "long, unstated",
        "packed",
        "refusal too long",
    ],
)
def test_an_answer_that_is_none_or_too_long_is_an_error_and_the_next_is_read_from_a_new_connection(
    serve: Serve, answer: bytes, error: type[Exception]
) -> None:
    server, connection = serve([answer], [OK])
    with pytest.raises(error):
        post(connection)
    wait_until(lambda: server.closed == 1, what="the end of the first connection")  # else it might be used again
    assert post(connection) == b"hello"


def test_who_refuses_before_all_was_sent_is_heard(serve: Serve) -> None:
    refusal = b"HTTP/1.1 413 Too large\r\nConnection: close\r\nContent-Length: 8\r\n\r\ntoo long"
    _, connection = serve([refusal], reads_bodies=False)
    # Unreachable where the kernel has thrown the answer away with the rest.
    with pytest.raises((ProtocolViolation, Unreachable)):
        post(connection, b"x" * 20_000_000)


@pytest.mark.process
@pytest.mark.parametrize("when", ["before", "meanwhile"])
def test_a_request_ends_at_once_when_the_party_is_told_to_stop(when: str) -> None:
    stop, silence = threading.Event(), threading.Event()
    with closing(socket.create_server(("127.0.0.1", 0))) as listening:
        address = f"http://127.0.0.1:{listening.getsockname()[1]}"

        def hear() -> None:
            accepted, _ = listening.accept()
            with accepted:
                accepted.recv(65536)
                stop.set()
                silence.wait(200)

        if when == "before":
            stop.set()
        else:
            threading.Thread(target=hear, daemon=True).start()
        with (
            closing(CoordinatorHttp(address, ca_file=None, read_timeout_s=200.0, stop=stop)) as connection,
            pytest.raises(Interrupted),
        ):
            post(connection)
        silence.set()


# Through a proxy.


@pytest.fixture
def no_proxy(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in ("HTTPS_PROXY", "HTTP_PROXY", "ALL_PROXY", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)
    return monkeypatch


def through(url: str, certificate: Path) -> CoordinatorHttp:
    return CoordinatorHttp(url, ca_file=str(certificate), read_timeout_s=60.0, stop=threading.Event())


@pytest.mark.process
@pytest.mark.parametrize("how", ["this machine", "NO_PROXY"])
def test_a_proxy_is_left_alone_for_this_machine_and_for_hosts_that_are_named(
    relay: Any, encrypted: tuple[str, Path], no_proxy: pytest.MonkeyPatch, how: str
) -> None:
    relay.failures = [(418, {}, b"heard")]
    no_proxy.setenv("HTTPS_PROXY", "http://127.0.0.1:9")
    if how == "NO_PROXY":
        no_proxy.setattr("labeler.system.http_client.is_loopback", lambda _: False)
        no_proxy.setenv("NO_PROXY", doors.HOST)
    with closing(through(*encrypted)) as connection, pytest.raises(ProtocolViolation, match="418"):
        post(connection)


@pytest.mark.process
def test_a_proxy_of_another_kind_is_refused_at_once(encrypted: tuple[str, Path], no_proxy: pytest.MonkeyPatch) -> None:
    no_proxy.setattr("labeler.system.http_client.is_loopback", lambda _: False)
    no_proxy.setenv("ALL_PROXY", "gopher://proxy:1")
    with pytest.raises(InvalidSetting, match="NO_PROXY"):
        through(*encrypted)


# The journal's head that a party has seen: kept in place, synced when nobody waits, whole or not at all


KEYS = PartyKeys.generate()


def answer(head: Head, *, after: str = "") -> Message:
    body = Mail(after, head.seq, head.hash).encode()
    return KEYS.message("poll", sender=COORDINATOR, recipient="hospital", sequence=1, body=body)


def head(seq: int) -> Head:
    return Head(seq, f"{seq % 15 + 1:x}" * 64)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "coordinator.head"


@pytest.fixture
def synced(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Files that were synced, in order."""
    found: list[str] = []
    real = os.fsync

    def noted(handle: int) -> None:
        found.append(Path(f"/proc/self/fd/{handle}").readlink().name)
        real(handle)

    monkeypatch.setattr(os, "fsync", noted)
    return found


def test_head_and_word_are_kept_in_place_and_found_by_the_next_process(path: Path) -> None:
    seen = SeenState(path)
    assert seen.head() == EMPTY
    assert seen.proof() == b""
    seen.keep(head(1), answer(head(1)))
    files = [path.stat().st_ino, path.with_name("coordinator.proof").stat().st_ino]
    for seq in range(2, 12):
        seen.keep(head(seq), answer(head(seq)))
        for one in (seen, SeenState(path)):
            assert one.head() == head(seq)
            assert one.proof() == frame([answer(head(seq))])
    assert files == [path.stat().st_ino, path.with_name("coordinator.proof").stat().st_ino]


def test_a_shorter_word_over_a_longer_one_leaves_nothing_of_it_also_where_it_was_not_cut(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long, short = answer(head(1), after="9" * 20 + "-" + "9" * 20), answer(head(2))
    SeenState(path).keep(head(1), long)
    monkeypatch.setattr(os, "ftruncate", lambda *_: None)  # killed in between
    SeenState(path).keep(head(2), short)
    word = path.with_name("coordinator.proof")
    assert word.stat().st_size == len(frame([long]))
    assert SeenState(path).proof() == frame([short])
    monkeypatch.undo()
    SeenState(path).keep(head(3), answer(head(3)))
    assert word.read_bytes() == frame([answer(head(3))])


def test_half_of_one_word_and_half_of_another_is_none(path: Path) -> None:
    SeenState(path).keep(head(1), answer(head(1)))
    word = path.with_name("coordinator.proof")
    old, new = frame([answer(head(1))]), frame([answer(head(2))])
    begins = len(new) - len(answer(head(2)).body)
    for cut in (begins, begins + 50, new.index(b"coordinator_hash") + 40):
        word.write_bytes(new[:cut] + old[cut:])
        assert SeenState(path).proof() == b""
    word.write_bytes(new)
    assert SeenState(path).proof() == new


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr("workers.party.coordinator.time.monotonic", lambda: now[0])
    return now


BOTH = ["coordinator.proof", "coordinator.head"]


def test_nothing_is_synced_while_somebody_may_wait_and_all_of_it_when_this_party_waits(
    path: Path, synced: list[str], clock: list[float]
) -> None:
    seen = SeenState(path)
    seen.keep(head(1), answer(head(1)))
    seen.rest()
    synced.clear()
    clock[0] += 60.0
    seen.keep(head(2), answer(head(2)))
    seen.keep(head(3), answer(head(3)))
    assert synced == []
    seen.rest()
    seen.rest()
    assert synced == BOTH
    seen.keep(head(4), answer(head(4)))
    seen.rest()
    assert synced == BOTH, "once a second is enough"
    clock[0] += SYNC_EVERY_S
    seen.rest()
    assert synced == 2 * BOTH


def test_what_a_person_consented_to_counts_from_the_next_look(path: Path) -> None:
    seen = SeenState(path)
    seen.keep(head(7), answer(head(7)))
    Anchor(path).replace(head(3))
    assert seen.head() == head(3)
    seen.keep(head(4), answer(head(4)))
    assert seen.head() == head(4)


def test_a_word_that_cannot_be_written_is_said_and_the_head_waits_for_it(path: Path) -> None:
    path.with_name("coordinator.proof").mkdir()
    seen = SeenState(path)
    with pytest.raises(Unavailable, match=r"coordinator\.proof cannot be written"):
        seen.keep(head(1), answer(head(1)))
    assert seen.head() == EMPTY


def test_a_word_for_half_of_which_there_is_room_is_none_and_the_head_waits_for_it(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda handle, data, at: real(handle, data[: len(data) // 2], at))
    seen = SeenState(path)
    with pytest.raises(Unavailable, match=r"coordinator\.proof cannot be written \(No space left on device\)"):
        seen.keep(head(1), answer(head(1)))
    assert seen.proof() == b""
    assert seen.head() == EMPTY
    monkeypatch.undo()
    seen.keep(head(1), answer(head(1)))
    assert seen.proof() == frame([answer(head(1))])
    assert seen.head() == head(1)
