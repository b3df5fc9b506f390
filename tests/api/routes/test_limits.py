"""Whoever draws things out, sends much or holds much costs itself, and nobody else: a real server, real sockets."""

from __future__ import annotations

import contextlib
import json
import logging
import re
import resource
import select
import socket
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from api import limits, server
from api.coordinator.config import LimitsTable
from api.limits import RateLimits, address_group, most_bytes, too_large
from tests.api.routes.conftest import ConfigOf, ServeIn, Service, eventually

ASK = b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n"
HALF = b"GET /healthz HTTP/1.1\r\nHost: x\r\nX-Slow: "


def connected(service: Service, *, source: str = "127.0.0.1") -> socket.socket:
    connection = service.connect(source=source)
    connection.settimeout(240)
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


def is_held(connection: socket.socket) -> bool:
    """Whether the other end has not closed it; what it sent is read and dropped."""
    while select.select([connection], [], [], 0)[0]:
        try:
            if not connection.recv(65536):
                return False
        except ConnectionError:
            return False
    return True


def head(path: str, token: str = "", *, length: int | None, kind: str = "application/json", more: str = "") -> bytes:
    """The head of a POST; without a length its body comes in chunks."""
    framing = "Transfer-Encoding: chunked" if length is None else f"Content-Length: {length}"
    shown = f"Authorization: Bearer {token}\r\n" if token else ""
    return f"POST {path} HTTP/1.1\r\nHost: x\r\n{shown}{more}Content-Type: {kind}\r\n{framing}\r\n\r\n".encode()


def problem(said: bytes) -> dict[str, Any]:
    """The problem document of the only answer of a connection."""
    top, _, body = said.partition(b"\r\n\r\n")
    found: dict[str, Any] = json.loads(body)
    assert b"application/problem+json" in top
    assert found["status"] == int(top.split()[1])
    return found | {"again": b"retry-after" in top.lower()}


def first(connection: socket.socket) -> dict[str, Any]:
    """The problem document that comes first, from a connection that stays open."""
    said = b""
    while b"\r\n\r\n" not in said:
        said += more(connection)
    length = int(re.findall(rb"content-length: (\d+)", said.lower())[0])
    while len(said.partition(b"\r\n\r\n")[2]) < length:
        said += more(connection)
    return problem(said)


def more(connection: socket.socket) -> bytes:
    part = connection.recv(65536)
    assert part, "the other end closed before its answer was complete"
    return part


@pytest.fixture
def patient_with_bodies(monkeypatch: pytest.MonkeyPatch) -> None:
    """No body that a test holds is given up while others are still sent, however slow the machine is."""
    monkeypatch.setattr(limits, "BODY_S", 600.0)


@pytest.fixture
def held() -> Iterator[list[socket.socket]]:
    sockets: list[socket.socket] = []
    yield sockets
    for one in sockets:
        one.close()


@pytest.mark.parametrize("sent", [b"", HALF, ASK])
def test_idle_connections_are_closed_for_newcomers_and_shut_nobody_out(
    serve_in: ServeIn,
    config_of: ConfigOf,
    tmp_path: Path,
    held: list[socket.socket],
    sent: bytes,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(server, "FIRST_REQUEST_S", 600.0)  # closed for newcomers, not because they took too long
    with serve_in(config_of(tmp_path / "home", max_connections=16)) as service:
        for number in range(60):
            held.append(connected(service, source=f"127.0.1.{number + 1}"))
            held[-1].sendall(sent)
        for _ in range(3):
            with service.http("requester") as http:
                assert http.get("/v1/whoami").status_code == 200
        if sent == ASK:
            for one in held[-8:]:
                with contextlib.suppress(ConnectionError):  # closed for a newcomer while its request was on its way
                    one.recv(10_000)
        eventually(lambda: sum(is_held(one) for one in held[:52]) <= 16)


@pytest.mark.parametrize("sent", [b"", b"GET", HALF])
def test_heads_that_never_end_are_given_up(service: Service, monkeypatch: pytest.MonkeyPatch, sent: bytes) -> None:
    monkeypatch.setattr(server, "FIRST_REQUEST_S", 0.3)
    with connected(service) as connection:
        connection.sendall(sent)
        assert answer(connection) == b""


@pytest.mark.usefixtures("no_discarding")
@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/v1/jobs", "application/json"),
        ("/v1/jobs", "multipart/form-data; boundary=x"),
        ("/v1/labels", "application/json"),
        ("/v1/messages", "application/octet-stream"),
        ("/v1/enrolments", "application/json"),
    ],
)
def test_a_body_that_comes_too_slowly_is_given_up(
    service: Service, monkeypatch: pytest.MonkeyPatch, path: str, kind: str
) -> None:
    monkeypatch.setattr(limits, "BODY_S", 0.3)
    with connected(service) as connection:
        connection.sendall(head(path, service.tokens["requester"], length=5000, kind=kind) + b"--x\r\n")
        refused = first(connection)
    assert refused["type"] == "urn:labeler:problem:unavailable"
    assert refused["again"]


def test_a_body_that_comes_fast_enough_takes_as_long_as_it_needs(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "BODY_S", 0.4)
    monkeypatch.setattr(limits, "LEAST_BYTES_PER_S", 200)
    body = b'{"name": "' + b"a" * 12_000 + b'"}'
    pace = select.poll()
    with connected(service) as connection:
        # The first piece comes with the head, and buys five seconds: nothing depends on when this thread has its turn.
        sent = head("/v1/tokens", service.tokens["admin"], length=len(body))
        for start in range(0, len(body), 1000):
            connection.sendall(sent + body[start : start + 1000])
            sent = b""
            pace.poll(100)
        assert first(connection)["status"] == 422, "heard to its end, far beyond the first time"


@pytest.mark.usefixtures("no_discarding", "patient_with_bodies")
def test_slow_bodies_of_strangers_shut_nobody_out(service: Service, held: list[socket.socket]) -> None:
    for number in range(40):
        for _ in range(2):
            held.append(connected(service, source=f"127.0.2.{number + 1}"))
            held[-1].sendall(head("/v1/enrolments", length=1000) + b"{")
    beyond = 80 - limits.BODIES_TOTAL["stranger"]
    eventually(lambda: sum(not is_open(one) for one in held) == beyond)
    refused = [first(one) for one in held if not is_open(one)]
    assert all(one["status"] == 503 and one["again"] for one in refused)
    with service.http("requester") as http:
        assert http.post("/v1/jobs:estimate", json={"task_id": "0" * 64, "queries": 1}).status_code == 404


@pytest.mark.usefixtures("no_discarding", "patient_with_bodies")
def test_one_client_holds_few_bodies_at_once(service: Service, held: list[socket.socket]) -> None:
    each = limits.BODIES_EACH["token"]
    for _ in range(each + 1):
        held.append(connected(service))
        held[-1].sendall(head("/v1/jobs", service.tokens["requester"], length=100_000) + b"{")
    readable, _, _ = select.select(held, [], [], 240)
    refused = first(readable[0])  # whichever came last: they come together
    assert (refused["status"], refused["again"]) == (503, True)
    with service.http("admin") as http:
        assert http.post("/v1/tokens", json={"name": "x", "role": "viewer"}).status_code == 201, "another token"
    for one in held:
        one.close()
    with service.http("requester") as http:
        eventually(lambda: http.post("/v1/jobs", json={"x": "y" * 100_000}).status_code == 422)


@pytest.mark.usefixtures("no_discarding", "patient_with_bodies")
@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages:poll"])
def test_small_bodies_of_parties_count_too(service: Service, held: list[socket.socket], path: str) -> None:
    each = limits.BODIES_EACH["party"]
    for _ in range(each + 1):
        held.append(connected(service))
        held[-1].sendall(head(path, length=1000, kind="application/octet-stream") + b"x")
    readable, _, _ = select.select(held, [], [], 60)
    assert readable, "as many small bodies as one likes are held"
    refused = first(readable[0])
    assert (refused["status"], refused["again"]) == (503, True)


@pytest.mark.parametrize("path", ["/v1/enrolments", "/v1/jobs", "/v1/labels", "/v1/messages", "/v1/tokens"])
@pytest.mark.parametrize("is_stated", [True, False])
def test_a_body_that_is_too_large_is_refused_before_it_is_read_and_while_it_is(
    service: Service, path: str, is_stated: bool
) -> None:
    kind = "application/octet-stream" if path == "/v1/messages" else "application/json"
    most = most_bytes(path, is_form=False, limits=LimitsTable())
    if not is_stated and path == "/v1/messages":
        pytest.skip("a stranger's frames are refused before so much of them is read")
    with connected(service) as connection:
        connection.sendall(
            head(
                path,
                service.tokens["admin"],
                length=most + 1 if is_stated else None,
                kind=kind,
                more="Expect: 100-continue\r\n",
            )
        )
        if not is_stated:
            assert connection.recv(1000).startswith(b"HTTP/1.1 100")
            piece = b"10000\r\n" + b" " * 65536 + b"\r\n"
            with contextlib.suppress(ConnectionError):
                for _ in range(most // 65536 + 2):
                    connection.sendall(piece)
                connection.sendall(b"0\r\n\r\n")
        assert first(connection)["type"] == "urn:labeler:problem:too-large"


def resident_mb() -> float:
    return int(re.findall(r"VmRSS:\s+(\d+)", Path("/proc/self/status").read_text())[0]) / 1024


def test_unfinished_forms_lie_on_disk(service: Service, held: list[socket.socket]) -> None:
    part = b'--x\r\nContent-Disposition: form-data; name="images"; filename="a.png"\r\n\r\n'
    image = b"\0" * (30 * 2**20)
    before = resident_mb()
    for _ in range(8):
        held.append(connected(service))
        form = "multipart/form-data; boundary=x"
        held[-1].sendall(head("/v1/jobs", service.tokens["requester"], length=10**8, kind=form) + part)
        held[-1].sendall(image)
    assert resident_mb() - before < 100


@pytest.mark.parametrize(
    "sent",
    [
        b"POST /v1/jobs HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n",
        b"POST /v1/jobs HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n",
        b"POST /v1/jobs HTTP/1.1\r\nHost: x\r\nContent-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"POST /v1/jobs HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: gzip\r\n\r\n0\r\n\r\n",
        b"\x16\x03\x01\x02\x00 a handshake of TLS\r\n\r\n",
    ],
)
def test_what_can_be_read_in_two_ways_is_refused_and_nothing_behind_it_is_answered(
    service: Service, sent: bytes
) -> None:
    with connected(service) as connection:
        connection.sendall(sent + ASK)
        said = answer(connection)
    assert said.startswith(b"HTTP/1.1 400")
    assert b"200 OK" not in said


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
def test_one_host_is_one_client_however_many_addresses_it_can_use(host: str, group: str) -> None:
    assert address_group(host) == group


def rejected(service: Service, forwarded: list[str]) -> list[int]:
    """The answers to wrong tokens that come with these headers."""
    with service.http(None) as http:
        http.headers["Authorization"] = "Bearer lab_wrong"
        return [http.get("/v1/whoami", headers={"X-Forwarded-For": one}).status_code for one in forwarded]


@pytest.fixture
def failures(monkeypatch: pytest.MonkeyPatch) -> int:
    """How many are allowed: far fewer than to people, in a window in which all of them come on any machine."""
    monkeypatch.setattr(limits, "WINDOW_S", 3600.0)
    monkeypatch.setattr("api.app.RateLimits", partial(RateLimits, failures_per_minute=20))
    return 20


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


def test_a_stranger_that_claims_ever_other_addresses_is_one_stranger_and_good_tokens_beside_it_are_heard(
    serve_in: ServeIn, config_of: ConfigOf, tmp_path: Path, failures: int
) -> None:
    with serve_in(config_of(tmp_path / "home")) as service:
        answers = rejected(service, [f"203.0.113.{number % 250}" for number in range(failures + 1)])
        assert (set(answers[:failures]), answers[failures]) == ({401}, 429)
        with service.http("viewer") as http:
            assert http.get("/v1/budget").status_code == 200


@pytest.mark.usefixtures("patient_with_bodies")
def test_behind_a_trusted_proxy_requests_at_once_are_counted_by_their_client(
    serve_in: ServeIn, config_of: ConfigOf, tmp_path: Path, held: list[socket.socket]
) -> None:
    config = config_of(tmp_path / "home", trusted_proxies=("127.0.0.1",), max_connections_per_address=4)

    def begin(client: str) -> None:
        held.append(connected(service))
        token = service.tokens["requester"]
        held[-1].sendall(head("/v1/jobs", token, length=90_000, more=f"X-Forwarded-For: {client}\r\n") + b"{")

    def status(client: str) -> int:
        with service.http("requester") as http:
            return http.get("/v1/whoami", headers={"X-Forwarded-For": client}).status_code

    with serve_in(config) as service:
        for _ in range(4):
            begin("198.51.100.7")
        for number in range(8):
            begin(f"198.51.100.{100 + number}")
        assert status("198.51.100.8") == 200
        eventually(lambda: status("198.51.100.7") == 429)
        with service.http("requester") as http:
            assert http.get("/healthz", headers={"X-Forwarded-For": "198.51.100.7"}).status_code == 200
        assert all(is_open(one) for one in held)


def test_the_limit_of_open_files_leaves_room_for_ourselves(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = [(1024, 1200)]
    monkeypatch.setattr(resource, "getrlimit", lambda _: known[-1])
    monkeypatch.setattr(resource, "setrlimit", lambda _, pair: known.append(pair))
    with caplog.at_level(logging.WARNING):
        assert server._affordable(200) == 200
        assert not caplog.records
        assert server._affordable(1000) == (1200 - server.FILES_FOR_OURSELVES) // server.BURST
    assert known[-1] == (1200, 1200)
    assert len(caplog.records) == 1


@pytest.mark.parametrize(("found", "said"), [(None, "more than 10 bytes"), (12, "12 bytes")])
def test_a_body_that_is_too_large_is_told_the_limit(found: int | None, said: str) -> None:
    assert str(too_large(10, found)).startswith(f"the body has {said}; at most 10 are taken.")
