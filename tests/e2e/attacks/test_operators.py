"""Operators on a bad day: the coordinator's disk is full while jobs run and while somebody uploads."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from api.client import Client
from api.client_http import ServiceProblem
from api.schema import Check
from tests.e2e.service.conftest import Service
from tests.e2e.service.harm import EVERYBODY, QUERIES, new_task, paid_at_instance_level, paused, posted, submit
from tests.processes import wait_until

pytestmark = pytest.mark.slow

ROOM_BYTES = 16_384
"""Less than the journal's log takes for one more entry once it has grown, and than the probe of readiness writes."""


@contextmanager
def full_disk(pid: int) -> Iterator[None]:
    """A process that can write no file beyond some bytes; to it that is a full disk (labeler.system.files)."""
    before = resource.prlimit(pid, resource.RLIMIT_FSIZE)
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (ROOM_BYTES, before[1]))
    try:
        yield
    finally:
        resource.prlimit(pid, resource.RLIMIT_FSIZE, before)


def storage(client: Client) -> Check:
    """What readiness says of the disk."""
    (found,) = (one for one in client.readiness().checks if one.name == "storage")
    return found


def pictures(folder: Path) -> list[Path]:
    rng = np.random.default_rng(5)
    paths = [folder / f"{number}.png" for number in range(QUERIES)]
    for path in paths:
        Image.fromarray(rng.integers(0, 256, (64, 64, 3), dtype=np.uint8)).save(path)
    return paths


def test_a_full_disk_is_told_to_who_sends_and_costs_a_running_job_time_only(
    service: Service, digit_features: np.ndarray, tmp_path: Path
) -> None:
    pid = service.pid("coordinator")
    with service.client() as client:
        before = posted(client)
        waiting = new_task(client, "sent when the disk was full")
        with paused(service.pid("agent-1")):
            job = submit(client, new_task(client, "under way"), digit_features)
            wait_until(lambda: "agent-1" in client.job(job.job_id).stage, what="agent-1 to be awaited")
            with full_disk(pid):
                wait_until(lambda: not storage(client).ok, what="readiness to say so")
                assert "the disk is full" in storage(client).detail
                with pytest.raises(ServiceProblem, match="the disk is full") as refused:
                    client.submit(waiting.task_id, images=pictures(tmp_path))
                assert (refused.value.status, refused.value.type) == (507, "urn:labeler:problem:storage-full")
                assert client.job(job.job_id).state not in ("failed", "refused")
                assert client.budget().accounts, "what needs no room is answered"
            wait_until(lambda: client.readiness().ready, what="readiness to be back")
        done = client.wait(job.job_id)
        assert done.state == "completed"
        sent = client.wait(client.submit(waiting.task_id, images=pictures(tmp_path)).job_id)
        assert sent.state == "completed"
        paid = paid_at_instance_level(client, before)
    assert service.pid("coordinator") == pid, "nobody had to start it again"
    charge = done.price.instance_charge_nano + sent.price.instance_charge_nano
    assert paid == dict.fromkeys(EVERYBODY, charge)
