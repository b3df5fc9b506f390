"""A coordinator's driver over a real journal, with mail in memory; a test takes its turns and signs for every party."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save

from api.coordinator.coordinator_thread import CoordinatorThread
from api.coordinator.views import ViewCache, read_view
from api.schema import JobView
from feature_store.rows import quantize
from labeler.driver.intake import Delivery, incoming
from labeler.driver.mail_memory import MemoryMailbox
from labeler.errors import AwaitingApproval, LabelerError
from labeler.ledger.chain import Head
from labeler.ledger.jobs import RoundRecord
from labeler.ledger.sequences import Sequences
from labeler.messages import COORDINATOR, Kind, Message, read_frames
from labeler.messages.bodies import (
    Declined,
    RefusalBody,
    Willing,
    aggregate_to_bytes,
    holdings_to_bytes,
    winner_to_bytes,
)
from labeler.rounds.effects import Patience
from labeler.sharing import Winner
from labeler.system.keys import PartyKeys
from labeler.tally import AggregateShare, Round
from tests.api.conftest import FINGERPRINT, House

AGENTS = ("east", "north", "west")
TALLIERS = ("t0", "t1", "t2")
YES = None
LATER = RefusalBody(AwaitingApproval.problem_type, "a person has to approve", False)
NO = RefusalBody("policy-refusal", "allow.methods: not this one", True)


@dataclass
class Site:
    """See the module."""

    house: House
    mailbox: MemoryMailbox = field(default_factory=MemoryMailbox)
    own: PartyKeys = field(default_factory=PartyKeys.generate)
    keys: dict[str, PartyKeys] = field(default_factory=dict)
    steady_s: float = 100.0
    sequence: int = 0

    def __post_init__(self) -> None:
        for agent in AGENTS:
            self.rotate(agent)
            facts: dict[str, Any] = {"classes": ["cat", "dog", "owl"], "backbone_fingerprint": FINGERPRINT}
            self.house.parties.contact(agent, self.house.clock(), facts | {"version": "labeler/0.2"}, Head(1, "a" * 64))
        for number, name in enumerate(TALLIERS):
            self.keys[name] = PartyKeys.generate()
            public = self.keys[name].public
            self.house.parties.enrol(name, "tallier", public.verify_key, public.seal_key, tallier=number)
            self.house.parties.contact(name, self.house.clock(), {"winner_group": "a" * 64}, Head(1, "a" * 64))
        self.cache = ViewCache(self.house.stores)
        self.restart()

    def rotate(self, name: str) -> None:
        """Give a party other keys."""
        self.keys[name] = PartyKeys.generate()
        public = self.keys[name].public
        self.house.parties.rotate(name, public.verify_key, public.seal_key)

    def restart(self, *, patience_s: float = 0.0) -> None:
        """Go on with a driver that remembers nothing, as after a crash."""
        house = self.house
        self.thread = CoordinatorThread(
            home=house.config.home,
            stores=replace(house.stores, sequences=Sequences(house.database)),
            keys=self.own,
            mailbox=self.mailbox,
            patience=Patience(patience_s, 5.0),
            steady=lambda: self.steady_s,
            requester_of="named {}".format,
        )
        self.driver = self.thread.driver

    def folder(self, job: JobView) -> Path:
        return self.house.config.home / "jobs" / job.job_id

    def submit(self, *, by: str = "tok-1", prepared: bool = True, start: int = 0, **fields: Any) -> JobView:
        """Take a job of two questions, which are chosen unless a test does without."""
        task = self.house.task(**fields)
        self.house.tasks.share(task.digest, by)
        job = self.house.submit(task, 2, by=by, start=start)
        if prepared:
            vectors = np.array([[1.0 + number / 7, 2.0, -1.0] for number in range(2)])
            (self.folder(job) / "questions.safetensors").write_bytes(save({"features": quantize(vectors)}))
        self.driver.wake(job.job_id)
        return job

    def asked(self, **fields: Any) -> JobView:
        """A job to which every agent has said yes, and whose agents were asked."""
        job = self.submit(**fields)
        self.thread.tick()
        for agent in AGENTS:
            self.deliver(self.yes(agent, job))
        self.thread.tick()
        return job

    def look(self, job: JobView, *, after_s: float = 0.0) -> JobView:
        """What a requester sees of a job once it was looked at again."""
        self.steady_s += after_s
        self.driver.wake(job.job_id)
        self.thread.tick()
        return self.seen(job)

    def seen(self, job: JobView) -> JobView:
        """What a requester sees; one who looks again and again sees no less."""
        fresh = read_view(job.job_id, self.house.stores)
        assert self.cache.view(self.house.jobs.get(job.job_id)) == fresh
        return fresh

    # What parties send.

    def message(self, kind: Kind, sender: str, body: bytes, job: JobView, **header: Any) -> Message:
        self.sequence += 1
        fields: dict[str, Any] = {"recipient": COORDINATOR, "task_digest": job.task_id, "sequence": self.sequence}
        return self.keys[sender].message(kind, sender=sender, body=body, **(fields | header))

    def deliver(self, *messages: Message, error: LabelerError | None = None) -> list[int | LabelerError]:
        taken = [incoming(one, self.house.parties.get(one.header.sender), self.own) for one in messages]
        outcomes: list[int | LabelerError] = []
        self.driver.deliver(Delivery(tuple(taken), error, outcomes.append))
        return outcomes

    def yes(self, agent: str, job: JobView) -> Message:
        return self.message("willing", agent, Willing(job.job_id, job.expires_at.timestamp()).encode(), job)

    def say(self, job: JobView, **said: RefusalBody | None) -> JobView:
        """Let agents answer a proposal, and look at the job."""
        for agent, refusal in said.items():
            if refusal is YES:
                self.deliver(self.yes(agent, job))
            else:
                self.deliver(self.message("declined", agent, Declined(job.job_id, refusal).encode(), job))
        return self.look(job)

    def share(self, agent: str, tallier: str, job: JobView) -> Message:
        seal_to = self.keys[tallier].public.seal_key
        digest = self.round(job).round_digest
        return self.message(
            "input-share", agent, bytes(100), job, recipient=tallier, round_digest=digest, seal_to=seal_to
        )

    def refuse(self, party: str, job: JobView, sentence: str, *, is_final: bool = True) -> None:
        body = RefusalBody("policy-refusal", sentence, is_final).encode()
        self.deliver(self.message("refused", party, body, job, round_digest=self.round(job).round_digest))

    def held(self, tallier: str, job: JobView, agents: Sequence[str] = AGENTS) -> Message:
        body = holdings_to_bytes(dict.fromkeys(agents, b"s" * 16))
        return self.message("holdings", tallier, body, job, round_digest=self.round(job).round_digest)

    def hold(self, job: JobView, *agents: str) -> JobView:
        """Let every tallier report that it holds shares of these agents, or of all."""
        for tallier in TALLIERS:
            self.deliver(self.held(tallier, job, agents or AGENTS))
        self.thread.tick()
        return self.seen(job)

    def summed(self, number: int, job: JobView) -> Message:
        one = self.round(job)
        of = self.house.tasks.get(job.task_id).task
        of_round = Round(of.digest, one.batch_digest, one.num_queries, of.num_classes, of.quorum)
        zeros = np.zeros((one.num_queries, of.num_classes), np.uint64)
        share = AggregateShare(number, of_round, frozenset(AGENTS), "b" * 64, zeros, False)
        return self._of_tallier("aggregate-share", number, aggregate_to_bytes(share), job)

    def won(self, number: int, job: JobView, labels: list[int]) -> Message:
        digest, found = self.round(job).round_digest, np.array(labels, dtype=np.int16)
        winner = Winner(number, digest, frozenset(AGENTS), "b" * 64, found, False)
        return self._of_tallier("winner", number, winner_to_bytes(winner), job)

    def _of_tallier(self, kind: Kind, number: int, body: bytes, job: JobView) -> Message:
        digest, seal_to = self.round(job).round_digest, self.own.public.seal_key
        return self.message(kind, TALLIERS[number], body, job, round_digest=digest, seal_to=seal_to)

    # What is there.

    def round(self, job: JobView) -> RoundRecord:
        return self.house.jobs.rounds(job.job_id)[0]

    def state(self, job: JobView) -> str:
        return self.house.jobs.get(job.job_id).state

    def charge(self, job: JobView, name: str = "0") -> str | None:
        """The state of a job's charge: of its first round, or as proposed."""
        return self.house.ledger.state(f"{job.job_id}/{name}")

    def spent(self) -> dict[str, int]:
        balances = self.house.ledger.balances()
        return {balance.account: balance.spent for balance in balances if balance.level == "instance"}

    def waiting(self, party: str) -> int:
        return self.mailbox.all_pending([party])[party]

    def mail(self, party: str) -> list[Message]:
        """What waits for a party."""
        found = asyncio.run(self.mailbox.receive(party, "", 0.0, 100))
        return [message for _, frames in found for message in read_frames(frames, max_messages=1)]

    def kinds(self, party: str) -> list[str]:
        return [message.header.kind for message in self.mail(party)]

    def later(self, **by: float) -> None:
        """Let time pass for the journal."""
        self.house.clock.now += timedelta(**by)
