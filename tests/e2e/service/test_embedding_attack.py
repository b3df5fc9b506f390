"""A small archive of very large black images, at a real federation: it holds up nobody and ends with its job."""

from __future__ import annotations

import io
import zipfile
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from api.client import Client
from api.schema import TaskRequest
from feature_store.results.questions import MAX_JOB_PIXELS, EmbedBoard
from tests.e2e.service.conftest import Service
from tests.e2e.service.harm import digits_as_files
from tests.processes import wait_until

SIDE = 7900
QUERIES = 4


def bomb(path: Path, images: int) -> Path:
    """Some kilobytes that unpack to gigabytes."""
    packed = io.BytesIO()
    Image.new("L", (SIDE, SIDE)).save(packed, "PNG")
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for number in range(images):
            archive.writestr(f"{number}.png", packed.getvalue())
    return path


def task_of(client: Client, queries: int) -> tuple[str, str]:
    request = TaskRequest(name="attack", method="knn", k=5, sigma_votes=30.0, delta=1e-5, max_queries=queries)
    made = client.create_task(request)
    return made.task_id, str(made.task["backbone_fingerprint"])


def decoders(service: Service) -> list[str]:
    """Process ids of those that decode for the embedder."""
    found = []
    for children in Path(f"/proc/{service.pid('embedder')}/task").glob("*/children"):
        with suppress(OSError):  # it has just ended
            for pid in children.read_text().split():
                found += [pid] if b"decode_process" in Path(f"/proc/{pid}/cmdline").read_bytes() else []
    return found


@pytest.mark.long
@pytest.mark.slow
def test_other_requesters_are_served_beside_a_bomb_and_cancelled_it_leaves_nothing(
    service: Service, digit_features: np.ndarray, tmp_path: Path
) -> None:
    home = service.home / "coordinator"
    with service.client() as admin:
        hostile = service.client(token=admin.create_token("hostile", "requester").token)
        honest = service.client(token=admin.create_token("honest", "requester").token)
    with hostile, honest:
        images = MAX_JOB_PIXELS // SIDE**2
        job = hostile.submit(task_of(hostile, images)[0], images=bomb(tmp_path / "bomb.zip", images))
        shard = home / "jobs" / job.job_id / ".public.shard.writing"
        wait_until(shard.exists, what="the bomb to be embedded")
        pictures = digits_as_files(tmp_path / "pictures", 0, QUERIES)
        task_id, fingerprint = task_of(honest, 2 * QUERIES)
        ours = [
            honest.submit(task_id, features=digit_features[:QUERIES], backbone_fingerprint=fingerprint),
            honest.submit(task_id, images=pictures),
        ]
        # Not by the clock: both are done while the bomb still goes off.
        assert [honest.wait(one.job_id).state for one in ours] == ["completed", "completed"]
        assert hostile.job(job.job_id).state == "queued"
        # Nobody was asked, so its queries come back; of a round that was asked it says "given-up".
        assert hostile.cancel(job.job_id).rounds[0].state == "not-asked"
        wait_until(lambda: not decoders(service), what="the decoder to end")
        wait_until(lambda: not (home / "jobs" / job.job_id).exists(), what="the folder to go")
        assert EmbedBoard(home).all_jobs() == []
