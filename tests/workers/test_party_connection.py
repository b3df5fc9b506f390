"""One connection that stays open: used again, made anew where it was closed, bounded, ended at once, proxied."""

from __future__ import annotations

import base64
import select
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from http.client import HTTPException, IncompleteRead
from pathlib import Path
from typing import Any

import pytest

from labeler.errors import InvalidSetting, TooLarge
from tests.workers import test_party
from workers.party.connection import Answer, Connection

encrypted = test_party.encrypted

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello"


def _received(connection: socket.socket) -> bytes:
    """What comes next; the server ends with its client, and does not ask a closed connection again and again."""
    found = connection.recv(65536)
    if not found:
        raise ConnectionError("the client has gone")
    return found


class Server:
    """Answers on loopback as it is told: of each connection, a script of what to send after each request.

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


Serve = Callable[..., tuple[Server, Connection]]


@pytest.fixture
def serve() -> Iterator[Serve]:
    opened: list[Any] = []

    def make(*scripts: list[bytes], path: str = "", **options: bool) -> tuple[Server, Connection]:
        server = Server(list(scripts), **options)
        connection = Connection(
            f"http://127.0.0.1:{server.port}{path}",
            certificates=ssl.create_default_context(),
            read_timeout_s=5.0,
            is_near=True,
        )
        opened.extend((connection, server))
        return server, connection

    yield make
    for one in opened:
        one.close()


def post(connection: Connection, data: bytes = b"data") -> Answer:
    return connection.post("/v1/messages", data, media_type="text/plain", most=100, most_of_refusal=20)


def test_many_requests_go_over_one_connection(serve: Serve) -> None:
    server, connection = serve([OK] * 3, path="/labels/")
    assert [post(connection) for _ in range(3)] == [Answer(200, "", b"hello")] * 3
    (requests,) = server.requests
    assert len(requests) == 3
    assert requests[0].startswith(b"POST /labels/v1/messages HTTP/1.1\r\n")
    assert b"Content-Type: text/plain" in requests[0]
    assert requests[0].endswith(b"\r\n\r\ndata")


def test_a_connection_that_was_closed_in_between_is_made_anew_without_a_word(serve: Serve) -> None:
    server, connection = serve([OK], [OK[:15] + b"\r\nConnection: close" + OK[15:]], [OK])
    for _ in range(3):
        assert post(connection).body == b"hello"
        if connection._open is not None and connection._open.sock is not None:
            assert select.select([connection._open.sock], [], [], 10)[0], "the server has closed it"
    assert [len(requests) for requests in server.requests] == [1, 1, 1]


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 50\r\n\r\nhello", IncompleteRead),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhel", IncompleteRead),
        (b"", ConnectionError),
        (b"SSH-2.0-OpenSSH\r\n", HTTPException),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 101\r\n\r\n" + b"x" * 101, TooLarge),
        (b"HTTP/1.1 200 OK\r\n\r\n" + b"x" * 101, TooLarge),
        (b"HTTP/1.1 503 No\r\nContent-Length: 21\r\n\r\n" + b"x" * 21, TooLarge),
    ],
    ids=["cut off", "chunk cut off", "nothing", "no HTTP", "too long", "too long, unstated", "refusal too long"],
)
def test_an_answer_that_is_none_or_too_long_is_an_error_and_the_next_is_read_from_a_new_connection(
    serve: Serve, answer: bytes, error: type[Exception]
) -> None:
    _, connection = serve([answer], [OK])
    with pytest.raises(error):
        post(connection)
    assert post(connection).body == b"hello"


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n", Answer(200, "", b"hello")),
        (b"HTTP/1.1 429 Later\r\nRetry-After: 7\r\nContent-Length: 2\r\n\r\nno", Answer(429, "7", b"no")),
        (b"HTTP/1.1 302 There\r\nLocation: http://x/\r\nContent-Length: 0\r\n\r\n", Answer(302, "", b"")),
        (b"HTTP/1.1 100 Continue\r\n\r\n" + OK, Answer(200, "", b"hello")),
    ],
    ids=["chunked", "refused", "a redirection is not followed", "continue"],
)
def test_whatever_else_is_answered_is_handed_on(serve: Serve, answer: bytes, expected: Answer) -> None:
    _, connection = serve([answer, OK])
    assert post(connection) == expected
    assert post(connection).body == b"hello"


def test_who_refuses_before_all_was_sent_is_heard(serve: Serve) -> None:
    refusal = b"HTTP/1.1 413 Too large\r\nConnection: close\r\nContent-Length: 8\r\n\r\ntoo long"
    _, connection = serve([refusal], reads_bodies=False)
    with suppress(ConnectionResetError):  # where the kernel has thrown the answer away with the rest
        assert post(connection, b"x" * 20_000_000).status == 413


def test_a_request_under_way_is_ended_by_another_thread(serve: Serve) -> None:
    silence = threading.Event()
    with closing(socket.create_server(("127.0.0.1", 0))) as listening:
        address = f"http://127.0.0.1:{listening.getsockname()[1]}"
        connection = Connection(address, certificates=ssl.create_default_context(), read_timeout_s=60.0, is_near=True)

        def hear() -> None:
            accepted, _ = listening.accept()
            with accepted:
                accepted.recv(65536)
                connection.end()
                silence.wait(30)

        threading.Thread(target=hear, daemon=True).start()
        with pytest.raises((OSError, HTTPException)):
            post(connection)
        silence.set()
        connection.close()


def test_a_request_that_begins_as_it_is_ended_makes_no_new_connection_to_wait_on(serve: Serve) -> None:
    server, connection = serve([OK], [OK])
    assert post(connection).status == 200
    connection.end()
    with pytest.raises(ConnectionAbortedError):
        post(connection)
    assert [len(requests) for requests in server.requests if requests] == [1]


# Through a proxy.


class Proxy:
    """Takes one CONNECT and passes everything on to a port of this machine."""

    def __init__(self, port: int) -> None:
        self.asked = b""
        self._to = port
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._socket.getsockname()[1]}"
        threading.Thread(target=self._run, daemon=True).start()

    def close(self) -> None:
        self._socket.close()

    def _run(self) -> None:
        with suppress(OSError):
            near, _ = self._socket.accept()
            with near, socket.create_connection(("127.0.0.1", self._to)) as far:
                while b"\r\n\r\n" not in self.asked:
                    self.asked += _received(near)
                near.sendall(b"HTTP/1.1 200 Connection established\r\n\r\n")
                back = threading.Thread(target=_pass_on, args=(far, near), daemon=True)
                back.start()
                _pass_on(near, far)
                back.join(timeout=60)


def _pass_on(one: socket.socket, other: socket.socket) -> None:
    with suppress(OSError):
        while data := one.recv(65536):
            other.sendall(data)
    with suppress(OSError):
        other.shutdown(socket.SHUT_WR)


@pytest.fixture
def no_proxy(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in ("HTTPS_PROXY", "HTTP_PROXY", "ALL_PROXY", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)
    return monkeypatch


def through(url: str, certificate: Path, *, is_near: bool = False) -> Connection:
    certificates = ssl.create_default_context(cafile=certificate)
    return Connection(url, certificates=certificates, read_timeout_s=5.0, is_near=is_near)


def test_a_proxy_of_the_environment_is_asked_for_a_tunnel_and_sees_no_more(
    relay: Any, encrypted: tuple[str, Path], no_proxy: pytest.MonkeyPatch
) -> None:
    relay.failures = [(418, {}, b"heard")] * 2
    url, certificate = encrypted
    port = int(url.rpartition(":")[2])
    with closing(Proxy(port)) as proxy:
        no_proxy.setenv("HTTPS_PROXY", f"http://user:pass%20word@{proxy.address}")
        with closing(through(url, certificate)) as connection:
            assert [post(connection) for _ in range(2)] == [Answer(418, "", b"heard")] * 2
        assert proxy.asked.startswith(f"CONNECT localhost:{port} HTTP/1.".encode())
        expected = b"Proxy-Authorization: Basic " + base64.b64encode(b"user:pass word")
        assert expected in proxy.asked
        assert b"v1/messages" not in proxy.asked


@pytest.mark.parametrize("how", ["this machine", "NO_PROXY"])
def test_a_proxy_is_left_alone_for_this_machine_and_for_hosts_that_are_named(
    relay: Any, encrypted: tuple[str, Path], no_proxy: pytest.MonkeyPatch, how: str
) -> None:
    relay.failures = [(418, {}, b"heard")]
    url, certificate = encrypted
    no_proxy.setenv("HTTPS_PROXY", "http://127.0.0.1:9")
    if how == "NO_PROXY":
        no_proxy.setenv("NO_PROXY", "localhost")
    with closing(through(url, certificate, is_near=how == "this machine")) as connection:
        assert post(connection).status == 418


@pytest.mark.parametrize("named", ["https://proxy:1", "socks5://proxy:1"])
def test_a_proxy_of_another_kind_is_refused_at_once(
    encrypted: tuple[str, Path], no_proxy: pytest.MonkeyPatch, named: str
) -> None:
    no_proxy.setenv("ALL_PROXY", named)
    with pytest.raises(InvalidSetting, match="NO_PROXY"):
        through(*encrypted)
