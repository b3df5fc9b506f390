"""A real Ray of two workers on this machine, for one module at a time; no process of it is left behind."""

from __future__ import annotations

import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from benchmarks.machine import cpu_seconds_below
from feature_store.cluster.driver import Driver
from labeler.errors import Unavailable
from tests.processes import is_gone


def needs_ray() -> None:
    """Skip where Ray is not installed; imports nothing, since a cluster's token is made before Ray is."""
    if find_spec("ray") is None:
        pytest.skip("Ray is not installed; `make test-long` installs the extra ray")


def processes_below(parent: int) -> dict[int, str]:
    """Every process that descends from one, with its command line; those that are gone and not yet reaped left out."""
    return {one: _command(one) for one in cpu_seconds_below(parent) if one != parent and not is_gone(one)}


def _command(process: int) -> str:
    try:
        return Path(f"/proc/{process}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""


def wait_until_gone(processes: set[int], *, patience_s: float = 240.0) -> set[int]:
    """Those of some processes that are still there after a while."""
    until = time.monotonic() + patience_s
    left = processes
    while left and time.monotonic() < until:
        time.sleep(0.1)
        left = {one for one in left if _command(one)}
    return left


@pytest.fixture(scope="module")
def party_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("party")


@pytest.fixture(scope="module")
def two_workers(party_folder: Path) -> Iterator[Driver]:
    """Skips where Ray is not installed; ends the cluster, and looks that nothing of it is left."""
    needs_ray()
    driver = Driver(beside=party_folder / "shard", cpus=2)
    try:
        folders = driver.cluster.folders
    except Unavailable:
        # Ray gives up on nodes of its own that begin slowly, as they do beside the end of a long run.
        driver.end()
        driver = Driver(beside=party_folder / "shard", cpus=2)
        folders = driver.cluster.folders
    assert driver.process is not None
    try:
        yield driver
    finally:
        # None where a test has ended it; beside others, this process may have children that are not the cluster's.
        started = set() if driver.process is None else {driver.process, *processes_below(driver.process)}
        driver.end()
        assert not wait_until_gone(started)
        assert not any(folder.exists() for folder in folders)
