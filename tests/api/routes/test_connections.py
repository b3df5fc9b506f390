"""Connections that draw things out cost each other, and nobody else: a real server, real sockets."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import resource
import select
import socket
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest

from api.connections import Crowd, Listener, address_group
from api.guarded_protocol import Guard, Guarded, Times
from api.rate_limit import RateLimits
from api.wire import Wire
from tests.api.routes.conftest import WIRES, ConfigOf, ServeIn, Service

ASK = b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n"
HALF = b"GET /healthz HTTP/1.1\r\nHost: x\r\nX-Slow: "
QUICK = Times(headers_s=0.4, body_window_s=0.4, body_bytes=1000, stalled_s=0.4, keep_alive_s=1)


def connected(service: Service, *, source: str = "127.0.0.1") -> socket.socket:
    host, port = service.url.split("//")[1].split(":")
    connection = socket.create_connection((host, int(port)), timeout=60, source_address=(source, 0))
    connection.settimeout(10)
    return connection


def answer(connection: socket.socket) -> bytes:
    """Everything until the other end closes; b"" also where it did so roughly."""
    said = b""
    with contextlib.suppress(ConnectionError):
        while part := connection.recv(65536):
            said += part
    return said


def is_open(connection: socket.socket) -> bool:
    readable, _, _ = select.select([connection], [], [], 0)
    return not readable


@pytest.fixture
def held() -> Iterator[list[socket.socket]]:
    sockets: list[socket.socket] = []
    yield sockets
    for one in sockets:
        one.close()


@pytest.fixture(scope="module", params=WIRES)
def wire(request: pytest.FixtureRequest) -> Wire:
    return cast("Wire", request.param)


@pytest.fixture(scope="module")
def serve_in(serve_in: ServeIn, wire: Wire) -> ServeIn:
    return partial(serve_in, wire=wire)


@pytest.fixture(scope="module")
def quick(serve_in: ServeIn, config_of: ConfigOf, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """A service of little patience."""
    with serve_in(config_of(tmp_path_factory.mktemp("quick") / "home"), times=QUICK) as service:
        yield service


def test_who_only_stops_sending_is_answered_and_then_closed(quick: Service) -> None:
    head = f"GET /v1/whoami HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {quick.tokens['requester']}\r\n\r\n"
    for asked in (head.encode(), ASK, ASK * 2):
        for _ in range(5):  # the end comes with the request, or while it is answered
            with connected(quick) as connection:
                connection.sendall(asked)
                connection.shutdown(socket.SHUT_WR)
                assert answer(connection).count(b"HTTP/1.1 200 OK") == asked.count(b"HTTP/1.1")
    for asked in (b"", HALF, b"POST /v1/jobs HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n{"):
        with connected(quick) as connection:
            connection.sendall(asked)
            connection.shutdown(socket.SHUT_WR)
            assert b" 200 " not in answer(connection)


def test_a_small_answer_does_not_wait_for_the_acknowledgement_of_its_head(
    quick: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[int] = []
    made = Guard.begin

    def look(self: Guard, protocol: Guarded) -> None:
        accepted = protocol.transport.get_extra_info("socket")
        found.append(accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
        made(self, protocol)

    monkeypatch.setattr(Guard, "begin", look)
    with connected(quick) as connection:
        connection.sendall(ASK)
        assert connection.recv(1000).startswith(b"HTTP/1.1 200")
    assert found
    assert found[0] != 0


@pytest.mark.parametrize("sent", [b"", b"GET", HALF, ASK + b"GET /h"])
def test_headers_that_never_end_are_given_up(quick: Service, sent: bytes) -> None:
    with connected(quick) as connection:
        connection.sendall(sent)
        said = answer(connection)
    assert said.count(b"HTTP/1.1 200") == sent.count(b"\r\n\r\n")
    assert b"HTTP/1.1 408" in said


def problem(said: bytes) -> dict[str, Any]:
    """The problem document of the last answer of a connection, as long as its head says."""
    head, _, body = said[said.rindex(b"HTTP/1.1 ") :].partition(b"\r\n\r\n")
    lines = dict(line.lower().split(b": ", 1) for line in head.split(b"\r\n")[1:])
    assert lines[b"content-type"] == b"application/problem+json"
    assert lines[b"connection"] == b"close"
    assert int(lines[b"content-length"]) == len(body)
    found: dict[str, Any] = json.loads(body)
    assert found["status"] == int(head.split()[1])
    return found


@pytest.mark.parametrize(
    "sent",
    [
        b"GET /healthz HTTP/1.1\r\n\r\n",
        b"GET /\xff HTTP/1.1\r\nHost: x\r\n\r\n",
        b"POST /v1/jobs HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n",
        b"POST /v1/jobs HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n",
        b"GET /healthz HTTP/1.1\r\nHost: x\r\nX: " + b"a" * 200_000 + b"\r\n\r\n",
        b"\x16\x03\x01\x02\x00 a handshake of TLS\r\n\r\n",
    ],
)
def test_what_is_no_request_is_refused_as_everything_else_is(quick: Service, sent: bytes) -> None:
    with connected(quick) as connection:
        connection.sendall(sent)
        said = answer(connection)
    assert problem(said)["type"] == "urn:labeler:problem:malformed-request"


def test_what_comes_too_slowly_is_refused_as_everything_else_is(quick: Service) -> None:
    with connected(quick) as connection:
        connection.sendall(HALF)
        assert problem(answer(connection))["type"] == "urn:labeler:problem:too-slow"


def test_headers_that_come_drop_by_drop_have_no_more_time_than_others(quick: Service) -> None:
    with connected(quick) as connection:
        connection.sendall(HALF)
        connection.settimeout(0.05)
        drops = 0
        with contextlib.suppress(ConnectionError):
            while drops < 1000:
                with contextlib.suppress(TimeoutError):
                    if not connection.recv(1000):
                        break
                connection.sendall(b"a")
                drops += 1
    assert drops < 1000


def test_an_idle_connection_is_closed(quick: Service) -> None:
    with connected(quick) as connection:
        connection.sendall(ASK)
        said = answer(connection)
    assert said.startswith(b"HTTP/1.1 200")
    assert b"408" not in said


@pytest.mark.parametrize("path", ["/v1/jobs", "/v1/labels", "/v1/messages"])
def test_a_body_that_does_not_come_is_given_up(quick: Service, path: str) -> None:
    kind = "application/octet-stream" if path == "/v1/messages" else "application/json"
    head = (
        f"POST {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {quick.tokens['requester']}\r\n"
        f"Content-Type: {kind}\r\nContent-Length: 5000\r\n\r\n"
    )
    with connected(quick) as connection:
        connection.sendall(head.encode() + b"{")
        assert b"HTTP/1.1 408" in answer(connection)


def test_a_body_that_comes_fast_enough_takes_as_long_as_it_needs(quick: Service) -> None:
    body = b'{"name": "' + b"a" * 12_000 + b'"}'
    head = (
        f"POST /v1/tokens HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {quick.tokens['admin']}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    pace = select.poll()
    with connected(quick) as connection:
        connection.sendall(head.encode())
        for start in range(0, len(body), 1000):
            connection.sendall(body[start : start + 1000])
            pace.poll(100)
        assert answer(connection).startswith(b"HTTP/1.1 422"), "three windows long, and heard to its end"


def test_an_answer_that_nobody_takes_is_given_up(quick: Service, held: list[socket.socket]) -> None:
    connection = connected(quick)
    held.append(connection)
    connection.sendall(300 * b"GET /openapi.json HTTP/1.1\r\nHost: x\r\n\r\n")
    select.poll().poll(1500)
    heard = answer(connection).count(b"HTTP/1.1 200")
    assert heard < 300, "the server waits for ever for somebody who takes no answer"


def test_slow_connections_of_one_address_make_room_for_each_other_and_harm_nobody_else(
    serve_in: ServeIn, config_of: ConfigOf, tmp_path: Path, held: list[socket.socket]
) -> None:
    with serve_in(config_of(tmp_path / "home", max_connections_per_address=8)) as service:
        for _ in range(60):
            held.append(connected(service, source="127.0.0.2"))
            held[-1].sendall(HALF)
        for source in ("127.0.0.1", "127.0.0.2"):
            with connected(service, source=source) as connection:
                connection.sendall(ASK)
                assert connection.recv(1000).startswith(b"HTTP/1.1 200"), source
        still = sum(is_open(one) for one in held)
        assert still <= 8


def test_when_everything_is_full_whoever_waits_longest_without_a_request_makes_room(
    serve_in: ServeIn, config_of: ConfigOf, tmp_path: Path, held: list[socket.socket]
) -> None:
    with serve_in(config_of(tmp_path / "home", max_connections=16)) as service:
        for number in range(80):
            held.append(connected(service, source=f"127.0.1.{number + 1}"))
            held[-1].sendall(HALF)
        with connected(service) as connection:
            connection.sendall(ASK)
            assert connection.recv(1000).startswith(b"HTTP/1.1 200")
        assert sum(is_open(one) for one in held) <= 16


def test_when_every_connection_has_a_request_under_way_health_can_still_be_asked(
    serve_in: ServeIn, config_of: ConfigOf, tmp_path: Path, held: list[socket.socket]
) -> None:
    with serve_in(config_of(tmp_path / "home", max_connections=16)) as service:
        head = (
            f"POST /v1/jobs HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {service.tokens['requester']}\r\n"
            "Content-Type: application/json\r\nContent-Length: 90000\r\nExpect: 100-continue\r\n\r\n"
        )
        for number in range(16):
            held.append(connected(service, source=f"127.0.1.{number + 1}"))
            held[-1].sendall(head.encode())
            assert held[-1].recv(1000).startswith(b"HTTP/1.1 100"), "it is under way"
        for _ in range(3):
            for path, begins in (("/healthz", b"HTTP/1.1 200"), ("/v1/whoami", b"HTTP/1.1 503")):
                with connected(service) as connection:
                    connection.sendall(f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
                    said = answer(connection)
                    assert said.startswith(begins), path
                    if path == "/v1/whoami":
                        assert problem(said)["type"] == "urn:labeler:problem:unavailable"
        assert all(is_open(one) for one in held), "requests under way are not interrupted"
        for one in held:
            one.close()


def test_a_peer_that_never_begins_tls_is_given_up(
    serve_in: ServeIn, config_of: ConfigOf, tmp_path: Path, held: list[socket.socket]
) -> None:
    files = tmp_path / "cert.pem", tmp_path / "key.pem"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    command += ["-days", "2", "-subj", "/CN=localhost", "-out", str(files[0]), "-keyout", str(files[1])]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("there is no openssl to make a certificate with")
    with serve_in(config_of(tmp_path / "home"), tls=files, times=QUICK) as service, connected(service) as connection:
        assert answer(connection) == b""


OUT_OF_FILES = """
import asyncio, logging, os, resource, socket, sys
from api.connections import Accepting, ConnectionLimits, Crowd, Listener

lines = []
class Kept(logging.Handler):
    def emit(self, record):
        lines.append(record.getMessage())
logging.getLogger().addHandler(Kept())

async def main():
    crowd = Crowd(ConnectionLimits())
    listening = Listener(socket.AF_INET, crowd)
    listening.bind(("127.0.0.1", 0))
    listening.listen(100)
    server = Accepting(listening, asyncio.Protocol, None)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    clients = [socket.socket() for _ in range(20)]
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + 1, hard))
    for one in clients:
        one.setblocking(False)
        try:
            one.connect(listening.getsockname())
        except BlockingIOError:
            pass
    for _ in range(20):
        await asyncio.sleep(0.02)
    told = len(lines)
    await asyncio.sleep(0.5)
    assert 1 <= told <= 20 and len(lines) == told, (told, len(lines), lines[:2])
    assert all("descriptors have run out" in line for line in lines), lines[:2]
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    before = len(crowd)
    with socket.socket() as last:
        last.setblocking(False)
        await asyncio.get_running_loop().sock_connect(last, listening.getsockname())
        await asyncio.sleep(0.1)
        assert len(crowd) == before + 1
    server.close()

if sys.argv[1] == "uvloop":
    import uvloop
    uvloop.run(main())
else:
    asyncio.run(main())
print("once each")
"""


def test_without_file_descriptors_newcomers_are_closed_and_nothing_spins(wire: Wire) -> None:
    done = subprocess.run(
        [sys.executable, "-c", OUT_OF_FILES, wire.loop], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.stdout == "once each\n", done.stderr


@pytest.mark.parametrize(
    ("host", "group"),
    [
        ("192.0.2.7", "192.0.2.7"),
        ("::ffff:192.0.2.7", "192.0.2.7"),
        ("2001:db8:1:2:3::4", "2001:db8:1:2::/64"),
        ("2001:db8:1:2:ffff::9", "2001:db8:1:2::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        ("unix", "unix"),
    ],
)
def test_one_host_is_one_address_however_many_it_can_use(host: str, group: str) -> None:
    assert address_group(host) == group


def rejected(service: Service, forwarded: list[str]) -> list[int]:
    """The answers to wrong tokens that come with these headers."""
    with service.http(None) as http:
        http.headers["Authorization"] = "Bearer lab_wrong"
        return [http.get("/v1/whoami", headers={"X-Forwarded-For": one}).status_code for one in forwarded]


@pytest.fixture
def failures(monkeypatch: pytest.MonkeyPatch) -> int:
    """How many are allowed: ten times fewer than to people, so that all of them come within a minute on any machine."""
    monkeypatch.setattr("api.app.RateLimits", partial(RateLimits, failures_per_minute=60))
    return 60


def test_an_address_that_somebody_claims_to_forward_does_not_lift_the_limit(
    serve_in: ServeIn, config_of: ConfigOf, tmp_path: Path, failures: int
) -> None:
    with serve_in(config_of(tmp_path / "home")) as service:
        answers = rejected(
            service, [f"203.0.113.{number % 250}, 198.51.100.{number % 7}" for number in range(failures + 5)]
        )
    assert set(answers[:failures]) == {401}
    assert set(answers[failures:]) == {429}


def test_behind_a_trusted_proxy_the_rightmost_stranger_counts(
    serve_in: ServeIn, config_of: ConfigOf, tmp_path: Path, failures: int
) -> None:
    config = config_of(tmp_path / "home", trusted_proxies=("127.0.0.0/8", "10.1.0.0/16"))
    with serve_in(config) as service:
        # What stands further left was written by the stranger; 10.1.2.3 is a proxy of ours.
        left = range(failures + 1)
        answers = rejected(service, [f"203.0.113.{number % 250}, 198.51.100.7, 10.1.2.3" for number in left])
        assert (set(answers[:failures]), answers[failures]) == ({401}, 429)
        assert rejected(service, ["203.0.113.1, 198.51.100.8"]) == [401], "a neighbour behind the same proxy"


def test_behind_a_trusted_proxy_connections_are_not_counted_by_its_address_but_requests_are_by_theirs(
    serve_in: ServeIn, config_of: ConfigOf, tmp_path: Path, held: list[socket.socket]
) -> None:
    config = config_of(tmp_path / "home", trusted_proxies=("127.0.0.1",), max_connections_per_address=4)

    def begin(client: str) -> socket.socket:
        head = (
            f"POST /v1/jobs HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {service.tokens['requester']}\r\n"
            f"X-Forwarded-For: {client}\r\nContent-Type: application/json\r\nContent-Length: 90000\r\n\r\n{{"
        )
        held.append(connected(service))
        held[-1].sendall(head.encode())
        return held[-1]

    def status(client: str) -> int:
        with service.http("requester") as http:
            return http.get("/v1/whoami", headers={"X-Forwarded-For": client}).status_code

    with serve_in(config) as service:
        for _ in range(4):
            begin("198.51.100.7")
        for number in range(8):
            begin(f"198.51.100.{100 + number}")
        assert status("198.51.100.8") == 200
        assert status("198.51.100.7") == 429
        assert all(is_open(one) for one in held)
        for one in held:
            one.close()


def test_the_limit_of_open_files_leaves_room_for_ourselves(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    from api import server

    limits = [(1024, 1200)]
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits[-1])
    monkeypatch.setattr(resource, "setrlimit", lambda _, pair: limits.append(pair))
    with caplog.at_level(logging.WARNING):
        assert server._affordable(700) == 700
        assert not caplog.records
        assert server._affordable(1000) == 1200 - server.FILES_FOR_OURSELVES
    assert limits[-1] == (1200, 1200)
    assert len(caplog.records) == 1


def test_a_listener_gives_its_spare_descriptor_back() -> None:
    from api.connections import ConnectionLimits

    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208  # a count, no paths
    Listener(socket.AF_INET, Crowd(ConnectionLimits())).close()
    assert len(os.listdir("/proc/self/fd")) == before  # noqa: PTH208
