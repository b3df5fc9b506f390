"""Labels of a finished job: stored releases come back whole, and every query has its row."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save

from api.coordinator.results import label_rows
from api.coordinator.views import read_view
from api.schema import JobView
from feature_store.results.job_process import read_names
from feature_store.results.pseudo_labels import SCHEMA, AnsweredRound, JobStamp, label_table
from labeler.batching import BATCH_QUERIES
from labeler.budget import NANO, UNBOUNDED_NANO
from labeler.errors import BadData, NotReady
from labeler.ledger.tasks import TaskRecord
from labeler.planning import METHOD, price
from labeler.release import Release, release_from_bytes, release_to_bytes
from labeler.setting import LEVELS
from tests.api.conftest import FINGERPRINT, House
from tests.job_steps import take_step
from tests.labeler.tasks import budgets_of

STAMP = JobStamp("job", "pixels", datetime(2026, 1, 1, tzinfo=UTC), {}, False)


def release(count: int, *, start: int = 0, classes: int = 3) -> Release:
    votes = np.random.default_rng(start).normal(0.0, 10.0, (count, classes))
    return Release(
        kind="histogram",
        labels=votes.argmax(axis=1).astype(np.int16),
        noisy_votes=votes,
        contributors=frozenset({"west", "east", "north"}),
        is_seeded=False,
    )


def write_questions(
    folder: Path, *, features: np.ndarray, rows: np.ndarray, assignment: np.ndarray, backbone: str = "pixels"
) -> None:
    arrays = {"features": features, "rows": rows, "assignment": assignment}
    data = save(arrays, {"fingerprint": FINGERPRINT, "backbone": backbone})
    (folder / "questions.safetensors").write_bytes(data)


def finish(house: House, record: TaskRecord, view: JobView, *, salt: int = 0) -> list[Release]:
    """Take a job through all its rounds, as the driver does; each job of a house needs its own salt."""
    take_step(
        house.jobs,
        "set_batches",
        view.job_id,
        [(one.number, f"{one.number + 99 * salt:064x}", f"{one.number + 9 + 99 * salt:064x}") for one in view.rounds],
    )
    house.begin(view.job_id)
    releases = []
    for one in view.rounds:
        take_step(house.jobs, "set_asked", view.job_id, one.number)
        take_step(house.jobs, "fix_contributors", view.job_id, one.number, record.participants)
        seq = house.ledger.post(f"{view.job_id}/{one.number}")
        take_step(house.jobs, "set_posted", view.job_id, one.number, seq)
        releases.append(release(one.queries, start=one.number))
        take_step(house.jobs, "store_release", view.job_id, one.number, release_to_bytes(releases[-1]))
    house.jobs.change(view.job_id, "completed", expected={"collecting"})
    return releases


def test_a_release_comes_back_as_it_was_and_equal_ones_are_equal_bytes() -> None:
    one = release(5)
    data = release_to_bytes(one)
    assert data == release_to_bytes(release(5))
    back = release_from_bytes(data)
    assert back.noisy_votes is not None
    assert (back.labels == one.labels).all()
    assert (back.noisy_votes == one.noisy_votes).all()
    assert (back.kind, back.contributors, back.is_seeded) == (one.kind, one.contributors, one.is_seeded)
    winner = Release("winner", one.labels, None, one.contributors, True)
    assert release_from_bytes(release_to_bytes(winner)).noisy_votes is None


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"x" * 100,
        release_to_bytes(release(5))[:-1],
        release_to_bytes(release(5)).replace(b"labeler-release/1", b"labeler-release/2"),
        save({"labels": np.zeros(3, np.int16)}),
        save({"labels": np.zeros(3, np.float32)}, {"release": "{}"}),
    ],
)
def test_a_damaged_release_is_refused(data: bytes) -> None:
    with pytest.raises(BadData, match="stored release is damaged"):
        release_from_bytes(data)


@pytest.mark.usefixtures("small_rounds")
def test_the_table_of_a_job_of_two_rounds_has_every_answer_in_its_place(house: House) -> None:
    record = house.task(max_queries=5000)
    view = house.submit(record, 5000)
    folder = house.config.home / "jobs" / view.job_id
    with pytest.raises(NotReady, match="is queued"):
        house.results.table(view.job_id)
    write_questions(folder, features=np.ones((5000, 3), np.int16), rows=np.arange(5000), assignment=np.arange(5000))
    releases = finish(house, record, view)
    table = house.results.table(view.job_id)
    assert table.schema.equals(SCHEMA)
    assert table.num_rows == 5000
    assert table["label"].to_numpy().tolist() == np.concatenate([one.labels for one in releases]).tolist()
    assert table["noisy_votes"].to_pylist()[4999] == releases[1].noisy_votes[-1].tolist()  # type: ignore[index]
    assert table["query_id"].to_pylist()[:2] == ["query-000000", "query-000001"]
    assert set(table["status"].to_pylist()) == {"answered"}
    done = read_view(view.job_id, house.stores)
    assert (done.queries_done, done.stage) == (5000, "done: 5000 of 5000 answered")
    assert table["ledger_seq"].to_pylist()[-1] == done.ledger_seq
    assert len(set(table["ledger_seq"].to_pylist()[BATCH_QUERIES - 1 : BATCH_QUERIES + 1])) == 2
    assert set(table["backbone"].to_pylist()) == {"pixels"}
    privacy = json.loads(table.schema.metadata[b"privacy"])
    assert privacy["instance"] == {"epsilon": price(record.task).instance.epsilon, "method": METHOD}
    # What was paid, by the ledger's own entries, and what of it each question took.
    posted = [one for one in house.ledger.entries(limit=1000) if one.kind == "post" and one.account == "federation"]
    paid = {level: sum(one.amount for one in posted if one.level == level) for level in LEVELS}
    assert done.cost is not None
    assert (done.cost.questions, done.cost.instance_nano) == (5000, paid["instance"])
    assert done.cost.agent_nano == (None if paid["agent"] >= UNBOUNDED_NANO else paid["agent"])
    assert done.cost.instance_epsilon == pytest.approx(done.price.instance_epsilon, rel=1e-6)
    assert (view.cost.questions, view.cost.instance_nano, view.cost.instance_epsilon) == (0, 0, 0.0)  # type: ignore[union-attr]
    share = label_rows(table)[0].mu_squared
    assert share is not None
    assert paid["instance"] <= round(share * NANO) * 5000 < paid["instance"] + 5000
    house.clock.turn(hours=1)
    assert house.results.table(view.job_id).equals(table)


def test_a_question_about_a_cluster_is_named_after_its_nearest_image(house: House) -> None:
    record = house.task()
    view = house.submit(record, 4, selection={"strategy": "clustered", "count": 2})
    folder = house.config.home / "jobs" / view.job_id
    job = house.jobs.get(view.job_id)
    # Vectors of the upload turn towards the first axis, one more than the other.
    centres = np.array([[0, 1672, -836], [2048, 0, 0]], np.int16)
    write_questions(folder, features=centres, rows=np.array([-1, -1]), assignment=np.array([0, 0, 1, 1]))
    _, questions = read_names(folder, job)
    assert questions.query_ids == ("cluster-000000", "cluster-000001")
    assert questions.sources == ("query-000000", "query-000003")
    finish(house, record, view)
    rows = label_rows(house.results.table(view.job_id))
    assert [one.source for one in rows] == ["query-000000", "query-000003"]
    assert all(one.noisy_votes is not None and one.label_name in ("cat", "dog", "owl") for one in rows)


def test_a_sample_of_vectors_keeps_its_names(house: House) -> None:
    view = house.submit(house.task(), 4, selection={"strategy": "random", "count": 2})
    folder = house.config.home / "jobs" / view.job_id
    write_questions(
        folder, features=np.ones((2, 3), np.int16), rows=np.array([1, 3]), assignment=np.array([0, 0, 1, 1])
    )
    _, questions = read_names(folder, house.jobs.get(view.job_id))
    assert questions.query_ids == questions.sources == ("query-000001", "query-000003")


def test_a_release_of_another_shape_or_a_missing_file_is_refused(house: House) -> None:
    record = house.task()
    view = house.submit(record, 4)
    house.clock.now += timedelta(seconds=1)
    folder = house.config.home / "jobs" / view.job_id
    job = house.jobs.get(view.job_id)
    with pytest.raises(BadData, match="cannot be read"):
        read_names(folder, job)
    write_questions(folder, features=np.ones((4, 3), np.int16), rows=np.arange(4), assignment=np.arange(4))
    with pytest.raises(BadData, match="not one of this task"):
        label_table(
            record.task,
            STAMP,
            read_names(folder, job)[1],
            [AnsweredRound(0, 4, 1, release(3))],
            budgets=budgets_of(record.task, 4),
        )
    write_questions(folder, features=np.ones((3, 3), np.int16), rows=np.arange(3), assignment=np.zeros(4, np.int64))
    with pytest.raises(BadData, match="its folder names 3"):
        read_names(folder, job)
