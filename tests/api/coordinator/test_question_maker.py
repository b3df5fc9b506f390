"""Who makes questions: vectors need no embedder, clusters a process, and requesters take turns."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file

from api.coordinator import coordinator_thread, submission
from api.coordinator.coordinator_thread import QuestionMaker
from api.coordinator.ownership import Reader
from api.coordinator.uploads import upload_of_features
from api.fair_pool import FairPool
from api.schema import JobRequest, JobView
from feature_store.query_selection import select_queries
from feature_store.results.questions import EmbedBoard, lane_of
from feature_store.rows import quantize
from labeler.driver.mail_redis import RedisMailbox
from labeler.ledger.jobs import JobRecord
from labeler.rounds.effects import AskedStrategy
from tests.api.conftest import House
from tests.processes import wait_until
from workers.up.redis_server import RedisServer

pytestmark = pytest.mark.process

VECTORS = np.random.default_rng(3).normal(size=(30, 4))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with RedisServer(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture
def mailbox(server: RedisServer) -> Iterator[RedisMailbox]:
    box = RedisMailbox(server.url)
    box._redis.flushall()
    yield box
    box.close()


@pytest.fixture
def prepare(house: House, mailbox: RedisMailbox) -> Iterator[Callable[..., QuestionMaker]]:
    made: list[QuestionMaker] = []

    def make(on_end: Callable[[str], None] = lambda _: None) -> QuestionMaker:
        made.append(
            QuestionMaker(
                house.config.home,
                is_wanted=lambda job_id: house.jobs.get(job_id).state == "queued",
                on_end=on_end,
                backbone_of=lambda _: "pixels:4",
                max_pixels=10**6,
                max_job_pixels=10**9,
            )
        )
        return made[-1]

    yield make
    for one in made:
        one.stop()


def submit(house: House, **selection: object) -> JobView:
    upload = upload_of_features(
        VECTORS.tolist(), None, folder=house.config.home / "incoming", limits=house.config.limits
    )
    task = house.task()
    request = {"task_id": task.digest, "backbone_fingerprint": task.task.backbone_fingerprint, "selection": selection}
    return house.submissions.submit(JobRequest.model_validate(request), upload, reader=Reader("tok-1", "requester"))


def ask(preparation: QuestionMaker, house: House, view: JobView) -> JobRecord:
    job = house.jobs.get(view.job_id)
    preparation.ask(job, house.tasks.get(job.task_digest).task)
    return job


def questions(house: House, job: JobRecord) -> Path:
    return house.config.home / "jobs" / job.job_id / "questions.safetensors"


@pytest.mark.parametrize("selection", [{}, {"strategy": "random", "count": 7, "seed": 5}])
def test_a_few_vectors_are_chosen_from_at_once_and_nobody_else_is_asked(
    house: House, mailbox: RedisMailbox, prepare: Callable[..., QuestionMaker], selection: dict[str, object]
) -> None:
    job = ask(prepare(), house, submit(house, **selection))
    found = load_file(questions(house, job))
    expected = select_queries(quantize(VECTORS), strategy=job.strategy, count=job.count, seed=job.seed)  # type: ignore[arg-type]
    assert np.array_equal(found["features"], expected.features)
    assert np.array_equal(found["rows"], expected.rows)
    assert np.array_equal(found["assignment"], expected.assignment)
    with safe_open(questions(house, job), "np") as file:
        assert file.metadata() == {"fingerprint": "f" * 16, "backbone": "pixels"}
    assert EmbedBoard(house.config.home).all_jobs() == []


def test_many_vectors_and_clusters_are_chosen_from_by_a_process(
    house: House, prepare: Callable[..., QuestionMaker], monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted: list[str] = []

    def submit_piece(_: FairPool, owner: str, piece: object, *, key: str) -> None:
        wanted.append(key)

    monkeypatch.setattr(FairPool, "submit", submit_piece)
    clustered = ask(prepare(), house, submit(house, strategy="clustered", count=5))
    monkeypatch.setattr(coordinator_thread, "AT_ONCE_BYTES", 0)
    many = ask(prepare(), house, submit(house))
    assert wanted == [clustered.job_id, many.job_id]


@pytest.mark.parametrize("strategy", ["clustered", pytest.param("spectral", marks=pytest.mark.long)])
def test_clusters_are_chosen_in_a_process_and_the_driver_is_told(
    house: House, prepare: Callable[..., QuestionMaker], strategy: AskedStrategy
) -> None:
    told = threading.Event()
    job = ask(prepare(lambda _: told.set()), house, submit(house, strategy=strategy, count=5, seed=3))
    assert told.wait(240)
    found = load_file(questions(house, job))
    expected = select_queries(quantize(VECTORS), strategy=strategy, count=5, seed=3)
    assert np.array_equal(found["features"], expected.features)
    assert np.array_equal(found["assignment"], expected.assignment)
    assert found["rows"].tolist() == [-1] * 5


def test_choosing_that_takes_too_much_fails_the_job_with_what_to_do(
    house: House, prepare: Callable[..., QuestionMaker], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bound is the system's, on the computing time of a real process that would work for much longer."""
    monkeypatch.setattr(coordinator_thread, "_MODULE", "tests.api.coordinator.endless")
    told = threading.Event()
    job = ask(prepare(lambda _: told.set()), house, submit(house, strategy="clustered", count=5))
    assert told.wait(240)
    assert "more memory or time than one job is given" in (questions(house, job).parent / "failed.json").read_text()


def test_images_are_asked_for_on_the_board_once_until_they_are_withdrawn(
    house: House, prepare: Callable[..., QuestionMaker]
) -> None:
    view = submit(house)
    job = house.jobs.get(view.job_id)
    images = JobRecord(**{**job.__dict__, "source": "images"})
    task, made = house.tasks.get(job.task_digest).task, prepare()
    board = EmbedBoard(house.config.home)
    for _ in range(2):
        made.ask(images, task)
        assert board.jobs(lane_of("tok-1")) == [job.job_id]
        with board.turn() as turn:
            assert turn == (lane_of("tok-1"), 1)
    made.withdraw(job.job_id)
    assert board.all_jobs() == []


def test_a_process_that_chooses_is_ended_when_its_job_is(
    house: House, prepare: Callable[..., QuestionMaker], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(coordinator_thread, "_MODULE", "tests.api.coordinator.sleeping")
    told = threading.Event()
    view = submit(house, strategy="clustered", count=5)
    job = ask(prepare(lambda _: told.set()), house, view)
    marker = questions(house, job).parent / "began"
    wait_until(marker.exists, what="its beginning")
    submission.cancel(view.job_id, stores=house.stores)
    assert told.wait(240)
    assert not (questions(house, job).parent / "failed.json").exists()
    assert not Path(f"/proc/{marker.read_text()}").exists()
