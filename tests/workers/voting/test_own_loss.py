"""The losses of single records: exact against deleting them one by one, and shown to their owner alone."""

from __future__ import annotations

import copy
import json
import pickle
import shutil
from pathlib import Path

import numpy as np
import pytest

from feature_store.shard import Shard
from labeler.budget import Account
from labeler.errors import InvalidSetting, PrivacyRefusal
from labeler.per_instance_privacy import OwnLosses, own_losses
from labeler.planning import price
from labeler.system.files import replace_file
from labeler.tally import QueryBatch
from labeler.task import Task
from tests.answering import AnsweringAgent
from tests.workers.audit.conftest import audited_task, natural_records
from tests.workers.builders import shard_of_rows
from workers.agent.agent import InMemoryLedger
from workers.cli import main
from workers.homes.new import make_agent_home
from workers.party.home import AGENT_FILE, read_agent_config, settings_toml
from workers.voting import NeighborIndexes, select_records


def indexes() -> NeighborIndexes:
    return NeighborIndexes(dimension=8, engine="numpy")


RECORDS = 14


def shard_of(folder: Path) -> Shard:
    return shard_of_rows(folder / "a.shard", *natural_records(RECORDS, 8), fingerprint="audit", max_records=1000)


def public_shard(path: Path) -> Path:
    """Twenty questions."""
    return shard_of_rows(path, natural_records(60, 8)[0][-20:], fingerprint="audit").path


def ballots(task: Task, batch: QueryBatch, shard: Shard) -> np.ndarray:
    ledger = InMemoryLedger({"instance": Account("a", "instance", 10**18)})
    return AnsweringAgent("a", shard, ledger=ledger, noise_secret=bytes(range(32)), engine="numpy").ballots(task, batch)


def without(shard: Shard, record: int, folder: Path) -> Shard:
    path = folder / f"without-{record}.shard"
    shutil.copytree(shard.path, path)
    found = Shard.open(path)
    found.delete([record])
    return found


@pytest.mark.parametrize(
    "task",
    [
        audited_task(max_queries=20),
        audited_task(max_queries=20, k=RECORDS),
        audited_task(max_queries=20, k=RECORDS - 1),
        audited_task(max_queries=20, method="reverse-knn", k=4),
    ],
)
def test_a_loss_is_what_deleting_the_record_changes(task: Task, tmp_path: Path) -> None:
    shard = shard_of(tmp_path)
    shard.delete([int(shard.record_ids[3])])  # of which nothing can be told any more
    batch = QueryBatch(natural_records(60, 8)[0][-20:])
    found = own_losses("a", task, batch, select_records(shard, records_per_person=None), indexes())
    here = ballots(task, batch, shard)
    changes = [
        int(((here - ballots(task, batch, without(shard, int(one), tmp_path))) ** 2).sum())
        for one in shard.record_ids[shard.rows]
    ]
    assert found._squared == sorted(changes)
    assert max(changes) > 0


def test_the_owner_is_told_no_more_than_the_price(tmp_path: Path) -> None:
    task = audited_task(max_queries=20)
    batch = QueryBatch(natural_records(60, 8)[0][-20:])
    told = own_losses("a", task, batch, select_records(shard_of(tmp_path), records_per_person=None), indexes()).told_to(
        "a"
    )
    assert told.records == RECORDS
    assert 0 < told.median_epsilon <= told.largest_epsilon < told.priced_epsilon
    assert told.priced_epsilon == pytest.approx(price(task).instance.epsilon)


def test_nobody_else_is_told_by_any_way(tmp_path: Path) -> None:
    task = audited_task(max_queries=20)
    losses = OwnLosses("a", task, 20, np.array([12, 4, 0]))
    with pytest.raises(PrivacyRefusal, match="that agent alone"):
        losses.told_to("coordinator")
    for way in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(PrivacyRefusal):
            way(losses)
    with pytest.raises(TypeError):
        json.dumps(losses)
    assert not hasattr(losses, "__dict__")
    for text in (repr(losses), str(losses), f"{losses}", repr(losses.told_to("a"))):
        assert "12" not in text
        assert "private" in text


def test_a_change_beyond_the_price_is_a_defect_and_not_told() -> None:
    with pytest.raises(InvalidSetting, match="defect"):
        OwnLosses("a", audited_task(max_queries=2), 2, np.array([5]))


def test_of_winners_no_more_is_told_than_their_own_price(tmp_path: Path) -> None:
    """They cost less than the sums they are read from, and that price holds for every record."""
    task = audited_task(release="winner", max_queries=64, sigma_votes=16.0)
    told = OwnLosses("a", task, 64, np.array([0, 128])).told_to("a")
    assert told.priced_epsilon == price(task).instance.epsilon
    assert told.largest_epsilon == told.priced_epsilon < price(task).instance.histogram_epsilon


MODEL = {"k": 1, "sigma_votes": 1.0, "training": {"min_records": 20, "regularisation": 0.1, "dimension": 1}}


@pytest.mark.parametrize(
    "changes",
    [
        {"records_per_person": 2},
        {"method": "ensemble", "k": 1},
        {"method": "blind-average", **MODEL},
        {"method": "aux-distill", **MODEL},
        {"method": "reverse-knn", "k": 1, "lifetime_budget": {"budget_nano": 10**9, "least_similarity": 0.5}},
    ],
)
def test_where_a_record_lets_another_in_or_moves_a_model_there_is_only_the_price(
    changes: dict[str, object], tmp_path: Path
) -> None:
    records = select_records(shard_of(tmp_path), records_per_person=None)
    with pytest.raises(InvalidSetting, match="the price is what there is"):
        own_losses("a", audited_task(**changes), QueryBatch(natural_records(8, 8)[0]), records, indexes())


def test_smooth_sensitivity_is_the_whole_distance_to_the_price(tmp_path: Path) -> None:
    """One record, nearest to all questions and of another class, takes the number to the price, whatever was there."""
    task, folder = audited_task(max_queries=20), tmp_path / "poisoned"
    batch = QueryBatch(np.repeat(natural_records(1, 8)[0], 20, axis=0))
    features = np.concatenate([natural_records(RECORDS, 8)[0] * 0 + -batch.features[:1], batch.features[:1]])
    folder.mkdir()
    labels = np.append(np.zeros(RECORDS, np.int16), np.int16(1))
    shard = shard_of_rows(folder / "a", features, labels, fingerprint="audit")
    with_it = own_losses("a", task, batch, select_records(shard, records_per_person=None), indexes())
    shard.delete(shard.record_ids[np.asarray(shard.labels) == 1])
    before = own_losses("a", task, batch, select_records(shard, records_per_person=None), indexes())
    assert before.told_to("a").largest_epsilon == 0
    assert with_it.told_to("a").largest_epsilon == pytest.approx(price(task).instance.epsilon)


def test_a_site_is_told_in_its_terminal_wherever_it_asks_and_nothing_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A path in agent.toml is one in the home where it is there, as for the agent itself: homes are moved."""
    shard, home, asked = shard_of(tmp_path).path, tmp_path / "home", public_shard(tmp_path / "q.shard")
    (tmp_path / "task.json").write_text(audited_task(max_queries=20).model_dump_json())
    make_agent_home(home, agent_id="a", coordinator_url="http://127.0.0.1:1", shard=shard, engine="numpy")
    arguments = ["agent", "exposure", tmp_path / "task.json", "--home", home, "--queries", asked]
    monkeypatch.setattr("sys.argv", ["labeler", *map(str, arguments)])
    monkeypatch.chdir(tmp_path)
    for is_moved in (False, True):
        if is_moved:
            shutil.move(shard, home / "own.shard")
            config = read_agent_config(home).model_copy(update={"shard": "own.shard"})
            replace_file(home / AGENT_FILE, settings_toml(config), mode=0o600)
        before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.is_file()}
        with pytest.raises(SystemExit) as ended:
            main()
        assert ended.value.code == 0
        printed = capsys.readouterr().out
        assert f"Your images {RECORDS}" in printed
        assert "For your eyes alone" in printed
        assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.is_file()} == before
