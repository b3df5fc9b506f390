"""What two readers of one stream could understand in two ways is refused, and spoils no answer before it."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator
from typing import cast

import pytest
from starlette.types import Receive, Scope, Send
from uvicorn import Config
from uvicorn.server import ServerState

from api.connections import ConnectionLimits, Crowd
from api.guarded_protocol import Times
from api.wire import Wire
from tests.api.routes.conftest import WIRES, ConfigOf, ServeIn, Service
from tests.api.routes.test_connections import QUICK, answer, connected

GET = b"GET /healthz HTTP/1.1\r\nHost: x\r\n"
POST = b"POST /v1/jobs:estimate HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
CHUNKED = POST + b"Transfer-Encoding: chunked\r\n\r\n"
LAST = GET + b"Connection: close\r\n\r\n"

MALFORMED = {
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
}
QUICK_ONLY = {
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
    "a head of more than its bound that came whole": GET + b"X: " + 17_000 * b"a" + b"\r\n\r\n",
    "empty lines without end": 20_000 * b"\r\n",
}
"""h11 takes these as RFC 9112 lets it, in the one way that it describes, or refuses some in other words."""


@pytest.fixture(scope="module", params=WIRES)
def wired(
    request: pytest.FixtureRequest, serve_in: ServeIn, config_of: ConfigOf, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Wire, Service]]:
    wire = cast("Wire", request.param)
    home = tmp_path_factory.mktemp("wired") / "home"
    with serve_in(config_of(home), times=QUICK, wire=wire) as service:
        yield wire, service


def say(service: Service, sent: bytes, *, pieces: int = 0) -> bytes:
    """What is answered until the connection is closed."""
    with connected(service) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with contextlib.suppress(ConnectionError):
            if not pieces:
                connection.sendall(sent)
            for start in range(0, len(sent) if pieces else 0, pieces or 1):
                connection.sendall(sent[start : start + pieces])
        return answer(connection)


def is_refused(sent: bytes, said: bytes) -> bool:
    # Who is cut off while it sends may not hear why.
    is_cut_off = not said and len(sent) > 10_000
    return b"HTTP/1.1 200" not in said and (is_cut_off or said.startswith(b"HTTP/1.1 400"))


BOTH = [(wire, name) for wire in WIRES for name in MALFORMED]
ONE = [(WIRES[1], name) for name in QUICK_ONLY]


@pytest.mark.parametrize(
    ("wired", "name"),
    [pytest.param(*wire.values, name, id=f"{wire.id}-{name}", marks=wire.marks) for wire, name in BOTH + ONE],
    indirect=["wired"],
)
def test_what_can_be_read_in_two_ways_is_refused_and_nothing_behind_it_is_answered(
    wired: tuple[Wire, Service], name: str
) -> None:
    _, service = wired
    sent = (MALFORMED | QUICK_ONLY)[name]
    assert is_refused(sent, say(service, sent + LAST)), "in one piece"
    if len(sent) < 1000:
        # A byte that is sent behind the refusal may reset the connection before the refusal is read: then once more.
        heard = (say(service, sent + LAST, pieces=1) for _ in range(5))
        assert is_refused(sent, next((one for one in heard if one), b"")), "byte by byte"


@pytest.mark.parametrize("name", ["a blank before a colon", "no host", "a length beside a coding"])
def test_what_is_malformed_behind_a_good_request_spoils_nothing_of_its_answer(
    wired: tuple[Wire, Service], name: str
) -> None:
    said = say(wired[1], 3 * (GET + b"\r\n") + MALFORMED[name] + LAST)
    first, second = said.split(b"HTTP/1.1 400")
    assert first.count(b"HTTP/1.1 200") == 3
    assert b"HTTP/1.1 200" not in second


@pytest.mark.parametrize("pieces", [0, 1, 7])
def test_requests_that_are_sent_ahead_are_answered_one_by_one_whatever_frames_their_bodies(
    wired: tuple[Wire, Service], pieces: int
) -> None:
    _, service = wired
    head = POST + f"Authorization: Bearer {service.tokens['requester']}\r\n".encode()
    chunks = head + b"Transfer-Encoding: Chunked\r\n\r\n"
    odd = b"\r\n\r\nGET /metrics HTTP/1.1\r\n\r\n"
    sent = (
        GET + b"\r\n",
        head + b"Content-Length: %d\r\n\r\n" % len(odd) + odd,
        GET + b"Connection: upgrade\r\nUpgrade: h2c\r\n\r\n",
        chunks + b"%x;a=b\r\n" % len(odd) + odd + b"\r\n0\r\n\r\n",
        GET + b"X: behind chunks \t\r\n\r\n",
        chunks + b"2\r\n{}\r\n0\r\nX-Trailer: y\r\n\r\n",
        head + b"Content-Length: 0\r\n\r\n",
        LAST,
    )
    said = say(service, b"".join(sent), pieces=pieces)
    statuses = [part[:3] for part in said.split(b"HTTP/1.1 ")[1:]]
    assert statuses == [b"200", b"422", b"200", b"422", b"200", b"422", b"422", b"200"], statuses


@pytest.mark.parametrize("beside", [b"5;" + 40_000 * b"a", b"0\r\n" + 4_000 * b"X-Y: abcdefgh\r\n"])
def test_what_stands_between_and_behind_chunks_is_bounded(wired: tuple[Wire, Service], beside: bytes) -> None:
    _, service = wired
    bearer = f"Authorization: Bearer {service.tokens['requester']}\r\n".encode()
    said = say(service, POST + bearer + b"Transfer-Encoding: chunked\r\n\r\n" + beside)
    assert said.startswith(b"HTTP/1.1 400"), "refused for its length, not for its time"


def test_a_peer_that_sends_much_ahead_costs_its_bytes(wired: tuple[Wire, Service]) -> None:
    said = say(wired[1], 2_000 * (GET + b"\r\n") + LAST)
    assert said.count(b"HTTP/1.1 200") == 2_001


def test_what_stands_behind_chunks_is_no_header_of_their_request(wired: tuple[Wire, Service]) -> None:
    _, service = wired
    bearer = f"Authorization: Bearer {service.tokens['requester']}\r\n".encode()
    said = say(service, CHUNKED + b"2\r\n{}\r\n0\r\n" + bearer + b"\r\n" + LAST)
    assert said.startswith(b"HTTP/1.1 401")


def test_an_answer_that_needs_no_body_leaves_the_rest_of_it_unread_as_the_next_request(
    wired: tuple[Wire, Service],
) -> None:
    smuggled = GET + b"\r\n"
    said = say(wired[1], POST + b"Content-Length: %d\r\n\r\n" % len(smuggled) + smuggled + LAST)
    assert said.startswith(b"HTTP/1.1 401")
    assert said.count(b"HTTP/1.1 200") <= 1, "its body is no request"


BEHIND_EACH_OTHER = {
    "no body": GET + b"\r\n",
    "a length": POST + b"Content-Length: 5\r\n\r\n\r\n\r\nx",
    "chunks": CHUNKED + b"6;a=b\r\n\r\n\r\nxx\r\n0\r\nX: y\r\n\r\n",
}


@pytest.mark.skipif(Wire.present().parser != "httptools", reason="httptools is absent")
@pytest.mark.parametrize("name", BEHIND_EACH_OTHER)
def test_wherever_a_read_ends_the_next_request_waits_for_the_answer_to_this_one(name: str) -> None:
    sent = BEHIND_EACH_OTHER[name] + GET + b"\r\n"
    begun: list[str] = []

    async def main() -> None:
        loop, may_answer = asyncio.get_running_loop(), asyncio.Event()

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            begun.append(scope["path"])
            while (await receive()).get("more_body"):
                pass
            await may_answer.wait()
            await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
            await send({"type": "http.response.body", "body": b""})

        config = Config(app, lifespan="off", log_config=None)
        config.load()
        listening = socket.create_server(("127.0.0.1", 0))
        for split in range(1, len(sent)):
            begun.clear()
            may_answer.clear()
            crowd = Crowd(ConnectionLimits())
            make = Wire("asyncio", "httptools").protocol(crowd, Times())
            with socket.create_connection(listening.getsockname()) as peer:
                accepted, place = listening.accept()
                assert crowd.enter(accepted, place, loop)
                protocol = make(config, ServerState(), {}, loop)
                transport, _ = await loop.connect_accepted_socket(lambda made=protocol: made, accepted)
                for part in (sent[:split], sent[split:]):
                    protocol.data_received(part)
                    await asyncio.sleep(0)
                assert len(begun) == 1, f"{split}: the next was begun beside it"
                assert not protocol.pipeline, f"{split}: the next was parsed before this one was answered"
                may_answer.set()
                answers = b""
                peer.setblocking(False)
                while answers.count(b"HTTP/1.1 200") < 2:
                    answers += await asyncio.wait_for(loop.sock_recv(peer, 65536), 60)
                assert len(begun) == 2
                transport.close()
                await asyncio.sleep(0)
        listening.close()

    asyncio.run(main())
