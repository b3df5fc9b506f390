"""The embedder's process: questions from images or features, over a real redis-server, killed and resumed."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image
from safetensors import safe_open
from safetensors.numpy import load_file

from feature_store.backbones import load_backbone
from feature_store.mailbox import Mailbox
from feature_store.quantize import quantize
from feature_store.query_selection import select_queries
from workers import embed_service
from workers.embed_service import MOST_ATTEMPTS, QUEUE, Embedder, run_embedder
from workers.redis_server import RedisServer

BACKBONE = load_backbone("pixels:4")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with RedisServer(tmp_path_factory.mktemp("redis")) as server:
        yield server


@dataclass
class Office:
    """A coordinator's home with jobs in it, and the mailbox through which it asks for questions."""

    home: Path
    mailbox: Mailbox
    server: RedisServer
    start: Callable[..., Any]

    def job(self, name: str, upload: pa.Table | None, **changes: Any) -> Path:
        folder = self.home / "jobs" / name
        folder.mkdir(parents=True)
        if upload is not None:
            pq.write_table(upload, folder / "upload.parquet")
        request = {
            "strategy": "all",
            "count": None,
            "seed": 0,
            "fingerprint": BACKBONE.fingerprint,
            "source": "images",
        }
        (folder / "request.json").write_text(json.dumps(request | changes))
        self.mailbox.add_work(QUEUE, name)
        return folder

    def run(self, backbones: dict[str, str] | None = None) -> Any:
        known = {BACKBONE.fingerprint: "pixels:4"} if backbones is None else backbones
        return self.start(lambda stop: run_embedder(self.home, self.server.url, known, stop=stop))

    def finish(self, *folders: Path, name: str = "questions.safetensors") -> None:
        running = self.run()
        for folder in folders:
            wait_for(folder / name)
        running.end()

    def failure(self, folder: Path) -> dict[str, str]:
        self.finish(folder, name="failed.json")
        content: dict[str, str] = json.loads((folder / "failed.json").read_text())
        return content


def wait_for(path: Path, *, seconds: float = 30.0) -> None:
    end = time.monotonic() + seconds
    while not path.exists():
        assert time.monotonic() < end, f"waited {seconds} s for {path.name}: {[p.name for p in path.parent.iterdir()]}"
        time.sleep(0.02)


@pytest.fixture
def office(tmp_path: Path, server: RedisServer, start: Any) -> Iterator[Office]:
    mailbox = Mailbox(server.url)
    mailbox._redis.flushall()
    yield Office(tmp_path / "coordinator", mailbox, server, start)
    mailbox.close()


def pictures(count: int, *, seed: int = 0) -> list[Image.Image]:
    rng = np.random.default_rng(seed)
    return [Image.fromarray(rng.integers(0, 255, size=(8, 8), dtype=np.uint8)) for _ in range(count)]


def png(image: Image.Image) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, format="PNG")
    return buffer.getvalue()


def images_table(images: list[bytes]) -> pa.Table:
    names = [f"photo {number}.png" for number in range(len(images))]
    return pa.table({"name": names, "image": pa.array(images, pa.binary())})


def features_table(features: np.ndarray) -> pa.Table:
    values = pa.FixedSizeListArray.from_arrays(pa.array(features.reshape(-1), pa.int16()), features.shape[1])
    return pa.table({"name": [str(number) for number in range(len(features))], "feature": values})


def test_images_become_the_questions_the_backbone_makes_of_them(office: Office) -> None:
    images = pictures(12)
    folder = office.job("job-1", images_table([png(image) for image in images]))
    office.finish(folder)
    found = load_file(folder / "questions.safetensors")
    assert np.array_equal(found["features"], quantize(BACKBONE.embed(images)))
    assert found["rows"].tolist() == found["assignment"].tolist() == list(range(12))
    with safe_open(folder / "questions.safetensors", "np") as file:
        assert file.metadata() == {"fingerprint": BACKBONE.fingerprint, "backbone": "pixels"}


def test_features_are_taken_as_they_are_and_clustered(office: Office) -> None:
    features = quantize(np.random.default_rng(1).normal(size=(40, 16)))
    folder = office.job(
        "job-1", features_table(features), source="features", strategy="clustered", count=5, seed=3, fingerprint="other"
    )
    office.finish(folder)
    found = load_file(folder / "questions.safetensors")
    expected = select_queries(features, strategy="clustered", count=5, seed=3)
    assert np.array_equal(found["features"], expected.features)
    assert np.array_equal(found["assignment"], expected.assignment)
    assert found["rows"].tolist() == [-1] * 5


def test_an_unknown_backbone_is_refused_with_the_known_ones_named(office: Office) -> None:
    failure = office.failure(office.job("job-1", images_table([png(pictures(1)[0])]), fingerprint="e" * 64))
    assert failure["problem_type"] == "invalid-setting"
    assert BACKBONE.fingerprint[:16] in failure["sentence"]


def test_a_backbone_that_is_not_the_one_it_is_configured_as_is_refused(office: Office) -> None:
    folder = office.job("job-1", images_table([png(pictures(1)[0])]), fingerprint="e" * 64)
    running = office.run({"e" * 64: "pixels:4"})
    wait_for(folder / "failed.json")
    running.end()
    assert "mixed-shards" in (folder / "failed.json").read_text()


def test_an_image_that_cannot_be_read_fails_the_job_by_its_name(office: Office) -> None:
    failure = office.failure(office.job("job-1", images_table([png(pictures(1)[0]), b"no image"])))
    assert failure["problem_type"] == "unreadable-image"
    assert "'photo 1.png'" in failure["sentence"]


@pytest.mark.parametrize(
    ("upload", "changes"),
    [
        (features_table(np.full((3, 4), 30_000, dtype=np.int16)), {"source": "features"}),
        (features_table(np.zeros((3, 4), dtype=np.int16)), {"source": "features"}),
        (pa.table({"name": ["a"], "feature": [[1.5, 2.0]]}), {"source": "features"}),
        (pa.table({"name": ["a"]}), {"source": "features"}),
        (None, {"source": "features"}),
        (None, {}),
        (features_table(quantize(np.eye(3))), {"source": "features", "strategy": "random", "count": 99}),
        (features_table(quantize(np.eye(3))), {"source": "features", "strategy": "guess"}),
    ],
    ids=["too long", "zero", "floats", "no feature", "no upload", "no images", "count", "strategy"],
)
def test_what_cannot_be_asked_about_fails_with_a_reason(
    office: Office, upload: pa.Table | None, changes: dict[str, Any]
) -> None:
    failure = office.failure(office.job("job-1", upload, **changes))
    assert failure["sentence"]
    assert failure["problem_type"] in ("bad-data", "invalid-setting")


def test_after_a_job_that_failed_the_next_one_is_done(office: Office) -> None:
    bad = office.job("job-1", images_table([b"no image"]))
    good = office.job("job-2", images_table([png(pictures(1)[0])]))
    office.finish(good)
    assert (bad / "failed.json").exists()


def test_work_that_was_done_is_not_done_again(office: Office) -> None:
    folder = office.job("job-1", images_table([png(pictures(1)[0])]))
    office.finish(folder)
    stamp = (folder / "questions.safetensors").stat().st_mtime_ns
    office.mailbox.add_work(QUEUE, "job-1")
    other = office.job("job-2", images_table([png(pictures(1)[0])]))
    office.finish(other)
    assert (folder / "questions.safetensors").stat().st_mtime_ns == stamp


def test_work_for_jobs_that_are_gone_or_have_no_proper_name_is_dropped(office: Office) -> None:
    office.mailbox.add_work(QUEUE, "gone")
    office.mailbox.add_work(QUEUE, "../../etc")
    office.finish(office.job("job-1", images_table([png(pictures(1)[0])])))


def test_work_that_kills_whoever_takes_it_is_given_up(office: Office) -> None:
    import threading

    folder = office.job("job-1", images_table([png(pictures(1)[0])]))
    embedder = Embedder(office.home, {BACKBONE.fingerprint: "pixels:4"}, stop=threading.Event())
    embedder.prepare("job-1", attempt=MOST_ATTEMPTS + 1, mailbox=office.mailbox)
    assert "never ended" in (folder / "failed.json").read_text()


def test_progress_is_published(office: Office) -> None:
    import asyncio

    office.finish(office.job("job-1", images_table([png(image) for image in pictures(3)])))

    async def events() -> list[dict[str, Any]]:
        watching = Mailbox(office.server.url)
        try:
            return [event for _, event in await watching.watch("job-1", "", 1.0)]
        finally:
            await watching.aclose()

    assert {"stage": "embedding", "done": 3, "total": 3} in asyncio.run(events())


def test_told_to_stop_in_the_middle_another_embedder_goes_on(office: Office, monkeypatch: pytest.MonkeyPatch) -> None:
    import threading

    folder = office.job("job-1", images_table([png(image) for image in pictures(200)]))
    stop = threading.Event()
    stop.set()
    embedder = Embedder(office.home, {BACKBONE.fingerprint: "pixels:4"}, stop=stop)
    with pytest.raises(embed_service.Interrupted):
        embedder.prepare("job-1", attempt=1, mailbox=office.mailbox)
    assert not (folder / "failed.json").exists()
    office.finish(folder)
    assert len(load_file(folder / "questions.safetensors")["features"]) == 200


@pytest.mark.parametrize("point", ["embedder.claimed", "embedder.embedded"])
def test_killed_at_any_step_another_embedder_makes_the_same_questions(
    office: Office, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, point: str
) -> None:
    images = pictures(70)
    folder = office.job("job-1", images_table([png(image) for image in images]))
    fault = tmp_path / "fault"
    fault.write_text(point)
    code = (
        "import sys, threading; from pathlib import Path; from workers.embed_service import run_embedder; "
        "run_embedder(Path(sys.argv[1]), sys.argv[2], {sys.argv[3]: 'pixels:4'}, stop=threading.Event())"
    )
    died = subprocess.run(
        [sys.executable, "-c", code, str(office.home), office.server.url, BACKBONE.fingerprint],
        env=os.environ | {"LABELER_FAULTS": str(fault)},
        cwd=Path(__file__).parents[2],
        timeout=60,
        check=False,
    )
    assert died.returncode == -signal.SIGKILL
    assert not (folder / "questions.safetensors").exists()
    monkeypatch.setattr(embed_service, "LEASE_S", 0.5)
    office.finish(folder)
    assert np.array_equal(load_file(folder / "questions.safetensors")["features"], quantize(BACKBONE.embed(images)))


def test_a_redis_that_goes_away_is_waited_for(tmp_path: Path, start: Any) -> None:
    with RedisServer(tmp_path / "redis", use_port=True) as server:
        mailbox = Mailbox(server.url)
        office = Office(tmp_path / "coordinator", mailbox, server, start)
        running = office.run()
        server.stop()
        time.sleep(1.0)
        server.start()
        folder = office.job("job-1", images_table([png(pictures(1)[0])]))
        wait_for(folder / "questions.safetensors")
        running.end()
        mailbox.close()
