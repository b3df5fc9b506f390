"""A cluster of one party's own: nobody else reaches it, and nothing of a record is left in its folder."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import feature_store.cluster.driver as door
from feature_store.cluster.driver import Driver
from feature_store.cluster.search import ClusterIndex
from feature_store.index import build_index
from labeler.errors import InvalidSetting
from tests.feature_store.cluster.conftest import needs_ray, processes_below, wait_until_gone
from tests.feature_store.cluster.test_cluster_search import queries_of, shard_at

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
            timeout=120,
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


def test_the_engine_is_named_without_loading_ray() -> None:
    script = (
        "import sys; import numpy as np; from feature_store.index import build_index; "
        "import feature_store.cluster.search; "
        "assert not [name for name in sys.modules if name.partition('.')[0] == 'ray']"
    )
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0
