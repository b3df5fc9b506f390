"""One connection that stays open: used again, reopened where it was closed, bounded, ended at once, proxied."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest

from labeler.errors import Interrupted, InvalidSetting, ProtocolViolation, TooLarge
from tests.workers import test_party
from workers.party import coordinator
from workers.party.coordinator import CoordinatorHttp, Unreachable

encrypted = test_party.encrypted

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
    """

    def __init__(self, scripts: list[list[bytes]], *, reads_bodies: bool = True) -> None:
        self.requests: list[list[bytes]] = []
        self._scripts = scripts
        self._reads_bodies = reads_bodies
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.port = self._socket.getsockname()[1]
        threading.Thread(target=self._run, daemon=True).start()

    def close(self) -> None:
        self._socket.close()

    def _run(self) -> None:
        with suppress(OSError):
            for script in self._scripts:
                connection, _ = self._socket.accept()
                with connection:
                    self.requests.append([])
                    for answer in script:
                        self.requests[-1].append(self._request(connection))
                        connection.sendall(answer)

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
        address = f"http://127.0.0.1:{server.port}{path}"
        connection = CoordinatorHttp(address, ca_file=None, read_timeout_s=5.0, stop=threading.Event())
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
        (b"HTTP/1.1 503 No\r\nContent-Length: 21\r\n\r\n" + b"x" * 21, TooLarge),
    ],
    ids=["cut", "chunk cut", "nothing", "no HTTP", "later", "elsewhere", "long", "long, unstated", "refusal too long"],
)
def test_an_answer_that_is_none_or_too_long_is_an_error_and_the_next_is_read_from_a_new_connection(
    serve: Serve, answer: bytes, error: type[Exception]
) -> None:
    _, connection = serve([answer], [OK])
    with pytest.raises(error):
        post(connection)
    assert post(connection) == b"hello"


def test_who_refuses_before_all_was_sent_is_heard(serve: Serve) -> None:
    refusal = b"HTTP/1.1 413 Too large\r\nConnection: close\r\nContent-Length: 8\r\n\r\ntoo long"
    _, connection = serve([refusal], reads_bodies=False)
    # Unreachable where the kernel has thrown the answer away with the rest.
    with pytest.raises((ProtocolViolation, Unreachable)):
        post(connection, b"x" * 20_000_000)


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
                silence.wait(30)

        if when == "before":
            stop.set()
        else:
            threading.Thread(target=hear, daemon=True).start()
        begun = time.monotonic()
        with (
            closing(CoordinatorHttp(address, ca_file=None, read_timeout_s=60.0, stop=stop)) as connection,
            pytest.raises(Interrupted),
        ):
            post(connection)
        silence.set()
        assert time.monotonic() - begun < 5


# Through a proxy.


@pytest.fixture
def no_proxy(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in ("HTTPS_PROXY", "HTTP_PROXY", "ALL_PROXY", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)
    return monkeypatch


def through(url: str, certificate: Path) -> CoordinatorHttp:
    return CoordinatorHttp(url, ca_file=str(certificate), read_timeout_s=5.0, stop=threading.Event())


@pytest.mark.parametrize("how", ["this machine", "NO_PROXY"])
def test_a_proxy_is_left_alone_for_this_machine_and_for_hosts_that_are_named(
    relay: Any, encrypted: tuple[str, Path], no_proxy: pytest.MonkeyPatch, how: str
) -> None:
    relay.failures = [(418, {}, b"heard")]
    no_proxy.setenv("HTTPS_PROXY", "http://127.0.0.1:9")
    if how == "NO_PROXY":
        no_proxy.setattr("labeler.system.http_client.is_loopback", lambda _: False)
        no_proxy.setenv("NO_PROXY", "localhost")
    with closing(through(*encrypted)) as connection, pytest.raises(ProtocolViolation, match="418"):
        post(connection)


def test_a_proxy_of_another_kind_is_refused_at_once(encrypted: tuple[str, Path], no_proxy: pytest.MonkeyPatch) -> None:
    no_proxy.setattr("labeler.system.http_client.is_loopback", lambda _: False)
    no_proxy.setenv("ALL_PROXY", "gopher://proxy:1")
    with pytest.raises(InvalidSetting, match="NO_PROXY"):
        through(*encrypted)
