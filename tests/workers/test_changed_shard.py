"""An agent and its shard: it goes over to a changed one by the clock, with everything built, and never when asked."""

from __future__ import annotations

import json
import multiprocessing
import re
import shutil
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from feature_store.index import build
from feature_store.shard import MARK_NAME, Shard, claim, deletions
from feature_store.shard_writer import erase_deleted
from labeler.errors import BadData, LabelerError, OutputInUse
from labeler.ledger.lifetimes import LifetimeSpends
from labeler.system.keys import PartyKeys
from labeler.tally import QueryBatch
from tests.operations import difference, operations
from tests.processes import wait_until
from tests.workers.agent_site import AGENT, Site
from tests.workers.voting.test_answers_of_neighbours import PUBLIC, SETTINGS, records_of, shard_of, task_of
from workers.agent import service
from workers.agent.service import _Records
from workers.party.home import AgentConfig
from workers.run.labeling import run_job
from workers.run.preparation import LabelingJob
from workers.run.task_file import QueriesTable, TaskFile, TaskTable

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


@pytest.mark.parametrize("engine", ["auto", "faiss", "int16"])
def test_the_index_is_built_when_the_agent_starts_and_when_records_change_and_never_when_it_is_asked(
    tmp_path: Path, engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine of an earlier version starts, too. A task that bounds a person's records leaves the index as it is."""
    built: list[int] = []
    exact_index = build.ExactIndex

    def counts(features: Any, *given: Any, **named: Any) -> Any:
        built.append(len(features))
        return exact_index(features, *given, **named)

    monkeypatch.setattr(build, "ExactIndex", counts)
    shard_of(tmp_path / "own", *records_of("any", 21))
    config = AgentConfig(agent_id="a", coordinator_url="http://127.0.0.1:1", shard="own", engine=engine)
    records = _Records(tmp_path, config, cast(LifetimeSpends, None), journal="1" * 64)
    assert len(built) == 1
    task = task_of(method="knn", k=5)
    for _ in range(2):
        records.agent().ballots(task, BATCH, KEY)
    assert len(built) == 1
    records.agent().ballots(task_of(method="reverse-knn", k=2), BATCH, KEY)
    assert built == [21, len(BATCH)]  # of the questions
    delete_one(records)
    records.agent().ballots(task, BATCH, KEY)
    assert len(built) == 2
    records.look()
    assert built[2:] == [20]
    records._shard.persons = np.arange(40).reshape(20, 2)
    for bound in (None, 1, None, 1):
        records.agent().ballots(task_of(method="knn", k=5, records_per_person=bound), BATCH, KEY)
    assert len(built) == 4


def test_a_deleted_record_soon_no_longer_votes_though_nobody_asks(
    records: _Records, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "LOOK_EVERY_S", 0.01)
    task = task_of(method="knn", k=100)
    assert records.agent().ballots(task, BATCH, KEY).sum(axis=1).tolist() == [21] * len(BATCH)
    with records.watched():
        delete_one(records)
        wait_until(lambda: records.agent().ballots(task, BATCH, KEY).sum() < 21 * len(BATCH))
    assert records.agent().ballots(task, BATCH, KEY).sum(axis=1).tolist() == [20] * len(BATCH)


def test_a_deletion_is_logged_once_with_its_moment_and_with_nothing_of_the_records(
    records: _Records, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="labeler.agent")
    gone = Shard.open(records._path).record_ids[0]
    delete_one(records)
    records.look()
    records.look()
    (told,) = (vars(one) for one in caplog.records if one.message == "records were deleted")
    (at,) = deletions(records._path)
    assert told["deleted_at"] == at
    assert told["affects"].startswith("rounds that are asked from now on are answered without them")
    assert str(gone) not in " ".join(one.getMessage() + str(vars(one)) for one in caplog.records)


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


# One private shard answers for one journal: a second home on it would have a second budget for every record


ONE, OTHER = "1" * 64, "2" * 64


@pytest.fixture
def homes(site: Site, tmp_path: Path) -> tuple[Site, Site]:
    """Two homes of one agent that answer from the same shard."""
    second = replace(site, home=tmp_path / "second")
    second.make()
    return site, second


def enrol(site: Site) -> None:
    """The relay knows one party of this name: the holder of these keys."""
    site.relay.enrolled[AGENT] = PartyKeys.load(site.home / "keys.json").public


def answer(site: Site, nonce: str) -> None:
    enrol(site)
    with site.run():
        site.shares_of(site.ask(nonce=nonce))


def test_a_second_home_answers_nothing_from_the_same_shard(homes: tuple[Site, Site]) -> None:
    first, second = homes
    answer(first, "first")
    try:
        second.start_once()
    except BadData as error:
        said = str(error)
    else:
        answer(second, "second")
        paid = first.spent() + second.spent()
        pytest.fail(f"two homes paid {paid} nano-units for the same records, each from a whole budget")
    assert re.search("answers for another home, of agent 'hospital-1' .*second budget.*write-off", said)


def test_the_same_home_goes_on_however_often_it_starts_and_wherever_it_is_moved(site: Site) -> None:
    answer(site, "first")
    site.start_once()
    site.home.rename(site.home.with_name("moved"))
    site.home = site.home.with_name("moved")
    answer(site, "second")


def test_a_copy_of_the_shard_answers_for_the_same_home(homes: tuple[Site, Site], tmp_path: Path) -> None:
    first, second = homes
    first.start_once()
    shutil.copytree(first.shard.path, tmp_path / "copy")
    second.make(shard=str(tmp_path / "copy"))
    with pytest.raises(BadData, match="answers for another home"):
        second.start_once()
    first.make(shard=str(tmp_path / "copy"))
    first.start_once()


def test_a_shard_is_handed_over_as_the_refusal_says(homes: tuple[Site, Site]) -> None:
    first, second = homes
    first.start_once()
    mark = first.shard.path / MARK_NAME
    assert mark.stat().st_mode & 0o777 == 0o600
    assert json.loads(mark.read_text())["agent"] == AGENT
    mark.unlink()
    answer(second, "second")
    with pytest.raises(BadData, match="answers for another home"):
        first.start_once()


def test_a_home_that_runs_stops_answering_once_the_shard_is_handed_over(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, seen, look = threading.Lock(), threading.Event(), service._Records.look

    def looked(records: service._Records) -> None:
        with gate:
            look(records)
            seen.set()

    monkeypatch.setattr(service, "LOOK_EVERY_S", 0.01)
    monkeypatch.setattr(service._Records, "look", looked)
    with site.run():
        site.shares_of(site.ask(nonce="before"))
        with gate:  # it does not look in between and take it back
            (site.shard.path / MARK_NAME).unlink()
            claim(site.shard.path, agent_id=AGENT, journal=OTHER)
            seen.clear()
        assert seen.wait(90)
        site.send(site.ask(nonce="after"))
        (refusal,) = site.refusals(1)
    assert "this agent cannot answer this round" in refusal.sentence
    assert str(site.shard.path) not in refusal.sentence


def test_a_mark_that_cannot_be_read_refuses_every_home(site: Site) -> None:
    site.start_once()
    for damage in (b"", b"{", b"[]", b'{"version": "labeler-shard-mark/2", "journal": "1"}'):
        (site.shard.path / MARK_NAME).write_bytes(damage)
        with pytest.raises(BadData, match="cannot be read, so nobody knows which home"):
            site.start_once()


def test_a_marked_shard_is_a_shard_as_before(site: Site) -> None:
    site.start_once()
    shard = Shard.open(site.shard.path)
    assert shard.delete(shard.record_ids[:1]) == 1
    site.start_once()


@pytest.mark.long
def test_labeler_run_asks_nobody_about_the_mark(site: Site, make_shard: Any, tmp_path: Path) -> None:
    """It has no budget that lasts beyond its folder, as docs/task-file.md says."""
    site.start_once()
    mark = (site.shard.path / MARK_NAME).read_bytes()
    other, public = make_shard("other", seed=1), make_shard("asked", seed=9, public=True)
    claim(other.path, agent_id="elsewhere", journal=OTHER)
    task, queries = TaskTable(name="t", epsilon=0.5, delta=1e-5), QueriesTable(strategy="random", count=8)
    file = TaskFile(task=task, queries=queries)
    job = LabelingJob(file, (site.shard.path, other.path), public.path, tmp_path / "job")
    found = run_job(job, warn=[].append)
    assert found["labels"]["asked"] == 8
    assert (site.shard.path / MARK_NAME).read_bytes() == mark


def test_where_nothing_can_be_written_it_says_so_and_refuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def read_only(*_: Any, **__: Any) -> None:
        raise OSError(30, "Read-only file system")

    with monkeypatch.context() as away:
        away.setattr("feature_store.shard.replace_file", read_only)
        with pytest.raises(BadData, match=r"cannot be marked \(Read-only file system\).*write to its folder once"):
            claim(tmp_path, agent_id="a", journal=ONE)
        assert not (tmp_path / MARK_NAME).exists()
    claim(tmp_path, agent_id="a", journal=ONE)
    with monkeypatch.context() as away:
        away.setattr("feature_store.shard.replace_file", read_only)
        away.setattr("feature_store.shard.exclusive", read_only)
        claim(tmp_path, agent_id="a", journal=ONE)  # marked before: nothing is written


def _claims(folder: Path, journal: str, ready: Any, won: Any) -> None:
    ready.wait()
    while True:
        try:
            claim(folder, agent_id="a", journal=journal)
        except OutputInUse:
            continue
        except BadData:
            return
        won.put(journal)
        return


@pytest.mark.process
@pytest.mark.parametrize("attempt", range(5))
def test_of_two_processes_that_start_at_once_one_has_the_shard(tmp_path: Path, attempt: int) -> None:
    context = multiprocessing.get_context("fork")
    ready, won = context.Barrier(4), context.Queue()
    journals = [f"{number}" * 64 for number in range(4)]
    claims: Callable[..., None] = _claims
    processes = [context.Process(target=claims, args=(tmp_path, one, ready, won)) for one in journals]
    for process in processes:
        process.start()
    for process in processes:
        process.join(90)
    assert won.get(timeout=90) == json.loads((tmp_path / MARK_NAME).read_text())["journal"]
    assert won.empty(), attempt
