"""Whoever dies, at whatever step: the job completes, paid for once, with the one answer its rounds' keys determine."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from feature_store.shard import Shard
from labeler.release import Release
from labeler.system.faults import FAULT_POINTS
from labeler.tally import QueryBatch, round_of
from labeler.task import ReleaseKind, parse_task
from tests.answering import AnsweringAgent
from tests.e2e.service.conftest import Service
from tests.e2e.service.harm import (
    EVERYBODY,
    QUERIES,
    arm,
    digits_as_files,
    new_task,
    paid_at_instance_level,
    posted,
    submit,
)
from tests.one_round import run_round
from tests.processes import wait_until
from tests.stolen_keys import stolen_keys

WINNER_STEPS = ("tallier.computed",)
"""Steps of a round that opens winners; all others are shown on one that opens the histogram."""

KILL_REDIS_AT = (
    "coordinator.reserved",
    "coordinator.proposed",
    "coordinator.asked",
    "agent.computed",
    "tallier.stored",
    "coordinator.posted",
)
KILLS = [(name.split(".")[0], name) for name in FAULT_POINTS] + [("redis", name) for name in KILL_REDIS_AT]
# Victims take turns: who dies again soon after it was started waits longer for its next start.
CELLS = sorted(KILLS, key=lambda kill: [name for name, _ in KILLS[: KILLS.index(kill)]].count(kill[0]))

QUICK = (
    ("coordinator", "coordinator.posted"),
    ("embedder", "embedder.claimed"),
    ("agent", "agent.charged"),
    ("tallier", "tallier.fixed"),
    ("redis", "agent.computed"),
)
"""One real kill of each role for every run of the tests; all of them are for `make test-all`."""


pytestmark = pytest.mark.slow


def expected_release(service: Service, task_fields: dict[str, object], batch: QueryBatch) -> Release:
    """What the parties' keys of this round determine, computed in this process: a copy of each was made in time."""
    task, keys = parse_task(task_fields), stolen_keys(service.copies)
    agents = []
    for home in sorted((service.home / "agents").iterdir()):
        shard = Shard.open(next(home.glob("*.shard")))
        (key,) = keys[home.name, round_of(task, batch).digest]
        agents.append(AnsweringAgent(home.name, shard, noise_secret=key))
    return run_round(task, batch, agents)


@pytest.mark.parametrize(
    ("victim", "point"),
    [pytest.param(*cell, marks=[] if cell in QUICK else pytest.mark.long) for cell in CELLS],
)
def test_a_killed_process_costs_time_and_nothing_else(
    service: Service, digit_features: np.ndarray, tmp_path: Path, victim: str, point: str
) -> None:
    release: ReleaseKind = "winner" if point in WINNER_STEPS else "histogram"
    answered_through_a_kill(
        service, digit_features, tmp_path, victim, point, place=CELLS.index((victim, point)), release=release
    )


@pytest.mark.long
@pytest.mark.parametrize("point", [point for victim, point in CELLS if victim == "coordinator"])
def test_a_coordinator_killed_beside_postgresql_costs_time_and_nothing_else(
    on_postgresql: Service, digit_features: np.ndarray, tmp_path: Path, point: str
) -> None:
    """Only the coordinator meets its database; the others die beside SQLite."""
    place = CELLS.index(("coordinator", point))
    answered_through_a_kill(on_postgresql, digit_features, tmp_path, "coordinator", point, place=place)


def answered_through_a_kill(
    service: Service,
    digit_features: np.ndarray,
    folder: Path,
    victim: str,
    point: str,
    *,
    place: int,
    **fields: object,
) -> None:
    """One job, of other questions at each place; a process dies at a point of it."""
    features = digit_features[place * QUERIES : (place + 1) * QUERIES]
    with service.client() as client:
        task = new_task(client, f"{victim} {point} {place}", **fields)
        if victim == "redis":  # no job waits for it to be back after the kill before
            wait_until(lambda: client.readiness().ready, what="redis to be back")
        before = posted(client)
        arm(service, f"{point}\n{service.pid('redis')}" if victim == "redis" else point)
        if victim == "embedder":  # vectors need none, so it would not be there to be killed
            job = client.submit(task.task_id, images=digits_as_files(folder / "digits", place * QUERIES, QUERIES))
        else:
            job = submit(client, task, features)
        done = client.wait(job.job_id)
        # A post is answered with its sender's next mail, so an agent may learn that it was sent when the job is over.
        wait_until(lambda: not service.faults.exists(), what="the fault point to be reached")
        assert done.state == "completed"
        assert paid_at_instance_level(client, before) == dict.fromkeys(EVERYBODY, done.price.instance_charge_nano)
        table = pq.read_table(client.labels(job.job_id, folder / "labels.parquet", of="questions"))
    expected = expected_release(service, task.task, QueryBatch(features, first_query=0))
    assert table["label"].to_pylist() == expected.labels.tolist()
    if expected.noisy_votes is not None:
        assert np.array_equal(np.array(table["noisy_votes"].to_pylist()), expected.noisy_votes)


def test_every_role_is_killed_in_every_run_of_the_tests() -> None:
    assert set(QUICK) <= set(KILLS)
    assert {victim for victim, _ in QUICK} == {victim for victim, _ in KILLS}


def row(victim: str, point: str) -> str:
    """One row of the table in docs/round.md."""
    return f"| {victim} | `{point}` | {FAULT_POINTS[point].rstrip('.')} | completed, charged once, the same answer |"


def test_the_table_of_kills_names_every_kill() -> None:
    text = (Path(__file__).parents[3] / "docs" / "round.md").read_text()
    written = text.split("<!-- crash matrix -->")[1].strip().splitlines()[2:]
    assert written == [row(victim, point) for victim, point in KILLS]
