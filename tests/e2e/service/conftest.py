"""A whole federation as real processes: `labeler up` on a free port, with its own redis-server and journals."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from sklearn.datasets import load_digits

from api.client import Client
from tests.e2e.conftest import SharedFederations
from tests.forked_command import ForkedCommand
from tests.postgres_server import PostgresServer
from workers.homes.new import set_line
from workers.party.home import COORDINATOR_FILE
from workers.up import Plan
from workers.up.home import make_federation

START_S = 90.0


@dataclass(frozen=True)
class Service:
    """A running federation.

    Attributes:
        url: of its coordinator.
        token: the first admin token.
        home: its folder.
        faults: the file that arms a fault point.
        process: the supervisor.
    """

    url: str
    token: str
    home: Path
    faults: Path
    process: ForkedCommand

    def client(self, *, token: str | None = None) -> Client:
        return Client(self.url, token or self.token)

    def pid(self, role: str) -> int:
        """Process id of a child now running: "coordinator", "redis", "agent-1" ..."""
        return int(json.loads((self.home / "processes.json").read_text())[role])


StartService = Callable[..., Service]


@contextmanager
def running(
    home: Path, *arguments: object, agents: int = 3, journal: str | None = None, more: str = ""
) -> Iterator[Service]:
    """Start `labeler up` in a folder, wait until it is ready, and stop it at the end.

    Args:
        home: the folder.
        arguments: more of the command line.
        agents: how many.
        journal: URL of a PostgreSQL database for the coordinator's journal; a file in its home where absent.
        more: of the coordinator's settings, where there is such a journal.
    """
    home.mkdir(mode=0o700, parents=True, exist_ok=True)
    if journal is not None:
        federation = make_federation(home, Plan(agents=agents))
        settings = federation.coordinator / COORDINATOR_FILE
        set_line(settings, "journal", journal)
        settings.write_text(f"{settings.read_text()}\n{more}")
    faults, log = home.parent / f"{home.name}.fault", home.parent / f"{home.name}.log"
    command = ("up", "--home", home, "--agents", agents, "--port", 0, "--json", *arguments)
    process = ForkedCommand(*command, errors=log, environment={"LABELER_FAULTS": str(faults)})
    try:
        line = process.stdout.readline()
        assert line, log.read_text()
        told = json.loads(line)
        yield Service(told["url"], told["token"], home, faults, process)
    finally:
        process.end()


@pytest.fixture
def service(federations: SharedFederations, tmp_path_factory: pytest.TempPathFactory) -> Service:
    """One federation of three agents for all tests that do not harm it."""
    return federations.get("service", lambda: running(tmp_path_factory.mktemp("up") / "federation"))


@pytest.fixture
def on_postgresql(
    federations: SharedFederations, postgres_server: PostgresServer, tmp_path_factory: pytest.TempPathFactory
) -> Service:
    """One federation of three agents whose coordinator keeps its journal in a real PostgreSQL."""

    def start() -> AbstractContextManager[Service]:
        home = tmp_path_factory.mktemp("postgresql") / "federation"
        return running(home, journal=postgres_server.new_database())

    return federations.get("postgresql", start)


@pytest.fixture
def harmed(federations: SharedFederations, tmp_path_factory: pytest.TempPathFactory) -> Service:
    """One federation of three agents for tests that harm it and leave it whole."""
    return federations.get("harmed", lambda: running(tmp_path_factory.mktemp("harmed") / "federation"))


@pytest.fixture(scope="session")
def digit_features() -> np.ndarray:
    """Features of real digits as the `pixels:8` backbone makes them, int16, shape (1797, 64)."""
    from feature_store.backbones import load_backbone
    from feature_store.rows import quantize

    backbone = load_backbone("pixels:8")
    from PIL import Image

    images = [Image.fromarray((image * (255 / 16)).round().astype(np.uint8)) for image in load_digits().images]
    return quantize(backbone.embed(images))


def wait_until(condition: Callable[[], bool], *, seconds: float = 90.0, what: str = "it") -> None:
    """Wait for something that other processes do. The limit ends a test that hangs and promises nothing about time: on
    shared cores several federations run beside each other."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"waited {seconds} s for {what}"
        time.sleep(0.05)
