"""Answers that nobody reads, or that are read too slowly: the real server, and clients that do not read."""

from __future__ import annotations

import contextlib
import json
import select
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import pytest
from starlette.types import Receive, Scope, Send

from api import limits
from api.server import Server, listen
from tests.api.routes.conftest import ConfigOf, ServeIn, eventually

pytestmark = pytest.mark.process

HEAD: Final = b"%s %s HTTP/1.1\r\nHost: x\r\n\r\n"
LARGE: Final = 32 * 2**20
"""More than the systems of both ends buffer, where the receiver's buffer is small."""
AHEAD: Final = 20_000
"""So many small answers, too."""


@dataclass
class Small:
    """An application with answers of every kind, and how many of them are under way."""

    under_way: int = 0
    ended: int = 0
    events: threading.Event = field(default_factory=threading.Event)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            while (message := await receive())["type"] != "lifespan.shutdown":
                await send({"type": f"{message['type']}.complete"})
            await send({"type": "lifespan.shutdown.complete"})
            return
        self.under_way += 1
        try:
            await self.answer(scope["path"], receive, send)
        finally:
            self.under_way -= 1
            self.ended += 1

    async def answer(self, path: str, receive: Receive, send: Send) -> None:
        headers = [(b"content-length", str(LARGE).encode())] if path in ("/whole", "/pieces") else []
        status = 500 if path == "/broken" else 200
        await send({"type": "http.response.start", "status": status, "headers": headers})
        if path == "/whole":
            await send({"type": "http.response.body", "body": bytes(LARGE)})
        elif path in ("/pieces", "/chunked", "/broken"):
            for start in range(0, LARGE, 2**20):
                is_last = start + 2**20 == LARGE
                await send({"type": "http.response.body", "body": bytes(2**20), "more_body": not is_last})
                if path == "/broken" and start > LARGE // 2:
                    raise RuntimeError("a defect in the middle of an answer")
        elif path == "/events":
            await send({"type": "http.response.body", "body": b"data: 1\n\n", "more_body": True})
            await receive()
            message = await receive()
            assert message["type"] == "http.disconnect"
        else:
            await send({"type": "http.response.body", "body": bytes(1000)})


@contextmanager
def serving(app: Small, **settings: Any) -> Iterator[tuple[Server, tuple[str, int]]]:
    """Serve an application on a port of its own."""
    ready = threading.Event()
    server = Server(app, most_idle=64, on_ready=ready.set, **settings)
    with listen("127.0.0.1", 0) as listening:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
        thread.start()
        try:
            assert ready.wait(60)
            yield server, listening.getsockname()
        finally:
            server.should_exit = True
            thread.join(60)


def silent(address: tuple[str, int]) -> socket.socket:
    """A client with a small buffer, so that little fits on the way."""
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.connect(address)
    client.settimeout(240)
    return client


def is_cut(client: socket.socket) -> bool:
    """Whether the other end has reset the connection; nothing is read."""
    poll = select.poll()
    poll.register(client, 0)
    return bool(poll.poll(0))


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "ANSWER_S", 0.5)


CASES: Final = {
    "one whole body": HEAD % (b"GET", b"/whole"),
    "a body in pieces": HEAD % (b"GET", b"/pieces"),
    "a chunked body": HEAD % (b"GET", b"/chunked"),
    "a body that fails in its middle": HEAD % (b"GET", b"/broken"),
    "a body before a close": b"GET /whole HTTP/1.0\r\n\r\n",
    "small answers, asked for at once": AHEAD * (HEAD % (b"GET", b"/small")),
    "heads alone, asked for at once": AHEAD * (HEAD % (b"HEAD", b"/small")),
    "a large one, and others behind it": HEAD % (b"GET", b"/whole") + 20 * (HEAD % (b"GET", b"/small")),
}


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("case", CASES)
def test_a_client_that_never_reads_is_cut_and_holds_nothing(case: str) -> None:
    app = Small()
    with serving(app) as (server, address), silent(address) as client:
        sender = threading.Thread(target=lambda: _send(client, CASES[case]))
        sender.start()
        eventually(lambda: app.ended > 0 or app.under_way > 0)
        eventually(lambda: is_cut(client), seconds=30)
        eventually(lambda: not server.server_state.connections and not app.under_way, seconds=30)
        sender.join()


def _send(client: socket.socket, sent: bytes) -> None:
    with contextlib.suppress(ConnectionError):
        client.sendall(sent)


@pytest.mark.usefixtures("impatient")
def test_a_client_behind_tls_that_never_reads_is_cut(tmp_path: Path) -> None:
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    made = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2"]
    made += ["-subj", "/CN=x", "-keyout", str(key), "-out", str(certificate)]
    subprocess.run(made, check=True, capture_output=True)
    app, trusting = Small(), ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    trusting.check_hostname, trusting.verify_mode = False, ssl.CERT_NONE
    with (
        serving(app, ssl_keyfile=str(key), ssl_certfile=str(certificate)) as (server, address),
        trusting.wrap_socket(silent(address)) as client,
    ):
        client.sendall(HEAD % (b"GET", b"/whole"))
        eventually(lambda: app.ended == 1 and not server.server_state.connections, seconds=30)


@pytest.mark.usefixtures("impatient")
def test_a_client_that_takes_a_byte_now_and_then_is_cut() -> None:
    app = Small()
    with serving(app) as (server, address), silent(address) as client:
        client.sendall(HEAD % (b"GET", b"/whole"))
        eventually(lambda: app.under_way > 0)

        def taking() -> bool:
            with contextlib.suppress(ConnectionError):
                client.recv(10)
            return not server.server_state.connections

        eventually(taking, seconds=60)
        assert app.ended == 1


def test_a_client_that_reads_fast_enough_gets_all_of_it_however_long_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "ANSWER_S", 2.0)
    monkeypatch.setattr(limits, "LEAST_BYTES_PER_S", 1000)
    app = Small()
    with serving(app) as (_, address), silent(address) as client:
        client.sendall(HEAD % (b"GET", b"/whole"))
        got, begun = 0, time.monotonic()
        while got < LARGE:
            # Half as fast as it could, for longer than a silent client may be silent.
            part = client.recv(2**20)
            assert part
            got += len(part)
            if time.monotonic() - begun < 6:
                select.select([], [], [], 0.1)
        assert got > LARGE


def test_a_client_that_reads_on_and_on_below_the_least_speed_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """It never stands still for long, but earns no time by what it takes."""
    monkeypatch.setattr(limits, "ANSWER_S", 2.0)
    monkeypatch.setattr(limits, "LEAST_BYTES_PER_S", 2**40)
    app = Small()
    with serving(app) as (server, address), silent(address) as client:
        client.sendall(HEAD % (b"GET", b"/whole"))
        eventually(lambda: app.under_way > 0)

        def taking() -> bool:
            with contextlib.suppress(ConnectionError):
                client.recv(2**16)
            return not server.server_state.connections

        eventually(taking, seconds=30)
        assert app.ended == 1


@pytest.mark.usefixtures("impatient")
def test_a_stream_without_events_is_not_cut() -> None:
    app = Small()
    with serving(app) as (server, address), silent(address) as client, silent(address) as other:
        client.sendall(HEAD % (b"GET", b"/events"))
        eventually(lambda: app.under_way == 1)
        other.sendall(HEAD % (b"GET", b"/whole"))
        eventually(lambda: is_cut(other), seconds=30)
        assert app.under_way == 1, "the stream began before it, and goes on"
        assert not is_cut(client)
    assert server.server_state.total_requests <= 1


@pytest.mark.usefixtures("impatient")
def test_a_stream_whose_client_went_ends_though_another_request_was_sent_behind_it() -> None:
    app = Small()
    with serving(app) as (_, address):
        with silent(address) as client:
            client.sendall(HEAD % (b"GET", b"/events") + HEAD % (b"GET", b"/small"))
            eventually(lambda: app.under_way == 1)
        eventually(lambda: app.ended == 1 and not app.under_way, seconds=30)


@pytest.mark.usefixtures("impatient")
def test_clients_that_never_read_give_their_places_back_to_others(
    serve_at_socket: ServeIn, socket_config_of: ConfigOf, tmp_path: Path
) -> None:
    with (
        serve_at_socket(socket_config_of(tmp_path / "home", max_connections_per_address=8)) as service,
        contextlib.ExitStack() as held,
    ):
        place = (service.url.split("/")[2].split(":")[0], int(service.url.rpartition(":")[2]))
        clients = [held.enter_context(silent(place)) for _ in range(8)]
        for one in clients:
            _send(one, 400 * (HEAD % (b"GET", b"/openapi.json")))
        eventually(lambda: all(map(is_cut, clients)), seconds=60)
        with service.http("viewer") as http:
            assert json.loads(http.get("/v1/whoami").content)["role"] == "viewer"
