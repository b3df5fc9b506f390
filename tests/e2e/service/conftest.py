"""A whole federation as real processes: `labeler up` on a free port, with its own redis-server and journals."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from api.client import Client
from tests.e2e.conftest import SharedFederations
from tests.forked_command import ForkedCommand
from tests.postgres_server import PostgresServer
from tests.stolen_keys import VARIABLE
from workers.homes.journals import backup_home
from workers.homes.new import set_line
from workers.party.home import COORDINATOR_FILE
from workers.up import FederationPlan
from workers.up.home import make_federation


@dataclass(frozen=True)
class Service:
    """A running federation.

    Attributes:
        url: of its coordinator.
        token: the first admin token.
        home: its folder.
        faults: the file that arms a fault point.
        copies: the file of every key that a party has drawn (`tests/stolen_keys.py`).
        process: the supervisor.
    """

    url: str
    token: str
    home: Path
    faults: Path
    copies: Path
    process: ForkedCommand

    @property
    def examples(self) -> Path:
        """The folder of images to try it with."""
        return self.home / "examples"

    @property
    def dashboard(self) -> str:
        return f"{self.url}/dashboard#token={self.token}"

    def client(self, *, token: str | None = None) -> Client:
        """A client that promises nothing about time: labels are made beside other federations, on shared cores."""
        return Client(self.url, token or self.token, patience_s=300.0)

    def pid(self, role: str) -> int:
        """Process id of a child now running: "coordinator", "redis", "agent-1" ..."""
        return int(json.loads((self.home / "processes.json").read_text())[role])


@contextmanager
def running(home: Path, *arguments: object, agents: int = 3, journal: str | None = None) -> Iterator[Service]:
    """Start `labeler up` in a folder, wait until it is ready, and stop it at the end.

    Args:
        home: the folder.
        arguments: more of the command line.
        agents: how many.
        journal: URL of a PostgreSQL database for the coordinator's journal; a file in its home where absent.
    """
    home.mkdir(mode=0o700, parents=True, exist_ok=True)
    if journal is not None:
        settings = make_federation(home, FederationPlan(agents=agents)).coordinator / COORDINATOR_FILE
        set_line(settings, "journal", journal)
    faults, copies, log = (home.parent / f"{home.name}.{what}" for what in ("fault", "keys", "log"))
    command = ("up", "--home", home, "--agents", agents, "--port", 0, "--json", *arguments)
    environment = {"LABELER_FAULTS": str(faults), VARIABLE: str(copies)}
    process = ForkedCommand(*command, errors=log, environment=environment)
    try:
        line = process.stdout.readline()
        assert line, log.read_text()
        told = json.loads(line)
        yield Service(told["url"], told["token"], home, faults, copies, process)
    finally:
        process.end()


@pytest.fixture
def on_postgresql(
    federations: SharedFederations, postgres_server: PostgresServer, tmp_path_factory: pytest.TempPathFactory
) -> Service:
    """One federation of three agents whose coordinator keeps its journal in a real PostgreSQL."""

    def start() -> AbstractContextManager[Service]:
        home = tmp_path_factory.mktemp("postgresql") / "federation"
        return running(home, journal=postgres_server.new_database())

    return federations.get("postgresql", start)


@dataclass(frozen=True)
class Stopped:
    """A federation that has ended, and a copy of its coordinator's home from before its last job.

    Attributes:
        home: its folder.
        older: the copy.
    """

    home: Path
    older: Path

    @property
    def coordinator(self) -> Path:
        return self.home / "coordinator"


@pytest.fixture
def stopped(
    federations: SharedFederations, digit_features: np.ndarray, tmp_path_factory: pytest.TempPathFactory
) -> Stopped:
    """One federation of two agents that has completed a job of each of two tasks, and has ended."""
    folder = tmp_path_factory.mktemp("stopped")
    return federations.get("stopped", lambda: _stopped(folder, digit_features))


@contextmanager
def _stopped(folder: Path, digit_features: np.ndarray) -> Iterator[Stopped]:
    from tests.e2e.service.harm import new_task, submit

    with running(folder / "federation", agents=2) as service, service.client() as client:
        for number in range(2):
            if number == 1:
                backup_home(service.home / "coordinator", folder / "older")
            done = client.wait(submit(client, new_task(client, f"job {number}"), digit_features[6 * number :]).job_id)
            assert done.state == "completed"
    yield Stopped(service.home, folder / "older")
