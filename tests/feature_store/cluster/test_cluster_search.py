"""Records that are searched by the processes of a party's own cluster: the answer of one process, and nobody else's."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import feature_store.cluster.driver as door
from feature_store.cluster.driver import Driver
from feature_store.cluster.search import ClusterIndex, file_of, mapped
from feature_store.index import Neighbors, build_index, nearest_by_definition
from feature_store.rows import quantize
from feature_store.shard import Shard
from feature_store.shard_writer import ShardWriter
from labeler.errors import InvalidSetting, Unavailable
from labeler.tally import QueryBatch, round_of
from labeler.task import Task
from tests.answering import AnsweringAgent
from tests.feature_store.cluster.conftest import needs_ray, processes_below, wait_until_gone
from tests.labeler.tasks import make_task
from workers.voting import select_records

pytestmark = pytest.mark.process

CLASSES = ("healthy", "ill")
ROWS, DIMENSION = 3000, 128


def shard_at(path: Path, *, seed: int = 1) -> Shard:
    """Records among which many are tied: every one is there four times."""
    rng = np.random.default_rng(seed)
    features = np.repeat(rng.normal(size=(ROWS // 4, DIMENSION)), 4, axis=0)
    with ShardWriter(path, classes=CLASSES, fingerprint="f", dimension=DIMENSION, public=False) as writer:
        writer.append(features, np.arange(ROWS) % 2, [f"name-of-{row}.png" for row in range(ROWS)])
        writer.finish()
    return Shard.open(path)


def queries_of(shard: Shard) -> NDArray[np.int16]:
    near = np.asarray(shard.features[::151])
    return np.concatenate([near, quantize(np.random.default_rng(5).normal(size=(10, DIMENSION)))])


def assert_equal(found: Neighbors, expected: Neighbors) -> None:
    for name in ("record_ids", "similarities", "rows"):
        one, other = getattr(found, name), getattr(expected, name)
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(one, other)


def by_definition(shard: Shard, queries: NDArray[np.int16], k: int) -> Neighbors:
    return nearest_by_definition(np.asarray(shard.features), np.asarray(shard.record_ids), queries, k)


@pytest.mark.long
def test_parts_find_what_the_definition_says(two_workers: Driver, tmp_path: Path) -> None:
    shard = shard_at(tmp_path / "shard")
    index = ClusterIndex(shard.features, shard.record_ids, memory_limit_bytes=4 << 20, driver=two_workers)
    assert len(set(index.ready())) == two_workers.cluster.cpus == 2
    queries = queries_of(shard)
    for k in (1, 3, 50, ROWS + 7):
        assert_equal(index.search(queries, k), by_definition(shard, queries, k))
    assert index.search(queries[:0], 5).rows.shape == (0, 5)


@pytest.mark.long
def test_records_in_memory_few_or_none_are_searched_as_well(two_workers: Driver) -> None:
    rng = np.random.default_rng(3)
    queries = quantize(rng.normal(size=(4, 8)))
    for count in (0, 1, 5):
        features = quantize(rng.normal(size=(count, 8))) if count else np.empty((0, 8), dtype=np.int16)
        ids = rng.permutation(count).astype(np.int64)
        index = ClusterIndex(features, ids, driver=two_workers)
        assert len(index) == count
        assert_equal(index.search(queries, 3), nearest_by_definition(features, ids, queries, 3))


@pytest.mark.long
def test_a_worker_that_is_killed_changes_nothing_and_another_takes_its_place(
    two_workers: Driver, tmp_path: Path
) -> None:
    shard = shard_at(tmp_path / "shard")
    index = ClusterIndex(shard.features, shard.record_ids, driver=two_workers)
    queries = np.repeat(queries_of(shard), 40, axis=0)
    expected = by_definition(shard, queries, 60)
    before = index.ready()
    for victim in range(2):
        found: list[Neighbors] = []
        searching = threading.Thread(target=lambda found=found: found.append(index.search(queries, 60)))
        searching.start()
        os.kill(index.ready()[victim] if victim else before[victim], signal.SIGKILL)
        searching.join()
        assert_equal(found[0], expected)
    after = index.ready()
    assert not set(after) & set(before)
    assert_equal(index.search(queries, 60), expected)


@pytest.mark.long
def test_a_part_that_begins_anew_has_forgotten_no_deletion(two_workers: Driver, tmp_path: Path) -> None:
    shard = shard_at(tmp_path / "shard")
    index = ClusterIndex(shard.features, shard.record_ids, driver=two_workers)
    queries = queries_of(shard)
    index.ready()
    gone = np.unique(by_definition(shard, queries, 2).record_ids)
    assert index.remove(gone) == len(gone)
    alive = ~np.isin(shard.record_ids, gone)
    left = nearest_by_definition(np.asarray(shard.features)[alive], np.asarray(shard.record_ids)[alive], queries, 9)
    for _ in range(2):
        np.testing.assert_array_equal(index.search(queries, 9).record_ids, left.record_ids)
        for process in index.ready():
            os.kill(process, signal.SIGKILL)
    assert len(index) == ROWS - len(gone)
    with pytest.raises(InvalidSetting, match="nothing was removed"):
        index.remove(gone[:1])


def task_for(shard: Shard) -> Task:
    fields = {"classes": CLASSES, "k": 9, "sigma_votes": 4.0, "max_queries": 30, "agents": 1}
    return make_task(**fields, backbone_fingerprint=shard.fingerprint)


def agent_for(shard: Shard, engine: str) -> AnsweringAgent:
    return AnsweringAgent("a", shard, noise_secret=bytes(32), is_seeded=True, engine=engine)


@pytest.fixture
def shared(two_workers: Driver, monkeypatch: pytest.MonkeyPatch) -> Driver:
    """The driver of engine ray in this process."""
    monkeypatch.setattr("feature_store.cluster.search.shared_driver", lambda **_: two_workers)
    return two_workers


def answered(agent: AnsweringAgent, task: Task, batch: QueryBatch) -> list[str]:
    return [message.share.fingerprint() for message in agent.answer(task, batch)]


@pytest.mark.long
def test_an_agent_charges_nothing_while_a_part_cannot_be_searched(shared: Driver, tmp_path: Path) -> None:
    shard = shard_at(tmp_path / "shard")
    task, batch = task_for(shard), QueryBatch(queries_of(shard))
    agent = agent_for(shard, "ray")
    lost = shard.path / "features.npy"
    lost.rename(tmp_path / "kept")
    with pytest.raises(Unavailable, match="not every part"):
        agent.answer(task, batch)
    assert not agent.charged
    (tmp_path / "kept").rename(lost)
    reference = agent_for(shard, "numpy")
    assert answered(agent, task, batch) == answered(reference, task, batch)
    assert agent.charged == [round_of(task, batch).digest]


@pytest.mark.long
@pytest.mark.parametrize("harm", ["every worker", "the process that drives Ray", "that process, and no other begins"])
def test_once_charged_the_answer_comes_whatever_is_killed(
    shared: Driver, tmp_path: Path, harm: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    shard = shard_at(tmp_path / "shard")
    task, batch = task_for(shard), QueryBatch(queries_of(shard))
    agent = agent_for(shard, "ray")
    charge: Callable[..., None] = agent.charge

    def charged_and_then_harmed(*asked: Any, **fields: Any) -> None:
        charge(*asked, **fields)
        if harm == "every worker":
            index = agent._neighbors.of_records(select_records(shard, records_per_person=None))
            assert isinstance(index, ClusterIndex)
            for process in index.ready():
                os.kill(process, signal.SIGKILL)
            return
        assert shared.process is not None
        os.kill(shared.process, signal.SIGKILL)
        if harm.endswith("no other begins"):
            monkeypatch.setattr(shared, "_begin", _no_other)
            (shard.path / "features.npy").unlink()  # records were erased meanwhile; this process has mapped the rows

    monkeypatch.setattr(agent, "charge", charged_and_then_harmed)
    reference = agent_for(shard, "numpy")
    assert answered(agent, task, batch) == answered(reference, task, batch)


def _no_other() -> None:
    raise Unavailable("no cluster")


def test_another_process_maps_the_very_rows(tmp_path: Path) -> None:
    shard = shard_at(tmp_path / "shard")
    for array in (shard.features, shard.record_ids):
        file = file_of(array)
        assert isinstance(file, Path)
        np.testing.assert_array_equal(mapped(file), array)
        assert not mapped(file).flags.writeable
        for other in (array[200:300], np.asarray(array)[::2]):
            np.testing.assert_array_equal(mapped(file_of(other)), other)


LISTENING = "0A"


def listening(processes: set[int]) -> set[str]:
    """Addresses at which some processes take connections, as the kernel writes them."""
    inodes = set()
    for process in processes:
        try:
            handles = list(Path(f"/proc/{process}/fd").iterdir())
            inodes |= {str(handle.readlink()) for handle in handles if handle.is_symlink()}
        except OSError:
            continue
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == LISTENING and f"socket:[{fields[9]}]" in inodes:
                found.add(fields[1].partition(":")[0])
    return found


@pytest.mark.long
def test_everything_of_a_cluster_of_our_own_listens_on_the_loopback_interface(two_workers: Driver) -> None:
    ClusterIndex(np.full((4, 2), 5, dtype=np.int16), np.arange(4), driver=two_workers).ready()
    found = listening(set(processes_below(os.getpid())))
    assert found
    assert found <= {"0100007F", "0000000000000000FFFF00000100007F", "00000000000000000000000001000000"}


@pytest.mark.long
def test_its_folder_is_its_owners_alone_and_holds_nothing_of_a_record(two_workers: Driver, party_folder: Path) -> None:
    shard = shard_at(party_folder / "shard")
    index = ClusterIndex(shard.features, shard.record_ids, driver=two_workers)
    queries = queries_of(shard)
    found = index.search(queries, 20)
    os.kill(index.ready()[0], signal.SIGKILL)
    index.search(queries, 20)
    folders = two_workers.cluster.folders
    assert folders[0].parent == party_folder
    assert all(stat.S_IMODE(folder.stat().st_mode) == 0o700 for folder in folders[:2])
    private = [str(number).encode() for number in found.record_ids[:, 0].tolist()]
    private += [np.asarray(shard.features[row]).tobytes() for row in (0, 1500)]
    private += [b"name-of-", b"healthy"]
    read = 0
    for path in folders[0].rglob("*"):
        if path.is_file() and not path.is_symlink():
            content = path.read_bytes()
            read += len(content)
            assert not [word for word in private if word in content], path.name
    assert read > 1000


def _address_and_token() -> tuple[str, str]:
    import ray

    return ray.get_runtime_context().gcs_address, os.environ["RAY_AUTH_TOKEN"]


@pytest.mark.long
def test_who_has_the_token_gets_in_and_nobody_else(two_workers: Driver) -> None:
    address, token = two_workers.ask(_address_and_token)
    assert address.startswith("127.0.0.1:")
    script = f"from ray._raylet import GcsClient; print(len(GcsClient(address={address!r}).get_all_node_info()))"
    settings = {"RAY_AUTH_MODE": "token", "RAY_gcs_rpc_server_connect_timeout_s": "3"}
    said = {}
    for name, shown in (("right", token), ("wrong", token[::-1])):
        asked = subprocess.run(
            [sys.executable, "-c", script],
            env=os.environ | settings | {"RAY_AUTH_TOKEN": shown},
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
        said[name] = asked.stdout.strip()
    assert said == {"right": "1", "wrong": ""}


@pytest.mark.long
def test_a_cluster_ends_with_the_process_that_began_it_however_that_ends(tmp_path: Path) -> None:
    needs_ray()
    script = (
        "import time; from pathlib import Path; from feature_store.cluster.driver import Driver\n"
        f"driver = Driver(beside=Path({str(tmp_path / 'shard')!r}), cpus=1)\n"
        "print(driver.cluster.cpus, flush=True); time.sleep(600)"
    )
    begun = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    try:
        assert begun.stdout is not None
        with begun.stdout:
            assert begun.stdout.readline() == "1\n"
        started = set(processes_below(begun.pid))
        assert len(started) > 2
    finally:
        begun.kill()
        begun.wait()
    assert not wait_until_gone(started)
    assert not list(tmp_path.iterdir())


def test_without_ray_the_sentence_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(door, "find_spec", lambda _: None)
    with pytest.raises(InvalidSetting, match=r"pip install 'private-labeler\[ray\]'"):
        build_index(np.full((1, 2), 5, dtype=np.int16), np.arange(1), engine="ray")
