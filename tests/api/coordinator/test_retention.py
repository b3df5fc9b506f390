"""What ended jobs leave, and when it goes; each test sweeps by itself, over a real journal and real folders."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from sqlalchemy import text
from sqlalchemy.exc import IntegrityError

from api.coordinator import submission
from api.coordinator.config import RetentionTable
from api.coordinator.ownership import Reader
from api.coordinator.results import Results
from api.coordinator.retention import ORPHAN_S, RetentionThread
from feature_store.results.job_process import LabelingOrder
from feature_store.results.questions import IMAGE_LABELS, LABELS, EmbedBoard, EmbedRequest
from labeler.errors import BadData, Gone, NotReady, StorageFull
from labeler.ledger.jobs import ForgottenJobs, JobRecord
from labeler.ledger.verification import verify_ledger
from labeler.query_budgets import COLUMNS
from labeler.system.files import replace_file
from tests.api.conftest import House
from tests.job_steps import take_step

BUDGETS = {name: [0, 0, 0] for name in COLUMNS}
IMAGES = pa.table({"source": ["a", "b", "c"], "label": pa.array([1, 0, 1], pa.int16())} | BUDGETS)
TABLE = pa.table({"query_id": ["a", "b", "c"], "label": pa.array([1, -1, 0], pa.int16())} | BUDGETS)
REQUESTER = Reader("tok-1", "requester")


@pytest.fixture
def retention(house: House) -> RetentionThread:
    return made(house)


class Given(Results):
    """Results whose answers are given; every job is labeled already, or is not to be."""

    def table(self, job_id: str) -> pa.Table:  # noqa: ARG002  # the same for all
        return TABLE

    def order(self, job: JobRecord) -> LabelingOrder:
        raise AssertionError(f"job {job.job_id} is labelled already, or is not to be")


def made(house: House, *, results: type[Results] = Given, **times: float) -> RetentionThread:
    """A retention that remembers nothing, as after a restart."""
    config = house.config.model_copy(update={"retention": RetentionTable(**times)})
    return RetentionThread(config, house.stores, results(config, house.stores, house.owners, house.budgets))


def completed(house: House) -> str:
    """A job that has ended as if every round of it had been opened elsewhere, and its images labeled."""
    job_id = house.submit(house.task(), 2).job_id
    folder = house.config.home / "jobs" / job_id
    (folder / "questions.safetensors").write_bytes(b"questions")
    (folder / "public.shard").mkdir()
    (folder / "public.shard" / "features.npy").write_bytes(b"features")
    pq.write_table(IMAGES, folder / IMAGE_LABELS)
    house.jobs.change(job_id, "completed", expected=("queued",))
    return job_id


def rows(house: House, table: str) -> int:
    with house.database.read() as connection:
        return int(connection.execute(text(f"SELECT count(*) FROM {table}")).scalar() or 0)


def test_a_completed_job_leaves_its_labels_and_after_its_time_nothing(house: House) -> None:
    retention = made(house, questions_s=60.0, labels_s=3600.0)
    results = retention._results
    job_id = completed(house)
    assert results.labels(job_id, reader=REQUESTER).equals(TABLE, check_metadata=True)
    retention.sweep()
    assert f"jobs/{job_id}/upload.parquet" in house.files()
    assert pq.read_table(house.config.home / "jobs" / job_id / LABELS).equals(TABLE, check_metadata=True)
    house.clock.turn(seconds=61)
    retention.sweep()
    assert house.files() == [f"jobs/{job_id}", f"jobs/{job_id}/{IMAGE_LABELS}", f"jobs/{job_id}/{LABELS}"]
    assert results.image_labels(job_id, reader=REQUESTER).equals(IMAGES)
    assert results.labels(job_id, reader=REQUESTER).equals(TABLE, check_metadata=True)
    house.clock.turn(seconds=3600)
    retention.sweep()
    assert house.files() == []
    with pytest.raises(Gone, match="were deleted on 2026-03-01 13:01 UTC"):
        results.labels(job_id, reader=REQUESTER)


@pytest.mark.parametrize("state", ["cancelled", "failed", "expired"])
def test_a_job_that_ends_without_labels_takes_its_folder_and_its_requests_with_it(
    house: House, retention: RetentionThread, state: Any
) -> None:
    kept, job_id = (house.submit(house.task(), 2, start=start).job_id for start in (0, 5))
    board = EmbedBoard(house.config.home)
    for one in (kept, job_id):
        board.put("tok-1", one, EmbedRequest(fingerprint="f"))
    retention.sweep()
    assert sorted(board.all_jobs()) == sorted([kept, job_id])
    house.jobs.change(job_id, state, expected=("queued",))
    retention.sweep()
    assert board.all_jobs() == [kept]
    assert house.files() == [f"jobs/{kept}", f"jobs/{kept}/upload.parquet"]


def test_what_somebody_wrote_into_a_folder_after_it_went_goes_at_the_next_sweep(
    house: House, retention: RetentionThread
) -> None:
    """The embedder may be at its last image when the job is cancelled."""
    job_id = house.submit(house.task(), 2).job_id
    submission.cancel(job_id, stores=house.stores)
    retention.sweep()
    folder = house.config.home / "jobs" / job_id
    (folder / ".public.shard.writing").mkdir(parents=True)
    retention.sweep()
    assert house.files() == []


def test_a_job_is_forgotten_before_its_files_go_so_a_crash_between_the_two_is_made_good(house: House) -> None:
    job_id = completed(house)
    ForgottenJobs(house.database, clock=house.clock).forget(job_id, "asked")
    after_the_crash = made(house)
    with pytest.raises(Gone):
        house.results.labels(job_id, reader=REQUESTER)
    after_the_crash.sweep()
    assert house.files() == []


def test_folders_of_no_job_go_after_an_hour_and_not_before(house: House, retention: RetentionThread) -> None:
    """An upload is moved into its folder before its job is written down."""
    folder = house.config.home / "jobs" / "job-never-taken"
    folder.mkdir(parents=True)
    (folder / "upload.parquet").write_bytes(b"half")
    begun = house.clock().timestamp()
    os.utime(folder, (begun, begun))
    house.clock.turn(seconds=ORPHAN_S - 1)
    retention.sweep()
    assert folder.exists()
    house.clock.turn(seconds=1)
    retention.sweep()
    assert house.files() == []


def test_a_job_whose_labels_cannot_be_read_keeps_its_folder_and_holds_up_no_other(house: House) -> None:
    bad, good = completed(house), completed(house)

    class Damaged(Given):
        def table(self, job_id: str) -> pa.Table:
            if job_id == bad:
                raise BadData("damaged")
            return TABLE

    retention = made(house, results=Damaged, questions_s=0.0)
    retention.sweep()
    retention.sweep()
    assert f"jobs/{bad}/upload.parquet" in house.files()
    assert f"jobs/{good}/upload.parquet" not in house.files()


def test_forgetting_drops_what_nobody_needs_and_leaves_the_chain_and_the_charges(
    house: House, retention: RetentionThread
) -> None:
    job_id = house.submit(house.task(), 2).job_id
    take_step(house.jobs, "set_batches", job_id, [(0, "b" * 64, "d" * 64)])
    take_step(house.jobs, "set_asked", job_id, 0)
    take_step(house.jobs, "report_holdings", job_id, 0, "t0", {"east": b"s" * 16})
    take_step(house.jobs, "report_refusal", job_id, 0, "west", "no", True)
    with pytest.raises(NotReady, match="Cancel it first"):
        retention.forget(job_id)
    submission.cancel(job_id, stores=house.stores)
    spent, head = house.ledger.balance("federation", "instance").spent, house.ledger.head()
    for _ in range(2):
        retention.forget(job_id)
    assert rows(house, "round_holdings") == rows(house, "round_refusals") == 0
    assert rows(house, "forgotten_jobs") == 1
    assert house.files() == []
    assert house.jobs.rounds(job_id)[0].round_digest == "d" * 64
    assert house.ledger.balance("federation", "instance").spent == spent > 0
    with house.database.read() as connection:
        assert verify_ledger(connection) == head


def test_the_database_itself_refuses_to_forget_a_job_that_runs_and_to_remember_a_forgotten_one(house: House) -> None:
    ForgottenJobs(house.database)
    job_id = house.submit(house.task(), 2).job_id
    insert = text("INSERT INTO forgotten_jobs VALUES (:job, '2026-03-01T12:00:00.000000Z', 'asked')")
    with pytest.raises(IntegrityError, match="only a job that has ended"), house.database.write() as connection:
        connection.execute(insert, {"job": job_id})
    submission.cancel(job_id, stores=house.stores)
    with house.database.write() as connection:
        connection.execute(insert, {"job": job_id})
    with pytest.raises(IntegrityError, match="kept for ever"), house.database.write() as connection:
        connection.execute(text("DELETE FROM forgotten_jobs"))


@pytest.fixture(autouse=True)
def nothing_is_left_half_written(house: House) -> Iterator[None]:
    yield
    assert list(Path(house.config.home).rglob(".labels*")) == []


def test_a_full_disk_leaves_the_questions_until_the_labels_are_kept(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    job_id = completed(house)
    retention = made(house, questions_s=0.0)
    write_table = pq.write_table

    def no_room(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(pq, "write_table", no_room)
    with pytest.raises(StorageFull, match="the disk is full"):
        retention.sweep()
    assert f"jobs/{job_id}/upload.parquet" in house.files()
    monkeypatch.setattr(pq, "write_table", write_table)
    retention.sweep()
    assert house.files() == [f"jobs/{job_id}", f"jobs/{job_id}/{IMAGE_LABELS}", f"jobs/{job_id}/{LABELS}"]
    replace_file(house.config.home / "jobs" / job_id / "late", b"")
