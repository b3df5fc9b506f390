"""What tests do to a running federation and put right again: pause a process, narrow a policy, see what was spent."""

from __future__ import annotations

import os
import signal
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import redis
from PIL import Image
from sklearn.datasets import load_digits

from api.client import Client
from api.schema import JobView, TaskRequest, TaskView
from tests.e2e.service.conftest import Service
from tests.forked_command import ForkedCommand

Account = tuple[str, str]

QUERIES = 6
AGENTS = ("agent-1", "agent-2", "agent-3")
EVERYBODY = {"federation", *(f"agent:{name}" for name in AGENTS)}


def new_task(client: Client, name: str, **changes: Any) -> TaskView:
    """A task of a few queries, cheap enough for dozens of them."""
    fields: dict[str, Any] = {"method": "knn", "k": 5, "sigma_votes": 20.0, "delta": 1e-5, "max_queries": QUERIES}
    return client.create_task(TaskRequest(name=name, **fields | changes))


def submit(client: Client, task: TaskView, features: np.ndarray) -> JobView:
    """All queries of a task as one job."""
    fingerprint = task.task["backbone_fingerprint"]
    return client.submit(task.task_id, features=features[:QUERIES], backbone_fingerprint=fingerprint)


def digits_as_files(folder: Path, start: int, count: int) -> Path:
    """The images that `digit_features` were made of, for jobs that need the embedder."""
    folder.mkdir()
    for number in range(start, start + count):
        pixels = (load_digits().images[number] * (255 / 16)).round().astype(np.uint8)
        Image.fromarray(pixels).save(folder / f"{number:04d}.png")
    return folder


def arm(service: Service, point: str) -> None:
    """Have whoever next reaches a fault point die there."""
    armed = service.faults.with_suffix(".new")
    armed.write_text(point)
    armed.rename(service.faults)


def posted(client: Client) -> dict[Account, int]:
    """What every account of the coordinator has paid; nothing may be reserved."""
    accounts = client.budget().accounts
    assert [one.account for one in accounts if one.reserved_nano] == []
    return {(one.account, one.level): one.posted_nano for one in accounts}


def paid_at_instance_level(client: Client, before: dict[Account, int]) -> dict[str, int]:
    """What each account has paid since, by name; those of revoked agents that paid nothing are left out."""
    after = posted(client)
    assert all(after[key] >= paid for key, paid in before.items())
    return {account: after[account, level] - before.get((account, level), 0)
            for account, level in after
            if level == "instance" and after[account, level] != before.get((account, level), 0)}  # fmt: skip


@contextmanager
def paused(pid: int) -> Iterator[None]:
    """A process that does nothing, as behind a cut cable."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


@contextmanager
def redis_of(service: Service) -> Iterator[Any]:
    """The federation's own redis."""
    settings = tomllib.loads((service.home / "coordinator" / "coordinator.toml").read_text())
    with redis.Redis.from_url(settings["redis_url"]) as store:
        yield store


@contextmanager
def started(log: Path, *arguments: object) -> Iterator[ForkedCommand]:
    """A role as a process of its own, until the block ends."""
    process = ForkedCommand(*arguments, errors=log, is_heard=False)
    try:
        yield process
    finally:
        process.end()
