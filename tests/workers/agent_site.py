"""One agent's home at a relay, its process as a thread, and what the parties around it see: for tests of agents."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from sqlalchemy import text

from feature_store.shard import Shard
from labeler.ledger.agent_memory import AgentMemory
from labeler.ledger.database import open_database
from labeler.ledger.ledger import Ledger
from labeler.messages import Message
from labeler.messages.bodies import Ask, Declined, Proposal, RefusalBody, TallierKey, Willing, share_from_bytes
from labeler.sharing import ShareVector
from labeler.system.keys import PartyKeys, verify
from labeler.tally import QueryBatch
from tests.labeler.tasks import make_task
from tests.processes import wait_until
from tests.workers.builders import killed_at, policy_of
from workers.agent.policy import Policy, policy_toml
from workers.agent.service import run_agent
from workers.party.home import AgentConfig, create_agent_home

AGENT = "hospital-1"
NOW = datetime(2026, 11, 20, 12, tzinfo=UTC)
UNTIL = NOW.timestamp() + 3600


PROCESS = (
    "from workers.agent.service import run_agent; run_agent(Path(sys.argv[1]), stop=threading.Event(), wait_s=0.5)"
)


@dataclass
class Site:
    """One agent's home, its talliers' keys, and the relay it talks to."""

    home: Path
    shard: Shard
    relay: Any
    batch: QueryBatch
    start: Callable[..., Any]
    now: datetime = NOW
    talliers: dict[str, PartyKeys] = field(
        default_factory=lambda: {f"tallier-{number}": PartyKeys.generate() for number in range(3)}
    )

    def make(self, policy: Policy | None = None, **settings: Any) -> None:
        """Make its home, or give it other settings, and let the relay know it."""
        fields = {"coordinator_url": self.relay.url, "shard": str(self.shard.path), "engine": "numpy"} | settings
        config = AgentConfig(agent_id=AGENT, **fields)
        self.relay.enrolled[AGENT] = create_agent_home(self.home, config, policy or self.policy())

    def start_once(self) -> None:
        """Start its process and stop it at once: what keeps it from starting is raised."""
        stopped = threading.Event()
        stopped.set()
        run_agent(self.home, stop=stopped, clock=lambda: self.now)

    def policy(self, **changes: Any) -> Policy:
        return policy_of(
            budget={"instance_epsilon": 5.0},
            talliers={name: keys.public.seal_key for name, keys in self.talliers.items()},
            verify_key=self.relay.keys.public.verify_key,
            **({"backbones": [self.shard.fingerprint], "releases": ["histogram", "winner"]} | changes),
        )

    def write_policy(self, **changes: Any) -> None:
        (self.home / "policy.toml").write_text(policy_toml(self.policy(**changes)))

    def ask(self, *, expires_at: float = 2e9, talliers: dict[str, str] | None = None, **changes: Any) -> Ask:
        facts = {"classes": self.shard.classes, "backbone_fingerprint": self.shard.fingerprint}
        fields = {"k": 5, "sigma_votes": 40.0, "delta": 1e-5, "max_queries": len(self.batch)}
        task = make_task(**(facts | fields | changes))
        keys = {name: keys.public for name, keys in self.talliers.items()}
        seal_keys = {name: key.seal_key for name, key in keys.items()} | (talliers or {})
        named = tuple(TallierKey(name, seal_keys[name], keys[name].verify_key) for name in keys)
        return Ask(task, self.batch, named, expires_at)

    def send(self, ask: Ask) -> Message:
        return self.relay.send("ask", AGENT, ask.encode(), task=ask.task.digest, round=ask.round.digest)

    def run(self, wait_s: float = 0.5) -> Any:
        return self.start(lambda stop: run_agent(self.home, stop=stop, clock=lambda: self.now, wait_s=wait_s))

    def killed_at(self, point: str) -> None:
        """Run the agent in a separate process, which ends itself by SIGKILL where it comes to that step."""
        killed_at(point, self.home.parent / "fault", PROCESS, self.home)

    def shares(self, ask: Ask, count: int) -> list[tuple[ShareVector, ...]]:
        """Return the shares that the talliers can open of answers to one ask, one tuple per answer."""
        found: dict[str, list[Message]] = {}

        def is_sent() -> bool:
            for name in self.talliers:
                mail = self.relay.mail_of(name)
                found[name] = [one for one in mail if one.header.round_digest == ask.round.digest]
            return min(map(len, found.values())) >= count

        wait_until(is_sent, what="shares")
        return [tuple(self._opened(name, found[name][number]) for name in found) for number in range(count)]

    def _opened(self, tallier: str, message: Message) -> ShareVector:
        verify(message, self.relay.enrolled[AGENT].verify_key)
        return share_from_bytes(self.talliers[tallier].open(message), max_entries=10_000)

    def shares_of(self, ask: Ask) -> tuple[ShareVector, ...]:
        """Send an ask, and return the shares of its first answer."""
        self.send(ask)
        return self.shares(ask, 1)[0]

    def proposal(self, job_id: str = "job-1", *, until: float = UNTIL, **changes: Any) -> Proposal:
        ask = self.ask(**changes)
        return Proposal(job_id, ask.task, (len(self.batch),), ask.talliers, until)

    def propose(self, made: Proposal) -> None:
        self.relay.send("proposal", AGENT, made.encode(), task=made.task.digest)

    def willing(self, count: int) -> list[Willing]:
        return [Willing.decode(message.body) for message in self.relay.wait_for("willing", count)]

    def declined(self, count: int) -> list[Declined]:
        return [Declined.decode(message.body) for message in self.relay.wait_for("declined", count)]

    def refusals(self, count: int) -> list[RefusalBody]:
        return [RefusalBody.decode(message.body) for message in self.relay.wait_for("refused", count)]

    def is_stored(self, ask: Ask) -> bool:
        """Return True if an answer lies in the journal."""
        with open_database(self.home / "journal.db", read_only=True) as database, database.read() as connection:
            states = text("SELECT state FROM agent_rounds WHERE round_digest = :digest")
            return connection.execute(states, {"digest": ask.round.digest}).scalar() == "stored"

    @contextmanager
    def ledger(self) -> Iterator[Ledger]:
        """Look at its ledger, also while its process runs."""
        with open_database(self.home / "journal.db", read_only=True) as database:
            yield Ledger(database, clock=lambda: NOW)

    def waiting(self) -> list[str]:
        """Return the digests of the tasks that wait for a person."""
        with self.ledger() as ledger:
            return [task.digest for _, task, _ in AgentMemory(ledger.database, ledger).waiting()]

    def spent(self) -> int:
        with self.ledger() as ledger:
            return sum(balance.spent for balance in ledger.balances() if balance.cap)


def same(first: tuple[ShareVector, ...], second: tuple[ShareVector, ...]) -> bool:
    return [share.fingerprint() for share in first] == [share.fingerprint() for share in second]
