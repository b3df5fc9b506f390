"""The desk's server: who may speak to it, what every answer carries, and that its files hold nothing from elsewhere."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import httpx2
import pytest

from api.console.site import is_loopback, serve_desk
from labeler.errors import InvalidSetting, NotFound, Unavailable

pytestmark = pytest.mark.process

DIGEST = "ab" * 32


@dataclass
class Recorded:
    """A site that writes down what is decided."""

    done: list[tuple[str, ...]] = field(default_factory=list)

    def overview(self) -> dict[str, Any]:
        return {"agent_id": "hospital-a", "waiting": [], "done": len(self.done)}

    def rounds(self) -> list[dict[str, Any]]:
        return [{"round": "r"}]

    def rounds_csv(self) -> str:
        return "round\nr\n"

    def approve(self, digest: str) -> None:
        if digest != DIGEST:
            raise NotFound("nobody asked for this task")
        self.done.append(("approve", digest))

    def refuse(self, digest: str, reason: str) -> None:
        self.done.append(("refuse", digest, reason))

    def stop(self, reason: str) -> None:
        self.done.append(("stop", reason))

    def resume(self) -> None:
        self.done.append(("resume",))

    def embed(self) -> None:
        self.done.append(("embed",))


@dataclass
class Desk:
    """A running desk."""

    address: str
    site: Recorded

    @property
    def port(self) -> int:
        return int(urlsplit(self.address).port or 0)

    @property
    def token(self) -> str:
        return self.address.partition("#token=")[2]

    def http(self, **headers: str) -> httpx2.Client:
        shown = {"Authorization": f"Bearer {self.token}"} | headers
        return httpx2.Client(base_url=f"http://127.0.0.1:{self.port}", headers=shown, trust_env=False, timeout=240)


@pytest.fixture(scope="module")
def desk() -> Iterator[Desk]:
    site, stop, told = Recorded(), threading.Event(), list[str]()
    ready = threading.Event()

    def tell(address: str) -> None:
        told.append(address)
        ready.set()

    running = threading.Thread(
        target=serve_desk, args=(site,), kwargs={"host": "127.0.0.1", "port": 0, "stop": stop, "on_ready": tell}
    )
    running.start()
    assert ready.wait(240)
    yield Desk(told[0], site)
    stop.set()
    running.join(240)
    assert not running.is_alive()


def test_idle_connections_do_not_close_the_desk(desk: Desk) -> None:
    with contextlib.ExitStack() as held:
        for _ in range(200):
            held.enter_context(socket.create_connection(("127.0.0.1", desk.port), timeout=60))
        for _ in range(5):
            with desk.http() as http:
                assert http.get("/v1/site").status_code == 200


def test_what_is_decided_reaches_the_site_and_the_answer_shows_what_is_then(desk: Desk) -> None:
    before = len(desk.site.done)
    with desk.http() as http:
        assert http.post(f"/v1/tasks/{DIGEST}/approve", json={}).json()["done"] == before + 1
        http.post(f"/v1/tasks/{DIGEST}/refuse", json={"reason": "no"})
        http.post("/v1/stop", json={"reason": "lunch"})
        http.post("/v1/resume", json={})
        http.post("/v1/images/embed", json={})
        assert http.get("/v1/rounds.json").json() == [{"round": "r"}]
        assert http.get("/v1/rounds.csv").text == "round\nr\n"
        unknown = http.post(f"/v1/tasks/{'cd' * 32}/approve", json={})
    assert (unknown.status_code, unknown.json()) == (404, {"detail": "nobody asked for this task"})
    assert desk.site.done[before:] == [
        ("approve", DIGEST), ("refuse", DIGEST, "no"), ("stop", "lunch"), ("resume",), ("embed",),
    ]  # fmt: skip


@pytest.mark.parametrize("shown", ["", "Bearer", "Bearer wrong", "Basic YTpi", "Bearer \xe9"])
@pytest.mark.parametrize("path", ["/v1/site", "/v1/rounds.csv", "/v1/nothing"])
def test_without_the_token_nothing_is_told(desk: Desk, shown: str, path: str) -> None:
    with desk.http() as http:
        answer = http.get(path, headers=[(b"Authorization", shown.encode("latin-1"))])
    assert answer.status_code == 401
    assert httpx2.get(f"http://127.0.0.1:{desk.port}{path}", trust_env=False, timeout=240).status_code == 401
    assert "hospital" not in answer.text
    assert desk.token not in answer.text


@pytest.mark.parametrize("host", ["evil.example", "evil.example:80", "127.0.0.1.evil.example", "0.0.0.0", "", "[::2]"])
def test_a_name_that_was_pointed_here_is_refused_before_anything_is_looked_at(desk: Desk, host: str) -> None:
    before = len(desk.site.done)
    with desk.http(Host=host) as http:
        for path in ("/", "/files/desk.js", "/v1/site"):
            assert http.get(path).status_code in (400, 421), path
        assert http.post("/v1/stop", json={}).status_code in (400, 421)
    assert len(desk.site.done) == before


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1:9000", "[::1]:8600", "LOCALHOST:1"])
def test_names_of_this_machine_are_taken_also_through_a_forwarded_port(desk: Desk, host: str) -> None:
    with desk.http(Host=host) as http:
        assert http.get("/v1/site").status_code == 200


@pytest.mark.parametrize("origin", ["http://evil.example", "null", "http://127.0.0.1:1", "https://localhost"])
def test_another_page_decides_nothing_even_with_the_token(desk: Desk, origin: str) -> None:
    before = len(desk.site.done)
    with desk.http(Origin=origin) as http:
        assert http.post("/v1/stop", json={}).status_code == 403
        assert "access-control-allow-origin" not in {name.lower() for name in http.get("/v1/site").headers}
    with desk.http(Origin=f"http://127.0.0.1:{desk.port}") as http:
        assert http.post("/v1/resume", json={}).status_code == 200
    assert len(desk.site.done) == before + 1


def test_bodies_are_small_json(desk: Desk) -> None:
    before = len(desk.site.done)
    with desk.http() as http:
        assert http.post("/v1/stop", json={"reason": "x" * 20_000}).status_code == 413
        assert http.post("/v1/stop", content=iter([b"{}"])).status_code == 413
        assert http.post("/v1/stop", json={"reason": "x" * 1001}).status_code == 422
        assert http.post("/v1/stop", json={"because": "x"}).status_code == 422
        assert http.post("/v1/stop", content=b"[").status_code == 422
        as_json = {"Content-Type": "application/json"}
        assert http.post("/v1/stop", content=b"[", headers=as_json).status_code == 400
    assert len(desk.site.done) == before


def test_every_answer_keeps_scripts_of_others_out(desk: Desk) -> None:
    with desk.http() as http:
        answers = [http.get(path) for path in ("/", "/files/desk.js", "/files/none", "/v1/site", "/v1/none", "/none")]
        answers.append(http.get("/v1/site", headers={"Authorization": ""}))
    for answer in answers:
        policy = answer.headers["Content-Security-Policy"]
        assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self'")
        assert "unsafe" not in policy
        assert "frame-ancestors 'none'" in policy
        assert answer.headers["Cache-Control"] == "no-store"
        assert answer.headers["Referrer-Policy"] == "no-referrer"
        assert answer.headers["X-Content-Type-Options"] == "nosniff"
        assert answer.headers["Cross-Origin-Resource-Policy"] == "same-origin"
        assert desk.token not in answer.text
    assert [answer.status_code for answer in answers] == [200, 200, 404, 200, 404, 404, 401]


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "example.org", "", "127.0.0.1.nip.io"])
def test_it_listens_on_this_machine_alone(host: str) -> None:
    with pytest.raises(InvalidSetting, match="for the machine that its agent runs on"):
        serve_desk(Recorded(), host=host, port=0, stop=threading.Event())
    assert not is_loopback(host)


def test_an_address_that_is_taken_is_said() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(Unavailable, match="Choose another port"):
        serve_desk(Recorded(), host="127.0.0.1", port=taken.getsockname()[1], stop=threading.Event())
