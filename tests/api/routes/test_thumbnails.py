"""Small pictures of a job's own images: made here from decoded pixels, for whoever sent them, while they lie here."""

from __future__ import annotations

import io
import os
import zipfile
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, PngImagePlugin

from api.client import Client, ServiceProblem
from api.coordinator.results import SIDE
from api.schema import MAX_THUMBNAILS, JobView
from tests.api.routes.conftest import FINGERPRINT, Service

SECRET = b"a sentence inside the file"
COLOURS = {"red.png": (250, 10, 10), "ünder/grün.png": (10, 200, 10)}


def picture(colour: tuple[int, int, int]) -> bytes:
    note = PngImagePlugin.PngInfo()
    note.add_text("comment", SECRET.decode())
    buffer = io.BytesIO()
    Image.new("RGB", (300, 200), colour).save(buffer, format="PNG", pnginfo=note)
    return buffer.getvalue()


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two pictures, and between them one whose header is right and whose pixels are not there."""
    path = tmp_path_factory.mktemp("archive") / "photos.zip"
    noise = io.BytesIO()
    Image.fromarray(np.random.default_rng(1).integers(0, 255, (64, 64, 3), np.uint8)).save(noise, format="PNG")
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("red.png", picture(COLOURS["red.png"]))
        file.writestr("damaged.png", noise.getvalue()[:2000])
        file.writestr("ünder/grün.png", picture(COLOURS["ünder/grün.png"]))
    return path


@pytest.fixture(scope="module")
def job(service: Service, archive: Path) -> JobView:
    """Nobody embeds it, so it waits for as long as these tests take."""
    with Client(service.url, service.tokens["requester"]) as client:
        return client.submit(service.task().task_id, images=archive)


@pytest.fixture(autouse=True)
def _decoding_may_take_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """What decodes is a process that has to start, and cores are shared with other tests."""
    monkeypatch.setattr("api.coordinator.results.TAKES_S", 240.0)


def decoders() -> list[str]:
    running = []
    for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split():
        with suppress(FileNotFoundError):  # another child of this process has just ended
            running += [pid] * ("decode_process" in Path(f"/proc/{pid}/cmdline").read_text())
    return running


def test_pictures_come_as_asked_and_one_that_is_damaged_keeps_no_other(service: Service, job: JobView) -> None:
    names = ["ünder/grün.png", "damaged.png", "no such.png", "red.png"]
    with Client(service.url, service.tokens["requester"]) as client:
        found = client.thumbnails(job.job_id, names)
    assert list(found) == names
    assert found["damaged.png"] is None
    assert found["no such.png"] is None
    for name, colour in COLOURS.items():
        data = found[name]
        assert data is not None
        with Image.open(io.BytesIO(data)) as image:
            assert (image.format, image.size) == ("JPEG", (SIDE, SIDE))
            middle = image.getpixel((SIDE // 2, SIDE // 2))
        assert np.abs(np.array(middle) - colour).max() < 12, name
        assert SECRET not in data
    assert decoders() == []


def test_the_answer_is_json_that_nobody_stores_or_takes_for_something_else(service: Service, job: JobView) -> None:
    with service.http("requester") as http:
        answer = http.post(f"/v1/jobs/{job.job_id}:thumbnails", json={"sources": ["red.png"]})
        assert answer.headers["Content-Type"] == "application/json"
        assert answer.headers["X-Content-Type-Options"] == "nosniff"
        assert answer.headers["Cache-Control"] == "no-store"
        for refused in ([], ["red.png"] * (MAX_THUMBNAILS + 1), [""], "red.png"):
            assert http.post(f"/v1/jobs/{job.job_id}:thumbnails", json={"sources": refused}).status_code == 422


def test_only_who_sent_the_images_and_administrators_see_them(service: Service, job: JobView) -> None:
    _, stranger = service.coordinator.tokens.create("somebody else", "requester")
    with Client(service.url, stranger) as other, pytest.raises(ServiceProblem) as unknown:
        other.thumbnails("job-" + "0" * 20, ["red.png"])
    with Client(service.url, stranger) as other, pytest.raises(ServiceProblem) as refused:
        other.thumbnails(job.job_id, ["red.png"])
    assert refused.value.status == unknown.value.status == 404
    with Client(service.url, service.tokens["viewer"]) as viewer, pytest.raises(ServiceProblem) as forbidden:
        viewer.thumbnails(job.job_id, ["red.png"])
    assert forbidden.value.status == 403
    with Client(service.url, service.tokens["admin"]) as admin:
        assert admin.thumbnails(job.job_id, ["red.png"])["red.png"] is not None


def test_vectors_have_no_pictures_and_deleted_images_have_none_any_more(service: Service, archive: Path) -> None:
    with Client(service.url, service.tokens["requester"]) as client:
        task = service.task().task_id
        vectors = client.submit(task, features=np.eye(1, 8).tolist(), backbone_fingerprint=FINGERPRINT)
        with pytest.raises(ServiceProblem, match="feature vectors") as none:
            client.thumbnails(vectors.job_id, ["query-000000"])
        assert none.value.status == 404
        job = client.submit(service.task().task_id, images=archive)
        client.cancel(job.job_id)
        client.forget(job.job_id)
        with pytest.raises(ServiceProblem, match="was deleted") as gone:
            client.thumbnails(job.job_id, ["red.png"])
        assert gone.value.status == 410


def test_what_takes_too_long_is_not_shown(service: Service, job: JobView, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("api.coordinator.results.TAKES_S", 0.0)
    with Client(service.url, service.tokens["requester"]) as client:
        assert client.thumbnails(job.job_id, ["red.png"]) == {"red.png": None}
    assert decoders() == []
