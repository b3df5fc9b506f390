"""The embedder's process: features from images, over a real redis-server, killed and resumed."""

from __future__ import annotations

import errno
import io
import json
import os
import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from feature_store.backbones import load_backbone
from feature_store.backbones.backbone import PixelBackbone
from feature_store.results.job_process import QuestionRequest, write_questions
from feature_store.results.questions import EmbedBoard, EmbedRequest, lane_of
from feature_store.rows import quantize
from feature_store.shard import Shard
from feature_store.shard_writer import ShardWriter
from labeler.driver.mail_redis import RedisMailbox
from labeler.errors import UnreadableImage
from tests.processes import wait_until
from tests.workers.builders import killed_at
from workers.embedder import service as embed_service
from workers.embedder.service import MOST_ATTEMPTS, ROLE, Embedder, run_embedder
from workers.up.redis_server import RedisServer

pytestmark = pytest.mark.process

BACKBONE = load_backbone("pixels:4")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with RedisServer(tmp_path_factory.mktemp("redis")) as server:
        yield server


@dataclass
class Office:
    """A coordinator's home with jobs in it, and the mailbox through which it asks for questions."""

    home: Path
    mailbox: RedisMailbox
    server: RedisServer
    start: Callable[..., Any]

    @property
    def board(self) -> EmbedBoard:
        return EmbedBoard(self.home)

    def job(self, name: str, upload: pa.Table | None, *, owner: str = "somebody", **changes: Any) -> Path:
        folder = self.home / "jobs" / name
        folder.mkdir(parents=True)
        if upload is not None:
            pq.write_table(upload, folder / "upload.parquet")
        request = EmbedRequest.model_validate({"fingerprint": BACKBONE.fingerprint} | changes)
        self.board.put(owner, name, request)
        return folder

    def run(self, backbones: dict[str, str] | None = None) -> Any:
        known = {BACKBONE.fingerprint: "pixels:4"} if backbones is None else backbones
        return self.start(lambda stop: run_embedder(self.home, self.server.url, known, stop=stop))

    def finish(self, *folders: Path, name: str = "public.shard", backbones: dict[str, str] | None = None) -> None:
        with self.run(backbones):
            for folder in folders:
                wait_until((folder / name).exists, what=f"{folder.name}/{name}")

    def turn(self, embedder: Embedder) -> None:
        """Let it work in this thread, as long as it has the turn of the usual requester."""
        embedder.turn(lane_of("somebody"), attempt=1)

    def failure(self, folder: Path) -> dict[str, str]:
        self.finish(folder, name="failed.json")
        content: dict[str, str] = json.loads((folder / "failed.json").read_text())
        return content


@pytest.fixture
def office(tmp_path: Path, server: RedisServer, start: Any) -> Iterator[Office]:
    mailbox = RedisMailbox(server.url)
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


def features_of(folder: Path) -> np.ndarray:
    return np.asarray(Shard.open(folder / "public.shard").features)


def test_images_become_the_features_the_backbone_makes_of_them(office: Office) -> None:
    images = pictures(12)
    folder = office.job("job-1", images_table([png(image) for image in images]))
    office.finish(folder)
    assert np.array_equal(features_of(folder), quantize(BACKBONE.embed(images)))
    assert office.board.all_jobs() == []


def test_an_unknown_backbone_is_refused_with_the_known_ones_named(office: Office) -> None:
    failure = office.failure(office.job("job-1", images_table([png(pictures(1)[0])]), fingerprint="e" * 64))
    assert failure["problem_type"] == "invalid-setting"
    assert BACKBONE.fingerprint[:16] in failure["sentence"]


def test_a_backbone_that_is_not_the_one_it_is_configured_as_is_refused(office: Office) -> None:
    folder = office.job("job-1", images_table([png(pictures(1)[0])]), fingerprint="e" * 64)
    office.finish(folder, name="failed.json", backbones={"e" * 64: "pixels:4"})
    assert "mixed-shards" in (folder / "failed.json").read_text()


def test_several_images_that_cannot_be_read_are_named_together(office: Office) -> None:
    """Truncated files have a good header, so that only decoding finds them; one by one each cost another submission."""
    whole = [png(picture) for picture in pictures(40)]
    for row in (3, 7, 39):
        whole[row] = whole[row][:60]
    sentence = office.failure(office.job("job-1", images_table(whole)))["sentence"]
    assert sentence.startswith("3 of the images")
    assert [name for name in (f"photo {n}.png" for n in range(40)) if repr(name) in sentence] == [
        "photo 3.png", "photo 7.png", "photo 39.png",
    ]  # fmt: skip


def test_of_very_many_images_that_cannot_be_read_ten_are_named(office: Office) -> None:
    sentence = office.failure(office.job("job-1", images_table([b"no image"] * 14)))["sentence"]
    assert sentence.startswith("at least 10 of the images")
    assert "photo 9.png" in sentence
    assert "photo 10.png" not in sentence


class BlindToBlack(PixelBackbone):
    """A network of rectified units, in small: of a black image it sees nothing."""

    def embed_prepared(self, prepared: np.ndarray) -> np.ndarray:
        return np.asarray(prepared.reshape(len(prepared), -1).astype(np.float32))


def test_an_image_of_which_nothing_is_seen_fails_the_job_and_moves_no_other_answer(
    office: Office, embedder: Embedder
) -> None:
    """Its row was missing in the features, so that each later image was answered under the name before its own."""
    embedder._loaded[BACKBONE.fingerprint] = BlindToBlack(size=4)
    folder = office.job("job-1", images_table([png(pictures(1)[0]), black(8), png(pictures(1, seed=1)[0])]))
    office.turn(embedder)
    assert len(features_of(folder)) == 2
    request = QuestionRequest(strategy="all", count=None, seed=0, fingerprint=BACKBONE.fingerprint, source="images")
    with pytest.raises(UnreadableImage, match=r"'photo 1.png' cannot be asked about: its feature is zero"):
        write_questions(folder, request)
    assert not (folder / "questions.safetensors").exists()


@pytest.mark.parametrize(
    "upload", [None, pa.table({"name": ["a"]}), pa.table({"name": ["a"], "image": pa.array([None], pa.binary())})]
)
def test_what_cannot_be_embedded_fails_with_a_reason(office: Office, upload: pa.Table | None) -> None:
    failure = office.failure(office.job("job-1", upload))
    assert failure["sentence"]
    assert failure["problem_type"] in ("bad-data", "invalid-setting", "unreadable-image")


def test_work_that_kills_whoever_takes_it_is_given_up(office: Office) -> None:
    folder = office.job("job-1", images_table([png(pictures(1)[0])]))
    begun = office.home / "embedding" / lane_of("somebody") / "turn"
    begun.write_text(str(MOST_ATTEMPTS))  # as a process leaves it that the system has ended so often
    assert "never ended" in office.failure(folder)["sentence"]


def test_told_to_stop_in_the_middle_another_embedder_goes_on(office: Office, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = office.job("job-1", images_table([png(image) for image in pictures(200)]))
    stop = threading.Event()
    stop.set()
    embedder = Embedder(office.home, {BACKBONE.fingerprint: "pixels:4"}, stop=stop)
    with pytest.raises(embed_service.Interrupted):
        office.turn(embedder)
    assert not (folder / "failed.json").exists()
    office.finish(folder)
    assert len(features_of(folder)) == 200


@pytest.mark.parametrize(
    "point", ["embedder.embedded", *(pytest.param(point, marks=pytest.mark.long) for point in ("embedder.claimed",))]
)
def test_killed_at_any_step_another_embedder_makes_the_same_features(
    office: Office, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, point: str
) -> None:
    images = pictures(70)
    folder = office.job("job-1", images_table([png(image) for image in images]))
    code = (
        "from workers.embedder.service import run_embedder; "
        "run_embedder(Path(sys.argv[1]), sys.argv[2], {sys.argv[3]: 'pixels:4'}, stop=threading.Event())"
    )
    killed_at(point, tmp_path / "fault", code, office.home, office.server.url, BACKBONE.fingerprint)
    assert (office.home / "embedding" / lane_of("somebody") / "turn").read_text() == "1"
    assert not (folder / "failed.json").exists()
    office.finish(folder)
    assert np.array_equal(features_of(folder), quantize(BACKBONE.embed(images)))


def test_a_redis_that_goes_away_holds_no_job_up(tmp_path: Path, start: Any) -> None:
    with RedisServer(tmp_path / "redis") as server, closing(RedisMailbox(server.url)) as mailbox:
        office = Office(tmp_path / "coordinator", mailbox, server, start)
        with office.run():
            wait_until(lambda: mailbox.is_alive(ROLE))
            for state in ("gone", "back"):
                server.stop() if state == "gone" else server.start()
                wait_until((office.job(state, images_table([png(pictures(1)[0])])) / "public.shard").exists)


def black(side: int) -> bytes:
    return png(Image.new("L", (side, side)))


@pytest.fixture
def embedder(office: Office) -> Embedder:
    return Embedder(office.home, {BACKBONE.fingerprint: "pixels:4"}, stop=threading.Event())


def at_each_batch(monkeypatch: pytest.MonkeyPatch, hook: Callable[[str, int], object]) -> None:
    """Call a function with the job and the number of its images that are embedded, whenever a batch is."""
    real = embed_service.embed_source

    def hooked(upload: Path, *arguments: Any, progress: Callable[[int, int], None], **options: Any) -> Any:
        def told(done: int, total: int) -> None:
            hook(upload.parent.name, done)
            progress(done, total)

        return real(upload, *arguments, progress=told, **options)

    monkeypatch.setattr(embed_service, "embed_source", hooked)


@pytest.mark.parametrize("is_removed", [False, True], ids=["cancelled", "and its folder is gone"])
def test_work_on_a_job_that_ends_stops_in_the_middle_and_leaves_nothing_half_made(
    office: Office, embedder: Embedder, monkeypatch: pytest.MonkeyPatch, is_removed: bool
) -> None:
    """The request is taken away while a large image is decoded; a bound that is not time: how many were embedded."""
    monkeypatch.setattr(embed_service, "BATCH_S", 0.0)
    folder = office.job("job-1", images_table([black(2000)] * 50))
    told: list[int] = []

    def ended(job_id: str, done: int) -> None:
        told.append(done)
        office.board.withdraw(job_id)
        if is_removed:
            shutil.rmtree(folder)

    at_each_batch(monkeypatch, ended)
    office.turn(embedder)
    assert told == [1]
    left = [] if not folder.exists() else [path.name for path in folder.iterdir() if path.name != ".public.shard.lock"]
    assert left == ([] if is_removed else ["upload.parquet"])
    assert folder.exists() is not is_removed
    assert children() == []


def test_requesters_take_turns_however_many_images_one_of_them_sent(
    office: Office, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One image a slice: a requester of two waits for one slice of the other, not for all images of the other."""
    monkeypatch.setattr(embed_service, "SLICE_S", 0.0)
    monkeypatch.setattr(embed_service, "BATCH_IMAGES", 1)
    done: list[str] = []
    at_each_batch(monkeypatch, lambda job_id, _: done.append(job_id))
    picture = png(pictures(1)[0])
    many = [office.job(f"many-{number}", images_table([picture] * 2), owner="hog") for number in range(3)]
    few = office.job("few", images_table([picture] * 2), owner="somebody else")
    office.finish(few, *many)
    # And so do the jobs of one requester, while it takes turns with others.
    assert done[:5] == ["many-0", "few", "many-1", "few", "many-2"]


def test_embedders_have_turns_of_different_requesters_and_of_one_without_jobs_nothing_is_left(office: Office) -> None:
    for name, owner in (("job-1", "one"), ("job-2", "two")):
        office.job(name, None, owner=owner)
    with office.board.turn() as first, office.board.turn() as second, office.board.turn() as third:
        assert (first, second, third) == ((lane_of("one"), 1), (lane_of("two"), 1), None)
        office.board.withdraw("job-1")
    with office.board.turn() as again:
        assert again == (lane_of("two"), 1)
    assert [path.name for path in (office.home / "embedding").iterdir()] == [lane_of("two")]


def test_a_job_alone_is_not_cut_into_slices(
    office: Office, embedder: Embedder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embed_service, "SLICE_S", 0.0)
    folder = office.job("job-1", images_table([png(image) for image in pictures(200)]))
    office.turn(embedder)
    assert len(features_of(folder)) == 200


def test_more_pixels_than_a_job_may_have_are_refused_before_anything_is_decoded(office: Office) -> None:
    failure = office.failure(office.job("job-1", images_table([black(100)] * 5), max_job_pixels=44_000))
    assert failure["problem_type"] == "too-large"
    assert "the first 5 images have 50000 pixels together, more than the 44000" in failure["sentence"]


def test_the_memory_of_the_embedder_does_not_grow_with_what_it_is_sent(office: Office, embedder: Embedder) -> None:
    small = office.job("small", images_table([black(50)] * 4))
    office.turn(embedder)
    sent = images_table([black(7900)] * 4)
    large = office.job("large", sent)
    before = memory_bytes("VmRSS")
    # The highest mark of this process is reset: tests before this one may have reached higher.
    Path("/proc/self/clear_refs").write_text("5")
    office.turn(embedder)
    assert (small / "public.shard").exists()
    assert (large / "public.shard").exists()
    # One such image is 62 MB of gray, and 250 MB of color; none of it was ever here.
    assert memory_bytes("VmRSS") - before < 60 * 10**6
    assert memory_bytes("VmHWM") - before < 120 * 10**6
    assert children() == []


def test_an_image_that_takes_longer_than_is_given_fails_its_job_and_not_the_embedder(
    office: Office, embedder: Embedder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("feature_store.decode_process.IMAGE_S", 0.001)  # no process has even started by then
    stuck = office.job("job-1", images_table([black(50)] * 2))
    office.turn(embedder)
    told = json.loads((stuck / "failed.json").read_text())
    assert told["problem_type"] == "unreadable-image"
    assert "'photo 0.png'" in told["sentence"]
    assert "more memory or time" in told["sentence"]


def test_with_a_full_disk_the_job_waits_and_is_not_counted_as_an_attempt(
    office: Office, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = office.job("job-1", images_table([png(image) for image in pictures(3)]))
    full = True
    tried = threading.Event()
    append = ShardWriter.append

    def no_room(*arguments: Any, **named: Any) -> None:
        if full:
            tried.set()
            raise OSError(errno.ENOSPC, "No space left on device")
        append(*arguments, **named)

    monkeypatch.setattr(embed_service, "AGAIN_S", 0.1)
    monkeypatch.setattr(ShardWriter, "append", no_room)
    with office.run():
        for _ in range(MOST_ATTEMPTS + 1):
            assert tried.wait(90)
            tried.clear()
        assert not (folder / "failed.json").exists()
        full = False
        wait_until((folder / "public.shard").exists)


def test_a_decoder_that_the_system_ends_fails_the_job_by_the_image_it_was_at(
    office: Office, embedder: Embedder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the bound on its memory does: the process is gone in the middle of an upload."""
    monkeypatch.setattr(embed_service, "BATCH_S", 0.0)
    folder = office.job("job-1", images_table([black(2000)] * 100))

    def ended(_: str, __: int) -> None:
        for pid in children():
            os.kill(int(pid), signal.SIGKILL)

    at_each_batch(monkeypatch, ended)
    office.turn(embedder)
    assert "more memory or time" in (folder / "failed.json").read_text()


def children() -> list[str]:
    """Decoders of this process that are still there."""
    found = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    return [pid for pid in found if "decode_process" in Path(f"/proc/{pid}/cmdline").read_text()]


def memory_bytes(field: str) -> int:
    line = next(one for one in Path("/proc/self/status").read_text().splitlines() if one.startswith(field))
    return 1024 * int(line.split()[1])
