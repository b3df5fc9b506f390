"""One agent over a coordinator that is a twin in the same process, in a time that only work and waiting move.

The agent is the real one, as its process makes it; only its clock, its stop signal and its way to the coordinator are
twins, and how long an answer takes is said by the test.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from feature_store.shard import Shard
from labeler.messages import COORDINATOR, Kind, Message, frame, read_frames
from labeler.messages.bodies import Ask, Mail, TallierKey
from labeler.system.keys import PartyKeys, PublicKeys
from labeler.tally import QueryBatch
from tests.labeler.tasks import make_task
from tests.workers.builders import policy_of
from workers.agent.agent import Agent
from workers.agent.public_clock import DrawnProbe
from workers.agent.service import run_agent
from workers.party.home import AgentConfig, create_agent_home

AGENT = "hospital-1"
NOW = datetime(2026, 11, 20, 12, tzinfo=UTC)


class Time(threading.Event):
    """A stop signal, and the time: waiting for it is what takes time."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 1000.0
        self.stop_at_s = float("inf")
        self.set_back = timedelta()

    def __call__(self) -> float:
        """Seconds that only go up."""
        return self.now_s

    def utc(self) -> datetime:
        return NOW + timedelta(seconds=self.now_s) - self.set_back

    def wait(self, timeout: float | None = None) -> bool:
        if self.is_set() or timeout is None:
            return True
        if self.now_s + timeout >= self.stop_at_s:
            self.now_s = self.stop_at_s
            self.set()
            return True
        self.now_s += timeout
        return False


@dataclass
class Sent:
    """One request of the agent: when it left, and what was in it."""

    at_s: float
    kinds: tuple[str, ...]
    rounds: tuple[str, ...]


@dataclass
class Coordinator:
    """Gives the next mail at each poll, and writes down when what came; out of mail it stops the agent."""

    time: Time
    keys: PartyKeys = field(default_factory=PartyKeys.generate)
    mails: list[list[Message]] = field(default_factory=list)
    sent: list[Sent] = field(default_factory=list)
    polled_at: list[float] = field(default_factory=list)
    sequence: int = 0

    def message(self, kind: Kind, body: bytes, *, task: str = "", round: str = "") -> Message:
        self.sequence += 1
        return self.keys.message(
            kind,
            sender=COORDINATOR,
            recipient=AGENT,
            sequence=self.sequence,
            task_digest=task,
            round_digest=round,
            body=body,
        )

    def ask(self, *asks: Ask) -> None:
        """These together are the mail of one poll."""
        self.mails.append(
            [self.message("ask", one.encode(), task=one.task.digest, round=one.round.digest) for one in asks]
        )

    def post(self, path: str, data: bytes) -> bytes:  # noqa: ARG002  # it has one door for all
        messages = read_frames(data, max_messages=300)
        kinds = tuple(one.header.kind for one in messages)
        rounds = tuple(one.header.round_digest for one in messages)
        self.sent.append(Sent(self.time.now_s, kinds, rounds))
        if "poll" not in kinds:
            return b'{"taken": 1}'
        if not self.mails:
            self.time.set()
        mail = self.mails.pop(0) if self.mails else []
        self.polled_at.append(self.time.now_s)
        body = Mail(f"{len(self.polled_at)}-0", 0, "").encode()
        return frame([self.message("poll", body), *mail])

    def close(self) -> None:
        pass


@dataclass
class Office:
    """An agent's home and its coordinator.

    Attributes:
        work_s: how long one answer takes, by the number of rows that it is computed from, drawn ones or records.
        fails: whether answers of the site's own records cannot be made.
        computed: how many were begun.
    """

    home: Path
    shard: Shard
    patch: pytest.MonkeyPatch
    time: Time
    coordinator: Coordinator
    batch: QueryBatch
    talliers: dict[str, PublicKeys]
    work_s: Callable[[int], float] = lambda _: 0.0
    fails: bool = False
    computed: int = 0

    def ask(self, number: int = 0, *, expires_in_s: float = 3600.0, **changes: Any) -> Ask:
        facts = {"classes": self.shard.classes, "backbone_fingerprint": self.shard.fingerprint}
        fields = {"name": f"t{number}", "k": 5, "sigma_votes": 4000.0, "delta": 1e-5, "max_queries": len(self.batch)}
        task = make_task(**(facts | fields | changes))
        named = tuple(TallierKey(name, keys.seal_key, keys.verify_key) for name, keys in self.talliers.items())
        return Ask(task, self.batch, named, self.time.utc().timestamp() + expires_in_s)

    def run(self) -> list[Sent]:
        """Serve until all mail is answered; what the agent has sent, with the polls."""
        self.time.clear()
        begun = len(self.coordinator.sent)
        run_agent(self.home, stop=self.time, clock=self.time.utc, ticks=self.time)
        return self.coordinator.sent[begun:]

    def after(self, *asks: Ask) -> tuple[Sent, float]:
        """Serve these asks as one mail; what is sent after them, and how many seconds later."""
        self.coordinator.ask(*asks)
        begun = self.time.now_s
        _, sent = self.run()
        return sent, sent.at_s - begun


def make_office(
    path: Path, patch: pytest.MonkeyPatch, make_shard: Callable[..., Shard], *, records: int = 60, **config: Any
) -> Office:
    """An office in a separate folder, whose answers take the time that the test says."""
    shard = make_shard(f"{path.name}-own", records=records, max_records=100)
    batch = QueryBatch(make_shard(f"{path.name}-public", records=8, seed=99, public=True).features[:])
    time = Time()
    talliers = {f"tallier-{number}": PartyKeys.generate().public for number in range(3)}
    coordinator = Coordinator(time)
    policy = policy_of(
        backbones=[shard.fingerprint],
        methods=["knn", "ensemble", "reverse-knn"],
        max_queries_per_day=1_000_000,
        talliers={name: keys.seal_key for name, keys in talliers.items()},
        verify_key=coordinator.keys.public.verify_key,
    )
    settings = AgentConfig(
        agent_id=AGENT,
        coordinator_url="http://127.0.0.1:1",
        shard=str(shard.path),
        engine="numpy",
        **config,
    )
    create_agent_home(path, settings, policy)
    office = Office(path, shard, patch, time, coordinator, batch, talliers)
    computed = Agent.computed

    def takes_time(self: Agent, task: Any, batch: Any, **named: Any) -> Any:
        if self.agent_id != AGENT:
            probed.now_s += office.work_s(len(self._shard))
            return computed(self, task, batch, **named)
        office.computed += 1
        time.now_s += office.work_s(len(self._shard))
        if office.fails:
            raise OSError("trouble of the site")
        return computed(self, task, batch, **named)

    probed = Time()
    patch.setattr(Agent, "computed", takes_time)
    patch.setattr("workers.agent.service.DrawnProbe", partial(DrawnProbe, clock=probed))
    patch.setattr("workers.party.link.CoordinatorHttp", lambda *_, **__: coordinator)
    return office


def shares_of(sent: Sent, ask: Ask) -> int:
    """Count the shares of an ask that left with a request."""
    pairs = zip(sent.kinds, sent.rounds, strict=True)
    return sum(kind == "input-share" and found == ask.round.digest for kind, found in pairs)
