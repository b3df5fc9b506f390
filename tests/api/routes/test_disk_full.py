"""A real disk that is full: what is sent is refused with a sentence, readiness says so, and nothing is lost."""

from __future__ import annotations

import io
import os
import subprocess
import zipfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from api.coordinator import stores
from tests.api.routes.conftest import FINGERPRINT, ConfigOf, ServeIn, Service, eventually

DISK_BYTES = 24 * 2**20


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own, of some megabytes; skips where none may be mounted."""
    image, place = tmp_path / "disk.img", tmp_path / "disk"
    place.mkdir()
    with image.open("wb") as file:
        file.truncate(DISK_BYTES)
    for command in (["mkfs.ext4", "-q", "-F", "-m", "0", image], ["mount", "-o", "loop", image, place]):
        try:
            subprocess.run(list(map(str, command)), check=True, capture_output=True, timeout=30)
        except (OSError, subprocess.SubprocessError):
            pytest.skip(f"a full disk needs {command[0]}, and the right to use it")
    yield place
    subprocess.run(["umount", "--lazy", str(place)], check=True, capture_output=True, timeout=30)


def fill(place: Path) -> Path:
    """Take every byte that is left."""
    filler = place / "filler"
    with filler.open("wb", buffering=0) as file:
        for size in (2**20, 4096, 1):
            with suppress(OSError):
                while True:
                    file.write(os.urandom(size))
    return filler


def archive(size: int) -> bytes:
    """A zip of pictures that do not pack."""
    rng = np.random.default_rng(0)
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as file:
        for number in range(size // 60_000 + 1):
            picture = io.BytesIO()
            Image.fromarray(rng.integers(0, 255, size=(140, 140, 3), dtype=np.uint8)).save(picture, "PNG")
            file.writestr(f"{number}.png", picture.getvalue())
    return packed.getvalue()


def storage(service: Service) -> tuple[int, bool, str]:
    with service.http("admin") as http:
        answer = http.get("/readyz")
    (found,) = (one for one in answer.json()["checks"] if one["name"] == "storage")
    return answer.status_code, found["ok"], found["detail"]


def test_on_a_full_disk_uploads_are_refused_with_507_and_go_through_once_there_is_room(
    disk: Path, config_of: ConfigOf, serve_in: ServeIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stores, "TOLD_AGAIN_S", 0.0)
    with serve_in(config_of(disk / "home")) as service, service.http("requester") as http:
        task = service.task()
        assert storage(service)[1]
        vectors = {
            "task_id": task.task_id,
            "features": np.eye(3, 8).tolist(),
            "backbone_fingerprint": FINGERPRINT,
        }
        request = '{"task_id": "' + task.task_id + '"}'
        form = {"archive": ("photos.zip", archive(4 * 2**20))}
        filler = fill(disk)
        spent = service.coordinator.ledger.head()
        answers = [
            http.post("/v1/jobs", json=vectors, headers={"Idempotency-Key": "vectors"}),
            http.post("/v1/jobs", data={"request": request}, files=form, headers={"Idempotency-Key": "images"}),
        ]
        for answer in answers:
            assert answer.status_code == 507, answer.text
            assert answer.headers["content-type"] == "application/problem+json"
            assert answer.json()["type"] == "urn:labeler:problem:storage-full"
            assert "the disk is full" in answer.json()["detail"]
            assert answer.headers["Retry-After"] == "60"
        status, ok, detail = storage(service)
        assert (status, ok) == (503, False)
        assert "full" in detail
        # Reading goes on, and nothing was charged or left.
        assert http.get("/v1/jobs").json()["items"] == []
        assert service.coordinator.ledger.head() == spent
        filler.unlink()
        assert storage(service)[1]
        assert http.post("/v1/jobs", json=vectors, headers={"Idempotency-Key": "vectors"}).status_code == 202
        again = http.post("/v1/jobs", data={"request": request}, files=form, headers={"Idempotency-Key": "images"})
        assert again.status_code == 202


def test_a_job_that_was_taken_waits_while_the_disk_is_full_and_goes_on(
    disk: Path, config_of: ConfigOf, serve_in: ServeIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its questions cannot be kept, then they can; it never fails of it."""
    with serve_in(config_of(disk / "home")) as service, service.http("requester") as http:
        task = service.task()
        jobs = service.coordinator.stores.jobs
        held = service.coordinator.conductor
        tick = held.tick
        monkeypatch.setattr(held, "tick", lambda *_: None)

        def take_turn() -> None:
            held.driver.wake(job_id)
            tick()

        vectors = {"task_id": task.task_id, "features": np.eye(3, 8).tolist(), "backbone_fingerprint": FINGERPRINT}
        job_id = http.post("/v1/jobs", json=vectors).json()["job_id"]
        filler = fill(disk)
        for _ in range(3):
            take_turn()
        assert jobs.get(job_id).state == "queued"
        filler.unlink()
        service.agree(job_id)
        take_turn()
        eventually(lambda: jobs.get(job_id).state == "collecting" or take_turn())


def test_what_was_found_is_told_again_for_a_moment_so_that_asking_often_is_no_work(
    tmp_path: Path, service: Service
) -> None:

    now = [0.0]
    journal = service.coordinator.stores.database
    before = journal.probe()
    probe = stores.RoomProbe(tmp_path, journal, now=lambda: now[0])
    for _ in range(50):
        probe.check()
    assert journal.probe() == before + 2
    now[0] = stores.TOLD_AGAIN_S
    probe.check()
    assert journal.probe() == before + 4
    assert list(tmp_path.iterdir()) == []
