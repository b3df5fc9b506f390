"""A journal on SQLite and one on PostgreSQL, for every test that asks for one.

The PostgreSQL server is started once per session in a folder of its own, on a free port of the loopback, as a user
that is not root. Where that cannot be done, its tests are skipped with the reason.
"""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import socket
import subprocess
import tempfile
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path

import psycopg
import pytest

from feature_store.journal.database import Database, open_database
from feature_store.journal.ledger import Ledger

PASSWORD = "a password that must not be seen"


@dataclass(frozen=True)
class PostgresServer:
    """A running server of our own."""

    port: int

    def url(self, database: str) -> str:
        return f"postgresql://labeler:{PASSWORD.replace(' ', '%20')}@127.0.0.1:{self.port}/{database}"

    def new_database(self) -> str:
        name = f"journal_{uuid.uuid4().hex}"
        with psycopg.connect(self.url("postgres"), autocommit=True) as connection:
            connection.execute(f'CREATE DATABASE "{name}"')
        return self.url(name)


class Clock:
    """A clock that a test sets."""

    def __init__(self) -> None:
        self.now = datetime(2026, 3, 1, 12, tzinfo=UTC)

    def __call__(self) -> datetime:
        return self.now

    def turn(self, **by: float) -> None:
        self.now += timedelta(**by)


@dataclass
class Place:
    """Where one journal lives, and everything that was opened there."""

    dialect: str
    target: str
    anchor: Path
    opened: list[Database] = field(default_factory=list)

    def open(self, *, read_only: bool = False, with_anchor: bool = True) -> Database:
        database = open_database(self.target, anchor=self.anchor if with_anchor else None, read_only=read_only)
        self.opened.append(database)
        return database

    def close(self) -> None:
        while self.opened:
            self.opened.pop().close()


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[PostgresServer]:
    """A PostgreSQL server with its own data, at full durability."""
    initdb, postgres = shutil.which("initdb"), shutil.which("postgres")
    if initdb is None or postgres is None:
        pytest.skip("no PostgreSQL on this machine: initdb and postgres are not on the PATH")
    user = _unprivileged_user()
    folder = Path(tempfile.mkdtemp(prefix="labeler-postgres-"))
    try:
        if user is not None:
            shutil.chown(folder, user)
        secret = folder / "password"
        secret.write_text(PASSWORD)
        data = str(folder / "data")
        made = subprocess.run(
            [initdb, "-D", data, "-U", "labeler", "--pwfile", str(secret), "-A", "scram-sha-256", "-E", "UTF8",
             "--no-locale"],
            user=user, group=user and _group_of(user), extra_groups=[] if user else None,
            cwd=folder, capture_output=True, text=True, check=False,
        )  # fmt: skip
        if made.returncode != 0:
            pytest.skip(f"PostgreSQL's initdb does not run here: {made.stderr[-200:]}")
        port = _free_port()
        with (folder / "log").open("wb") as log:
            process = subprocess.Popen(
                [postgres, "-D", data, "-p", str(port), "-c", "listen_addresses=127.0.0.1",
                 "-c", "unix_socket_directories="],
                user=user, group=user and _group_of(user), extra_groups=[] if user else None,
                cwd=folder, stdout=log, stderr=log,
            )  # fmt: skip
        server = PostgresServer(port)
        try:
            _wait_for(server, process, folder / "log")
            yield server
        finally:
            process.send_signal(signal.SIGQUIT)  # its data is thrown away, so it need not be tidied up
            process.wait(60)
    finally:
        shutil.rmtree(folder)


@pytest.fixture(params=["sqlite", "postgresql"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    """A place without a journal yet, on either database."""
    if request.param == "sqlite":
        target = str(tmp_path / "journal.db")
    else:
        target = request.getfixturevalue("postgres_server").new_database()
    place = Place(request.param, target, tmp_path / "journal.head")
    yield place
    place.close()


@pytest.fixture
def sqlite_place(tmp_path: Path) -> Iterator[Place]:
    """A place without a journal yet, on SQLite."""
    place = Place("sqlite", str(tmp_path / "journal.db"), tmp_path / "journal.head")
    yield place
    place.close()


@pytest.fixture
def database(place: Place) -> Database:
    """An open journal without tables, with an anchor."""
    return place.open()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def ledger(database: Database, clock: Clock) -> Ledger:
    """A ledger with the account 'federation', instance level, cap 100."""
    ledger = Ledger(database, clock=clock)
    ledger.open_account("federation", "instance", 100)
    return ledger


def _unprivileged_user() -> str | None:
    """Whom to run PostgreSQL as; it refuses to run as root."""
    if os.geteuid() != 0:
        return None
    for name in ("postgres", "nobody"):
        try:
            return pwd.getpwnam(name).pw_name
        except KeyError:
            continue
    pytest.skip("PostgreSQL does not run as root, and there is no other user")


def _group_of(user: str) -> int:
    return pwd.getpwnam(user).pw_gid


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _wait_for(server: PostgresServer, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if process.poll() is not None:
            pytest.skip(f"PostgreSQL does not start here: {log.read_text(errors='replace')[-300:]}")
        try:
            psycopg.connect(server.url("postgres"), connect_timeout=2).close()
            return
        except psycopg.OperationalError:
            time.sleep(0.05)
    pytest.skip("PostgreSQL did not answer within a minute")
