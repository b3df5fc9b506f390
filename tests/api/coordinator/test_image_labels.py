"""Labels of every image of a service's job: made by real processes from real files, once, and kept while the job is."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from sklearn.datasets import load_digits

from api.coordinator import results
from api.coordinator.config import RetentionTable
from api.coordinator.ownership import Reader
from api.coordinator.results import Results, is_labelled
from api.coordinator.retention import RetentionThread
from api.coordinator.views import read_view, with_progress
from feature_store.results.job_process import LabelingOrder, QuestionRequest, label_job, write_questions
from feature_store.results.models import read_model
from feature_store.results.pseudo_labels import AnsweredRound, JobStamp, QuestionNames, label_table
from feature_store.results.questions import (
    IMAGE_FAILURE,
    IMAGE_LABELS,
    LABELS,
    PROGRESS,
    QUESTIONS,
    STUDENT,
    read_stored_questions,
    saying_progress,
    write_parquet,
)
from feature_store.rows import quantize
from labeler.errors import BadData, Gone, NotReady, Unavailable
from labeler.ledger.jobs import JobRecord
from labeler.planning import price
from labeler.privacy_card import guarantee, privacy_card
from labeler.release import Release
from labeler.task import Task
from tests.api.conftest import FINGERPRINT, House
from tests.labeler.tasks import budgets_of

REQUESTER = Reader("tok-1", "requester")
IMAGES, CLUSTERS, AGENTS = 200, 9, ("east", "north", "west")
_ALL = load_digits()
PICTURES, TRUTH = _ALL.data[_ALL.target < 3] - 8.0, _ALL.target[_ALL.target < 3]
"""Zeros, ones and twos, which the agents of the house call cat, dog and owl."""


class Job:
    """A job about digits, ended as if its rounds had been opened elsewhere.

    Attributes:
        record: the job.
        table: its questions and answers.
        features: of its images.
        release: what was opened.
    """

    def __init__(self, house: House, *, start: int = 0, abstains: bool = False) -> None:
        self.house = house
        self.features = quantize(PICTURES[start : start + IMAGES])
        self.task: Task = house.task(
            max_queries=CLUSTERS, name=f"t{start}", method="reverse-knn", k=1, sigma_votes=1.0
        ).task
        upload = self._upload(start)
        job_id = house.submit(house.tasks.get(self.task.digest), CLUSTERS).job_id
        self.folder = house.config.home / "jobs" / job_id
        upload.replace(self.folder / "upload.parquet")
        wanted = {"strategy": "clustered", "count": CLUSTERS, "seed": 0, "fingerprint": FINGERPRINT}
        write_questions(self.folder, QuestionRequest.model_validate(wanted | {"source": "features"}))
        self.questions = read_stored_questions(self.folder / QUESTIONS)
        votes = np.zeros((CLUSTERS, 3))
        np.add.at(votes, (self.questions.assignment, TRUTH[start : start + IMAGES]), 1.0)
        votes += np.random.default_rng(start).normal(0, 1.0, votes.shape)
        labels = np.full(CLUSTERS, -1, np.int16) if abstains else votes.argmax(axis=1).astype(np.int16)
        self.release = Release("histogram", labels, votes, frozenset(AGENTS), is_seeded=False)
        house.jobs.change(job_id, "completed", expected=("queued",))
        self.record: JobRecord = house.jobs.get(job_id)
        names = QuestionNames.of(np.zeros(CLUSTERS, np.int64), ["x"], kind="cluster")
        stamp = JobStamp(job_id, "pixels", self.record.updated_at, guarantee(price(self.task)), False)
        rounds = [AnsweredRound(0, CLUSTERS, 1, self.release)]
        self.table: pa.Table = label_table(self.task, stamp, names, rounds, budgets=budgets_of(self.task, CLUSTERS))

    def order(self) -> LabelingOrder:
        return LabelingOrder(
            folder=str(self.folder),
            job_id=self.record.job_id,
            task_digest=self.task.digest,
            classes=self.task.classes,
            contributors=len(AGENTS),
            card=privacy_card(self.task, price(self.task), is_seeded=False),
            privacy=guarantee(price(self.task)),
            is_seeded=False,
            created_at=self.record.updated_at.isoformat(),
            source="features",
            backbone="pixels:8",
        )

    def _upload(self, start: int) -> Path:
        path = self.house.config.home / f"upload-{start}.parquet"
        column = pa.FixedSizeListArray.from_arrays(pa.array(self.features.ravel()), self.features.shape[1])
        pq.write_table(pa.table({"name": [f"{start + n}.png" for n in range(IMAGES)], "feature": column}), path)
        return path


class Desk:
    """Results of some jobs, and what deletes their sources."""

    def __init__(self, house: House, *jobs: Job, questions_s: float = 600.0) -> None:
        known = {job.record.job_id: job for job in jobs}

        class Known(Results):
            def table(self, job_id: str) -> pa.Table:
                return known[job_id].table

            def order(self, job: JobRecord) -> LabelingOrder:
                return known[job.job_id].order()

        config = house.config.model_copy(update={"retention": RetentionTable(questions_s=questions_s)})
        self.results = Known(config, house.stores, house.owners, house.budgets)
        self.retention = RetentionThread(config, house.stores, self.results)

    def image_labels(self, job: Job) -> pa.Table:
        return self.results.image_labels(job.record.job_id, reader=REQUESTER)


@pytest.fixture(autouse=True)
def _whoever_asks_waits_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """What labels is a process that has to start, and cores are shared with other tests."""
    monkeypatch.setattr(results, "WAIT_S", 240.0)


@pytest.fixture
def job(house: House) -> Job:
    return Job(house)


@pytest.fixture
def desk(house: House, job: Job) -> Iterator[Desk]:
    made = Desk(house, job, questions_s=60.0)
    yield made
    made.results.stop()


@pytest.mark.process
def test_features_do_not_go_before_the_images_are_labelled(desk: Desk, job: Job, house: House) -> None:
    desk.retention.sweep()
    assert not is_labelled(job.folder), "nobody has asked, and there is time"
    house.clock.turn(seconds=61)
    desk.retention.sweep()
    assert (job.folder / QUESTIONS).exists()
    desk.image_labels(job)
    desk.retention.sweep()
    kept = {path.name for path in job.folder.iterdir()}
    assert kept == {"labels.parquet", IMAGE_LABELS, STUDENT}
    assert len(desk.image_labels(job)) == IMAGES


@pytest.mark.long
def test_the_student_of_a_job_is_known_by_what_it_tells_with_the_price_of_the_ledger(job: Job) -> None:
    write_parquet(job.table, job.folder / LABELS)
    label_job(job.order())
    order, student = job.order(), read_model(job.folder / STUDENT)
    assert order.released.find(student) == (job.record.job_id, order.card)
    stranger = replace(student, arrays=dict(student.arrays) | {"temperature": np.array([9.0])})
    assert order.released.find(stranger) is None


@pytest.mark.process
def test_a_job_of_which_nothing_was_answered_says_so_and_holds_up_no_other(house: House) -> None:
    jobs = [Job(house, start=0, abstains=True), Job(house, start=200)]
    desk = Desk(house, *jobs)
    try:
        with pytest.raises(NotReady, match="no question was answered"):
            desk.image_labels(jobs[0])
        with pytest.raises(NotReady, match="no question was answered"):
            desk.results.student(jobs[0].record.job_id, reader=REQUESTER)
        assert len(desk.image_labels(jobs[1])) == IMAGES
    finally:
        desk.results.stop()


@pytest.mark.long
@pytest.mark.process
def test_a_process_that_ends_early_fails_its_own_job_alone(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    """The order of the first is one that its process cannot read, so it ends there; so does another."""
    bad, good = Job(house, start=0), Job(house, start=200)
    desk = Desk(house, bad, good)
    broken = bad.order().model_copy(update={"folder": "\0"})
    monkeypatch.setattr(bad, "order", lambda: broken)
    for job in (bad, good):
        desk.results.write_labels(job.record)
    desk.results.label(bad.record)
    desk.results.label(good.record)
    desk.image_labels(good)
    assert (good.folder / IMAGE_LABELS).exists()
    with pytest.raises(BadData, match="more memory or time"):
        desk.image_labels(bad)
    assert (bad.folder / IMAGE_FAILURE).exists()
    desk.results.stop()


@pytest.mark.long
@pytest.mark.process
def test_whoever_asks_too_early_is_told_to_come_again(desk: Desk, job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(results, "WAIT_S", 0.0)
    with pytest.raises(Unavailable, match="ask again in a moment"):
        desk.image_labels(job)
    monkeypatch.setattr(results, "WAIT_S", 60.0)
    assert len(desk.image_labels(job)) == IMAGES


def test_view_and_refusal_say_how_much_is_done_while_images_are_labeled(
    desk: Desk, job: Job, house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In place of the process that labels the test writes its progress."""
    monkeypatch.setattr(desk.results, "label", lambda *_, **__: None)
    plain = read_view(job.record.job_id, house.stores)
    assert with_progress(plain, house.config.home) == plain
    with saying_progress(job.folder) as say:
        for done, percent in ((0, 0), (1, 7), (13, 100)):
            say("Labeling images", done, 13)
            view = with_progress(plain, house.config.home)
            assert view.stage == f"{plain.stage}; {plain.images} images are being labeled: {percent} % done"
            with pytest.raises(Unavailable, match=f"are being labeled: {percent} % done; ask again in a moment"):
                desk.image_labels(job)
    assert not (job.folder / PROGRESS).exists()
    assert with_progress(plain, house.config.home) == plain
    for damaged in (b"", b"-5", b"x" * 1000, b"\xff"):
        (job.folder / PROGRESS).write_bytes(damaged)
        assert with_progress(plain, house.config.home) == plain


def test_where_features_went_with_an_earlier_version_the_questions_are_still_there(desk: Desk, job: Job) -> None:
    desk.results.write_labels(job.record)
    (job.folder / QUESTIONS).unlink()
    with pytest.raises(Gone, match="of=questions"):
        desk.image_labels(job)
    assert desk.results.labels(job.record.job_id, reader=REQUESTER).num_rows == CLUSTERS
