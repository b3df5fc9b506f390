"""`labeler up`: a whole federation on one machine, every role a process of its own, kept running until told to stop.

    stage 0   redis-server             on a socket inside the home; only the coordinator and the embedder use it
    stage 1   coordinator, embedder
              agents, talliers         reach the coordinator over HTTP, as they would from five sites

What all roles share is imported once, beside the making of the federation (workers.federation.nursery); then all of
them start at once, each rings when it is ready (workers.readiness), and jobs can be taken when the coordinator says
that everybody is there. To stop, all are told at once, and redis-server last.

It is what a deployment over five hospitals does, but for two things: one owner can read all homes, so nothing is
protected from that owner, and plain HTTP is used, because nothing leaves the machine.
"""

from __future__ import annotations

import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Final

from feature_store.durable import exclusive
from labeler.errors import InvalidSetting, LabelerError, Unavailable
from workers.federation.nursery import CAN_FORK, role_launcher, warm
from workers.federation.plan import Plan
from workers.federation.redis_server import RedisServer
from workers.federation.requests import CoordinatorDoor
from workers.federation.supervisor import Death, Process, Program, Supervisor, die_with_parent, launcher
from workers.readiness import NOTIFY, Bell, tell_ready

if TYPE_CHECKING:
    from workers.federation.home import LocalFederation
    from workers.federation.journal import AdminToken

HOST: Final = "127.0.0.1"

READY_WITHIN_S: Final = 120.0
"""How long the parts may take to find each other before `up` gives up."""

_INFRASTRUCTURE, _ROLES = 0, 1
_REDIS = "redis"
_MOST_EARLY_DEATHS = 4
_TICK_S = 0.05
_ASK_EVERY_S = 0.2
_LOOK_EVERY_S = 2.0
"""How often the coordinator is asked although not everybody has rung: a revoked party never does."""


@dataclass(frozen=True, repr=False)
class Running:
    """A federation that is ready.

    Attributes:
        token: the administrator's token of this federation, the same at every start.
        is_token_new: whether it was made at this start.
    """

    url: str
    token: str
    is_token_new: bool
    federation: LocalFederation


def run_up(
    home: Path,
    plan: Plan,
    *,
    port: int,
    stop: threading.Event,
    on_ready: Callable[[Running], None],
    on_death: Callable[[Death], None],
    on_killed: Callable[[Sequence[str]], None] = lambda _: None,
) -> None:
    """Make or reopen a federation, run it, and stop it when `stop` is set. Call it from a process's main thread.

    Args:
        plan: what it should be when it is made.
        port: where the coordinator listens on loopback; 0 chooses a free one.
        on_ready: called once, when jobs can be taken.
        on_death: called for every program that died and is to be started again.
        on_killed: called at the end with the programs that did not stop within their grace, where there are any.

    Raises:
        OutputInUse: another `up` runs on this home.
        InvalidSetting: the port is taken, or the plan contradicts the federation that is there.
        Unavailable: the parts did not become ready.
    """
    home = home.resolve()
    made = [one for one in (home, *home.parents) if not one.exists()]
    home.mkdir(mode=0o700, parents=True, exist_ok=True)
    with exclusive(home / ".lock", f"the federation in {home}"), _nothing_left_empty(home, made):
        port = _usable_port(port)
        warm()
        # Here, beside what the roles import: whoever is sent away above has waited for none of it.
        from workers.federation.home import make_federation
        from workers.federation.journal import prepare_journal

        federation = make_federation(home, plan)
        redis = RedisServer(federation.redis, before_exec=die_with_parent())
        try:
            federation.set_addresses(url=f"http://{HOST}:{port}", redis_url=redis.url)
            token = prepare_journal(federation)
            with Bell() as bell:
                run = _Run(federation, redis, bell, port=port, token=token, stop=stop, on_death=on_death)
                run.until_told(on_ready, on_killed)
        finally:
            redis.stop()


@contextmanager
def _nothing_left_empty(home: Path, made: Sequence[Path]) -> Iterator[None]:
    """Where a refusal leaves no file in a home that was made here, its folders go again, while its lock is held.

    Nobody then finds an empty home, of which no command could say what it is. Files are never removed: what is half
    made is finished by the next start.
    """
    try:
        yield
    except LabelerError:
        others = [path for path in home.rglob("*") if path.name != ".lock"]
        if made and all(path.is_dir() and not path.is_symlink() for path in others):
            # Whoever opened the lock meanwhile sees that it is gone (feature_store.durable), and tries again.
            (home / ".lock").unlink()
            with suppress(OSError):  # somebody put something there meanwhile
                for folder in (*sorted(others, key=lambda path: len(path.parts), reverse=True), *made):
                    folder.rmdir()
        raise


class _Run:
    """One run of a federation, from its first process to its last."""

    def __init__(
        self,
        federation: LocalFederation,
        redis: RedisServer,
        bell: Bell,
        *,
        port: int,
        token: AdminToken,
        stop: threading.Event,
        on_death: Callable[[Death], None],
    ) -> None:
        self._federation = federation
        self._bell = bell
        self._port = port
        self._token = token
        self._stop = stop
        self._on_death = on_death
        self._supervisor = Supervisor(_programs(federation, redis, bell, port=port))
        self._door = CoordinatorDoor(HOST, port, token.secret)
        self._pids: dict[str, int] = {}
        self._has_been_ready = False
        self._given_up: set[str] = set()

    def until_told(self, on_ready: Callable[[Running], None], on_killed: Callable[[Sequence[str]], None]) -> None:
        if self._stop.is_set():
            return
        try:
            since = datetime.now(UTC)
            self._supervisor.start()
            if self._wait_for_everybody(since):
                self._has_been_ready = True
                url, token = f"http://{HOST}:{self._port}", self._token
                on_ready(Running(url, token.secret, token.is_new, self._federation))
                tell_ready()
                while not self._stop.wait(_TICK_S):
                    self._tend()
        finally:
            killed = self._supervisor.stop()
            if killed:
                on_killed(killed)

    def _wait_for_everybody(self, since: datetime) -> bool:
        """True once jobs can be taken; False when told to stop before. Who was heard of before `since` is not there."""
        started = time.monotonic()
        look_at, ask_at = started + _LOOK_EVERY_S, started
        rung: set[int] = set()
        while not self._stop.wait(_TICK_S):
            self._tend()
            rung |= self._bell.rung()
            now = time.monotonic()
            if now < ask_at or (not self._expected() <= rung and now < look_at):
                continue
            words = self._door.what_is_missing(since=since, without=self._given_up)
            if not words:
                return True
            if now > started + READY_WITHIN_S:
                raise Unavailable(
                    f"not ready after {READY_WITHIN_S:.0f} s: {words}. The logs are in {self._federation.logs}"
                )
            ask_at, look_at = now + _ASK_EVERY_S, now + _LOOK_EVERY_S
        return False

    def _expected(self) -> set[int]:
        """The processes that ring when they are ready."""
        silent = {_REDIS, *self._given_up}
        return {pid for name, pid in self._supervisor.pids.items() if name not in silent}

    def _tend(self) -> None:
        for death in self._supervisor.tend():
            if not self._has_been_ready:
                self._judge(death)
            self._on_death(death)
        pids = self._supervisor.pids
        if pids != self._pids:
            self._pids = pids
            self._federation.write_processes(pids)

    def _judge(self, death: Death) -> None:
        """Before everything was ready once, a program that cannot start is a reason to stop; a single agent is not."""
        if death.code not in (1, 2) and death.deaths < _MOST_EARLY_DEATHS:
            return
        given_up = self._given_up | {death.name}  # which it may have been before: it dies again at every start
        if death.name in self._federation.agents and len(given_up) < len(self._federation.agents):
            self._given_up = given_up
            return
        output = self._federation.logs / f"{death.name}.log"
        # Its own code says whether trying again can help: 1 and 2 are for good.
        kind = {1: LabelerError, 2: InvalidSetting}.get(death.code, Unavailable)
        raise kind(f"{death.name} cannot start (exit code {death.code}); the end of {output}:\n{_tail(output)}")


class _Redis:
    """A RedisServer as a supervisor sees it."""

    def __init__(self, server: RedisServer) -> None:
        self._server = server
        self.pid = server.pid

    def poll(self) -> int | None:
        return None if self._server.is_running else 1

    def terminate(self) -> None:
        self._server.stop()

    def kill(self) -> None:
        self._server.stop()

    def wait(self) -> int:
        self._server.stop()
        return 0


def _programs(federation: LocalFederation, redis: RedisServer, bell: Bell, *, port: int) -> list[Program]:
    """Everything that has to run, in its stages."""
    rings = {NOTIFY: bell.address}

    def role(name: str, *arguments: str) -> Program:
        output = federation.logs / f"{name}.log"
        if CAN_FORK:
            return Program(name, _ROLES, role_launcher(name, arguments, output=output, environment=rings), output)
        command = (sys.executable, "-P", "-m", "workers.cli", *arguments)
        return Program(name, _ROLES, launcher(name, command, output=output, environment=rings), output)

    def launch_redis() -> Process:
        redis.start()
        return _Redis(redis)

    coordinator = str(federation.coordinator)
    return [
        Program(_REDIS, _INFRASTRUCTURE, launch_redis),
        # First, because everybody else reaches it: it listens before it opens its journal.
        role("coordinator", "serve", "--home", coordinator, "--host", HOST, "--port", str(port)),
        role("embedder", "embedder", "--home", coordinator),
        *(role(name, "tallier", "run", "--home", str(path)) for name, path in federation.talliers.items()),
        *(role(name, "agent", "run", "--home", str(path)) for name, path in federation.agents.items()),
    ]


def _tail(path: Path) -> str:
    try:
        return "\n".join(path.read_text(encoding="utf-8", errors="replace").splitlines()[-5:])
    except OSError:
        return "(empty)"


def _usable_port(port: int) -> int:
    """The port itself if it is free, or a free one for 0."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError as error:
            raise InvalidSetting(
                f"port {port} cannot be used ({error.strerror}); choose another with --port, or let `--port 0` choose"
            ) from None
        chosen: int = probe.getsockname()[1]
    return chosen
