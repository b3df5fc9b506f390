"""Whatever a device can do to an agent's process, it does before anything is charged."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from feature_store.index import build
from feature_store.index.exact_index import Engine
from feature_store.shard import Shard
from labeler.errors import BudgetExceeded, InvalidSetting
from labeler.tally import QueryBatch
from labeler.task import Task
from tests.answering import AnsweringAgent
from tests.feature_store.index.fake_devices import FakeDevice
from tests.labeler.tasks import make_task


class NotingLedger:
    def __init__(self, events: list[str], *, is_covered: bool = True) -> None:
        self._events, self._is_covered = events, is_covered

    def charge(self, **_: object) -> None:
        if not self._is_covered:
            raise BudgetExceeded("nothing is left")
        self._events.append("charge")


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeDevice:
    """A machine with a device; what is asked of it, in order, is in `events`."""
    device, known = FakeDevice(), build.load_engine

    def loaded(name: str) -> Engine:
        if name == "faiss-gpu":
            device.events.append("contact")
        return device if name == "faiss-gpu" else known(name)

    monkeypatch.setattr(build, "load_engine", loaded)
    monkeypatch.setattr("workers.voting.load_engine", loaded)
    return device


def task_of(shard: Shard, **more: object) -> Task:
    fields = {"classes": shard.classes, "k": 5, "sigma_votes": 4.0, "max_queries": 9, "agents": 1}
    return make_task(**fields | {"backbone_fingerprint": shard.fingerprint} | more)


def agent_of(shard: Shard, ledger: NotingLedger, engine: str = "faiss-gpu") -> AnsweringAgent:
    agent = AnsweringAgent("a", shard, noise_secret=bytes(32), ledger=ledger, is_seeded=True, engine=engine)
    agent.build_index()
    return agent


@pytest.fixture
def batch(make_shard: Callable[..., Shard]) -> QueryBatch:
    return QueryBatch(make_shard("public", records=9, seed=99, public=True).features[:])


def test_first_contact_index_and_canary_come_before_the_charge(
    make_shard: Callable[..., Shard], batch: QueryBatch, cuda: FakeDevice
) -> None:
    shard = make_shard("own")
    agent = agent_of(shard, NotingLedger(cuda.events))
    agent.answer(task_of(shard), batch)
    agent.answer(task_of(shard, nonce="another"), batch)
    assert cuda.events[0] == "contact"
    assert cuda.events[-2:] == ["charge", "charge"]
    assert cuda.events.count("index") == 1
    assert cuda.made == 1


def test_a_refused_charge_finds_the_index_as_it_was(
    make_shard: Callable[..., Shard], batch: QueryBatch, cuda: FakeDevice
) -> None:
    """Else a refusal would take as long as the records are many."""
    shard = make_shard("own")
    agent = agent_of(shard, NotingLedger(cuda.events, is_covered=False))
    before = list(cuda.events)
    with pytest.raises(BudgetExceeded):
        agent.answer(task_of(shard), batch)
    assert cuda.events == before


def test_an_engine_that_does_not_work_is_refused_when_the_agent_starts(
    make_shard: Callable[..., Shard], cuda: FakeDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(name: str) -> Engine:
        raise InvalidSetting("the first search on it ended its process with SIGABRT")

    monkeypatch.setattr("workers.voting.load_engine", refuses)
    with pytest.raises(InvalidSetting, match="SIGABRT"):
        agent_of(make_shard("own"), NotingLedger(cuda.events))
    assert "charge" not in cuda.events


def test_ballots_from_a_device_are_those_of_the_processor_and_an_agent_that_ends_gives_it_back(
    make_shard: Callable[..., Shard], batch: QueryBatch, cuda: FakeDevice
) -> None:
    shard = make_shard("own")
    for method, k in (("knn", 7), ("reverse-knn", 2)):
        task = task_of(shard, method=method, k=k)
        expected = agent_of(shard, NotingLedger([]), engine="numpy").ballots(task, batch)
        agent = agent_of(shard, NotingLedger([]))
        assert np.array_equal(agent.ballots(task, batch), expected)
        del agent
        assert not cuda.alive
