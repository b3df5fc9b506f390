"""`labeler up`: a whole federation on one machine, one process per role, kept running until told to stop.

    stage 0   redis-server             on a socket inside the home; only the coordinator and the embedder use it.
    stage 1   coordinator, embedder
              agents, talliers         reach the coordinator over HTTP, as they would from five sites.

What all roles share is imported once, while the federation is made. Then all roles start at once. Jobs can be taken
when the coordinator says that everybody is there. After a few seconds, missing roles are named with the last complaint
of their logs. To stop, all are stopped at once, and redis-server last.

A deployment over five hospitals does the same, with two differences. Here one owner can read all homes, so nothing is
protected from that owner. Plain HTTP is used, because nothing leaves the machine.
"""

from __future__ import annotations

import http.client
import json
import socket
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from labeler.errors import InvalidSetting, LabelerError, Unavailable
from labeler.system.files import exclusive, replace_file
from workers.service_process import tell_ready
from workers.up import FederationPlan
from workers.up.redis_server import RedisServer
from workers.up.supervisor import Death, Process, Program, Supervisor, die_with_parent, role_launcher, warm

if TYPE_CHECKING:
    from workers.up.home import LocalFederation

HOST: Final = "127.0.0.1"

READY_WITHIN_S: Final = 300.0
"""Seconds that the parts may take to find each other before `up` gives up. A busy machine may need a minute."""

_INFRASTRUCTURE, _ROLES = 0, 1
_REDIS = "redis"
_MOST_EARLY_DEATHS = 4
_TICK_S = 0.05
_ASK_EVERY_S = 0.2
_ASK_TIMEOUT_S = 10.0
_TELL_AFTER_S = 5.0
"""Seconds before `up` says which parts are missing, and why."""


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
    plan: FederationPlan,
    *,
    port: int,
    stop: threading.Event,
    on_ready: Callable[[Running], None],
    complain: Callable[[str], None],
) -> None:
    """Create or reopen a federation, run it, and stop it when `stop` is set. Call it from a process's main thread.

    Args:
        plan: what it should be when it is made.
        port: where the coordinator listens on loopback; 0 chooses a free one.
        on_ready: called once, when jobs can be taken.
        complain: called with a sentence that names roles that died, are missing, or had to be killed.

    Raises:
        OutputInUse: another `up` runs on this home.
        InvalidSetting: the port is taken, or the plan contradicts the federation that is there.
        Unavailable: the parts did not become ready.
    """
    home = home.resolve()
    made = [one for one in (home, *home.parents) if not one.exists()]
    home.mkdir(mode=0o700, parents=True, exist_ok=True)
    with (
        exclusive(home / ".lock", f"the federation in {home}"),
        _nothing_left_empty(home, made),
        _usable_port(port) as port,
    ):
        warm()
        # Imported here, while the roles import: a caller refused above has waited for none of it.
        from workers.up.home import make_federation, prepare_journal

        federation = make_federation(home, plan)
        with RedisServer(federation.redis, before_exec=die_with_parent()) as redis:
            federation.set_addresses(url=f"http://{HOST}:{port}", redis_url=redis.url)
            token = prepare_journal(federation)
            running = Running(f"http://{HOST}:{port}", *token, federation)
            _Run(running, redis, port=port, stop=stop, complain=complain).until_told(on_ready)


@contextmanager
def _nothing_left_empty(home: Path, made: Sequence[Path]) -> Iterator[None]:
    """Remove the folders of a home that was made here if a refusal leaves no file in it, while its lock is held.

    So no empty home remains, about which no command could say what it is. Files are never removed: the next start
    finishes what is half made.
    """
    try:
        yield
    except LabelerError:
        others = [path for path in home.rglob("*") if path.name != ".lock"]
        if made and all(path.is_dir() and not path.is_symlink() for path in others):
            # A process that opened the lock meanwhile sees that it is gone (labeler.system.files), and tries again.
            (home / ".lock").unlink()
            with suppress(OSError):  # another process put something there meanwhile
                for folder in (*sorted(others, key=lambda path: len(path.parts), reverse=True), *made):
                    folder.rmdir()
        raise


class _Run:
    """One run of a federation, from its first process to its last."""

    def __init__(
        self,
        running: Running,
        redis: RedisServer,
        *,
        port: int,
        stop: threading.Event,
        complain: Callable[[str], None],
    ) -> None:
        self._running, self._federation = running, running.federation
        self._port = port
        self._stop = stop
        self._complain = complain
        self._supervisor = Supervisor(_programs(running.federation, redis, port=port))
        self._pids: dict[str, int] = {}
        self._has_been_ready = False
        self._given_up: set[str] = set()

    def until_told(self, on_ready: Callable[[Running], None]) -> None:
        if self._stop.is_set():
            return
        try:
            since = datetime.now(UTC)
            self._supervisor.start()
            if self._wait_for_everybody(since):
                self._has_been_ready = True
                on_ready(self._running)
                tell_ready()
                while not self._stop.wait(_TICK_S):
                    self._tend()
        finally:
            if killed := self._supervisor.stop():
                names = ", ".join(killed)
                self._complain(
                    f"killed, because it did not stop in time: {names}. Nothing that was acknowledged is lost"
                )

    def _wait_for_everybody(self, since: datetime) -> bool:
        """Return True once jobs can be taken; False when told to stop before. A party last heard of before `since` is
        absent.
        """
        started = ask_at = time.monotonic()
        told: set[str] = set()
        while not self._stop.wait(_TICK_S):
            self._tend()
            if (now := time.monotonic()) < ask_at:
                continue
            words, silent = self._what_is_missing(since)
            if not words:
                return True
            if now > started + READY_WITHIN_S:
                raise Unavailable(
                    f"not ready after {READY_WITHIN_S:.0f} s: {words}. The logs are in {self._federation.logs}"
                )
            if now > started + _TELL_AFTER_S:
                for name in (one for one in silent if one not in told):
                    if said := last_complaint(self._log(name), since):
                        told.add(name)
                        self._complain(f"{name} is not there yet: {said}")
            ask_at = time.monotonic() + _ASK_EVERY_S
        return False

    def _what_is_missing(self, since: datetime) -> tuple[str, list[str]]:
        """Return what is not there yet, in words, empty when nothing is missing; and the parties that it waits for."""
        parties: Collection[dict[str, Any]] = ()
        words = ""
        try:
            status, document = self._ask("/readyz")
            if status != http.client.OK:
                checks = [one for one in document.get("checks", ()) if not one["ok"]]
                failed = ", ".join(f"{one.get('name')} ({one.get('detail')})" for one in checks)
                words = failed or f"the coordinator is not ready (status {status})"
            parties = self._ask("/v1/parties")[1].get("parties", ())
        except Unavailable as error:
            return str(error), []
        silent = [
            party["party_id"]
            for party in parties
            if party["state"] == "active" and party["party_id"] not in self._given_up and not _heard_of(party, since)
        ]
        return words or (f"not heard from yet: {', '.join(silent)}" if silent else ""), silent

    def _ask(self, path: str) -> tuple[int, dict[str, Any]]:
        connection = http.client.HTTPConnection(HOST, self._port, timeout=_ASK_TIMEOUT_S)
        try:
            connection.request("GET", path, headers={"Authorization": f"Bearer {self._running.token}"})
            answer = connection.getresponse()
            content = answer.read()
        except (OSError, http.client.HTTPException):
            raise Unavailable("the coordinator does not answer") from None
        finally:
            connection.close()
        try:
            document = json.loads(content)
        except ValueError:
            document = None
        return answer.status, document if isinstance(document, dict) else {}

    def _tend(self) -> None:
        for death in self._supervisor.tend():
            if not self._has_been_ready:
                self._judge(death)
            why = last_complaint(self._log(death.name), None)
            again = f"started again in {death.restart_in_s:.0f} s"
            self._complain(f"{death.name} ended (exit code {death.code}); {again}{why and f'. It said: {why}'}")
        pids = self._supervisor.pids
        if pids != self._pids:
            self._pids = pids
            with suppress(OSError):  # on a full disk too, the others continue: the file is only for people
                file = self._federation.home / "processes.json"
                replace_file(file, json.dumps(pids, indent=1).encode(), mode=0o600)

    def _log(self, name: str) -> Path:
        return self._federation.logs / f"{name}.log"

    def _judge(self, death: Death) -> None:
        """Stop for a program that cannot start before everything was ready once, unless it is a single agent."""
        if death.code not in (1, 2) and death.deaths < _MOST_EARLY_DEATHS:
            return
        given_up = self._given_up | {death.name}  # it may have been given up before: it dies again at every start
        if death.name in self._federation.agents and len(given_up) < len(self._federation.agents):
            self._given_up = given_up
            return
        output = self._log(death.name)
        # Its own code says whether trying again can help: 1 and 2 are for good.
        kind = {1: LabelerError, 2: InvalidSetting}.get(death.code, Unavailable)
        raise kind(f"{death.name} cannot start (exit code {death.code}); the end of {output}:\n{_tail(output)}")


def _programs(federation: LocalFederation, redis: RedisServer, *, port: int) -> list[Program]:
    """Return everything that has to run, in its stages."""

    def role(name: str, *arguments: str) -> Program:
        output = federation.logs / f"{name}.log"
        return Program(name, _ROLES, role_launcher(name, arguments, output=output), output)

    def launch_redis() -> Process:
        redis.start()
        return redis.process

    coordinator = str(federation.coordinator)
    return [
        Program(_REDIS, _INFRASTRUCTURE, launch_redis),
        # First, because everybody else reaches it: it listens before it opens its journal.
        role("coordinator", "serve", "--home", coordinator, "--host", HOST, "--port", str(port)),
        role("embedder", "embedder", "--home", coordinator),
        *(role(name, "tallier", "run", "--home", str(path)) for name, path in federation.talliers.items()),
        *(role(name, "agent", "run", "--home", str(path)) for name, path in federation.agents.items()),
    ]


def _heard_of(party: dict[str, Any], since: datetime) -> bool:
    contact = party.get("last_contact")
    return contact is not None and datetime.fromisoformat(contact) >= since


def _tail(path: Path, lines: int = 5) -> str:
    try:
        return "\n".join(path.read_text(encoding="utf-8", errors="replace").splitlines()[-lines:])
    except OSError:
        return "(empty)"


def last_complaint(log_file: Path, since: datetime | None) -> str:
    """Return the last complaint of a role's log, in a line; empty where it has none.

    Args:
        since: read only JSON lines after this; None reads any.
    """
    for line in reversed(_tail(log_file, 20).splitlines()):
        if line.startswith("labeler: "):  # a command's last word, before its end
            return line.removeprefix("labeler: ")
        with suppress(ValueError, KeyError, TypeError):
            document = json.loads(line)
            if document["level"] in ("WARNING", "ERROR") and (
                since is None or datetime.fromisoformat(document["at"]) >= since
            ):
                reason = document.get("sentence", "")
                return f"{document['message']}{reason and f' ({reason})'}"
    return ""


@contextmanager
def _usable_port(port: int) -> Iterator[int]:
    """Yield the port itself if it is free, or a free one for 0.

    On Linux it stays bound while the block runs. So no other program is given it in the seconds until the coordinator
    listens. The coordinator can listen at it too, because both set SO_REUSEADDR.
    """
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError as error:
            raise InvalidSetting(
                f"port {port} cannot be used ({error.strerror}); choose another with --port, or let `--port 0` choose"
            ) from None
        chosen: int = probe.getsockname()[1]
        if not sys.platform.startswith("linux"):
            probe.close()
        yield chosen
