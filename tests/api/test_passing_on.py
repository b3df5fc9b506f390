"""What a coordinator that follows answers by itself, and what it passes on as it is."""

from __future__ import annotations

import http.client
import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import anyio
import httpx2
import pytest
import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send

from api.coordinator.config import SideBySideTable
from api.leading import SideBySide, is_only_read
from api.passing_on import PassingOn, check_peer_url
from labeler.errors import InvalidSetting
from tests.api.conftest import House


@contextmanager
def serving(app: ASGIApp) -> Iterator[str]:
    """An application behind a real server; its URL."""
    listening = socket.socket()
    listening.bind(("127.0.0.1", 0))
    listening.listen()

    async def whole(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "lifespan":
            await app(scope, receive, send)
            return
        for step in ("startup", "shutdown"):
            await receive()
            if step == "shutdown" and isinstance(app, PassingOn):
                await app.aclose()
            await send({"type": f"lifespan.{step}.complete"})

    server = uvicorn.Server(
        uvicorn.Config(
            whole, http="h11", proxy_headers=False, log_config=None, lifespan="on", timeout_graceful_shutdown=1
        )
    )
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()
        listening.close()


class Leader:
    """Tells what it was asked, in two pieces, the second once it is let."""

    def __init__(self) -> None:
        self.may_end = threading.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = b""
        while (message := await receive())["type"] == "http.request":
            body += message.get("body", b"")
            if not message.get("more_body", False):
                break
        headers = [(name.decode(), value.decode()) for name, value in scope["headers"]]
        told = {"method": scope["method"], "path": scope["raw_path"].decode(), "query": scope["query_string"].decode()}
        answer = json.dumps(told | {"headers": headers, "bytes": len(body)}).encode() + b"\n"
        kept = [(b"content-type", b"application/x-told"), (b"x-own", b"1"), (b"x-own", b"2"), (b"set-cookie", b"a=b")]
        await send({"type": "http.response.start", "status": 418, "headers": kept})
        await send({"type": "http.response.body", "body": answer, "more_body": True})
        await anyio.to_thread.run_sync(self.may_end.wait)
        await send({"type": "http.response.body", "body": b"end", "more_body": False})


def ask(url: str, method: str, path: str, **more: Any) -> tuple[http.client.HTTPResponse, http.client.HTTPConnection]:
    place = urlsplit(url)
    connection = http.client.HTTPConnection(place.hostname or "", place.port, timeout=30)
    connection.request(method, path, **more)
    return connection.getresponse(), connection


def test_a_request_and_its_answer_are_passed_on_as_they_are_piece_by_piece() -> None:
    leader, passing_on = Leader(), PassingOn(delta=1e-5)
    with serving(leader) as behind, serving(passing_on) as url:
        passing_on.to(f"{behind}/")
        body = [b"x" * 100_000, b"y" * 200_000]
        headers = {
            "Authorization": "Bearer lab_secret",
            "Idempotency-Key": "k",
            "Connection": "keep-alive, te",
            "TE": "x",
        }
        answer, connection = ask(
            url, "POST", "/v1/jobs/a%2Fb?of=questions&x=%20", body=iter(body), headers=headers, encode_chunked=True
        )
        told = json.loads(answer.readline())
        leader.may_end.set()  # only now, so the first piece did not wait for the last
        assert answer.read() == b"end"
        connection.close()
        assert (answer.status, answer.getheader("content-type")) == (418, "application/x-told")
        assert answer.headers.get_all("x-own") == ["1", "2"]
        assert (told["method"], told["path"], told["query"]) == ("POST", "/v1/jobs/a%2Fb", "of=questions&x=%20")
        assert told["bytes"] == 300_000
        sent = dict(told["headers"])
        assert (sent["authorization"], sent["idempotency-key"]) == ("Bearer lab_secret", "k")
        assert sent["x-forwarded-for"] == "127.0.0.1"
        assert "te" not in sent


def asked_raw(url: str, target: str, *headers: str) -> dict[str, Any]:
    """What the leader says that it was asked, where a target is sent that no client library would send."""
    place = urlsplit(url)
    lines = (f"GET {target} HTTP/1.1", "Host: a", "Connection: close", *headers)
    with socket.create_connection((place.hostname or "", place.port or 0), timeout=30) as connection:
        connection.sendall("".join(f"{line}\r\n" for line in (*lines, "")).encode())
        answer = http.client.HTTPResponse(connection)
        answer.begin()
        told: dict[str, Any] = json.loads(answer.readline())
        return told


@pytest.mark.parametrize("target", ["@{elsewhere}/v1/parties", "http://{elsewhere}/v1/parties", ".invalid/v1", "*"])
def test_nothing_that_is_asked_for_sends_a_request_anywhere_but_to_who_leads(target: str) -> None:
    leader, passing_on = Leader(), PassingOn(delta=1e-5)
    leader.may_end.set()
    with serving(leader) as behind, serving(passing_on) as url, socket.socket() as elsewhere:
        elsewhere.bind(("127.0.0.1", 0))
        elsewhere.listen()
        elsewhere.settimeout(0.0)
        passing_on.to(behind)
        wanted = target.format(elsewhere=f"127.0.0.1:{elsewhere.getsockname()[1]}")
        assert asked_raw(url, wanted)["path"] == wanted
        with pytest.raises(BlockingIOError):
            elsewhere.accept()


def test_what_one_requester_is_given_or_says_of_itself_reaches_no_other() -> None:
    leader, passing_on = Leader(), PassingOn(delta=1e-5)
    leader.may_end.set()
    with serving(leader) as behind, serving(passing_on) as url:
        passing_on.to(behind)
        asked_raw(url, "/v1/parties", "Authorization: Bearer lab_secret")
        told = asked_raw(url, "/v1/parties", "X-Forwarded-For: 10.1.1.1", "X-Forwarded-Proto: https")
    assert sorted(told["headers"]) == [
        ["host", urlsplit(behind).netloc],
        ["x-forwarded-for", "127.0.0.1"],
        ["x-forwarded-proto", "http"],
    ]


@pytest.mark.parametrize("is_known", [False, True])
def test_where_nobody_leads_or_who_did_is_gone_whoever_asks_is_told_to_ask_again(is_known: bool) -> None:
    passing_on = PassingOn(delta=1e-5)
    with serving(passing_on) as url:
        if is_known:
            with serving(Leader()) as behind:
                passing_on.to(behind)
        answer, connection = ask(url, "POST", "/v1/jobs", body=b"{}")
        problem = json.loads(answer.read())
        connection.close()
        assert (answer.status, answer.getheader("content-type")) == (503, "application/problem+json")
        assert answer.getheader("retry-after")
        assert problem["type"] == "urn:labeler:problem:unavailable"


@pytest.mark.parametrize(
    ("method", "path", "query", "is_own"),
    [
        ("GET", "/v1/jobs/job-1", "", True),
        ("GET", "/v1/jobs", "after=x", True),
        ("GET", "/v1/jobs/job-1/events", "", True),
        ("POST", "/v1/jobs:estimate", "", True),
        ("GET", "/v1/jobs/job-1/labels", "format=jsonl&of=questions", True),
        ("GET", "/v1/jobs/job-1/labels", "format=jsonl", False),
        ("GET", "/v1/jobs/job-1/labels", "of=images", False),
        ("GET", "/v1/jobs/job-1/student", "", False),
        ("POST", "/v1/jobs", "", False),
        ("DELETE", "/v1/jobs/job-1", "", False),
        ("DELETE", "/v1/jobs/job-1/data", "", False),
        ("POST", "/v1/labels", "", False),
        ("POST", "/v1/messages", "", False),
        ("GET", "/v1/parties", "", False),
        ("GET", "/v1/tokens", "", False),
        ("GET", "/readyz", "", False),
    ],
)
def test_only_what_is_read_is_answered_by_who_follows(method: str, path: str, query: str, is_own: bool) -> None:
    assert is_only_read({"method": method, "path": path, "query_string": query.encode()}) is is_own


@pytest.mark.parametrize(
    "url",
    ["http://10.1.2.3:8443", "http://labels.example.org", "ftp://127.0.0.1", "http://127.0.0.1.example.org/", ":"],
)
def test_tokens_are_never_passed_on_in_clear_to_another_machine(url: str, house: House) -> None:
    with pytest.raises(InvalidSetting, match=r"in clear|cannot be read"):
        check_peer_url(url)
    # Refused before anything is opened: whoever gives such an address is told so at once.
    settings = house.config.model_copy(update={"side_by_side": SideBySideTable(), "journal": "postgresql://none"})
    with pytest.raises(InvalidSetting, match=r"in clear|cannot be read"):
        SideBySide(settings, url=url, on_lost=lambda: None)
    # An address that an earlier version wrote into the journal is passed nothing.
    passing_on = PassingOn(delta=1e-5)
    with serving(passing_on) as own:
        passing_on.to(url)
        answer = httpx2.get(f"{own}/v1/jobs", headers={"authorization": "Bearer secret"})
        assert answer.status_code == 503
        assert "not reached over TLS" in answer.json()["detail"]
        passing_on.to(None)
        assert "no coordinator leads" in httpx2.get(f"{own}/v1/jobs").json()["detail"]


def test_an_authority_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidSetting, match=r"side_by_side\.ca_file"):
        PassingOn(delta=1e-5, ca_file=str(tmp_path / "none.pem"))
    for fine in ("https://10.1.2.3:8443", "http://127.0.0.1:9", "http://[::1]:9", "http://localhost:9"):
        assert check_peer_url(fine) == fine
