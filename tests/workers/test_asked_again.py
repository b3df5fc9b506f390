"""Asking again tells nobody anything: two neighboring worlds, whatever is asked when, show the same kinds and
sentences, and in each of them what is sent again are the bytes that were sent first."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from feature_store.query_selection import model_rows
from feature_store.shard import Shard
from labeler.errors import LabelerError
from labeler.ledger.database import Database, open_database
from labeler.rounds.agent import Recipients
from labeler.system.erasable import KeyFolder
from labeler.system.keys import PartyKeys, seal_body
from labeler.tally import QueryBatch, round_of
from labeler.task import Task, parse_task
from tests.answering import AnsweringAgent
from tests.scored import scored
from tests.workers.agent_site import AGENT, UNTIL, Site, same
from tests.workers.builders import policy_of
from tests.workers.journal_store import Clock, DurableSite, JournalStore
from workers.agent.policy import Policy

METHODS = ("knn", "reverse-knn", "ensemble", "blind-average", "aux-distill", "evaluate")
KEYS = [PartyKeys.generate().public.seal_key for _ in range(4)]
TALLIERS: Recipients = tuple((f"tallier-{number}", KEYS[number]) for number in range(3))
ROTATED: Recipients = (*TALLIERS[:2], ("tallier-2", KEYS[3]))


def policy() -> Policy:
    return policy_of(budget={"instance_epsilon": 5.0}, methods=list(METHODS), releases=["histogram", "winner"])


def asked_of(method: str, shard: Shard, queries: np.ndarray) -> tuple[Task, QueryBatch]:
    batch = QueryBatch(model_rows(shard.dimension)) if method == "blind-average" else QueryBatch(queries)
    if method == "evaluate":
        asked = scored(shard.classes, shard.dimension, fingerprint=shard.fingerprint)
        batch = QueryBatch(asked.rows(shard.dimension, num_classes=len(shard.classes)))
    fields: dict[str, object] = {
        "name": "t", "classes": shard.classes, "method": method, "k": 1 if method in ("reverse-knn", "evaluate") else 5,
        "sigma_votes": 40.0, "delta": 1e-5, "agents": 1, "max_queries": len(batch), "colluding_agents": 0,
        "backbone_fingerprint": shard.fingerprint,
    }  # fmt: skip
    if method in ("blind-average", "aux-distill"):
        fields["training"] = {"min_records": 8, "regularisation": 0.1, "dimension": 4}
    if method in ("knn", "reverse-knn"):
        return parse_task(fields), batch
    del fields["k"]
    return parse_task(fields), batch


@dataclass
class World:
    """An agent over one shard, and what the outside sees of it.

    Attributes:
        transcript: per step that shows anything: its kind, the lengths or the sentence, and whether bytes came again.
    """

    folder: Path
    shard: Shard
    task: Task
    batch: QueryBatch
    changes: bool
    clock: Clock = field(default_factory=Clock)
    transcript: list[tuple[object, ...]] = field(default_factory=list)
    first: tuple[bytes, ...] | None = None

    def __post_init__(self) -> None:
        self.database: Database | None = None
        self.open()

    def open(self) -> None:
        if self.database is not None:
            self.database.close()
        self.database = open_database(
            self.folder / "journal.db", anchor=self.folder / "journal.head", allow_unsynced=True
        )
        site = DurableSite(
            self.database, policy(), clock=self.clock, keys=KeyFolder(self.folder / "erasable"), expires_at=UNTIL
        )
        site.rounds.sweep()
        self.rounds = JournalStore(self.database, site.rounds)
        self.agent = AnsweringAgent("a", self.shard, ledger=site.ledger, rounds=self.rounds, engine="numpy")

    @property
    def digest(self) -> str:
        return round_of(self.task, self.batch).digest

    def step(self, name: str) -> None:
        if name == "ask":
            self.show(name, lambda: self.answer(TALLIERS))
        elif name == "ask rotated":
            self.show(name, lambda: self.answer(ROTATED))
        elif name == "charge only":
            self.show(name, lambda: self.agent.charge(self.task, self.batch, recipients=TALLIERS))
        elif name == "settle":
            self.rounds.erase(self.digest)
        elif name == "restart":
            self.open()
        elif self.changes and len(self.shard) > 2:
            self.shard.delete(self.shard.record_ids[self.shard.alive][:1])

    def answer(self, recipients: Recipients) -> tuple[bytes, ...]:
        def seal(number: int, body: bytes) -> bytes:
            name, key = recipients[number]
            return seal_body(
                "input-share", sender="a", recipient=name, task_digest=self.task.digest, round_digest=self.digest,
                body=body, seal_to=key,
            )  # fmt: skip

        stored = self.rounds.stored(self.digest, recipients)
        if stored is None:
            self.agent.charge(self.task, self.batch, recipients=recipients)
            stored = self.agent.bodies(self.task, self.batch, recipients=recipients, seal=seal)
        return tuple(stored)

    def show(self, name: str, work: Callable[[], tuple[bytes, ...] | None]) -> None:
        try:
            sent = work()
        except LabelerError as error:
            self.transcript.append((name, "refused", error.problem_type, str(error)))
            return
        if sent is not None:
            self.first = sent if self.first is None else self.first
            assert sent == self.first, "other bytes were sent again"
            self.transcript.append((name, "sent", *(len(body) for body in sent)))


def worlds(tmp_path: Path, make_shard: Callable[..., Shard], method: str, steps: list[str]) -> tuple[World, World]:
    """One in which records come to be deleted, and its neighbor, which lacks a record and whose records stay."""
    make_shard("one")
    make_shard("public", records=30, seed=99, public=True)
    made = []
    for name in ("a", "b"):
        folder = tmp_path / "worlds" / name
        folder.mkdir(parents=True)
        shutil.copytree(tmp_path / "one", folder / "shard")
        shard = Shard.open(folder / "shard")
        if name == "b":
            shard.delete(shard.record_ids[7:8])
        task, batch = asked_of(method, shard, Shard.open(tmp_path / "public").features[:])
        made.append(World(folder, shard, task, batch, changes=name == "a"))
    for world in made:
        for step in steps:
            world.step(step)
        if world.database is not None:
            world.database.close()
    return made[0], made[1]


LIFE = [
    "charge only", "change records", "restart", "ask", "change records", "ask", "restart", "ask", "ask rotated", "ask",
    "settle", "ask", "change records", "restart", "ask",
]  # fmt: skip


@pytest.mark.parametrize("method", METHODS)
def test_a_whole_life_of_a_round_looks_alike_for_every_method(
    tmp_path: Path, make_shard: Callable[..., Shard], method: str
) -> None:
    one, other = worlds(tmp_path, make_shard, method, LIFE)
    assert one.transcript == other.transcript
    kinds = [shown[1] for shown in one.transcript]
    assert kinds == ["sent"] * 3 + ["refused", "sent"] + ["refused"] * 2
    assert one.transcript[-1] == one.transcript[-2]
    assert one.first != other.first


# The process.


@pytest.mark.process
@pytest.mark.parametrize(
    "point",
    ["agent.stored", *(pytest.param(point, marks=pytest.mark.long) for point in ("agent.charged", "agent.computed"))],
)
def test_killed_before_anything_left_and_then_a_record_deleted_one_answer_leaves(
    site: Site, tmp_path: Path, point: str
) -> None:
    ask = site.ask()
    site.send(ask)
    site.killed_at(point)
    assert site.relay.mail_of("tallier-0") == []
    other = Shard.open(site.shard.path)
    other.delete(other.record_ids[:1])
    with site.run():
        site.shares_of(ask)
        other.delete(other.record_ids[1:2])
        site.send(ask)
        first, again = site.shares(ask, 2)
    assert same(first, again)
    assert site.relay.received("refused") == []
    assert {message.header.sender for message in site.relay.inbox} == {AGENT}
