"""A real coordinator: SQLite on disk, tokens of every role, behind a door without an address (tests.doors)

Tests of sockets, of connections and of Redis ask for `socket_service` or `own_socket_service`, which have a real
server: redis-server, and uvicorn in a thread.
"""

from __future__ import annotations

import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pytest
import uvicorn

from api import request_context
from api.coordinator.config import CoordinatorConfig, LimitsTable
from api.coordinator.ownership import Reader
from api.coordinator.service import Coordinator
from api.schema import PartyRequest, Role, TaskRequest, TaskView
from api.server import listen, serve_at, server_of
from labeler.caps import CapsTable
from labeler.driver.mail_memory import MemoryMailbox
from labeler.messages import COORDINATOR, Message, frame
from labeler.messages.bodies import Poll
from labeler.rounds.effects import ProposalReply
from labeler.system.keys import PartyKeys
from tests import doors
from workers.up.redis_server import RedisServer

CLASSES = ("backpack", "keyboard", "mug")
FINGERPRINT = "sha256:test-backbone"
AGENTS = ("agent-a", "agent-b", "agent-c")
TALLIERS = ("tallier-0", "tallier-1", "tallier-2")
DIMENSION = 8
NOBODY = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
ROLES: tuple[Role, ...] = ("viewer", "requester", "admin")


@dataclass
class Service:
    """A running service and what a test needs to talk to it."""

    url: str
    coordinator: Coordinator
    tokens: dict[Role, str] = field(repr=False)
    keys: dict[str, PartyKeys] = field(default_factory=dict, repr=False)

    def http(self, role: Role | None) -> httpx2.Client:
        headers = {} if role is None else {"Authorization": f"Bearer {self.tokens[role]}"}
        # The limit ends a test that hangs, and promises nothing about time: cores are shared with other tests.
        # Reading the system's certificates takes 20 ms of a core, and hundreds of tests would do it for nothing.
        return httpx2.Client(base_url=self.url, headers=headers, timeout=240, trust_env=False, verify=NOBODY)

    def connect(self, *, source: str = "127.0.0.1") -> socket.socket:
        """A bare connection to it."""
        host, port = self.url.removeprefix("http://").split(":")
        return socket.create_connection((host, int(port)), timeout=240, source_address=(source, 0))

    def polling(self, who: str, number: int, *, keys: PartyKeys | None = None, **changes: Any) -> Message:
        """A poll that a party signs."""
        fields: dict[str, Any] = {"after": "", "wait_s": 0.0, "journal_seq": 0, "journal_hash": ""}
        fields |= {"coordinator_seq": 0, "coordinator_hash": "", "program": "labeler/0.5", "facts": {}}
        body = Poll(**fields | changes).encode()
        return (keys or self.keys[who]).message("poll", sender=who, recipient=COORDINATOR, sequence=number, body=body)

    def post(self, *messages: Message, path: str = "/v1/messages") -> httpx2.Response:
        """Send messages as a party does, and return the answer."""
        with self.http(None) as http:
            return http.post(path, content=frame(messages), headers={"Content-Type": "application/octet-stream"})

    def agree(self, job_id: str) -> None:
        """Every agent has said yes to a job."""
        store = self.coordinator.stores.jobs.willingness
        for agent in AGENTS:
            store.report(job_id, agent, ProposalReply("willing", until_s=time.time() + 3600))
        self.coordinator.driver.wake(job_id)

    def holder(self, role: Role) -> str:
        """Id of the token of a role."""
        record = self.coordinator.tokens.find(self.tokens[role])
        assert record is not None
        return record.token_id

    def reader(self, role: Role) -> Reader:
        """Whoever holds the token of a role."""
        return Reader(self.holder(role), role)

    def task(self, *, by: str | None = None, **changes: object) -> TaskView:
        """A task, of the requester unless another token's id is given."""
        fields: dict[str, object] = {
            "name": "tools",
            "classes": CLASSES,
            "method": "knn",
            "k": 1,
            "sigma_votes": 20.0,
            "max_queries": 100,
            "backbone_fingerprint": FINGERPRINT,
        }
        return self.coordinator.create_task(
            TaskRequest.model_validate(fields | changes), by=by or self.holder("requester")
        )

    def vectors(self, **more: object) -> dict[str, Any]:
        """The body of a job of three feature vectors in a task of its own."""
        features = np.eye(3, DIMENSION).tolist()
        return {"task_id": self.task().task_id, "features": features, "backbone_fingerprint": FINGERPRINT} | more


def eventually(holds: Callable[[], bool], *, seconds: float = 240.0) -> None:
    """Wait until something holds."""
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "it did not come to hold"
        time.sleep(0.02)


@pytest.fixture(scope="session")
def redis_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with RedisServer(tmp_path_factory.mktemp("redis")) as server:
        yield server.url


def filled(coordinator: Coordinator, *, is_filled: bool) -> Service:
    """A coordinator's tokens and, where it is filled, its parties."""
    tokens = {role: coordinator.tokens.create(f"a {role}", role)[1] for role in ROLES}
    keys = {name: PartyKeys.generate() for name in (*AGENTS, *TALLIERS)} if is_filled else {}
    for name in keys:
        public = keys[name].public
        coordinator.roster.enrol(
            PartyRequest(
                party_id=name,
                role="agent" if name in AGENTS else "tallier",
                verify_key=public.verify_key,
                seal_key=public.seal_key,
                tallier=None if name in AGENTS else TALLIERS.index(name),
            )
        )
    return Service("", coordinator, tokens, keys)


@contextmanager
def running(config: CoordinatorConfig, *, is_filled: bool = True) -> Iterator[Service]:
    """Open, fill and serve a coordinator behind a door until the block ends; not filled, nobody is enrolled."""
    coordinator = Coordinator.open(config, mailbox=MemoryMailbox())
    service = filled(coordinator, is_filled=is_filled)
    coordinator.start()
    try:
        with doors.serving(server_of(coordinator)) as number:
            yield replace(service, url=f"http://{doors.HOST}:{number}")
    finally:
        coordinator.stop()


@contextmanager
def running_at_a_socket(config: CoordinatorConfig, *, is_filled: bool = True, port: int = 0) -> Iterator[Service]:
    """The same with the mailbox of the settings, Redis, and uvicorn at a port of loopback."""
    coordinator = Coordinator.open(config)
    service = filled(coordinator, is_filled=is_filled)
    ready = threading.Event()
    servers: list[uvicorn.Server] = []

    def on_ready(url: str) -> None:
        service.url = url
        ready.set()

    def run() -> None:
        with listen("127.0.0.1", port) as listening:
            serve_at(listening, coordinator, on_ready=on_ready, on_server=servers.append)

    thread = threading.Thread(target=run, name="server")
    thread.start()
    try:
        assert ready.wait(240), "the server did not start"
        yield service
    finally:
        if servers:
            servers[0].should_exit = True
        thread.join(240)
        assert not thread.is_alive()


ConfigOf = Callable[..., CoordinatorConfig]
ServeIn = Callable[..., AbstractContextManager[Service]]


def config_at(
    home: Path,
    *,
    federation_epsilon: float = 50.0,
    trusted_proxies: tuple[str, ...] = (),
    redis_url: str = "redis://127.0.0.1:1/0",
    **limits: int,
) -> CoordinatorConfig:
    """The settings of a coordinator in a folder, which is made."""
    home.mkdir(parents=True, exist_ok=True, mode=0o700)
    return CoordinatorConfig(
        home=home,
        redis_url=redis_url,
        public_url="http://127.0.0.1:8080",
        classes=CLASSES,
        federation=CapsTable(instance_epsilon=federation_epsilon, agent_epsilon="unlimited"),
        agents=CapsTable(instance_epsilon=federation_epsilon, agent_epsilon="unlimited"),
        backbones={FINGERPRINT: "pixels"},
        trusted_proxies=trusted_proxies,
        limits=LimitsTable(**({"max_requests_per_minute": 1_000_000} | limits)),
    )


@pytest.fixture(scope="session")
def config_of() -> ConfigOf:
    return config_at


@pytest.fixture(scope="session")
def socket_config_of(redis_url: str) -> ConfigOf:
    """Settings of a service with a real server, and with the Redis of all tests."""
    return partial(config_at, redis_url=redis_url)


@pytest.fixture(scope="session")
def service(config_of: ConfigOf, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with running(config_of(tmp_path_factory.mktemp("coordinator") / "home")) as started:
        yield started


@pytest.fixture(scope="session")
def socket_service(socket_config_of: ConfigOf, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with running_at_a_socket(socket_config_of(tmp_path_factory.mktemp("coordinator") / "home")) as started:
        yield started


def of_new_requester(service: Service) -> Service:
    """The same service with a requester who has no jobs yet: each of another's keeps its place for ten seconds."""
    _, secret = service.coordinator.tokens.create("a new requester", "requester")
    return replace(service, tokens=service.tokens | {"requester": secret})


def asking_once(config: CoordinatorConfig) -> CoordinatorConfig:
    """The same settings, but nobody is asked twice: mail that is counted is the same on a slow machine."""
    return config.model_copy(update={"timing": config.timing.model_copy(update={"ask_again_s": 3600.0})})


@pytest.fixture
def own(config_of: ConfigOf, tmp_path: Path) -> Iterator[Service]:
    """A service of one test, beside which none has mail or jobs."""
    with running(asking_once(config_of(tmp_path / "home"))) as started:
        yield started


@pytest.fixture
def own_socket_service(tmp_path: Path) -> Iterator[Service]:
    """A service of one test with a real server, and with mail of its own."""
    with RedisServer(tmp_path / "redis") as server:
        config = asking_once(config_at(tmp_path / "home", redis_url=server.url))
        with running_at_a_socket(config) as started:
            yield started


@pytest.fixture
def no_discarding(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who is refused is not given five seconds to send the rest of a body that never comes."""
    monkeypatch.setattr(request_context, "DISCARD_S", 0.1)


@pytest.fixture(scope="session")
def serve_in() -> ServeIn:
    """For tests that need a service of their own."""
    return running


@pytest.fixture(scope="session")
def serve_at_socket() -> ServeIn:
    """For tests that need a service of their own with a real server."""
    return running_at_a_socket


@pytest.fixture
def features() -> list[list[float]]:
    rows = np.random.default_rng(7).normal(size=(2, DIMENSION))
    return (rows / np.linalg.norm(rows, axis=1, keepdims=True)).round(6).tolist()
