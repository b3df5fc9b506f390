"""An agent goes over to a changed shard by the clock, with everything built, and never because somebody asks."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from typing import cast

import numpy as np
import pytest

from feature_store.shard import Shard
from feature_store.shard_writer import erase_deleted
from labeler.errors import LabelerError
from labeler.ledger.lifetimes import LifetimeSpends
from labeler.tally import QueryBatch
from tests.operations import difference, operations
from tests.workers.voting.test_answers_of_neighbours import PUBLIC, SETTINGS, records_of, shard_of, task_of
from workers.agent import service
from workers.agent.service import _Records
from workers.party.home import AgentConfig

BATCH, KEY = QueryBatch(PUBLIC), bytes(32)


@pytest.fixture
def records(tmp_path: Path) -> _Records:
    shard_of(tmp_path / "own", *records_of("any", 21))
    config = AgentConfig(agent_id="a", coordinator_url="http://127.0.0.1:1", shard="own", engine="numpy")
    return _Records(tmp_path, config, cast(LifetimeSpends, None), journal="1" * 64)


def delete_one(records: _Records) -> None:
    shard = Shard.open(records._path)
    shard.delete(shard.record_ids[shard.alive][:1])
    erase_deleted(records._path)


@pytest.mark.parametrize("way", ["knn", "ensemble"])
def test_the_first_question_after_a_deletion_runs_the_same_operations_as_any_other(records: _Records, way: str) -> None:
    """The index was rebuilt when the next question came: 0.4 s that revealed a deletion."""
    task = task_of(**SETTINGS[way])

    def ask() -> object:
        return records.agent().ballots(task, BATCH, KEY)

    ask()
    usual = operations(ask)
    version = records.agent().shard_version
    delete_one(records)
    assert not difference(usual, operations(ask))
    assert records.agent().shard_version == version
    records.look()
    assert records.agent().shard_version != version
    assert not difference(usual, operations(ask))


def test_a_deleted_record_soon_no_longer_votes_though_nobody_asks(
    records: _Records, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "LOOK_EVERY_S", 0.01)
    task = task_of(method="knn", k=100)
    assert records.agent().ballots(task, BATCH, KEY).sum(axis=1).tolist() == [21] * len(BATCH)
    with records.watched():
        delete_one(records)
        until = time.monotonic() + 60
        while records.agent().ballots(task, BATCH, KEY).sum() == 21 * len(BATCH):
            assert time.monotonic() < until
            time.sleep(0.01)
    assert records.agent().ballots(task, BATCH, KEY).sum(axis=1).tolist() == [20] * len(BATCH)


def test_what_was_built_while_the_new_index_was_is_taken_over_too(
    records: _Records, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = task_of(**SETTINGS["ensemble"])
    opened = _Records._open

    def slowly(self: _Records, *, verify: bool) -> object:
        agent = opened(self, verify=verify)
        records.agent().ballots(task, BATCH, KEY)
        return agent

    monkeypatch.setattr(_Records, "_open", slowly)
    delete_one(records)
    records.look()
    monkeypatch.setattr("workers.learning.linear.train_head", lambda *_, **__: pytest.fail("trained when asked"))
    assert records.agent().ballots(task, BATCH, KEY).sum() == len(BATCH)


def test_an_agent_lets_go_of_the_files_of_whoever_left_and_answers_as_before(records: _Records) -> None:
    """Erased bytes that a process has mapped stay on the disk, under no name, until it closes them."""
    task = task_of(method="knn", k=100)
    agent = records.agent()
    agent.ballots(task, BATCH, KEY)
    delete_one(records)
    assert agent.ballots(task, BATCH, KEY).sum() == 21 * len(BATCH), "the rows of before are there until it looks"
    del agent
    records.look()
    mapped = [line for line in Path("/proc/self/maps").read_text().splitlines() if str(records._path) in line]
    assert {line.split(maxsplit=5)[5] for line in mapped} == {
        str(records._path / f"{name}.1.npy") for name in ("features", "labels", "record_ids")
    }
    assert records.agent().ballots(task, BATCH, KEY).sum(axis=1).tolist() == [20] * len(BATCH)


def test_models_are_forgotten_whichever_shard_they_are_of(records: _Records) -> None:
    task = task_of(**SETTINGS["ensemble"])
    records.agent().ballots(task, BATCH, KEY)
    records.forget_models()
    delete_one(records)
    records.look()
    asked = operations(partial(records.agent().ballots, task, BATCH, KEY))
    assert len(asked) > len(operations(partial(records.agent().ballots, task, BATCH, KEY)))


def test_a_shard_that_became_unusable_is_answered_from_by_nobody_until_it_is_mended(records: _Records) -> None:
    manifest = records._path / "manifest.json"
    good = manifest.read_bytes()
    manifest.write_bytes(b"{}")
    records.look()
    with pytest.raises(LabelerError):
        records.agent()
    manifest.write_bytes(good)
    records.look()
    assert np.array_equal(records.agent().ballots(task_of(method="knn", k=1), BATCH, KEY).sum(axis=1), [1] * len(BATCH))
