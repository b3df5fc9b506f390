"""A folder in which sites of a deployment are made: the commands that people type, and the processes behind them."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from api.client import Client
from feature_store.backbones import load_backbone
from tests.ports import kept_port
from workers.up.redis_server import RedisServer

TALLIERS = ("registry", "university", "auditor")
EMBED = ("--backbone", "pixels:8", "--classes", ",".join("0123456789"), "--max-records", "2000")


@dataclass
class Place:
    """The folder, a redis-server, and what runs.

    Attributes:
        folder: where commands run.
        run: the command line, run in this process.
        redis_url: of the server.
        port: kept for the coordinator.
        running: processes by their names; each has a log of its name in the folder.
    """

    folder: Path
    run: Callable[..., Any]
    redis_url: str
    port: int
    running: dict[str, subprocess.Popen[str]] = field(default_factory=dict)

    def labeler(self, *arguments: object) -> str:
        """Run a command to its end, in this process; what it printed."""
        done = self.run(*arguments)
        assert done.code == 0, (arguments, done.err)
        return str(done.out)

    def document(self, *arguments: object) -> Any:
        """Run a command to its end; the document that it printed."""
        return json.loads(self.labeler(*arguments, "--json"))

    def start(self, name: str, *arguments: object, told: bool = False) -> str:
        """Start a command in the background; with `told`, wait for the line that it prints and give it back."""
        log = self.folder / f"{name}.log"
        with log.open("w") as file:
            process = subprocess.Popen(
                [sys.executable, "-m", "workers.cli", *map(str, arguments)],
                cwd=self.folder,
                env=os.environ | {"OMP_NUM_THREADS": "1", "COLUMNS": "80"},
                stdout=subprocess.PIPE if told else file,
                stderr=file,
                text=True,
            )
        self.running[name] = process
        if process.stdout is None:
            return ""
        line = process.stdout.readline()
        assert line, log.read_text()
        return line

    def stop(self, *names: str) -> None:
        """Stop processes: all are told before one is waited for."""
        for name in names:
            self.running[name].send_signal(signal.SIGTERM)
        for name in names:
            process = self.running.pop(name)
            try:
                process.wait(timeout=300)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            if process.stdout is not None:
                process.stdout.close()

    def make_coordinator(self, url: str) -> str:
        """Make the home of a coordinator at an address; its first token."""
        self.labeler("serve", "--home", "coordinator", "--init")
        settings = self.folder / "coordinator" / "coordinator.toml"
        text = settings.read_text()
        for pattern, line in (
            ("^public_url.*", f'public_url = "{url}"'),
            ("^redis_url.*", f'redis_url = "{self.redis_url}"'),
            (r"^\[backbones\]", f'[backbones]\n{load_backbone("pixels:8").fingerprint} = "pixels:8"'),
        ):
            text, count = re.subn(pattern, lambda _, line=line: line, text, count=1, flags=re.MULTILINE)
            assert count == 1, pattern
        settings.write_text(text)
        made = self.document("keys", "token", "--home", "coordinator", "--name", "first", "--role", "admin")
        return str(made["token"])

    def join(self, name: str, role: str, *more: object) -> None:
        """An invitation is made at the operator's and used at the site, the phrase compared."""
        made = self.document("invite", name, "--role", role)
        self.labeler(role, "join", made["file"], "--home", name, "--phrase", made["phrase"], *more)


@pytest.fixture
def place(tmp_path: Path, labeler: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    """An empty one, which is the working directory."""
    monkeypatch.chdir(tmp_path)
    with RedisServer(tmp_path / "redis") as redis, kept_port() as port:
        found = Place(tmp_path, labeler, redis.url, port)
        try:
            yield found
        finally:
            found.stop(*found.running)


def free_port() -> int:
    """A port that nobody listens at now."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


def is_ready(check: str | None = None) -> bool:
    """Whether the service of the environment answers that it, or one part of it, is ready."""
    authority = os.environ.get("LABELER_CA_FILE")
    with Client(
        os.environ["LABELER_URL"], os.environ["LABELER_TOKEN"], ca_file=Path(authority) if authority else None
    ) as client:
        found = client.readiness()
    return found.ready if check is None else any(one.ok for one in found.checks if one.name == check)
