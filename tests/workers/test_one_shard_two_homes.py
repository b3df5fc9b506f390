"""One private shard answers for one journal: a second home on it would have a second budget for every record."""

from __future__ import annotations

import json
import multiprocessing
import re
import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from feature_store.shard import MARK_NAME, Shard, claim
from labeler.errors import BadData, OutputInUse
from labeler.system.keys import PartyKeys
from labeler.tally import QueryBatch
from tests.workers.test_agent_service import AGENT, Site
from workers.agent.service import LOOK_EVERY_S
from workers.run.labeling import run_job
from workers.run.preparation import LabelingJob
from workers.run.task_file import QueriesTable, TaskFile, TaskTable

ONE, OTHER = "1" * 64, "2" * 64


@pytest.fixture
def homes(tmp_path: Path, make_shard: Any, relay: Any, start: Any) -> tuple[Site, Site]:
    """Two homes of one agent that answer from the same shard."""
    batch = QueryBatch(make_shard("public", records=9, seed=99, public=True).features[:])
    first = Site(tmp_path / "first", make_shard("own"), relay, batch, start)
    second = replace(first, home=tmp_path / "second")
    for site in (first, second):
        site.make()
    return first, second


def enrol(site: Site) -> None:
    """The relay knows one party of this name: the holder of these keys."""
    site.relay.enrolled[AGENT] = PartyKeys.load(site.home / "keys.json").public


def answer(site: Site, nonce: str) -> None:
    enrol(site)
    running = site.run()
    site.send(ask := site.ask(nonce=nonce))
    site.shares(ask, 1)
    running.end()


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


def test_the_same_home_goes_on_however_often_it_starts_and_wherever_it_is_moved(homes: tuple[Site, Site]) -> None:
    first, _ = homes
    answer(first, "first")
    first.start_once()
    first.home.rename(first.home.with_name("moved"))
    first.home = first.home.with_name("moved")
    answer(first, "second")


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


def test_a_home_that_runs_stops_answering_once_the_shard_is_handed_over(homes: tuple[Site, Site]) -> None:
    first, _ = homes
    enrol(first)
    running = first.run()
    first.send(ask := first.ask(nonce="before"))
    first.shares(ask, 1)
    # At once, so that the first home does not look in between and take it back.
    (first.shard.path / MARK_NAME).unlink()
    claim(first.shard.path, agent_id=AGENT, journal=OTHER)
    time.sleep(2 * LOOK_EVERY_S)  # it looks at its shard by the clock
    first.send(first.ask(nonce="after"))
    (refusal,) = first.refusals(1)
    running.end()
    assert "this agent cannot answer this round" in refusal.sentence
    assert str(first.shard.path) not in refusal.sentence


def test_a_mark_that_cannot_be_read_refuses_every_home(homes: tuple[Site, Site]) -> None:
    first, _ = homes
    first.start_once()
    for damage in (b"", b"{", b"[]", b'{"version": "labeler-shard-mark/2", "journal": "1"}'):
        (first.shard.path / MARK_NAME).write_bytes(damage)
        with pytest.raises(BadData, match="cannot be read, so nobody knows which home"):
            first.start_once()


def test_a_marked_shard_is_a_shard_as_before(homes: tuple[Site, Site]) -> None:
    first, _ = homes
    first.start_once()
    shard = Shard.open(first.shard.path)
    assert shard.delete(shard.record_ids[:1]) == 1
    first.start_once()


@pytest.mark.long
def test_labeler_run_asks_nobody_about_the_mark(homes: tuple[Site, Site], make_shard: Any, tmp_path: Path) -> None:
    """It has no budget that lasts beyond its folder, as docs/task-file.md says."""
    first, _ = homes
    first.start_once()
    mark = (first.shard.path / MARK_NAME).read_bytes()
    other, public = make_shard("other", seed=1), make_shard("asked", seed=9, public=True)
    claim(other.path, agent_id="elsewhere", journal=OTHER)
    task, queries = TaskTable(name="t", epsilon=0.5, delta=1e-5), QueriesTable(strategy="random", count=8)
    file = TaskFile(task=task, queries=queries)
    job = LabelingJob(file, (first.shard.path, other.path), public.path, tmp_path / "job")
    found = run_job(job, warn=[].append)
    assert found["labels"]["asked"] == 8
    assert (first.shard.path / MARK_NAME).read_bytes() == mark


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
        process.join(60)
    assert won.get(timeout=10) == json.loads((tmp_path / MARK_NAME).read_text())["journal"]
    assert won.empty(), attempt
