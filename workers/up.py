"""`labeler up`: a whole federation on one machine, every role a process of its own, kept running until told to stop.

    stage 0   redis-server             on a socket inside the home; only the coordinator and the embedder use it
    stage 1   coordinator, embedder
    stage 2   agents, talliers         reach the coordinator over HTTP, as they would from five sites

It is what a deployment over five hospitals does, but for two things: one owner can read all homes, so nothing is
protected from that owner, and plain HTTP is used, because nothing leaves the machine.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from feature_store.durable import exclusive
from feature_store.journal.database import Database
from feature_store.journal.migrations.opening import open_upgraded
from feature_store.journal.tokens import TokenStore
from labeler.errors import InvalidSetting, JournalInUse, Unavailable
from workers.federation import LocalFederation, Plan, make_federation
from workers.key_care import journal_of
from workers.nursery import CAN_FORK, role_launcher
from workers.party_home import ANCHOR_FILE
from workers.redis_server import RedisServer
from workers.supervisor import Death, Process, Program, Supervisor, die_with_parent, launcher
from workers.up_requests import CoordinatorDoor

HOST: Final = "127.0.0.1"
FIRST_TOKEN: Final = "first administrator"
OWN_TOKEN: Final = "labeler up"
"""Name of the supervisor's own token, with which it enrols the parties; revoked as soon as everybody is there."""

READY_WITHIN_S: Final = 120.0
"""How long the parts may take to find each other before `up` gives up."""

_INFRASTRUCTURE, _SERVICE, _PARTIES = 0, 1, 2
_MOST_EARLY_DEATHS = 4
_TICK_S = 0.05
_ENDING_S = 5.0
_ASK_EVERY_S = 0.2
_ONE_THREAD = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


@dataclass(frozen=True, repr=False)
class Running:
    """A federation that is ready.

    Attributes:
        url: of the coordinator.
        token: the administrator's token of this federation, the same at every start.
        is_token_new: whether it was made at this start.
        federation: its folders.
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
        home: its folder.
        plan: what it should be when it is made.
        port: where the coordinator listens on loopback; 0 chooses a free one.
        stop: set it to end.
        on_ready: called once, when jobs can be taken.
        on_death: called for every program that died and is to be started again.
        on_killed: called at the end with the programs that did not stop within their grace, where there are any.

    Raises:
        OutputInUse: another `up` runs on this home.
        InvalidSetting: the port is taken, or the plan contradicts the federation that is there.
        Unavailable: the parts did not become ready.
    """
    home = home.resolve()
    home.mkdir(mode=0o700, parents=True, exist_ok=True)
    with exclusive(home / ".lock", f"the federation in {home}"):
        port = _usable_port(port)
        federation = make_federation(home, plan)
        redis = RedisServer(federation.redis, before_exec=die_with_parent())
        try:
            federation.set_addresses(url=f"http://{HOST}:{port}", redis_url=redis.url)
            tokens = _tokens(federation)
            run = _Run(federation, redis, port=port, tokens=tokens, stop=stop, on_death=on_death, on_killed=on_killed)
            run.until_told(on_ready)
        finally:
            redis.stop()


@dataclass(frozen=True, repr=False)
class _Tokens:
    own: str
    first: str
    is_first_new: bool


class _Run:
    """One run of a federation, from its first process to its last."""

    def __init__(
        self,
        federation: LocalFederation,
        redis: RedisServer,
        *,
        port: int,
        tokens: _Tokens,
        stop: threading.Event,
        on_death: Callable[[Death], None],
        on_killed: Callable[[Sequence[str]], None],
    ) -> None:
        self._federation = federation
        self._port = port
        self._tokens = tokens
        self._stop = stop
        self._on_death = on_death
        self._on_killed = on_killed
        self._supervisor = Supervisor(_programs(federation, redis, port=port))
        self._door = CoordinatorDoor(HOST, port, tokens.own)
        self._pids: dict[str, int] = {}
        self._has_been_ready = False
        self._given_up: set[str] = set()

    def until_told(self, on_ready: Callable[[Running], None]) -> None:
        try:
            if self._start():
                self._has_been_ready = True
                url, tokens = f"http://{HOST}:{self._port}", self._tokens
                on_ready(Running(url, tokens.first, tokens.is_first_new, self._federation))
                while not self._stop.wait(_TICK_S):
                    self._tend()
        finally:
            killed = self._supervisor.stop()
            if killed:
                self._on_killed(killed)

    def _start(self) -> bool:
        """True once jobs can be taken; False when told to stop before."""
        self._supervisor.start(stage=_INFRASTRUCTURE)
        self._supervisor.start(stage=_SERVICE)
        # Who is not enrolled is turned away, so parties start once they are.
        if not self._wait_for(lambda: "" if self._door.is_alive() else "the coordinator does not answer"):
            return False
        self._door.enrol(self._federation.enrolments())
        since = datetime.now(UTC)
        self._supervisor.start(stage=_PARTIES)
        if not self._wait_for(lambda: self._door.what_is_missing(since=since, without=self._given_up)):
            return False
        self._door.revoke_own_token()
        return True

    def _wait_for(self, missing: Callable[[], str]) -> bool:
        """Tend the programs until nothing is missing; False when told to stop before."""
        until = time.monotonic() + READY_WITHIN_S
        ask_at = 0.0
        while not self._stop.wait(_TICK_S):
            self._tend()
            if time.monotonic() < ask_at:
                continue
            ask_at = time.monotonic() + _ASK_EVERY_S
            words = missing()
            if not words:
                return True
            if time.monotonic() > until:
                raise Unavailable(
                    f"not ready after {READY_WITHIN_S:.0f} s: {words}. The logs are in {self._federation.logs}"
                )
        return False

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
        raise Unavailable(f"{death.name} cannot start (exit code {death.code}); the end of {output}:\n{_tail(output)}")


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


def _programs(federation: LocalFederation, redis: RedisServer, *, port: int) -> list[Program]:
    """Everything that has to run, in its stages."""
    # Many processes share the cores: numerical libraries that each take all of them would get in each other's way.
    single = {name: "1" for name in _ONE_THREAD if name not in os.environ}

    def role(name: str, stage: int, *arguments: str) -> Program:
        output = federation.logs / f"{name}.log"
        if CAN_FORK:
            return Program(name, stage, role_launcher(name, arguments, output=output, environment=single), output)
        command = (sys.executable, "-P", "-m", "workers.cli", *arguments)
        return Program(name, stage, launcher(name, command, output=output, environment=single), output)

    def launch_redis() -> Process:
        redis.start()
        return _Redis(redis)

    coordinator = str(federation.coordinator)
    return [
        Program("redis", _INFRASTRUCTURE, launch_redis),
        role("coordinator", _SERVICE, "serve", "--home", coordinator, "--host", HOST, "--port", str(port)),
        role("embedder", _SERVICE, "embedder", "--home", coordinator),
        *(role(name, _PARTIES, "agent", "run", "--home", str(path)) for name, path in federation.agents.items()),
        *(role(name, _PARTIES, "tallier", "run", "--home", str(path)) for name, path in federation.talliers.items()),
    ]


def _tokens(federation: LocalFederation) -> _Tokens:
    """The tokens of this start; those with which an earlier start enrolled the parties are revoked.

    The administrator's is kept in a file of the home, so that a federation that is started again tells the same. The
    file opens nothing that the home's owner could not open: the keys of every party lie beside it.
    """
    with closing(_journal(federation.coordinator)) as database:
        store = TokenStore(database)
        for known in store.list():
            if known.name == OWN_TOKEN and known.revoked_at is None:
                store.revoke(known.token_id)
        first = federation.read_token()
        is_kept = first is not None and store.find(first) is not None
        if first is None or not is_kept:
            first = store.create(FIRST_TOKEN, "admin")[1]
            federation.keep_token(first)
        return _Tokens(own=store.create(OWN_TOKEN, "admin")[1], first=first, is_first_new=not is_kept)


def _journal(home: Path) -> Database:
    """The coordinator's journal. Right after an earlier supervisor was killed, its coordinator may still be ending."""
    until = time.monotonic() + _ENDING_S
    while True:
        try:
            return open_upgraded(journal_of(home), anchor=home / ANCHOR_FILE)
        except JournalInUse:
            if time.monotonic() > until:
                raise
            time.sleep(_TICK_S)


def _tail(path: Path, *, lines: int = 5) -> str:
    try:
        return "\n".join(path.read_text(encoding="utf-8", errors="replace").splitlines()[-lines:])
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
